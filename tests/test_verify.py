"""A verification passes for what is right and faster, and fails for what is wrong, silent, slow or broken."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf import accuracy
from autokernel_hf import verify as verification
from autokernel_hf.accuracy import Accuracy, in_higher_precision, twin
from autokernel_hf.build import build
from autokernel_hf.build import load as load_package
from autokernel_hf.errors import ModelError, UsageError
from autokernel_hf.kernels import kernel_type, layers_source, starter
from autokernel_hf.models import LoadedModel, load
from autokernel_hf.records import Candidate, ModelSpec, Record, Site, Verification
from autokernel_hf.verify import verify
from autokernel_hf.verify_columns import Timing
from tests.trained import minilm

torch.set_num_threads(1)

_numbers = itertools.count()


class Staged(Record):
    target: str
    kernel_type: str
    sites: tuple[Site, ...]
    path: str


def package(folder: Path, name: str, function: str) -> str:
    """A package variant whose kernel is a Python function given as source, with the layers that ship."""
    path = folder / f"_ak_test_{name}_{next(_numbers)}"
    path.mkdir()
    (path / "__init__.py").write_text("from . import layers\n")
    (path / "_ops.py").write_text(f"import time\nimport torch\nimport torch.nn.functional as F\n\n{function}")
    source = layers_source(name)
    assert source is not None
    (path / "layers.py").write_text(source)
    return str(path)


RMSNORM = """
def rmsnorm(x, weight, eps, offset=0.0):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return {result}
"""
RIGHT = RMSNORM.format(result="weight * wide.to(x.dtype)")
WRONG = RMSNORM.format(result="wide.to(x.dtype) + 0 * weight")  # ignores the weight


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Two layers, 32 tokens; norm weights away from 1, as trained ones are."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("tiny-llama")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    config.save_pretrained(folder)
    loaded = load(ModelSpec(model=str(folder), random_weights=True, device="cpu"))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in loaded.model.named_parameters():
        if "norm" in name:
            parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    return loaded


def norm_sites(loaded: LoadedModel) -> tuple[Site, ...]:
    return tuple(kernel_type("rmsnorm").find(loaded.model))


def staged(loaded: LoadedModel, folder: Path, function: str, **changes: Any) -> Staged:
    kernel = Staged(
        target="rmsnorm",
        kernel_type="rmsnorm",
        sites=norm_sites(loaded),
        path=package(folder, "rmsnorm", function),
    )
    return kernel.model_copy(update=changes)


def quick(loaded: LoadedModel, *kernels: Staged, **options: Any) -> Verification:
    return verify(loaded, kernels, budget_s=1.0, compile=options.pop("compile", False), **options)


# --- right and wrong ----------------------------------------------------------------------------------------------


def test_a_right_kernel_is_called_at_every_site_and_its_error_is_like_the_plain_model_s(
    tiny_llama: LoadedModel, tmp_path: Path
) -> None:
    result = quick(tiny_llama, staged(tiny_llama, tmp_path, RIGHT))
    assert result.kernel_calls == {"rmsnorm": 5}
    assert result.error is not None
    assert result.error.ratio_to_eager == pytest.approx(1.0, abs=0.2)
    assert 0 < result.error.max_abs < 1e-4
    assert result.error.top1_agreement == 1.0
    assert result.error.kl is not None
    assert result.error.kl < 1e-6
    assert result.latency_ms.eager is not None
    assert result.latency_ms.eager > 0
    assert result.speedup.vs_eager is not None
    assert result.speedup_ci95.vs_eager is not None
    low, high = result.speedup_ci95.vs_eager
    assert low <= result.speedup.vs_eager <= high
    assert result.passed == (low > 1)
    assert result.latency_ms.compile is None
    assert any("float64" in note for note in result.notes)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (WRONG, "error is .* times its own"),
        (RMSNORM.format(result="(weight * wide).to(x.dtype) * 1.0003"), "error is .* times its own"),
        (RMSNORM.format(result="torch.full_like(x, float('nan'))"), "infinities or NaNs"),
        (RMSNORM.format(result="(weight * wide).double()"), "does not run|another form"),
        ("def rmsnorm(x, weight, eps, offset=0.0):\n    raise NotImplementedError('too wide')\n", "too wide"),
    ],
    ids=["ignores the weight", "slightly off", "not finite", "other dtype", "refuses"],
)
def test_a_wrong_kernel_fails_and_is_not_timed(
    tiny_llama: LoadedModel, tmp_path: Path, function: str, message: str
) -> None:
    import re

    result = quick(tiny_llama, staged(tiny_llama, tmp_path, function))
    assert not result.passed
    assert re.search(message, result.reason), result.reason
    assert result.speedup.vs_eager is None
    assert result.latency_ms.eager is None


def test_a_site_whose_kernel_is_never_called_fails(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    # The embedding's module is in the model, but nothing calls a forward of the attention's unused twin.
    kernel = staged(tiny_llama, tmp_path, RIGHT)
    tiny_llama.model.spare = nn.Module()
    try:
        spare = kernel.sites[0].model_copy(update={"name": "spare", "path": "spare"})
        result = quick(tiny_llama, kernel.model_copy(update={"sites": (*kernel.sites, spare)}))
    finally:
        del tiny_llama.model.spare
    assert not result.passed
    assert result.reason == "the kernel at spare is never called"
    assert result.kernel_calls == {"rmsnorm": 5}
    assert result.speedup.vs_eager is None


def test_a_layer_that_does_not_call_its_kernel_fails(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    kernel = staged(tiny_llama, tmp_path, RIGHT)
    layers = Path(kernel.path) / "layers.py"
    layers.write_text(
        layers.read_text().replace(
            "rmsnorm(hidden_states, self.weight, self.variance_epsilon)", "hidden_states * self.weight"
        )
    )
    result = quick(tiny_llama, kernel)
    assert (result.passed, result.kernel_calls) == (False, {"rmsnorm": 0})
    assert "and 4 more is never called" in result.reason


def test_the_plain_model_is_untouched_and_process_wide_functions_are_back(
    tiny_llama: LoadedModel, tmp_path: Path
) -> None:
    import transformers.models.llama.modeling_llama as modeling

    rotary = (
        "def rotary_embedding(q, k, cos, sin, interleaved=False):\n"
        "    def turn(x):\n"
        "        half = x.shape[-1] // 2\n"
        "        return torch.cat((-x[..., half:], x[..., :half]), -1)\n"
        "    cos, sin = cos[:, None], sin[:, None]\n"
        "    return q * cos + turn(q) * sin, k * cos + turn(k) * sin\n"
    )
    kind = kernel_type("rotary_embedding")
    kernels = [
        staged(tiny_llama, tmp_path, RIGHT),
        Staged(
            target="rotary",
            kernel_type="rotary_embedding",
            sites=tuple(kind.find(tiny_llama.model)),
            path=package(tmp_path, "rotary_embedding", rotary),
        ),
    ]
    original = modeling.apply_rotary_pos_emb
    before = {name: dict(vars(module)) for name, module in tiny_llama.model.named_modules()}
    output = tiny_llama.run().logits
    result = quick(tiny_llama, *kernels)
    assert result.kernel_calls == {"rmsnorm": 5, "rotary": 2}
    assert result.error is not None
    assert result.error.ratio_to_eager < 1.5
    assert modeling.apply_rotary_pos_emb is original
    after = {name: dict(vars(module)) for name, module in tiny_llama.model.named_modules()}
    assert all(after[name].keys() == before[name].keys() for name in before)
    assert all(after[n][k] is before[n][k] for n in before for k in before[n] if k != "_parameters")
    assert torch.equal(tiny_llama.run().logits, output)


def test_a_kernel_that_writes_to_a_weight_is_found_out(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    writes = RMSNORM.format(result="weight.mul_(1.0 + 1e-7).mul_(1.0) * wide.to(x.dtype)")
    weights = {n: p.detach().clone() for n, p in tiny_llama.model.named_parameters()}
    try:
        result = quick(tiny_llama, staged(tiny_llama, tmp_path, writes))
    finally:
        for name, parameter in tiny_llama.model.named_parameters():
            parameter.data.copy_(weights[name])
    assert not result.passed
    assert "writes to the model's weights" in result.reason
    assert result.speedup.vs_eager is None


def test_nothing_to_verify_and_overlapping_kernels_are_told(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    kernel = staged(tiny_llama, tmp_path, RIGHT)
    with pytest.raises(UsageError, match="no kernels"):
        verify(tiny_llama, [])
    with pytest.raises(UsageError, match="same site"):
        quick(tiny_llama, kernel, kernel.model_copy(update={"target": "again"}))


def test_a_16_bit_model_is_held_against_float32(tmp_path: Path, tiny_llama: LoadedModel) -> None:
    spec = tiny_llama.spec.model_copy(update={"dtype": "bfloat16"})
    loaded = load(spec)
    result = quick(loaded, staged(loaded, tmp_path, RIGHT))
    assert any("against float32, on 3 inputs" in note for note in result.notes)
    assert result.error is not None
    assert 1e-4 < result.error.max_abs < 0.1
    assert result.error.ratio_to_eager == pytest.approx(1.0, abs=0.2)


# --- speed --------------------------------------------------------------------------------------------------------

SLOW = """
import time
import torch.nn.functional as F
from torch import nn

