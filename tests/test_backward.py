"""Kernels of gradients: their numbers, what a package with one does in training, and what one without must not do."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autokernel_hf import build, interface, packages, tune
from autokernel_hf.errors import CandidateError, UsageError
from autokernel_hf.export_hf import export_file
from autokernel_hf.judge.cases import STAGES, Scope, cases_of, key_of
from autokernel_hf.judge.checks import check_values, expect
from autokernel_hf.judge.timing import Local, Values
from autokernel_hf.judge.turn import Turn
from autokernel_hf.kernels import kernel_type, kernel_types, starter
from autokernel_hf.kernels._backward import backward_workload, by_autograd
from autokernel_hf.kernels.base import KernelType, make_inputs, upcast
from autokernel_hf.records import Candidate, Evaluation, Package, Stages, Workload
from autokernel_hf.variant import Domain
from tests.package_factory import candidate

TYPES = tuple(name for name, found in kernel_types().items() if found.gradients is not None)
LARGEST = 1 << 17


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forward_of(found: KernelType) -> KernelType:
    assert found.gradients is not None
    return kernel_type(found.gradients.forward)


def calls_of(found: KernelType) -> list[Workload]:
    """Every call of every stage, in every dtype, once."""
    scope = Scope(kernel_type=found, workloads=found.workloads["cpu"], dtypes=found.dtypes, backend="cuda")
    whole = Domain(dtypes=found.dtypes, values={})
    calls = {key_of(c.workload): c.workload for stage in STAGES for c in cases_of(stage, scope, whole)}
    return [w for w in calls.values() if max(math.prod(s.shape) for _, s in w.tensors) <= LARGEST]


# --- the types ----------------------------------------------------------------------------------------------------


def test_a_backward_takes_the_gradients_and_then_what_the_forward_takes() -> None:
    assert TYPES == (
        "activation_backward",
        "cross_entropy_backward",
        "gated_activation_backward",
        "layernorm_backward",
        "rmsnorm_backward",
        "rotary_embedding_backward",
        "softmax_backward",
    )
    for name in TYPES:
        found = kernel_type(name)
        forward = forward_of(found)
        assert found.gradients is not None and name == f"{forward.name}_backward"
        grads = found.schema.args[: forward.schema.returns]
        assert all(a.name.startswith("grad") and a.type == "Tensor" for a in grads)
        assert found.schema.args[len(grads) :] == forward.schema.args
        assert found.schema.returns == len(found.outputs) == len(found.gradients.of)
        assert not found.layers, "nothing of a model is replaced by it"


@pytest.mark.parametrize("name", TYPES)
def test_the_oracle_is_the_derivative_of_the_forwards_oracle(name: str) -> None:
    found = kernel_type(name)
    forward = forward_of(found)
    assert found.gradients is not None
    compared = 0
    for workload in calls_of(found):
        if workload.dtype != "float32" or workload.values == "nonfinite":
            continue
        exact = upcast(make_inputs(found, workload, 11))
        outputs = found.oracle(**exact)
        grads = tuple(exact.pop(a.name) for a in found.schema.args[: forward.schema.returns])
        tensors = {n: exact.pop(n) for n in found.gradients.of}
        for got, want in zip(outputs, by_autograd(forward.oracle, grads, tensors, **exact), strict=True):
            assert got.shape == want.shape
            scale = want.abs().max().item() if want.numel() else 0.0
            assert not want.numel() or (got - want).abs().max().item() <= 1e-9 * scale + 1e-300, (
                workload.label
            )
            compared += want.numel()
    assert compared > 10_000


@pytest.mark.parametrize("name", TYPES)
def test_autograd_of_the_models_own_ops_is_within_tolerance(name: str) -> None:
    found = kernel_type(name)
    calls = calls_of(found)
    assert {w.dtype for w in calls} == set(found.dtypes)
    for workload in calls:
        args = make_inputs(found, workload, 12)
        outcome = check_values(found.reference(**args), expect(found, workload, args), found, workload)
        assert not outcome.problem, f"{workload.label} {workload.dtype} {workload.values}: {outcome.problem}"


def test_a_workload_of_a_model_becomes_that_of_its_backward() -> None:
    forward, backward = kernel_type("cross_entropy"), kernel_type("cross_entropy_backward")
    called = forward.build({"N": 6, "V": 10}, "bfloat16", {}).model_copy(update={"calls": 3, "share": 0.25})
    made = backward_workload(backward, forward, called)
    assert made.dtype == "bfloat16" and made.calls == 3 and made.share == 0.25
    assert made.tensor("grad").shape == () and made.tensor("grad").dtype == "float32"
    assert made.args[1:] == called.args


# --- the judge does not time a forward pass -----------------------------------------------------------------------


def test_of_a_peer_that_is_a_backward_pass_the_forward_pass_is_not_timed() -> None:
    order: list[str] = []

    def function(x: Tensor) -> Tensor:
        raise AssertionError("what is called is what was prepared")

    def prepare(x: Tensor) -> Any:
        order.append(f"forward of {x.item():g}")
        return lambda **arguments: order.append("backward") or x * 2

    function.prepare = prepare  # type: ignore[attr-defined]
    x, sinks = torch.zeros(1), [[torch.empty(1)] for _ in range(2)]
    sources = [[torch.full((1,), value)] for value in (3.0, 5.0)]
    turn = Turn(function, {"x": x}, [x], sources, sinks, prepare)
    times = turn.take(None, 0.0)
    assert len(times.device_us) == 2
    assert order == ["forward of 5", "backward", "forward of 3", "backward", "forward of 5", "backward"]
    assert [sink[0].item() for sink in sinks] == [6.0, 10.0]


def test_the_judges_eager_contender_is_autograds_backward_on_this_rounds_values() -> None:
    found = kernel_type("rmsnorm_backward")
    workload = found.build({"M": 16, "N": 64}, "float32", {})
    values = Values(found, workload, torch.device("cpu"), [1, 2])
    assert set(values.live) == {"grad", "x"}
    local = Local("eager", found.peers[0].make(workload, torch.device("cpu")), values)  # type: ignore[arg-type]
    import random

    values.refresh(random.Random(3))
    local.turn()
    for call in range(values.calls):
        args = values.args_of(call)
        assert not check_values(local.sinks[call], expect(found, workload, args), found, workload).problem


# --- starters ------------------------------------------------------------------------------------------------------


def test_triton_starters_are_right_in_the_interpreter() -> None:
    """In a process of its own, since the interpreter is chosen at import."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", *TYPES],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == set(TYPES)
    for name, examined in report.items():
        assert examined["calls"] > 50 and not examined["problems"], f"{name}: {examined['problems'][:5]}"


