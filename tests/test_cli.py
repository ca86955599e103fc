"""The command line keeps its contract: fast help, one JSON document, exit codes, failures told in a sentence."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

import autokernel_hf
from autokernel_hf import _render, doctor, pipeline, records, shipping, toolchain, tunables
from autokernel_hf._console import Console, guarded
from autokernel_hf.agent import Playbook
from autokernel_hf.candidates import read_candidate
from autokernel_hf.cli import app
from autokernel_hf.errors import ToolMissingError, UsageError, last_words
from autokernel_hf.ledger import Verdict
from autokernel_hf.progress import Silent
from autokernel_hf.records import (
    Evaluation,
    Latency,
    ModelSpec,
    OutputError,
    Profile,
    Proposal,
    PulledModel,
    RunModel,
    RunRecord,
    Speedup,
    SpeedupInterval,
    Stages,
    TargetResult,
    Verification,
    WorkloadResult,
    write_atomically,
)
from autokernel_hf.runs import Run
from autokernel_hf.search import Limits, Search
from tests.loop_helpers import KnownJudge, decide, device, diagnose, settings, starter, target

COMMANDS = [
    "optimize",
    "pull",
    "profile",
    "extract",
    "bench",
    "compile",
    "types",
    "starter",
    "verify",
    "export",
    "publish",
    "check",
    "tune",
    "report",
    "context",
    "try",
    "best",
    "ledger",
    "skill",
    "doctor",
    "gpus",
]


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A searched run, judged by a formula."""
    run = Run.create(tmp_path, "org/model", settings(max_experiments=6))
    run.add_target(target(), [starter()])
    Search(
        target(),
        [starter()],
        run=run,
        judge=KnownJudge(),
        decide=decide,
        diagnose=diagnose,
        limits=Limits(max_experiments=6, max_reverts=9),
        progress=Silent(),
    ).run_all(Playbook())
    run.close()
    return run.path


def test_every_command_of_the_contract_is_there() -> None:
    names = {c.name or c.callback.__name__ for c in app.registered_commands} | {
        g.name for g in app.registered_groups
    }
    assert names == set(COMMANDS)


def test_help_imports_no_framework() -> None:
    """Of every command, one after the other in a fresh process: what one imports stays for all to see."""
    script = (
        "import sys\n"
        "from autokernel_hf.cli import app\n"
        "for command in sys.argv[1:]:\n"
        "    print('=', command)\n"
        "    try:\n        app([a for a in (command, '--help') if a])\n"
        "    except SystemExit as e:\n        assert not e.code, (command, e.code)\n"
        "    loaded = {'torch', 'triton', 'transformers', 'kernels', 'optuna'} & set(sys.modules)\n"
        "    assert not loaded, (command, loaded)\n"
    )
    commands = ["", *COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", script, *commands], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.split("\n= ")
    assert [part.splitlines()[0].removeprefix("=").strip() for part in told] == commands
    assert all("Usage" in part for part in told)


def test_help_answers_in_half_a_second_of_processor_time() -> None:
    best = 9.0
    for _ in range(3):
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "autokernel_hf", "optimize", "--help"], capture_output=True, check=True
        )
        after = os.times()
        best = min(
            best, after.children_user + after.children_system - before.children_user - before.children_system
        )
    assert best < 0.5


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["optimize"], 2),
        (["optimize", "gpt2", "--resume", "x"], 2),
        (["optimize", "gpt2", "--backend", "fortran"], 2),
        (["optimize", "gpt2", "--proposer", "llm", "--device", "tpu"], 2),
        (["profile", "gpt2", "--random-weights", "--input-shape", "1,-5"], 2),
        (["profile", "gpt2", "--random-weights", "--dtype", "int8"], 2),
        (["profile", "gpt2", "--random-weights", "--input-shape", "1,\u00b2"], 2),
        (["profile", "gpt2", "--random-weights", "--input-shape", "1," + "9" * 5000], 2),
        (["profile", "gpt2", "--random-weights", "--input-shape", "99999999,99999999"], 2),
        (["optimize", "gpt2", "--proposer", "llm"], 2),
        (["optimize", "gpt2", "--random-weights", "--name", "!!!"], 2),
        (["optimize", "gpt2", "--random-weights", "--license", ""], 2),
        (["optimize", "gpt2", "--budget", "0s"], 2),
        (["optimize", "gpt2", "--budget", "9" * 400 + "h"], 2),
        (["optimize", "gpt2", "--proposer", "luck"], 2),
        (["optimize", "gpt2", "--llm", "some/model"], 2),
        (["optimize", "gpt2", "--max-cost", "1"], 2),
        (["optimize", "gpt2", "--proposer", "llm", "--llm", "m", "--price-in", "1"], 2),
        (["optimize", "gpt2", "--proposer", "llm", "--llm", "m", "--base-url", "localhost:8000"], 2),
        (["extract", "gpt2", "--backend", "fortran"], 2),
        (["bench", "any.cpp", "--device", "tpu"], 2),
        (["tune", "any", "--device", "tpu"], 2),
        (["nonsense"], 2),
        (["starter", "nonsense", "--backend", "cpp"], 2),
        (["bench", "no-such-file.cpp"], 1),
        (["bench", "no-such-file"], 1),
        (["export", "no-such-run", "--name", "any-name"], 1),
        (["ledger", "--run", "no-such-run"], 1),
        (["check", "no-such-folder/at-all"], 1),
    ],
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    got, out, err = invoke(*arguments)
    assert got == code, err
    assert out == ""
    assert err
    assert "Traceback" not in err