class Sleepy(nn.Module):
    def forward(self, input):
        time.sleep(0.02)
        return F.silu(input)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.act = Sleepy()
        self.last = nn.Linear(16, 16)
    def forward(self, x):
        return self.last(self.act(self.first(x)))
"""
ACT = Site(name="act", kernel_type="activation", layer="SiLU", attach="module", path="act")


def net(folder: Path) -> LoadedModel:
    (folder / "net.py").write_text(SLOW)
    return load(ModelSpec(model=f"{folder}/net.py:Net", input_shape=(4, 16), device="cpu"))


def activation(folder: Path, pause: float) -> Staged:
    function = f"def activation(x, kind):\n    time.sleep({pause})\n    return F.silu(x)\n"
    return Staged(
        target="activation",
        kernel_type="activation",
        sites=(ACT,),
        path=package(folder, "activation", function),
    )


def test_a_faster_kernel_passes_with_an_interval_above_one(tmp_path: Path) -> None:
    result = quick(net(tmp_path), activation(tmp_path, 0.002))
    assert result.passed, result.reason
    assert result.speedup.vs_eager is not None
    assert result.speedup_ci95.vs_eager is not None
    assert 1 < result.speedup_ci95.vs_eager[0] <= result.speedup.vs_eager < 15
    assert result.latency_ms.eager is not None
    assert result.latency_ms.eager > 20
    assert result.reason.startswith("right, and ")


def test_a_slower_kernel_is_right_and_does_not_pass(tmp_path: Path) -> None:
    result = quick(net(tmp_path), activation(tmp_path, 0.06))
    assert not result.passed
    assert result.reason.startswith("right, but not faster")
    assert result.speedup_ci95.vs_eager is not None
    assert result.speedup_ci95.vs_eager[1] < 1
    assert result.error is not None
    assert result.error.ratio_to_eager == 1.0
    assert result.error.top1_agreement is None


@pytest.mark.parametrize(
    "output",
    ["y * float('nan')", "y.argmax(-1)", "'a word'"],
    ids=["not finite", "whole numbers", "no tensor"],
)
def test_a_model_of_whose_output_nothing_can_be_compared_passes_nothing(output: str, tmp_path: Path) -> None:
    source = SLOW.replace("return self.last", "y = self.last").rstrip() + f"\n        return {output}\n"
    (tmp_path / "net.py").write_text(source)
    loaded = load(ModelSpec(model=f"{tmp_path}/net.py:Net", input_shape=(4, 16), device="cpu"))
    result = quick(loaded, activation(tmp_path, 0.002))
    assert not result.passed
    assert "nothing can be compared" in result.reason
    assert result.error is None and result.speedup.vs_eager is None


@pytest.mark.slow
def test_torch_compile_is_timed_beside_and_its_columns_run_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(SLOW.replace("        time.sleep(0.02)\n", ""))
    loaded = load(ModelSpec(model=f"{tmp_path}/net.py:Net", input_shape=(4, 16), device="cpu"))
    function = """