# --- a package with gradients -------------------------------------------------------------------------------------


def pair(name: str, backend: str = "cpp") -> tuple[Candidate, Candidate]:
    return candidate(name, backend), candidate(f"{name}_backward", backend)


def trained(name: str) -> Any:
    """The loaded module of a kernel with its gradients."""
    forward, backward = pair(name)
    return build.load(build.build(forward, backward=backward).path)


FORWARDS = tuple(name.removesuffix("_backward") for name in TYPES)


def leaves_of(name: str, number: int, dtype: str = "float32") -> tuple[dict[str, Any], list[Tensor]]:
    """Arguments of a call of the sweep, and those that gradients are asked for."""
    found, backward = kernel_type(name), kernel_type(f"{name}_backward")
    axes, options = found.sweep[number]
    args = make_inputs(found, found.build(axes, dtype, options), 3)
    assert backward.gradients is not None
    wanted = [args[n].requires_grad_() for n in backward.gradients.of if args[n] is not None]
    return args, wanted


def floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("name", FORWARDS)
def test_gradients_of_a_package_are_those_of_the_models_own_ops(name: str) -> None:
    function, found = getattr(trained(name), name), kernel_type(name)
    for number in range(3):
        for dtype, allowed in (("float32", 2e-6), ("bfloat16", 2e-2)):
            args, wanted = leaves_of(name, number, dtype)
            outputs = function(**args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.manual_seed(number)
            grads = [torch.randn_like(o) for o in outputs]
            got = torch.autograd.grad(outputs, wanted, grads)
            # In float64: torch's own in bfloat16 may be as far off as what is allowed here.
            exact = {n: v.detach().double() if floating(v) else v for n, v in args.items()}
            of = [next(exact[n] for n, v in args.items() if v is leaf).requires_grad_() for leaf in wanted]
            plain = torch.autograd.grad(found.reference(**exact), of, [g.double() for g in grads])
            for g, p, leaf in zip(got, plain, wanted, strict=True):
                assert g.dtype == leaf.dtype and g.shape == leaf.shape
                assert (g.double() - p).abs().max() <= allowed * p.abs().max(), (number, dtype)


@pytest.mark.parametrize("name", FORWARDS)
def test_torch_finds_operator_and_formula_in_order_and_compiles_them(name: str) -> None:
    module, found = trained(name), kernel_type(name)
    function = getattr(module, name)
    args, wanted = leaves_of(name, 0)
    coded = tuple(found.codes[n][v] if isinstance(v, str) else v for n, v in args.items())
    torch.library.opcheck(getattr(getattr(torch.ops, module.__name__), name).default, coded)

    def loss() -> Tensor:
        outputs = function(**args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.stack([(o * o).sum() for o in outputs]).sum()

    plain = torch.autograd.grad(loss(), wanted)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


def test_gradients_that_are_not_asked_for_are_not_there_and_absent_parameters_have_none() -> None:
    layernorm = trained("layernorm").layernorm
    x, weight = torch.randn(4, 16), torch.rand(16, requires_grad=True)
    layernorm(x, weight, None, 1e-5).sum().backward()
    assert x.grad is None and weight.grad is not None and weight.grad.shape == (16,)
    # Frozen parameters, as in adapter training, and a gradient that comes expanded.
    frozen = weight.detach()
    leaf = x.clone().requires_grad_()
    layernorm(leaf, frozen, None, 1e-5).sum().backward()
    assert leaf.grad is not None
    plain = x.clone().requires_grad_()
    torch.nn.functional.layer_norm(plain, (16,), frozen).sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, atol=1e-6, rtol=1e-4)


def test_what_has_no_gradient_raises_instead_of_being_silently_wrong() -> None:
    rotary = trained("rotary_embedding").rotary_embedding
    q, k = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 2, 3, 8)
    cos, sin = torch.rand(1, 3, 8, requires_grad=True), torch.rand(1, 3, 8)
    out, _ = rotary(q, k, cos, sin)
    with pytest.raises(RuntimeError, match="no gradient for cos"):
        out.sum().backward()
    # A second derivative neither.
    rmsnorm = trained("rmsnorm").rmsnorm
    x = torch.randn(3, 8, requires_grad=True)
    (first,) = torch.autograd.grad(rmsnorm(x, torch.ones(8), 1e-6).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="rmsnorm_backward: this kernel has no backward"):
        first.sum().backward()