@pytest.mark.parametrize("content", [b"not json", b"{}", b"[]", b"", b"\xff\xfe"])
def test_files_that_are_something_else_are_told_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_bytes(content)
    candidate = tmp_path / "mine.cpp"
    candidate.write_text(starter().source)
    for arguments in (["extract", str(wrong)], ["bench", str(candidate), "--target", str(wrong)]):
        code, _, err = invoke(*arguments)
        assert code == 1
        assert f"{wrong} cannot be read as a" in err
        assert "fault" not in err and "pydantic" not in err


@pytest.mark.parametrize("name", ["run.json", "profile.json", "result.json", "verification.json"])
def test_a_damaged_run_is_told_in_a_sentence(name: str, run_dir: Path) -> None:
    (run_dir / name).write_text("{")
    code, _, err = invoke("report", str(run_dir))
    assert code == 1
    assert f"{name} cannot be read as a" in err
    assert "fault" not in err


@pytest.mark.parametrize("verb", ["context", "best"])
def test_a_run_that_ended_before_its_profile_is_told_so(verb: str, tmp_path: Path) -> None:
    with Run.create(tmp_path, "org/model", settings()) as run:
        pass
    code, _, err = invoke(verb, "--run", str(run.path))
    assert code == 1
    assert "has no targets yet" in err and "--resume" in err


def test_failures_are_one_json_document_too() -> None:
    code, out, err = invoke("ledger", "--run", "no-such-run", "--json")
    assert code == 1
    assert set(json.loads(out)["error"]) == {"message", "remedy"}
    assert "no-such-run is not a run folder" in err


def test_a_full_disk_is_named_by_where_the_file_should_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/from/a", None, "/to/b")

    monkeypatch.setattr(shipping, "export", export)
    code, _, err = invoke("export", str(tmp_path / "mine.cpp"), "--name", "x")
    assert code == 1
    assert "No space left on device: /to/b" in err and "Free some disk space" in err


def test_a_profile_is_told_also_where_the_disk_has_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    spec = ModelSpec(model="llama", random_weights=True)
    model = PulledModel(
        id="llama", revision=None, path=None, architecture="M", parameters=1, weights="random",
        dtype="float32", input_shape=(1, 32),
    )  # fmt: skip
    found = Profile(spec=spec, model=model, device=device(), total_ms=1.0, sites=(), other_share=0.5)
    monkeypatch.setattr(pipeline, "profile_model", lambda *_, **__: found)
    monkeypatch.setattr(records.os, "fsync", full)
    out = tmp_path / "profile.json"
    code, stdout, stderr = invoke("profile", "llama", "--random-weights", "--out", str(out), "--json")
    assert code == 1
    assert Profile.model_validate_json(stdout) == found  # the one document, no second that tells the error
    assert f"No space left on device: {out}" in stderr and "Free some disk space" in stderr
    assert list(tmp_path.iterdir()) == []
    code, stdout, _ = invoke("profile", "llama", "--random-weights", "--out", str(out))
    assert code == 1 and "1.00 ms a pass" in stdout