calls = []

@torch.library.custom_op("ak_test_verify::silu", mutates_args=())
def silu(x: torch.Tensor) -> torch.Tensor:
    calls.append(1)
    return F.silu(x)

silu.register_fake(torch.empty_like)

def activation(x, kind):
    return torch.ops.ak_test_verify.silu(x)
"""
    kernel = Staged(
        target="activation",
        kernel_type="activation",
        sites=(ACT,),
        path=package(tmp_path, "activation", function),
    )
    calls = load_package(kernel.path).layers.activation.__globals__["calls"]
    seen: dict[str, int] = {}
    timed = verification._Bench._timed

    def counted(bench: Any, name: str, run: Callable[[], Any]) -> float:
        before = len(calls)
        ms = timed(bench, name, run)
        seen[name] = len(calls) - before
        return ms

    monkeypatch.setattr(verification._Bench, "_timed", counted)
    result = quick(loaded, kernel, compile=True)
    assert seen == {"eager": 0, "eager_kernels": 1, "compile": 0, "compile_kernels": 1}
    latency = result.latency_ms
    assert latency.compile is not None
    assert latency.compile_kernels is not None
    assert latency.compile_cudagraphs is None
    assert result.speedup.vs_compile is not None
    assert result.speedup_ci95.vs_compile is not None
    low, high = result.speedup_ci95.vs_compile
    assert low <= result.speedup.vs_compile <= high


def test_without_a_compiler_the_compiled_columns_are_empty_and_the_notes_say_why(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    loaded = net(tmp_path)
    with inductor.patch({"cpp.cxx": ("/nonexistent/compiler",), "force_disable_caches": True}):
        result = quick(loaded, activation(tmp_path, 0.002), compile=True)
    assert result.passed, result.reason
    assert result.latency_ms.compile is None
    assert result.speedup.vs_compile is None
    assert any("compile was not measured: torch.compile fails" in note for note in result.notes)


def test_a_replay_that_gives_other_numbers_fails_the_kernels_and_leaves_out_the_plain_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = net(tmp_path)
    bench = verification._Bench(loaded, [activation(tmp_path, 0.0)], random.Random(0))
    plain = verification.floating_tensors(bench.run_plain(loaded.inputs))
    patched_off = verification._largest(
        verification.floating_tensors(bench.run_patched(loaded.inputs)), plain
    )

    def captured(scale: float) -> Callable[..., Callable[[], Any]]:
        def capture(model: nn.Module, inputs: Any, others: Any) -> Callable[[], Any]:
            # A graph that ignores its inputs would give what it was captured with.
            return lambda: scale * model(**inputs)

        return capture

    for scale, columns in ((1.0, {"eager_cudagraphs", "eager_kernels_cudagraphs"}), (1.5, set())):
        monkeypatch.setattr(verification, "captured_pass", captured(scale))
        timing, notes = Timing(), verification._Notes()
        found = bench._captured(loaded.inputs, plain, patched_off, timing, notes)
        assert set(found) == columns
        assert ("replayed from a CUDA graph" in timing.problem) == (scale != 1.0)
        assert any("eager_cudagraphs was not measured" in line for line in notes.lines) == (scale != 1.0)


# --- parts --------------------------------------------------------------------------------------------------------


def test_the_verdict_on_torch_compile_takes_the_best_of_each_side_round_by_round() -> None:
    timing = Timing()
    for drift in (1.0, 1.1, 0.9):
        timing.pairs.append({"eager": 8.0 * drift, "eager_kernels": 4.0 * drift})
        timing.rounds.append(
            {
                "eager": 8.0 * drift,
                "eager_kernels": 4.0 * drift,
                "compile": 3.0 * drift,
                "compile_cudagraphs": 2.4 * drift,
                "compile_kernels": 2.0 * drift,
                "eager_kernels_cudagraphs": 1.6 * drift,
            }
        )
    assert timing.speedup().vs_eager == pytest.approx(2.0)
    assert timing.speedup().vs_compile == pytest.approx(1.5)
    interval = timing.intervals().vs_compile
    assert interval is not None
    assert interval == pytest.approx((1.5, 1.5))
    assert timing.latency().compile_cudagraphs == pytest.approx(2.4)


def test_a_twin_shares_every_tensor_and_no_module(tiny_llama: LoadedModel) -> None:
    copy = twin(tiny_llama.model)
    own = dict(tiny_llama.model.named_parameters())
    assert all(parameter is own[name] for name, parameter in copy.named_parameters())
    assert all(a is not b for a, b in zip(copy.modules(), tiny_llama.model.modules(), strict=True))
    assert torch.equal(copy(**tiny_llama.inputs).logits, tiny_llama.run().logits)


def test_a_run_in_higher_precision_leaves_the_model_s_own_weights(tiny_llama: LoadedModel) -> None:
    with in_higher_precision(tiny_llama.model) as (exact, wide, notes):
        assert (wide, notes) == (torch.float64, [])
        assert all(p.dtype == torch.float64 for p in exact.parameters())
        logits = exact(**tiny_llama.inputs).logits
    assert logits.dtype == torch.float64
    assert 0 < (tiny_llama.run().logits - logits).abs().max() < 1e-4
    assert all(p.dtype == torch.float32 for p in tiny_llama.model.parameters())


def test_without_memory_for_higher_precision_nothing_passes(
    tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "free_memory", lambda device: 1000)
    with (
        pytest.raises(ModelError, match="float64 run to compare with needs"),
        in_higher_precision(tiny_llama.model),
    ):
        pass
    result = quick(tiny_llama, staged(tiny_llama, tmp_path, RIGHT))
    assert not result.passed
    assert "no run in higher precision" in result.reason
    assert result.error is None


def compared(plain: Tensor, patched: Tensor, exact: Tensor) -> Accuracy:
    found = Accuracy()
    found.add({"logits": plain}, {"logits": patched}, {"logits": exact}, vocabulary=plain.shape[-1])
    return found


def test_ratios_and_token_agreement_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(2, 50, 40, generator=generator, dtype=torch.float64)
    noise = torch.randn(exact.shape, generator=generator, dtype=torch.float64) * 1e-3
    plain, patched = (exact + noise).float(), (exact + 3 * noise).float()
    found = compared(plain, patched, exact)
    assert found.ratio == pytest.approx(3, rel=1e-3)
    assert found.worst == pytest.approx(3, rel=1e-3)
    assert found.max_abs == pytest.approx(3 * noise.abs().max().item(), rel=1e-3)
    expected = (plain.argmax(-1) == patched.argmax(-1)).double().mean().item()
    assert found.top1_agreement == pytest.approx(expected)
    p, q = plain.double().log_softmax(-1), patched.double().log_softmax(-1)
    assert found.kl == pytest.approx(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean().item())
    assert not found.right
    assert compared(plain, plain, exact).right


def test_one_wrong_output_among_many_is_not_lost_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1, 1000, 100, generator=generator, dtype=torch.float64)
    plain = (exact + torch.randn(exact.shape, generator=generator, dtype=torch.float64) * 1e-3).float()
    patched = plain.clone()
    patched[0, 500, 50] += 0.05
    found = compared(plain, patched, exact)
    assert found.ratio < 1.5
    assert not found.right
    assert "largest error" in found.reason


def test_infinities_must_be_where_the_plain_model_has_them() -> None:
    exact = torch.ones(1, 4, 8, dtype=torch.float64)
    plain = exact.float().clone()
    plain[0, 0, 0] = float("inf")
    assert compared(plain, plain.clone(), exact).finite
    assert not compared(plain, exact.float(), exact).finite


# --- a real kernel ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_kernel_is_verified_in_a_trained_model(tmp_path: Path) -> None:
    folder = minilm()
    source = starter("activation", "cpp")
    if source is None:
        pytest.skip("there is no cpp starter for activation")
    built = build(Candidate(kernel_type="activation", backend="cpp", source=source), device="cpu")
    loaded = load(ModelSpec(model=str(folder), device="cpu", input_shape=(2, 32)))
    sites = tuple(kernel_type("activation").find(loaded.model))
    assert len(sites) == 6
    kernel = Staged(target="activation", kernel_type="activation", sites=sites, path=built.path)
    result = quick(loaded, kernel)
    assert result.kernel_calls == {"activation": 6}
    assert result.error is not None
    assert result.error.ratio_to_eager < 1.5
    assert result.speedup.vs_eager is not None


@pytest.mark.gpu
def test_on_a_gpu_all_eight_columns_are_measured(tmp_path: Path) -> None:
    loaded = load(ModelSpec(model="llama", random_weights=True, device="cuda", input_shape=(1, 64)))
    function = """