def test_the_forward_keeps_no_tensor_of_which_only_the_shape_matters() -> None:
    rotary = trained("rotary_embedding").rotary_embedding
    q, k = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 2, 3, 8, requires_grad=True)
    cos, sin = torch.rand(1, 3, 8), torch.rand(1, 3, 8)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotary(q, k, cos, sin)
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}


def test_two_kernels_with_the_same_gradients_live_in_one_process() -> None:
    forward, backward = pair("rmsnorm")
    other = forward.model_copy(update={"source": forward.source + "// another\n"})
    x = torch.randn(4, 32, requires_grad=True)
    found = []
    for one in (forward, other):
        module = build.load(build.build(one, backward=backward).path)
        found.append(torch.autograd.grad(module.rmsnorm(x, torch.ones(32), 1e-6).square().sum(), x)[0])
    alone = build.load(build.build(backward).path)
    assert alone.__name__ in sys.modules and torch.equal(found[0], found[1])


def test_a_backward_of_something_else_or_of_less_is_refused() -> None:
    forward, backward = pair("rmsnorm")
    with pytest.raises(CandidateError, match="computes no gradients of rmsnorm"):
        build.build(forward, backward=candidate("layernorm_backward", "cpp"))
    with pytest.raises(CandidateError, match="that of its gradients a triton one"):
        build.build(forward, backward=candidate("rmsnorm_backward", "triton"))
    narrow = backward.source.replace(
        "// kernel_type: rmsnorm_backward\n",
        "// kernel_type: rmsnorm_backward\n// supports: dtype=float32\n",
    )
    with pytest.raises(CandidateError, match="not dtype float16, dtype bfloat16"):
        build.build(forward, backward=backward.model_copy(update={"source": narrow}))
    gated, slopes = pair("gated_activation")
    only = slopes.source.replace(
        "// kernel_type: gated_activation_backward\n",
        "// kernel_type: gated_activation_backward\n// supports: kind=silu\n",
    )
    with pytest.raises(CandidateError, match="not kind none, kind gelu"):
        build.build(gated, backward=slopes.model_copy(update={"source": only}))