def test_traceback_only_with_debug() -> None:
    assert "Traceback" not in invoke("ledger", "--run", "no-such-run")[2]
    assert "Traceback" in invoke("ledger", "--run", "no-such-run", "--debug")[2]


def test_types_lists_all_with_schemas_that_parse() -> None:
    code, out, _ = invoke("types", "--json")
    assert code == 0
    listed = {t["name"]: t for t in json.loads(out)["types"]}
    gradients = {name for name in listed if name.endswith("_backward")}
    assert len(listed) == 19 and len(gradients) == 7
    assert not any(listed[name]["patches_models"] for name in gradients)
    assert "triton" in listed["matmul"]["backends"]
    assert listed["activation"]["backends"] == ["triton", "cuda", "cpp"]
    assert (
        listed["rmsnorm"]["schema"]
        == "rmsnorm(Tensor x, Tensor weight, float eps, float offset=0.0) -> Tensor"
    )
    assert listed["rmsnorm"]["patches_models"] is True
    assert listed["reduce"]["patches_models"] is False


def test_starter_prints_the_source_as_it_is(repository_root: Path) -> None:
    code, out, _ = invoke("starter", "rmsnorm", "--backend", "cpp")
    assert code == 0
    assert out == (repository_root / "autokernel_hf/kernels/cpp/rmsnorm.cpp").read_text()


def test_verbs_of_a_coding_agent_read_a_run(run_dir: Path) -> None:
    code, out, _ = invoke("context", "--run", str(run_dir), "--json")
    document = json.loads(out)
    assert code == 0
    assert document["target"] == "rmsnorm"
    assert document["experiments_left"] == 0
    assert len(document["attempts"]) == 6
    assert Path(document["file"]).read_text() == document["source"]
    best = json.loads(invoke("best", "--run", str(run_dir), "--json")[1])
    assert best["source"] == document["source"]
    assert best["speedup_vs_eager"] == pytest.approx(document["speedup_vs_eager"])
    rows = json.loads(invoke("ledger", "--run", str(run_dir), "--json")[1])["experiments"]
    assert [r["experiment"] for r in rows] == [1, 2, 3, 4, 5, 6]


def test_context_tells_the_best_of_other_kinds(run_dir: Path) -> None:
    """kMode is what chooses the algorithm in these candidates."""
    with Run.open(run_dir) as run:  # one that is slower now, and not hopeless
        search = Search(
            target(), [starter()], run=run, judge=KnownJudge(), decide=decide, diagnose=diagnose,
            limits=Limits(), progress=Silent(),
        )  # fmt: skip
        source = tunables.substitute(run.incumbent("rmsnorm").source, {"kMode": 2})  # type: ignore[union-attr]
        candidate = starter().model_copy(update={"source": source})
        proposal = Proposal(source=source, rationale="mode 2", tunables=tunables.values(source))
        slower = search.experiment(candidate, proposal)
        assert slower.decision == "revert"
    document = json.loads(invoke("context", "--run", str(run_dir), "--json")[1])
    rows = json.loads(invoke("ledger", "--run", str(run_dir), "--json")[1])["experiments"]
    modes = {r["experiment"]: r["tunables"]["kMode"] for r in rows}
    present = int(re.search(r"kMode = (\d)", document["source"])[1])
    told = {a["experiment"]: a for a in document["alternatives"]}
    assert slower.experiment in told and present not in {modes[number] for number in told}
    assert document["since_improvement"] >= 1
    assert all(a["speedup_vs_eager"] < document["speedup_vs_eager"] for a in told.values())
    text = invoke("context", "--run", str(run_dir))[1]
    assert "The best of other kinds" in text
    for number, other in told.items():
        assert f"- #{number} cpp" in text and f"git show {other['commit'][:12]}" in text