@torch.library.custom_op("ak_test_verify_gpu::rmsnorm", mutates_args=())
def op(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)

op.register_fake(lambda x, weight, eps: torch.empty_like(x))

def rmsnorm(x, weight, eps, offset=0.0):
    return torch.ops.ak_test_verify_gpu.rmsnorm(x, weight, eps)
"""
    begin = time.monotonic()
    result = verify(loaded, [staged(loaded, tmp_path, function)], budget_s=60)
    assert time.monotonic() - begin < 400
    assert result.kernel_calls == {"rmsnorm": 25}
    assert result.error is not None
    assert result.error.ratio_to_eager < 1.5
    columns = result.latency_ms.model_dump()
    assert all(value is not None and value > 0 for value in columns.values()), (columns, result.notes)
    assert result.speedup.vs_compile is not None


def test_where_the_kernels_cost_is_told_beside_where_they_win() -> None:
    timing = Timing()
    for i in range(20):
        noise = 1 + 0.01 * (i % 3)
        timing.rounds.append(
            {
                "eager": 10.0,
                "eager_kernels": 8.0,
                "compile": 4.0 * noise,
                "compile_kernels": 4.0,
                "compile_cudagraphs": 1.5,
                "compile_kernels_cudagraphs": 3.0 * noise,
                "eager_cudagraphs": 2.0,
                "eager_kernels_cudagraphs": 1.6,
            }
        )
    (told,) = timing.slower()
    assert told.startswith("under torch.compile with CUDA graphs the kernels cost: 0.49")
    timing.rounds = [{"eager": 10.0, "eager_kernels": 8.0}]
    assert timing.slower() == ()
