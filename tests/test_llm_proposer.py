"""The language model in the loop: rounds, repairs, reflexions, budgets, and a run that survives whatever is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autokernel_hf import llm_account, llm_prompts, llm_proposer, pipeline, tunables
from autokernel_hf.errors import UsageError
from autokernel_hf.ledger import Asked, Reflected, Round
from autokernel_hf.llm import KEY_VARIABLE, Chat, LanguageModelError, Patience
from autokernel_hf.llm_proposer import LanguageModel, Rules, reasons_in
from autokernel_hf.progress import Silent
from autokernel_hf.records import Candidate, Evaluation, Stages, TargetResult, Winner
from autokernel_hf.report import write_report
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search
from tests.llm_server import ChatServer, Step, error
from tests.loop_helpers import SOURCE, KnownJudge, decide, diagnose, formula, settings, target

HEAD = SOURCE + "// the launcher\n"
BODY = 'extern "C" int rmsnorm(const AkTensor *x) {\n  return 0;\n}\n'
STARTER = Candidate(kernel_type="rmsnorm", backend="cpp", source=HEAD + BODY)
WORSE = {"kUnroll": 1, "kChunk": 512, "kMode": 0}


def edit(old: str, new: str, hypothesis: str = "h") -> str:
    return f"Hypothesis: {hypothesis}\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n"


def returns(value: int, hypothesis: str = "another value") -> str:
    """An edit that makes a new structure, different for each value."""
    return edit("  return 0;", f"  return {value};", hypothesis)


class Judge(KnownJudge):
    """Knows structures as well: `fast` in the code halves the time, `broken` does not compile, `wrong` is wrong."""

    def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
        if "broken" in candidate.source:
            self.judged.append(candidate.digest)
            words = "kernel.cpp:7: error: 'broken' was not declared in this scope"
            return Evaluation(status="compile_error", stages=Stages(smoke="failed"), reason=words)
        if "wrong" in candidate.source:
            self.judged.append(candidate.digest)
            return Evaluation(
                status="incorrect", stages=Stages(smoke="failed"), reason="element 3 is 1, not 2"
            )
        factor = 0.5 if "fast" in candidate.source else 1.0
        against = 0.5 if incumbent is not None and "fast" in incumbent.source else 1.0
        found = super().evaluate(candidate, incumbent)
        ratio = against / factor
        workloads = []
        for result in found.workloads:
            changed = {"latency_us": (result.latency_us or 0.0) * factor}
            name = "eager" if incumbent is None else "incumbent"
            by = ratio if incumbent is not None else 1 / factor
            speedup = getattr(result, f"speedup_vs_{name}") * by
            changed |= {f"speedup_vs_{name}": speedup, f"ci95_vs_{name}": (speedup * 0.995, speedup * 1.005)}
            workloads.append(result.model_copy(update=changed))
        return found.model_copy(update={"workloads": tuple(workloads)})


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (KEY_VARIABLE, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**more: object) -> Run:
        run = Run.create(tmp_path, "org/model", settings(proposer="llm", llm="m", **more))
        run.add_target(target(), [STARTER])
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()


def model_of(run: Run, server: ChatServer, **rules: object) -> LanguageModel:
    asked = Chat("m", base_url=server.url, patience=Patience(attempts=2, timeout_s=20), sleep=lambda s: None)
    return LanguageModel(run, asked, rules=Rules(**{"temperatures": (0.3,), "playbook_turns": 0, **rules}))


def search_of(run: Run, judge: KnownJudge | None = None, **limits: object) -> Search:
    return Search(
        target(),
        [STARTER],
        run=run,
        judge=judge or Judge(),
        decide=decide,
        diagnose=diagnose,
        limits=Limits(**{"max_reverts": 30, **limits}),
        progress=Silent(),
    )


def go(
    run: Run, server: ChatServer, experiments: int, judge: KnownJudge | None = None, **rules: object
) -> tuple[TargetResult, Winner | None]:
    search = search_of(run, judge, max_experiments=experiments)
    return search.run_all(model_of(run, server, **rules))


def events(run: Run, kind: type) -> list:
    return [e for e in run.events() if isinstance(e, kind)]


def who(run: Run) -> list[str]:
    """Who proposed each experiment."""
    first = [e.tag.split(",")[0] for e in run.experiments()]
    return ["playbook" if t in ("opening", "tpe") else t for t in first]


# --- rounds -------------------------------------------------------------------------------------------------------


def test_a_round_asks_for_several_candidates_at_rising_temperature(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(returns(1, "first"), returns(2, "second"), returns(3, "third")) as server:
        go(run, server, 4, temperatures=(0.2, 0.6, 1.0))
    assert [a["temperature"] for a in server.asked] == [0.2, 0.6, 1.0]
    assert [e.description for e in run.experiments()] == ["cpp starter", "first", "second", "third"]
    assert "propose something else" not in server.prompts()[0]
    assert "- first\n- second" in server.prompts()[2]
    (round_,) = events(run, Round)
    assert (round_.usable, round_.unusable) == (3, ())
    last = run.source(run.experiments()[-1]).source
    assert last == STARTER.source.replace("return 0", "return 3")


def test_a_prompt_tells_the_task_and_what_was_tried(make_run: Callable[..., Run]) -> None:
    run = make_run()
    answers = [
        returns(1, "slower by far").replace("return 1;", "return 1;  // x"),
        "#2: it did the same work",
        returns(2),
    ]
    with ChatServer(*answers) as server:
        go(run, server, 3)
    system, first = (m["content"] for m in server.asked[0]["messages"])
    assert 'extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps' in system
    assert "// kernel_type: rmsnorm" in system
    assert "<<<<<<< SEARCH" in system
    assert "x 32x64 float32, weight 64 float32, eps=1e-06" in first
    assert "memory-bound in this test" in first
    assert STARTER.source.strip() in first
    assert "torch.rsqrt" in first, "the plain expression that defines the result"
    reflect, second = server.prompts()[1:]
    assert "#2: expected: slower by far" in reflect
    assert "Best: #1" in second
    assert "Worst: #2" in second
    assert "+  return 1;" in second
    assert "The judge: not faster" in second
    assert "Why: it did the same work" in second


def test_what_was_kept_is_what_the_next_edits_apply_to(make_run: Callable[..., Run]) -> None:
    run = make_run()
    chain = [
        returns(1).replace("return 1", "fast(1)"),
        "#2: fewer passes",
        edit("  fast(1);", "  fast(2) + kUnroll;"),
    ]
    with ChatServer(*chain) as server:
        result, winner = go(run, server, 3)
    assert result.kept == 2, "the starter, then the fast one; the third is no faster"
    assert winner is not None
    assert "fast(1)" in winner.candidate.source
    assert "fast(2)" in run.source(run.experiments()[-1]).source


def test_what_was_tried_before_is_not_judged_again(make_run: Callable[..., Run]) -> None:
    run = make_run()
    judge = Judge()
    again = edit("  return 0;", "  return 1;  // once more", "the same, in other words")
    answers = [returns(1), "#2: no", again, returns(2)]
    with ChatServer(*answers) as server:
        go(run, server, 3, judge)
    assert len(judge.judged) == 3
    rounds = events(run, Round)
    assert [r.usable for r in rounds] == [1, 0, 1]
    assert rounds[1].unusable == ("repeats #2 (revert, passed)",)


def test_two_answers_of_a_round_that_are_the_same_count_once(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(returns(1), returns(1), returns(2)) as server:
        go(run, server, 3, temperatures=(0.1, 0.5, 0.9))
    assert [e.tag for e in run.experiments()] == ["starter", "llm", "llm"]
    assert events(run, Round)[0].unusable == ("repeats another answer of this round",)


# --- repairs and reflexions ---------------------------------------------------------------------------------------


def test_a_candidate_that_failed_is_repaired_with_the_compilers_words(make_run: Callable[..., Run]) -> None:
    run = make_run()
    answers = [
        returns(1, "a bold idea").replace("return 1", "broken(1)"),
        edit("  broken(1);", "  fast(1);", "the name was wrong"),
        "#2: a typo\n#3: the idea works",
    ]
    with ChatServer(*answers) as server:
        go(run, server, 3)
    repair = server.prompts()[1]
    assert "'broken' was not declared in this scope" in repair
    assert "broken(1);" in repair
    assert "a bold idea" in repair
    tried = run.experiments()
    assert [(e.evaluation.status, e.decision) for e in tried[1:]] == [
        ("compile_error", "revert"),
        ("passed", "keep"),
    ]
    assert tried[2].tag == "llm,repair,repair-of-2"


def test_repairs_are_bounded_and_then_the_next_round_begins(make_run: Callable[..., Run]) -> None:
    run = make_run()
    wrong = [
        returns(1).replace("return 1", "wrong(1)"),
        edit("  wrong(1);", "  wrong(2);"),
        edit("  wrong(2);", "  wrong(3);"),
        "#2: a\n#3: b\n#4: c",
        returns(5),
    ]
    with ChatServer(*wrong) as server:
        go(run, server, 5, repairs=2)
    assert [e.evaluation.status for e in run.experiments()] == ["passed", *["incorrect"] * 3, "passed"]
    assert [e.purpose for e in events(run, Asked)] == ["propose", "repair", "repair", "reflect", "propose"]
    assert {r.experiment: r.why for r in events(run, Reflected)} == {2: "a", 3: "b", 4: "c"}


def test_a_failed_candidate_is_not_repaired_for_ever_by_answers_without_code(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    answers = [returns(1).replace("return 1", "broken(1)"), "Sorry about that.", "Oh.", "#2: no", returns(3)]
    with ChatServer(*answers) as server:
        go(run, server, 3)
    rounds = events(run, Round)
    assert [(r.kind, r.usable) for r in rounds] == [("propose", 1), ("repair", 0), ("propose", 1)]
    assert "refused" in rounds[1].unusable[0] or "no_code" in rounds[1].unusable[0]


def test_reflexions_are_kept_in_the_ledger_and_told_again_after_a_resumption(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    with ChatServer(
        returns(1, "less work"), "#2: loads were the bottleneck", returns(2), "#3: no", returns(3)
    ) as server:
        go(run, server, 3)
        path = run.path
        run.close()
        with Run.open(path) as again:
            go(again, server, 4)
            (first, second) = events(again, Reflected)
    assert (first.experiment, first.expected, first.why) == (2, "less work", "loads were the bottleneck")
    assert first.happened.startswith("not faster; 1.000x the incumbent")
    assert second.experiment == 3
    assert "Why: loads were the bottleneck" in server.prompts()[-1]


def test_a_model_that_gives_no_reason_leaves_what_happened(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(returns(1), "", returns(2)) as server:
        go(run, server, 3)
    (reflected,) = events(run, Reflected)
    assert (reflected.experiment, reflected.why) == (2, "")


def test_reasons_are_read_line_by_line() -> None:
    assert reasons_in("#3: too many loads\n- **#4:** fewer\n5. out", [3, 4]) == {
        3: "too many loads",
        4: "fewer",
    }
    assert reasons_in("<think>hm</think>\nIt spilled.", [7]) == {7: "It spilled."}
    assert reasons_in("It spilled.", [7, 8]) == {}
    assert reasons_in("```cpp\nint x;\n```", [7]) == {}
    assert reasons_in("", [7]) == {}


# --- the playbook's part ------------------------------------------------------------------------------------------


def test_the_playbook_searches_the_tunables_of_a_structure_that_was_kept(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    with ChatServer(
        returns(1).replace("return 1", "fast(1)"), "#2: good", edit("  fast(1);", "  fast(2);")
    ) as server:
        go(run, server, 6, playbook_turns=3)
    assert who(run) == ["starter", "llm", *["playbook"] * 3, "llm"]
    assert all("fast(1)" in run.source(e).source for e in run.experiments()[2:5])


def test_constants_alone_are_no_new_structure(make_run: Callable[..., Run]) -> None:
    run = make_run()
    constant = edit(
        "constexpr int kMode = 0;  // tune(algorithm): 0, 1, 2",
        "constexpr int kMode = 1;  // tune(algorithm): 0, 1, 2",
    )
    with ChatServer(constant, "#2: good", returns(2)) as server:
        go(run, server, 3, playbook_turns=3)
    assert [(e.tag, e.decision) for e in run.experiments()][1:] == [("llm", "keep"), ("llm", "revert")]


# --- bad answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step(text="I would tile the loop."), "no_code"),
        (Step(text=""), "empty"),
        (Step(text="Hypothesis: x\n```cpp\n" + STARTER.source[:200]), "cut_off"),
        (Step(text="Hypothesis: x\n```cpp\n" + STARTER.source[:200], finish="length"), "cut_off"),
        (Step(text="I'm sorry, I can't do that."), "refused"),
        (Step(text=edit("  return nothing;", "  return 1;")), "bad_edit"),
        (Step(text=edit("// kernel_type: rmsnorm", "// kernel_type: softmax")), "contract"),
        (Step(text=edit("kUnroll = 1;  // tune(compute): 1, 2, 4, 8", "x")), "bad_edit"),
        (
            Step(text=edit("constexpr int kMode = 0;  // tune(algorithm): 0, 1, 2", "constexpr int kMode = 7;  // tune(algorithm): 0, 1, 2")),
            "contract",
        ),
    ],
)  # fmt: skip
def test_a_run_survives_a_model_of_bad_answers_and_says_so(
    make_run: Callable[..., Run], step: Step, words: str
) -> None:
    run = make_run()
    with ChatServer(step) as server:
        result, winner = go(run, server, 4, fruitless_rounds=2)
    rounds = events(run, Round)
    assert [r.usable for r in rounds] == [0, 0, 0]
    assert all(r.unusable[0].startswith(words) for r in rounds[:2]), rounds[0].unusable
    assert "made no usable proposal in 2 rounds" in rounds[2].note
    assert result.reason.endswith("m made no usable proposal in 2 rounds")
    assert who(run) == ["starter", *["playbook"] * 3], "the playbook goes on"
    assert winner is not None
    # Each bad answer is asked for once more, except a refusal.
    assert len(server.asked) == (2 if words == "refused" else 4)


def test_a_cut_off_answer_is_asked_for_again_with_twice_the_room(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(Step(text="Hypothesis: x\n```cpp\nint", finish="length"), returns(1)) as server:
        go(run, server, 2, answer_tokens=500)
    assert [a["max_tokens"] for a in server.asked] == [500, 1000]
    assert "cut off" in server.prompts()[1]
    assert [e.outcome for e in events(run, Asked)] == ["cut_off", "answered"]


def test_an_unusable_answer_is_answered_with_what_is_wrong_with_it(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(edit("  return nothing;", "  return 1;"), returns(1)) as server:
        go(run, server, 2)
    again = server.asked[1]["messages"]
    assert [m["role"] for m in again] == ["system", "user", "assistant", "user"]
    assert "'return nothing;'" in again[3]["content"]
    assert "Most like it: 'return 0;'" in again[3]["content"]
    assert len(run.experiments()) == 2


# --- a server that fails ------------------------------------------------------------------------------------------


def test_an_outage_gives_the_playbook_a_turn_and_is_over_when_it_is_over(
    make_run: Callable[..., Run],
) -> None:
    run = make_run()
    down = error(503, "down")
    with ChatServer(returns(1), "#2: no", down, down, returns(2)) as server:
        go(run, server, 4)
    assert who(run) == ["starter", "llm", "playbook", "llm"]
    assert "HTTP 503: down" in events(run, Round)[1].unusable[0]
    assert [e.outcome for e in events(run, Asked)] == ["answered", "answered", "unavailable", "answered"]


def test_a_lasting_outage_leaves_the_playbook_alone(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(returns(1), "#2: no", error(503, "down")) as server:
        result, _ = go(run, server, 7, fruitless_rounds=2)
    assert who(run) == ["starter", "llm", *["playbook"] * 5]
    assert len(server.asked) == 2 + 2 * 2, "two rounds of two requests each"
    assert "made no usable proposal in 2 rounds" in result.reason


@pytest.mark.parametrize("status", [401, 402, 404, 503])
def test_a_model_that_never_answered_ends_the_run_with_a_sentence(
    make_run: Callable[..., Run], status: int
) -> None:
    run = make_run()
    with (
        ChatServer(error(status, "no")) as server,
        pytest.raises(LanguageModelError, match=f"HTTP {status}") as told,
    ):
        go(run, server, 4)
    assert told.value.remedy
    assert [e.outcome for e in events(run, Asked)] == ["unavailable" if status == 503 else "failed"]


def test_a_key_that_is_withdrawn_in_the_night_does_not_end_the_run(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(returns(1), "#2: no", error(401, "revoked")) as server:
        result, winner = go(run, server, 5)
    assert winner is not None
    assert result.experiments == 5
    assert "its key was refused (HTTP 401: revoked)" in result.reason
    assert len(server.asked) == 3


def test_what_a_round_had_before_its_end_is_judged(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(returns(1), error(402, "pay")) as server:
        result, _ = go(run, server, 4, temperatures=(0.1, 0.5, 0.9))
    assert who(run) == ["starter", "llm", "playbook", "playbook"]
    assert "no credit left" in result.reason
    assert events(run, Round)[0].usable == 1


def test_unusable_answers_are_told_even_where_the_budget_ends_the_round(make_run: Callable[..., Run]) -> None:
    run = make_run(max_tokens=2300)
    with ChatServer("I would tile.") as server:
        go(run, server, 3)
    assert len(server.asked) == 1, "another answer does not fit"
    assert events(run, Round)[0].unusable[0].startswith("no_code")
    assert "tokens are spent" in events(run, Round)[-1].note


def test_what_a_gpus_file_is_rejected_for_is_told_before(repository_root: Path) -> None:
    """The judge captures every call in a CUDA graph; on a CPU there is nothing to capture."""
    told = {b: llm_prompts.system("rmsnorm", b) for b in ("triton", "cuda", "cpp")}
    assert all("CUDA graph" in told[b] and "the judge tries" in told[b] for b in ("triton", "cuda"))
    assert "CUDA graph" not in told["cpp"]
    assert "capturable in a CUDA graph" in (repository_root / "program.md").read_text()


def test_a_full_context_makes_the_prompt_shorter_step_by_step(
    make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run()
    full = error(400, "This model's maximum context length is 4096 tokens")
    with ChatServer(
        returns(1), "#2: it was slow", full, full, full, returns(2), "#3: x", returns(3)
    ) as server:
        go(run, server, 4)
    prompts = [p for p in server.prompts() if "# The file" in p]
    assert ["Worst: " in p for p in prompts] == [False, True, False, False, False, False]
    assert ["Why: it was slow" in p for p in prompts] == [False, True, True, True, False, False]
    assert [len(a) for a in prompts[1:5]] == sorted((len(a) for a in prompts[1:5]), reverse=True)
    told = [r.getMessage() for r in caplog.records if "context of m is full" in r.getMessage()]
    assert len(told) == 3
    assert "without the worst attempt" in told[0]
    asked = events(run, Asked)
    assert [a.outcome for a in asked][2:6] == ["context_full"] * 3 + ["answered"]
    assert asked[5].detail == "with the contract, the calls and the file alone"
    assert [e.tag for e in run.experiments()] == ["starter", "llm", "llm", "llm"]


def test_a_context_that_nothing_fits_is_given_up(make_run: Callable[..., Run]) -> None:
    run = make_run()
    full = error(400, "maximum context length")
    with ChatServer(returns(1), "#2: no", full) as server:
        result, _ = go(run, server, 4, fruitless_rounds=2)
    assert "does not fit the context of m" in events(run, Round)[1].unusable[0]
    assert result.experiments == 4
    assert len(server.asked) == 2 + 4 + 1


# --- budgets ------------------------------------------------------------------------------------------------------


def test_the_token_budget_holds_and_is_not_given_anew_by_a_resumption(make_run: Callable[..., Run]) -> None:
    run = make_run(max_tokens=5000)
    with ChatServer(*[returns(i) if i % 2 else f"#{i // 2 + 2}: no" for i in range(1, 40)]) as server:
        result, winner = go(run, server, 12)
        spent = llm_account.spent_by(run)
        assert 3300 <= spent.tokens <= 5000
        assert spent.tokens == 1100 * len(server.asked)
        assert winner is not None
        assert result.experiments == 12, "the playbook has cost no token"
        assert f"{spent.tokens} of 5000 tokens are spent (--max-tokens)" in result.reason
        asked, path = len(server.asked), run.path
        run.close()
        with Run.open(path) as again:
            go(again, server, 14)
            assert len(server.asked) == asked
            assert llm_account.spent_by(again) == spent
    # No answer may be longer than what is left, less its prompt.
    assert server.asked[0]["max_tokens"] == 5000
    assert server.asked[2]["max_tokens"] <= 5000 - 2 * 1100 - 1000


def test_the_cost_budget_holds_by_the_users_prices(make_run: Callable[..., Run]) -> None:
    run = make_run(
        max_cost=0.02, price_in=2.0, price_out=20.0
    )  # 0.004 dollars a question of 1000 and 100 tokens
    with ChatServer(*[returns(i) if i % 2 else f"#{i // 2 + 2}: no" for i in range(1, 40)]) as server:
        result, _ = go(run, server, 12)
    spent = llm_account.spent_by(run)
    assert spent.cost_usd == pytest.approx(0.004 * len(server.asked))
    assert 1 <= len(server.asked) <= 5
    assert spent.cost_usd <= 0.02
    assert "of 0.0200 dollars are spent (--max-cost)" in result.reason
    assert all(a.cost_usd == pytest.approx(0.004) for a in events(run, Asked))


def test_the_cost_budget_holds_by_what_answers_cost(make_run: Callable[..., Run]) -> None:
    run = make_run(max_cost=1.0)
    usage = {"prompt_tokens": 10, "completion_tokens": 10, "cost": 0.3}
    steps = [Step(text=returns(i) if i % 2 else "#2: no", usage=usage) for i in range(1, 20)]
    with ChatServer(*steps) as server:
        llm_account.prepare(run, chat=Chat("m", base_url=server.url))
        go(run, server, 12)
    assert len(server.asked) == 3, "a fourth may cost 0.3 as well, and 0.1 is left"
    assert llm_account.spent_by(run).cost_usd == pytest.approx(0.9)


def test_what_was_spent_is_told_in_a_sentence(make_run: Callable[..., Run]) -> None:
    run = make_run(price_in=1.0, price_out=1.0)
    assert llm_account.summary(run) is None
    with ChatServer(returns(1), error(503, "down")) as server:
        go(run, server, 3)
    assert (
        llm_account.summary(run) == "m was asked 3 times (2 without an answer): 1100 tokens, 0.0011 dollars"
    )


def test_one_price_alone_is_refused(make_run: Callable[..., Run]) -> None:
    run = make_run(price_in=1.0)
    with ChatServer("yes") as server, pytest.raises(UsageError, match="One price alone"):
        llm_account.prepare(run, chat=Chat("m", base_url=server.url))


def test_a_cost_budget_without_any_price_is_refused_with_a_sentence(make_run: Callable[..., Run]) -> None:
    run = make_run(max_cost=1.0)
    with ChatServer("yes") as server, pytest.raises(UsageError, match="--max-cost cannot be held") as told:
        llm_account.prepare(run, chat=Chat("m", base_url=server.url))
    assert "--price-in" in told.value.remedy
    assert events(run, Asked)[0].purpose == "price"


def test_a_cost_budget_is_held_by_the_servers_list_of_prices(make_run: Callable[..., Run]) -> None:
    run = make_run(max_cost=0.02)
    models = {"data": [{"id": "m", "pricing": {"prompt": "0.000002", "completion": "0.00002"}}]}
    with ChatServer(*[returns(i) if i % 2 else "#2: no" for i in range(1, 40)], models=models) as server:
        llm_account.prepare(run, chat=Chat("m", base_url=server.url))
        assert server.asked == [], "the list says it: no question is spent on it"
        go(run, server, 12)
    assert 1 <= len(server.asked) <= 5
    assert llm_account.spent_by(run).cost_usd == pytest.approx(0.004 * len(server.asked))


# --- crashes and what a person can read ---------------------------------------------------------------------------


def test_candidates_that_wait_for_the_judge_survive_a_crash(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer(returns(1), "#2: no", returns(2), returns(3)) as server:
        go(run, server, 2, temperatures=(0.1, 0.5, 0.9))
        (first,) = events(run, Round)
        assert first.usable == 1, "no more than the experiments that are left"
        path = run.path
        run.close()
        with Run.open(path) as again:
            search = search_of(again, max_experiments=9)
            made = model_of(again, server, temperatures=(0.1, 0.5)).propose(search.context(), 1)
            asked = len(server.asked)
            # The process dies here: the other candidate was paid for, and is not asked for again.
            after = model_of(again, server).propose(search.context(), 9)
            assert len(server.asked) == asked
            assert made[0] in after
            assert len(after) == 2


@pytest.mark.parametrize("written", [True, False], ids=["after the write", "before the write"])
@pytest.mark.parametrize("at", range(1, 17, 3))
def test_a_run_that_dies_at_a_write_goes_on_with_nothing_counted_twice(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, at: int, written: bool
) -> None:
    class Dead(BaseException):
        pass

    append, count = Run.append, 0

    def dying(self: Run, event: object) -> None:
        nonlocal count
        count += 1
        if count == at and not written:
            raise Dead
        append(self, event)
        if count == at:
            raise Dead

    answered = 0

    def answer(body: dict[str, Any]) -> str:
        nonlocal answered
        answered += 1
        if "write one short line" in body["messages"][-1]["content"]:
            return "#2: a\n#3: b\n#4: c\n#5: d\n#6: e"
        return returns(answered) if answered % 3 else returns(answered).replace("return", "wrong +=", 2)

    run = make_run()
    with ChatServer(answer) as server:
        monkeypatch.setattr(Run, "append", dying)
        with pytest.raises(Dead):
            go(run, server, 6, temperatures=(0.1, 0.5))
        monkeypatch.setattr(Run, "append", append)
        path = run.path
        run.close()
        with Run.open(path) as again:
            go(again, server, 6, temperatures=(0.1, 0.5))
            tried = again.experiments()
            asked = events(again, Asked)
            reflected = [e.experiment for e in events(again, Reflected)]
    assert len(tried) == 6
    numbers = [e.experiment for e in tried]
    assert numbers == sorted(set(numbers))
    assert len({e.digest for e in tried}) == 6, "no source is judged twice"
    assert len(set(reflected)) == len(reflected)
    # One question at most was put and not entered: the one that the process died of.
    assert len(server.asked) - 1 <= len(asked) <= len(server.asked)


def test_the_report_tells_tokens_and_cost(make_run: Callable[..., Run]) -> None:
    run = make_run(price_in=2.0, price_out=10.0)
    with ChatServer(returns(1), "Prose.", returns(2), returns(3), tokens=(1000, 100)) as server:
        go(run, server, 4, temperatures=(0.1, 0.5))
    asked = events(run, Asked)
    lines = llm_account.bill(run)
    total = lines[-1]
    assert (total.questions, total.unanswered) == (len(asked), 0)
    assert (total.prompt_tokens, total.completion_tokens) == (1000 * len(asked), 100 * len(asked))
    assert total.cost_usd == pytest.approx(len(asked) * (1000 * 2.0 + 100 * 10.0) / 1e6)
    assert sum(line.questions for line in lines[:-1]) == total.questions
    assert {line.purpose for line in lines} >= {"what to try", "what is to be learned"}
    page = write_report(run.path).read_text()
    assert f"{total.cost_usd:.4f} dollars" in page
    assert f'<td class="n">{total.prompt_tokens}</td><td class="n">{total.completion_tokens}</td>' in page


def test_a_run_without_a_language_model_has_no_bill(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert llm_account.bill(run) == []
    assert "Language model" not in write_report(run.path).read_text()


def test_conversations_can_be_read(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with ChatServer("Prose.", returns(1)) as server:
        go(run, server, 2)
    first, second = events(run, Asked)
    assert [first.transcript, second.transcript] == ["llm/00001-propose.md", "llm/00002-again.md"]
    page = (run.path / "llm/00002-again.md").read_text()
    assert (
        page.index("## system")
        < page.index("## user")
        < page.index("Prose.")
        < page.index("## answer (answered)")
    )
    assert page.rstrip().endswith(">>>>>>> REPLACE")


def test_a_run_makes_the_proposer_that_it_was_asked_for(make_run: Callable[..., Run]) -> None:
    run = make_run(base_url="http://127.0.0.1:9/v1")
    made = pipeline.proposer_for(run)
    assert isinstance(made, llm_proposer.LanguageModel)
    assert (made.chat.model, made.chat.base_url) == ("m", "http://127.0.0.1:9/v1")


def test_the_best_of_model_and_playbook_wins(make_run: Callable[..., Run]) -> None:
    """The structure comes from the model, its constants from the playbook; together they reach the optimum."""
    run = make_run()
    with ChatServer(returns(1).replace("return 1", "fast(1)"), "#2: good", "no more ideas") as server:
        _, winner = go(run, server, 40, playbook_turns=30)
    assert winner is not None
    assert "fast(1)" in winner.candidate.source
    best = tunables.values(winner.candidate.source)
    assert formula(best) == min(20.0, formula(best))