def test_try_refuses_a_file_for_another_type_and_a_spent_budget(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.cpp"
    other.write_text("// kernel_type: softmax\n")
    code, _, err = invoke("try", str(other), "--note", "x", "--run", str(run_dir))
    assert code == 1
    assert "is a softmax kernel" in err
    mine = tmp_path / "mine.cpp"
    mine.write_text(starter().source)
    code, _, err = invoke("try", str(mine), "--note", "x", "--run", str(run_dir))
    assert code == 1
    assert "All 6 experiments" in err


def test_try_tells_all_that_bench_tells_and_the_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run.create(tmp_path, "org/model", settings(max_experiments=6)) as run:
        run.add_target(target(), [starter()])

    @contextmanager
    def searching(run: Run, *_: object) -> Iterator[Search]:
        yield Search(
            target(), [starter()], run=run, judge=KnownJudge(), decide=decide, diagnose=diagnose,
            limits=Limits(), progress=Silent(),
        )  # fmt: skip

    monkeypatch.setattr(pipeline, "searching", searching)
    mine = tmp_path / "mine.cpp"
    mine.write_text(starter().source.replace("kUnroll = 1", "kUnroll = 4"))
    code, out, err = invoke("try", str(mine), "--note", "unroll", "--run", str(run.path), "--json")
    assert code == 0, err
    document = json.loads(out)
    assert set(Evaluation.model_fields) | {"decision", "experiment"} <= set(document)
    assert (document["status"], document["decision"], document["experiment"]) == ("passed", "keep", 2)
    assert document["stages"]["edges"] == "passed"
    (workload,) = document["workloads"]
    assert document["speedup_vs_incumbent"] == pytest.approx(workload["speedup_vs_incumbent"])


def test_report_writes_a_page_and_a_picture(run_dir: Path) -> None:
    code, out, _ = invoke("report", str(run_dir), "--json")
    assert code == 0
    page = Path(json.loads(out)["path"]).read_text()
    assert "5.000" in page or "kUnroll" in page
    assert (run_dir / "progress.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_skill_is_installed_where_asked(tmp_path: Path) -> None:
    code, out, _ = invoke("skill", "add", "--dest", str(tmp_path), "--json")
    assert code == 0
    text = Path(json.loads(out)["path"]).read_text()
    assert text.startswith("---\nname: autokernel-hf\n")
    assert "autokernel-hf try FILE --note" in text
    assert invoke("skill", "add")[0] == 2


def test_program_md_names_only_commands_that_exist(repository_root: Path) -> None:
    import re

    text = (repository_root / "program.md").read_text()
    named = set(re.findall(r"`autokernel-hf (\w+)", text))
    assert named >= {"context", "try", "best", "ledger", "optimize"}
    assert named <= set(COMMANDS)


def test_doctor_has_a_remedy_for_every_failure_that_has_one() -> None:
    code, out, _ = invoke("doctor", "--json")
    assert code == 0
    checks = {c["name"]: c for c in json.loads(out)["checks"]}
    assert checks["torch"]["ok"]
    assert checks["transformers accepts kernels"]["ok"]
    assert all(c["remedy"] for c in checks.values() if not c["ok"])


@pytest.mark.parametrize(
    ("transformers", "kernels", "wanted"),
    [
        ("5.22.2", "0.17.2", None),
        ("5.23.0", "0.17.2", ">=0.18.2,<0.19"),
        ("5.24.0", "0.17.2", ">=0.18.2,<0.19"),
        ("5.17.0", "0.17.2", ">=0.16,<0.17"),
        ("5.18.0", "0.17.0", None),
        ("5.20.2", "0.17.0", ">=0.17.2,<0.18"),
    ],
)
def test_doctor_knows_which_versions_refuse_each_other(
    transformers: str, kernels: str, wanted: str | None
) -> None:
    assert doctor.refused_pair(transformers, kernels) == wanted


def test_doctor_names_a_variable_that_breaks_every_hub_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    found = {c.name: c for c in doctor.examine()}["kernels can reach the Hub"]
    assert not found.ok
    assert found.remedy == "unset DO_NOT_TRACK"


def test_doctor_looks_at_the_compiler_that_builds_use(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.gxx.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        found = {c.name: c for c in doctor.examine()}["g++"]
    finally:
        toolchain.gxx.cache_clear()
    assert not found.ok
    assert "apt-get install g++" in found.remedy


def test_a_verification_without_times_shows_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = Verification(
        passed=False, kernel_calls={"rmsnorm": 1}, latency_ms=Latency(), speedup=Speedup(),
        speedup_ci95=SpeedupInterval(), error=None, reason="wrong",
    )  # fmt: skip
    _render.verification_text(Console(json=False), nothing)
    assert capsys.readouterr().out == ""


def test_doctor_examines_an_installation_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it did not import
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(doctor, "installed", lambda name: {"huggingface_hub": "1.40.0"}.get(name))
    found = {c.name: c for c in doctor.examine()}
    assert not found["torch"].ok
    assert found["gpu"].detail.startswith("could not be tried: ModuleNotFoundError: ")
    assert found["gpu"].remedy
    assert not found["hub"].ok
    assert found["huggingface_hub"].ok
    assert "cannot publish" in found["huggingface_hub"].detail
    assert found["build cache"].ok


def test_a_build_cache_that_cannot_be_made_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run.create(tmp_path / "agent", "org/model", settings(max_experiments=6)) as run:
        run.add_target(target(), [starter()])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOKERNEL_HF_CACHE", str(tmp_path / "file" / "cache"))
    source = Path(__file__).parent / "honest" / "rmsnorm_plain.cpp"
    (candidate,) = run.path.glob("targets/*/kernel.cpp")
    for command in (
        ["bench", str(source), "--quick"],
        ["optimize", "gpt2", "--random-weights", "--device", "cpu", "--out", str(tmp_path / "runs")],
        ["try", str(candidate), "--note", "x", "--run", str(run.path)],
        ["tune", str(tmp_path)],
    ):
        code, _, err = invoke(*command)
        assert code == 1
        assert f"The build cache {tmp_path / 'file' / 'cache'} cannot be written: Not a directory." in err
        assert "set AUTOKERNEL_HF_CACHE to a folder that you can write" in err
        assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_gpus_lists_this_device_and_the_known_ones() -> None:
    code, out, _ = invoke("gpus", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["devices"][0]["kind"] == "cpu"
    assert document["devices"][0]["units"] >= 1
    assert len(document["known"]) >= 20


def test_python_m_is_the_same_program() -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "autokernel_hf", "starter", "x", "--backend", "cpp"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "There is no kernel type 'x'" in done.stderr
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", ""),
        ("Killed\n", "Killed"),
        ("Traceback (most recent call last):\n  File \"a.py\", line 1\n    f()\nValueError: bad\nmore\n", "ValueError: bad"),
        ("Traceback (most recent call last):\n  File \"a.py\", line 1\ntorch.OutOfMemoryError\n", "torch.OutOfMemoryError"),
        (
            "Traceback (most recent call last):\n  x\nKeyError: 1\n\nDuring handling:\n\n"
            "Traceback (most recent call last):\n  y\nRuntimeError: no memory (at alloc.cpp:1)\nframe #0: f + 0x1\n\"\n",
            "RuntimeError: no memory (at alloc.cpp:1)",
        ),
    ],
)  # fmt: skip
def test_last_words_of_a_process_are_its_exception(said: str, words: str) -> None:
    assert last_words(said) == words


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("import sys; sys.exit(0)", r"ended without a result \(exit code 0\)\. .*sys\.exit"),
        ("import os; os.abort()", r"ended without a result \(signal SIGABRT"),
    ],
)
def test_a_model_that_ends_its_process_is_told_in_a_sentence(end: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(f"from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        {end}\n")
    code, _, err = invoke("pull", f"{file}:Net", "--device", "cpu", "--input-shape", "1,4")
    assert code == 1
    assert re.search(told, " ".join(err.split()))
    assert "Traceback" not in err


def test_files_of_the_current_folder_shadow_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("profile", "torch", "random", "autokernel_hf"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the folder was imported')\n")
    (tmp_path / "net.py").write_text("from torch import nn\nclass Net(nn.ReLU):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    pulled = pipeline.pull(ModelSpec(model="net.py:Net", device="cpu", input_shape=(1, 4)))
    assert pulled.architecture == "Net"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top": 0}, "--top 0 leaves nothing to do"),
        ({"max_experiments": -1}, "--max-experiments -1 leaves nothing to do"),
        ({"budget_s": 0.0}, "budget of 0 s"),
        ({"backend": "fortran"}, "--backend fortran is unknown"),
        ({"proposer": "luck"}, "--proposer luck is unknown"),
        ({"max_cost": 1.0}, "mean nothing to the playbook proposer"),
        ({"license": "no licence"}, "is no licence's identifier"),
    ],
)
def test_python_and_the_command_line_refuse_the_same(
    options: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull(spec: ModelSpec) -> PulledModel:
        raise AssertionError("the model is pulled before the options are looked at")

    monkeypatch.setattr(pipeline, "pull", pull)
    with pytest.raises(UsageError, match=told):
        autokernel_hf.optimize("gpt2", random_weights=True, device="cpu", out=tmp_path, **options)


def test_a_run_that_waits_for_a_coding_agent_says_so() -> None:
    def skipped(backend: Literal["cpp"] | None, reason: str) -> TargetResult:
        return TargetResult(
            name="rmsnorm", kernel_type="rmsnorm", backend=backend, share=0.1, status="skipped", reason=reason
        )

    waiting, passed_over = skipped("cpp", "left to a coding agent"), skipped(None, "too little to measure")
    assert pipeline._reason([passed_over, waiting], None) == "rmsnorm: left to a coding agent"
    assert pipeline._reason([passed_over], None).startswith("no kernel type has enough to gain")


def test_version_is_told() -> None:
    assert invoke("--version") == (0, f"autokernel-hf {autokernel_hf.__version__}\n", "")


def test_export_says_that_a_source_is_neither_a_run_nor_a_file(tmp_path: Path) -> None:
    for source, told in ((tmp_path / "absent", "is not there"), (tmp_path, "neither a run folder")):
        code, _, err = invoke("export", str(source), "--name", "any-name")
        assert code == 1
        assert f"{source} is " in err and told in err


def test_a_byte_order_mark_is_no_part_of_a_candidate(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.cpp", tmp_path / "marked.cpp"
    plain.write_text(starter().source, encoding="utf-8")
    marked.write_text(starter().source, encoding="utf-8-sig")
    assert marked.read_bytes().startswith(b"\xef\xbb\xbf")
    assert read_candidate(marked) == read_candidate(plain)


def test_files_of_a_run_can_be_read_by_whoever_reads_its_folder(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "results.tsv", "x\n")
    finally:
        os.umask(before)
    assert (tmp_path / "results.tsv").stat().st_mode & 0o777 == 0o640
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path / "folder", "x\n")
    assert caught.value.filename == str(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "results.tsv"]


def test_a_table_tells_workloads_of_one_shape_apart(capsys: pytest.CaptureFixture[str]) -> None:
    works = [
        WorkloadResult(label=f"4x8/{kind}", shape="4x8", dtype="float32", latency_us=1.0)
        for kind in ("gelu", "silu")
    ]
    evaluation = Evaluation(status="passed", stages=Stages(), workloads=tuple(works))
    _render.bench_text(Console(json=False), evaluation)
    rows = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert rows == ["4x8/gelu", "4x8/silu"]


def test_log_lines_go_through_a_progress_bar_that_has_taken_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written past the bar, a line would be glued to it."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with guarded("types", False, False):
        behind, bar = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", behind)
        logging.getLogger("autokernel_hf.any").warning("before")
        monkeypatch.setattr(sys, "stderr", bar)
        logging.getLogger("autokernel_hf.any").warning("while it stands there")
    assert (behind.getvalue(), bar.getvalue()) == ("before\n", "while it stands there\n")


def test_numbers_are_written_without_powers_where_they_are_times() -> None:
    numbers = [None, 0.01234567, 839.04, 11930.4, 2094750.0]
    assert [_render.number(n) for n in numbers] == ["", "0.01235", "839", "11930", "2094750"]


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_fails_nothing(closed: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m autokernel_hf types {closed}>&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("rmsnorm" in done.stdout) == (closed == 2)


def test_help_keeps_what_stands_in_brackets() -> None:
    """Typer reads square brackets as markup."""
    text = " ".join(invoke("optimize", "--help")[1].replace("\u2502", " ").split())
    assert re.search(r"tokens of questions\s+\(default: as the server says\)", text)


def test_an_interrupted_run_is_named_with_the_way_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = PulledModel(
        id="org/model", revision=None, path=None, architecture="M", parameters=1, weights="random",
        dtype="float32", input_shape=(1, 32),
    )  # fmt: skip

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "pull", lambda spec: model)
    monkeypatch.setattr(pipeline, "profile_into", interrupt)
    code, _, err = invoke("optimize", "llama", "--random-weights", "--out", str(tmp_path))
    assert code == 130
    (run,) = tmp_path.iterdir()
    assert f"optimize --resume {run}" in err
    code, _, err = invoke("optimize", "--resume", str(run), "--top", "2")
    assert code == 130
    assert f"optimize --resume {run}" in err
    assert "keeps its own settings" in caplog.text


def test_a_run_without_git_is_refused_before_its_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissingError, match="git is not installed"):
        Run.create(tmp_path, "org/model", settings())
    assert list(tmp_path.iterdir()) == []


def test_verifying_again_leaves_the_packages_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Path] = []

    def stage(*_: object, out: Path, **__: object) -> list[object]:
        places.append(out)
        return []

    monkeypatch.setattr(shipping, "winners_of", lambda run: (SimpleNamespace(model=None), []))
    monkeypatch.setattr(shipping, "stage", stage)
    monkeypatch.setattr(shipping, "verify", lambda *_: "verified")
    with Run.open(run_dir) as run:
        assert shipping.verify_again(run, Silent()) == "verified"
    (place,) = places
    assert not place.is_relative_to(run_dir) and not place.exists()
    assert not (run_dir / "result.json").exists()  # the run has not come to an end