# --- exported ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    forward, backward = pair("rmsnorm")
    return export_file(forward, "trained-norms", backward=backward, out=tmp_path_factory.mktemp("packages"))


def test_the_gradients_folder_is_byte_for_byte_what_is_built_alone(package: Package) -> None:
    forward, backward = pair("rmsnorm")
    (variant,) = (v.path for v in packages.read_variants(Path(package.path)))
    inner = build.build(backward)
    for path, file in packages.files_of(Path(inner.path)):
        assert (variant / inner.id / path).read_bytes() == file.read_bytes()
    assert packages.has_gradients(variant) and not packages.inspect(Path(package.path))
    assert package.functions == ("rmsnorm",), "the operator of the gradients is no function of the package"
    layers = (variant / "layers.py").read_text()
    assert (
        layers.count("has_backward = True") == len(package.layers) == 4
        and "has_backward = False" not in layers
    )
    # Without them the same kernel is another build, and says so.
    plain = Path(build.build(forward).path)
    assert plain.name != variant.name and not packages.has_gradients(plain)
    assert "has_backward = True" not in (plain / "layers.py").read_text()


def test_the_shipped_tests_hold_gradients_against_autograds(package: Package) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=package.path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    text = (Path(package.path) / "tests/test_rmsnorm.py").read_text()
    assert text.count("@pytest.mark.parametrize") == 2 and 'for n in ["x", "weight"]' in text
    assert "12 passed" in done.stdout


def test_the_card_tells_what_has_gradients_and_that_nobody_judged_them(package: Package) -> None:
    card = (Path(package.path) / "README.md").read_text()
    assert "`has_backward` is True" in card and "(`Mode.TRAINING`)" in card
    assert "`rmsnorm` has gradients of x, weight, and of no other argument" in card
    assert "Gradients: not judged." in card
    assert f"`{build.build(pair('rmsnorm')[1]).id}`" in card


def test_a_version_that_loses_its_gradients_breaks_its_promise(package: Package) -> None:
    (variant,) = (v.path for v in packages.read_variants(Path(package.path)))
    plain = Path(build.build(pair("rmsnorm")[0]).path)
    assert interface.breaking_changes(variant, plain) == ["rmsnorm has no gradients any more"]
    assert interface.breaking_changes(plain, variant) == []


def test_tuning_finds_the_kernel_and_keeps_its_gradients(package: Package) -> None:
    forward, backward = pair("rmsnorm")
    found = tune.candidate_of(Path(package.path))
    assert found.digest == forward.digest
    kept = tune.backward_of(Path(package.path), found)
    assert kept is not None and kept.digest == backward.digest


