"""The binding: what it hands to a candidate, what it refuses, and what torch sees of the operator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from autokernel_hf import binding, build, native, toolchain
from autokernel_hf.kernels import kernel_types
from tests import build_candidates as sources
from tests.build_candidates import expected_rmsnorm, loaded, made, operator

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")


@pytest.fixture(scope="module")
def rmsnorm() -> ModuleType:
    return loaded("rmsnorm", sources.RMSNORM_CPP)


@pytest.fixture(scope="module")
def activation() -> ModuleType:
    return loaded("activation", sources.ACTIVATION_PROBE_CPP)


@pytest.fixture(scope="module")
def add_norm() -> ModuleType:
    return loaded("add_norm", sources.ADD_NORM_CPP)


# --- what the candidate is called with ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.transpose(0, 1),
        lambda x: x[..., ::2],
        lambda x: x[:, :1],
        lambda x: x[0, 0],
        lambda x: x[:1].expand(6, 5, 64),
        lambda x: x[..., 1:],
        lambda x: x[:0],
    ],
    ids=["plain", "transposed", "sliced", "one column", "one row", "expanded", "offset", "empty"],
)
def test_result_is_right_new_and_contiguous_in_every_layout(rmsnorm: ModuleType, view: object) -> None:
    x = view(torch.randn(3, 5, 64))  # type: ignore[operator]
    weight = torch.rand(128)[:: 128 // x.shape[-1]][: x.shape[-1]]
    before = x.clone()
    y = rmsnorm.rmsnorm(x, weight, 1e-5, 0.5)
    torch.testing.assert_close(y, expected_rmsnorm(x, weight, 1e-5, 0.5), rtol=1e-5, atol=1e-6)
    assert y.is_contiguous() and y.shape == x.shape
    assert torch.equal(x, before)


def seen(y: torch.Tensor) -> dict[str, object]:
    ndim = int(y.flatten()[0])
    flat = [int(v) for v in y.flatten()[: 5 + 2 * ndim]]  # the probe writes no more
    return {
        "kind": flat[1],
        "threads": flat[2],
        "workspace": flat[3],
        "misaligned": flat[4],
        "sizes": flat[5 : 5 + ndim],
        "strides": flat[5 + ndim : 5 + 2 * ndim],
    }


@pytest.mark.parametrize(
    ("x", "sizes", "strides"),
    [
        (torch.randn(2, 3, 20), [6, 20], [20, 1]),
        (torch.randn(20), [1, 20], [20, 1]),
        (torch.randn(2, 3, 40)[..., ::2], [6, 20], [40, 2]),
        (torch.randn(2, 1, 3, 20), [6, 20], [20, 1]),
        (torch.randn(3, 2, 20).transpose(0, 1), [2, 3, 20], [20, 40, 1]),
        (torch.randn(2, 4, 20)[:, :3], [2, 3, 20], [80, 20, 1]),
        (torch.randn(1, 20).expand(5, 20), [5, 20], [0, 1]),
    ],
    ids=["3d", "1d", "sliced", "unit", "transposed", "gap", "expanded"],
)
def test_leading_dimensions_are_merged_wherever_strides_allow(
    activation: ModuleType, x: torch.Tensor, sizes: list[int], strides: list[int]
) -> None:
    got = seen(activation.activation(x, "silu"))
    assert (got["sizes"], got["strides"]) == (sizes, strides)


def test_words_arrive_as_codes_and_workspace_as_asked(activation: ModuleType) -> None:
    x = torch.randn(4, 8)
    for word, code in {
        "none": 0,
        "gelu": 1,
        "gelu_tanh": 2,
        "gelu_new": 3,
        "quick_gelu": 4,
        "silu": 5,
    }.items():
        got = seen(activation.activation(x, word))
        assert got["kind"] == code
        assert got["workspace"] == (0 if word == "quick_gelu" else 1000)
        assert got["misaligned"] == 0


def test_thread_count_follows_torch(activation: ModuleType) -> None:
    before = torch.get_num_threads()
    try:
        for n in (1, 3, 2):
            torch.set_num_threads(n)
            assert seen(activation.activation(torch.randn(4, 8), "silu"))["threads"] == n
    finally:
        torch.set_num_threads(before)


def test_optional_tensors_and_two_outputs(add_norm: ModuleType) -> None:
    x, residual, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.rand(8)
    y, s = add_norm.add_norm(x, residual, weight, None, 1e-6, kind="layer")
    torch.testing.assert_close(s, x + residual)
    torch.testing.assert_close(y, -(x + residual) * weight)
    y, s = add_norm.add_norm(x, residual, None, None, 1e-6)
    torch.testing.assert_close(y, x + residual)
    assert y.data_ptr() != s.data_ptr()


@pytest.mark.parametrize("misplaced", ["x", "residual", "both", "offset"])
def test_contiguous_aligned_copies_where_the_candidate_wants_them(
    add_norm: ModuleType, misplaced: str
) -> None:
    x, residual = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    if misplaced in ("x", "both"):
        x = torch.randn(2, 3, 8).transpose(0, 1)
    if misplaced in ("residual", "both"):
        residual = torch.randn(3, 2, 24)[..., ::3]
    if misplaced == "offset":
        x = torch.randn(49)[1:].view(3, 2, 8)
        assert x.data_ptr() % 16
    y, s = add_norm.add_norm(x, residual, None, None, 1e-6)
    torch.testing.assert_close(s, x + residual)
    torch.testing.assert_close(y, x + residual)


def test_dimension_arrives_counted_from_the_front() -> None:
    module = loaded("reduce", sources.REDUCE_PROBE_CPP)
    x = torch.randn(5, 4, 6)
    for dim in (-3, -2, -1, 0, 1, 2):
        for keepdim in (False, True):
            y = module.reduce(x, dim, keepdim, "max")
            assert y.shape == x.amax(dim, keepdim).shape
            assert [int(v) for v in y.flatten()[:3]] == [dim % 3, int(keepdim), 2]
    assert module.reduce(torch.tensor([1.0, 2.0, 3.0]).expand(3, 3)).shape == (3,)
    with pytest.raises(RuntimeError, match="dimension 3 is out of range"):
        module.reduce(x, 3)


def test_attention_gets_nulls_and_its_default_scale() -> None:
    module = loaded("flash_attention", sources.ATTENTION_PROBE_CPP)
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 8)
    y = module.flash_attention(q, k, v)
    assert y.shape == (1, 4, 5, 8)
    assert y.flatten()[:7].tolist() == [0, -1, 0, 0, 0, -1, 0.25]
    cu = torch.tensor([0, 5], dtype=torch.int32)
    y = module.flash_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool), cu, cu, 5, 7, 0.5, True, 3)
    assert y.flatten()[:7].tolist() == [1, 11, 1, 5, 1, 3, 0.5]
    with pytest.raises(RuntimeError, match="Hq must be a multiple of Hk"):
        module.flash_attention(q[:, :3], k, v)
    with pytest.raises(RuntimeError, match="mask has shape"):
        module.flash_attention(q, k, v, torch.ones(5, 6, dtype=torch.bool))


# --- refusals -----------------------------------------------------------------------------------------------------


def test_outside_of_the_domain_is_refused_by_name(rmsnorm: ModuleType, activation: ModuleType) -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    with pytest.raises(
        NotImplementedError, match="float16 is outside of this kernel's domain .dtype: float32"
    ):
        rmsnorm.rmsnorm(x.half(), weight, 1e-6)
    with pytest.raises(NotImplementedError, match="x must be one of float32, float16, bfloat16"):
        activation.activation(x.double(), "silu")
    with pytest.raises(NotImplementedError, match="does not support these arguments"):
        activation.activation(x.half(), "silu")  # the launcher says so
    with pytest.raises(ValueError, match="kind must be one of"):
        activation.activation(x, "swish")


def test_domain_of_words_and_flags() -> None:
    source = sources.ACTIVATION_PROBE_CPP.replace(
        "// kernel_type: activation", "// kernel_type: activation\n// supports: kind=silu,gelu; dtype=float32"
    )
    module = loaded("activation", source)
    assert seen(module.activation(torch.randn(4, 8), "gelu"))["kind"] == 1
    with pytest.raises(NotImplementedError, match="kind gelu_new is outside .*kind: silu, gelu"):
        module.activation(torch.randn(4, 8), "gelu_new")
    source = sources.REDUCE_PROBE_CPP.replace("\n#include", "\n// supports: keepdim=true\n#include", 1)
    module = loaded("reduce", source)
    assert module.reduce(torch.randn(5, 4), 0, True).shape == (1, 4)
    with pytest.raises(NotImplementedError, match="keepdim False"):
        module.reduce(torch.randn(5, 4), 0)


def test_errors_of_a_launcher_become_python_errors(activation: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="the kernel returned error 7"):
        activation.activation(torch.randn(4, 8), "relu")
    with pytest.raises(RuntimeError, match="refuses contiguous arguments as not contiguous"):
        activation.activation(torch.randn(4, 8), "relu2")


def test_no_call_when_all_outputs_are_empty(activation: ModuleType) -> None:
    assert activation.activation(torch.randn(0, 8), "relu").shape == (0, 8)  # relu would return an error


def test_mismatched_arguments_never_reach_the_candidate(rmsnorm: ModuleType, add_norm: ModuleType) -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    with pytest.raises(
        RuntimeError, match=r"weight has shape \(7\), which does not fit \(N\) where x has shape \(3, 8\)"
    ):
        rmsnorm.rmsnorm(x, weight[:7], 1e-6)
    with pytest.raises(RuntimeError, match="weight has shape"):
        rmsnorm.rmsnorm(x, weight[None], 1e-6)
    with pytest.raises(NotImplementedError, match="dtype of weight"):
        rmsnorm.rmsnorm(x, weight.double(), 1e-6)
    with pytest.raises(RuntimeError, match="residual has shape"):
        add_norm.add_norm(x, torch.randn(2, 8), None, None, 1e-6)
    with pytest.raises(NotImplementedError, match="dtype of residual"):
        add_norm.add_norm(x, x.half(), None, None, 1e-6)


# --- what torch sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", binding.NO_GRAD])
def test_operators_pass_torchs_own_check(rmsnorm: ModuleType, add_norm: ModuleType, suffix: str) -> None:
    x, weight = torch.randn(3, 5, 8), torch.rand(8)
    torch.library.opcheck(operator(rmsnorm, f"rmsnorm{suffix}"), (x, weight, 1e-6))
    torch.library.opcheck(operator(rmsnorm, f"rmsnorm{suffix}"), (x.transpose(0, 1), weight, 1e-6, 1.0))
    torch.library.opcheck(operator(add_norm, f"add_norm{suffix}"), (x, x + 1, None, None, 1e-6))
    torch.library.opcheck(
        operator(add_norm, f"add_norm{suffix}"), (x.mT, x.mT + 1, torch.rand(5), None, 1e-6, 0.0, 1)
    )


def test_compiles_whole_and_gives_the_same(rmsnorm: ModuleType) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return rmsnorm.rmsnorm(x.sin(), w, 1e-6) * 2

    weight = torch.rand(8)
    for backend, shapes in (("inductor", ((3, 8),)), ("aot_eager", ((3, 8), (5, 8), (2, 3, 8)))):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for shape in shapes:
            x = torch.randn(shape)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x, weight), layer(x, weight))
    y = compiled(torch.randn(3, 8), torch.nn.Parameter(weight))
    with pytest.raises(RuntimeError, match="has no backward"):
        y.sum().backward()


def test_gradients_raise_and_are_never_silently_missing(rmsnorm: ModuleType, add_norm: ModuleType) -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    y = rmsnorm.rmsnorm(x, weight.requires_grad_(), 1e-6)
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="has no backward"):
        y.sum().backward()
    _, s = add_norm.add_norm(x.requires_grad_(), torch.randn(3, 8), None, None, 1e-6)
    with pytest.raises(RuntimeError, match="has no backward"):
        s.sum().backward()
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda t: rmsnorm.rmsnorm(t, weight.detach(), 1e-6).sum())(x.detach())
    with torch.no_grad():
        assert not rmsnorm.rmsnorm(x, weight, 1e-6).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(
            rmsnorm.rmsnorm(x, weight, 1e-6),
            expected_rmsnorm(x.detach(), weight.detach(), 1e-6),
            rtol=1e-5,
            atol=1e-6,
        )


def test_inference_does_not_go_through_the_autograd_formula(rmsnorm: ModuleType) -> None:
    x, weight = torch.randn(3, 8), torch.nn.Parameter(torch.rand(8))

    def called() -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            rmsnorm.rmsnorm(x, weight, 1e-6)
        return {
            e.key.rpartition("::")[2] for e in profile.key_averages() if e.key.startswith(rmsnorm.__name__)
        }

    with torch.no_grad():
        assert called() == {"rmsnorm_no_grad"}
    assert called() == {"rmsnorm"}


EVERY_TYPE = sorted(kernel_types())


def stub(name: str) -> str:
    """A Triton candidate that is never run: its variant needs no compiler, and has fakes like any other."""
    from autokernel_hf.contract import python_signature

    return f'KERNEL_TYPE = "{name}"\n\n\ndef kernel_fn{python_signature(kernel_types()[name])}:\n    raise AssertionError\n'


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_fakes_have_the_outputs_that_the_type_declares(name: str) -> None:
    from autokernel_hf.kernels.base import DTYPES, output_specs
    from autokernel_hf.records import TensorSpec

    kernel_type = kernel_types()[name]
    function = getattr(build.load(made(name, "triton", stub(name)).path), name)
    checked = 0
    for axes, options in (*kernel_type.sweep, *kernel_type.edges):
        for dtype in kernel_type.dtypes:
            args = {
                key: torch.empty(value.shape, dtype=DTYPES[value.dtype], device="meta")
                if isinstance(value, TensorSpec)
                else value
                for key, value in kernel_type.build(axes, dtype, options).args
            }
            outputs = function(**args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            assert [(tuple(o.shape), o.dtype) for o in outputs] == list(
                output_specs(kernel_type.outputs, args)
            )
            assert all(o.is_contiguous() for o in outputs)
            checked += 1
    assert checked


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_binding_of_every_type_is_valid(name: str, tmp_path: Path) -> None:
    kernel_type = kernel_types()[name]
    fit = binding.fit(kernel_type)
    assert list(fit.shapes) and set(fit.shapes) == {a.name for a in kernel_type.schema.args if a.is_tensor}
    for backend in ("cpp", "cuda") if name == "matmul" else ("cuda",):
        levels = build.cpu_levels() if backend == "cpp" else ()
        file = tmp_path / f"{backend}.cpp"
        file.write_text(binding.binding_source(kernel_type, backend, levels))  # type: ignore[arg-type]
        done = subprocess.run(
            [
                toolchain.gxx().path,
                *(
                    "-std=c++20",
                    "-fsyntax-only",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    "-DUSE_CUDA" if backend == "cuda" else "-O0",
                ),
                f"-DTORCH_TARGET_VERSION={native.TORCH_TARGET}",
                *(
                    f"-I{binding.RUNTIME.parent}",
                    "-isystem",
                    f"{Path(torch.__file__).parent / 'include'}",
                    str(file),
                ),
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