def verification(low: float, ratio: float) -> Verification:
    return Verification(
        passed=low > 1,
        kernel_calls={"rmsnorm": 4},
        latency_ms=Latency(eager=ratio, eager_kernels=1.0),
        speedup=Speedup(vs_eager=ratio),
        speedup_ci95=SpeedupInterval(vs_eager=(low, 2 * ratio - low)),
        error=OutputError(max_abs=0.0, ratio_to_eager=1.0, top1_agreement=1.0, kl=0.0),
        reason=f"{ratio} times as fast",
    )


def test_the_latest_verification_is_the_verdict_and_the_earlier_ones_stay_in_the_ledger(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = verification(0.98, 1.01), verification(1.03, 1.05)
    wrong = verification(0.98, 1.01).model_copy(
        update={"error": None, "speedup": Speedup(), "speedup_ci95": SpeedupInterval(), "reason": "wrong"}
    )
    monkeypatch.setattr(shipping, "winners_of", lambda run: (SimpleNamespace(model=None), []))
    monkeypatch.setattr(shipping, "stage", lambda *_, **__: [])
    told = RunRecord(
        status="no_speedup",
        reason=slow.reason,
        run_dir=str(run_dir),
        model=RunModel(id="org/model", revision=None, architecture="M", weights="random"),
        device=device(),
        targets=(),
        verification=slow,
        packages=(),
        seconds=3.0,
    )
    told.save(run_dir / "result.json")  # as a run left it that ended before verdicts were entered
    seen = []
    for found, code in ((fast, 0), (wrong, 1), (slow, 1)):
        monkeypatch.setattr(shipping, "verify", lambda *_, found=found: found)
        assert invoke("verify", str(run_dir))[0] == code
        result = RunRecord.load(run_dir / "result.json")
        assert result.verification == found and result.reason == found.reason
        assert result.model_copy(
            update={"status": told.status, "reason": told.reason, "verification": slow}
        ) == told.model_copy(update={"run_dir": result.run_dir})
        assert found.reason in (run_dir / "report.html").read_text()
        seen.append(result.status)
    assert seen == ["won", "failed", "no_speedup"]
    with Run.open(run_dir) as run:
        verdicts = [e for e in run.events() if isinstance(e, Verdict)]
        assert [e.status for e in verdicts] == ["no_speedup", *seen]
        assert [e.verification for e in verdicts] == [slow, fast, wrong, slow]
        assert len(run.experiments()) == 6