def test_export_takes_files_and_starters_from_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from autokernel_hf.cli import app

    for name in ("rmsnorm", "rmsnorm_backward", "softmax_backward", "reduce"):
        (tmp_path / f"{name}.cpp").write_text(starter(name, "cpp") or "")
    out = ["--out", str(tmp_path / "packages")]

    def invoke(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["export", *words, *out])
        return done.exit_code, done.output

    kernel = str(tmp_path / "rmsnorm.cpp")
    code, said = invoke(kernel, "--backward", str(tmp_path / "rmsnorm_backward.cpp"), "--name", "by-file")
    assert code == 0, said
    code, said = invoke(
        kernel, str(tmp_path / "reduce.cpp"), "--bundle", "--backward", "starter", "--name", "by-starter"
    )
    assert code == 0, said
    bundle = tmp_path / "packages" / "by-starter"
    (variant,) = (v.path for v in packages.read_variants(bundle))
    trained = {part.name.split("_cpp_")[0]: packages.has_gradients(part) for part in packages.parts(variant)}
    assert trained == {"_ak_reduce": False, "_ak_rmsnorm": True}
    card = (bundle / "README.md").read_text()
    assert "`has_backward` is True for those of `rmsnorm`, and False for the others" in card
    code, said = invoke(kernel, "--backward", str(tmp_path / "softmax_backward.cpp"), "--name", "wrong")
    assert code == 2 and "computes no gradients of rmsnorm" in said
    code, said = invoke(str(tmp_path / "reduce.cpp"), "--backward", "starter", "--name", "none")
    assert code == 2 and "no cpp starter for the gradients of reduce" in said


@pytest.mark.parametrize("status", ["passed", "incorrect"])
def test_of_a_run_gradients_ship_only_where_the_judge_passed_them(
    status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from autokernel_hf import evaluate, shipping

    forward, backward = pair("rmsnorm")
    called = kernel_type("rmsnorm").build({"M": 8, "N": 16}, "float32", {})
    asked: list[Any] = []

    def judge(one: Candidate, **how: Any) -> Evaluation:
        asked.append((one, how))
        stages = Stages(**dict.fromkeys(Stages.model_fields, "passed"))
        return Evaluation(status=status, stages=stages, built_id="_ak_rmsnorm_backward_cpp_0")  # type: ignore[arg-type]

    monkeypatch.setattr(evaluate, "evaluate", judge)
    winner = SimpleNamespace(candidate=forward, target=SimpleNamespace(workloads=(called,), device="cpu"))
    found = shipping._judged_backward(winner, backward)  # type: ignore[arg-type]
    ((one, how),) = asked
    assert one == backward and how["device"] == "cpu"
    assert [w.shape for w in how["workloads"]] == ["8x16,8x16,16"]
    assert (found is not None) == (status == "passed")
    assert shipping._judged_backward(winner, None) is None  # type: ignore[arg-type]


def test_backwards_are_matched_by_type(tmp_path: Path) -> None:
    from autokernel_hf import shipping

    file = tmp_path / "mine.cpp"
    file.write_text((starter("rmsnorm_backward", "cpp") or "") + "// mine\n")
    both = [candidate("rmsnorm", "cpp"), candidate("softmax", "cpp")]
    found = shipping._backwards_of(both, [str(file), "starter"])
    assert found["rmsnorm"].source.endswith("// mine\n"), "a file comes before the starter"
    assert found["softmax"].source == starter("softmax_backward", "cpp")
    assert shipping._backwards_of(both, []) == {}
    with pytest.raises(UsageError, match="no gradients of softmax"):
        shipping._backwards_of(both[1:], [str(file)])


# --- in a model, through `kernels` ----------------------------------------------------------------------------------

TRAINING = """
import json, sys
from pathlib import Path

import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100,
)
model = LlamaForCausalLM(config).train()
ids = torch.randint(100, (2, 16))
before = {name: p.detach().clone() for name, p in model.named_parameters()}


def step(model, calls=False):
    model.load_state_dict(before, strict=False)
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile() as seen:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    optimizer.step()
    counts = {}
    for event in seen.key_averages():
        if event.key.startswith("_ak_"):
            name = event.key.split("::")[1].removesuffix("_no_grad")
            counts[name] = counts.get(name, 0) + event.count
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}, counts


def largest(a, b):
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max()).item() for n in b)


plain_loss, plain, none = step(model)
mapping = {hook: {"cpu": LocalLayerRepository(next(folder.glob("build/*")), layer_name=layer)}
           for hook, layer in {"RMSNorm": "RMSNorm", "rotary_pos_emb": "RotaryEmbedding"}.items()}
mode = Mode.TRAINING | Mode.TORCH_COMPILE if sys.argv[2] == "compile" else Mode.TRAINING
with use_kernel_mapping(mapping, inherit_mapping=False):
    kernelize(model, mode=mode, device="cpu")
loss, grads, calls = step(model)
found = {"loss": loss, "plain_loss": plain_loss, "error": largest(grads, plain), "calls": calls, "before": none}
if sys.argv[2] == "compile":
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad(set_to_none=True)
    model.load_state_dict(before, strict=False)
    compiled(input_ids=ids, labels=ids).loss.backward()
    found["compiled_error"] = largest({n: p.grad for n, p in model.named_parameters()}, plain)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def norms_and_rotary(tmp_path_factory: pytest.TempPathFactory) -> Package:
    from autokernel_hf.bundle import export_files

    kinds = ("rmsnorm", "rotary_embedding")
    return export_files(
        [candidate(kind, "cpp") for kind in kinds],
        "trained-llama",
        backwards={kind: candidate(f"{kind}_backward", "cpp") for kind in kinds},
        out=tmp_path_factory.mktemp("packages"),
    )


@pytest.mark.parametrize("how", ["eager", "compile"])
def test_a_llama_trains_a_step_with_the_gradients_that_it_has_without(
    norms_and_rotary: Package, how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", TRAINING, norms_and_rotary.path, how],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LOCAL_KERNELS", "PYTHON"))},
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["before"] == {}
    assert found["calls"] == {
        "rmsnorm": 5,
        "rmsnorm_backward": 5,
        "rotary_embedding": 2,
        "rotary_embedding_backward": 2,
    }
    assert abs(found["loss"] - found["plain_loss"]) < 1e-5
    assert found["error"] < 1e-4
    if how == "compile":
        assert found["compiled_error"] < 1e-4


def test_apply_trains_every_place_that_a_package_fits(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    import autokernel_hf as ak

    forward, backward = pair("gated_activation")
    package = export_file(forward, "trained-mlp", backward=backward, out=tmp_path)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
        )
    ).train()
    ids = torch.randint(50, (2, 8))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    ak.apply(model, package.path)
    try:
        got = gradients()
    finally:
        ak.restore(model)
    assert set(got) == set(plain)
    for name, want in plain.items():
        assert (got[name] - want).abs().max() <= 1e-4 * want.abs().max(), name
    without = export_file(forward, "inference-mlp", out=tmp_path)
    with pytest.raises(UsageError, match="has no backward"):
        ak.apply(model, without.path)


INTERPRETED = """
import json, sys
from pathlib import Path
import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
x = torch.randn(5, 96, requires_grad=True)
weight = torch.rand(96, requires_grad=True)
g = torch.randn(5, 96)
got = torch.autograd.grad(kernel.rmsnorm(x, weight, 1e-6), (x, weight), g)
plain = torch.autograd.grad(torch.nn.functional.rms_norm(x, (96,), weight, 1e-6), (x, weight), g)
print(json.dumps([(a - b).abs().max().item() for a, b in zip(got, plain)]))
"""


def test_a_triton_package_has_gradients_too(tmp_path: Path) -> None:
    from autokernel_hf.export_hf import stage

    forward, backward = pair("rmsnorm", "triton")
    made = build.build(forward, backward=backward)
    package = stage(
        made, candidate=forward, name="trained-triton", out=tmp_path, interpreter=True, backward=backward
    )
    assert package.variants == ("torch-cpu", "torch-cuda", "torch-rocm")
    done = subprocess.run(
        [sys.executable, "-B", "-c", INTERPRETED, package.path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(json.loads(done.stdout.strip().splitlines()[-1])) < 1e-5
