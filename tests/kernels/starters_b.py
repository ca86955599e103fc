"""Triton starters in the interpreter, and compiled for GPUs that are not here. A program of its own: both change Triton.

    TRITON_INTERPRET=1 python -m tests.kernels.starters_b interpret
    python -m tests.kernels.starters_b compile

print one JSON object each.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from autokernel_hf import tunables
from autokernel_hf.judge.checks import check_values, expect
from autokernel_hf.kernels import kernel_type, starter
from autokernel_hf.kernels.base import make_inputs
from tests.kernels.interpreted import load, problems_of, spec_size, with_each_choice, workloads_of

TYPES = ("matmul", "flash_attention", "fused_mlp", "cross_entropy", "rotary_embedding", "reduce")


def source_of(name: str) -> str:
    source = starter(name, "triton")
    assert source is not None
    return source


# --- interpreted --------------------------------------------------------------------------------------------------


def examine(name: str, folder: Path) -> dict[str, Any]:
    kind, source = kernel_type(name), source_of(name)
    ordinary = workloads_of(kind)
    short = sorted((w for w in ordinary if min(spec_size(w)) > 0), key=lambda w: max(spec_size(w)))
    few = [short[len(short) // 3], short[2 * len(short) // 3]]
    settings = [({}, ordinary), *with_each_choice(tunables.parse(source), few)]
    problems, calls = [], 0
    for i, (values, workloads) in enumerate(settings):
        module = load(tunables.substitute(source, values), folder, f"{name}_{i}")
        for workload in workloads:
            calls += 1
            problems += [
                f"{workload.label} {workload.dtype} {workload.values} {values or ''}: {problem}"
                for problem in problems_of(module, kind, workload)
            ]
    module = load(source + (WIDEN if name == "matmul" else ""), folder, f"{name}_special")
    for case, right in SPECIAL.get(name, lambda module: iter(()))(module):
        calls += 1
        problems += [] if right else [case]
    return {"calls": calls, "problems": problems}


def special_attention(module: Any) -> Iterator[tuple[str, bool]]:
    """Masks that hide everything from a query, in the ways that models hide."""
    kind = kernel_type("flash_attention")
    q, k, v = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
    shown = torch.rand(1, 1, 20, 70) < 0.7
    shown[..., 5, :] = False
    shown[..., 6, :64] = False  # the first block of keys is all hidden
    lowest = torch.finfo(torch.float32).min
    masks = {
        "bool": shown,
        "minus infinity": torch.zeros(shown.shape).masked_fill(~shown, -math.inf),
        # All keys at the lowest number are all alike: such a query gets the mean of the values.
        "the lowest number": torch.zeros(shown.shape).masked_fill(~shown, lowest),
        "two dimensions": shown[0, 0],
    }
    for name, mask in masks.items():
        args = kind.schema.bind({"q": q, "k": k, "v": v, "mask": mask})
        out = module.kernel_fn(**args)
        (exact,) = kind.oracle(**{**args, "q": q.double(), "k": k.double(), "v": v.double()})
        yield f"mask by {name}", torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-6)
        hidden = torch.zeros(1, 2, 16) if name != "the lowest number" else v.mean(2)
        yield f"hidden by {name}", torch.allclose(out[:, :, 5], hidden, rtol=1e-5, atol=1e-6)


def special_matmul(module: Any) -> Iterator[tuple[str, bool]]:
    """float8 as it is computed where the hardware has none."""
    bits, out = torch.arange(256, dtype=torch.int32).to(torch.uint8), torch.empty(256)
    module.widen[(1,)](bits, out)
    exact = bits.view(torch.float8_e4m3fn).float()
    yield "all float8 numbers", bool(((out == exact) | (out.isnan() & exact.isnan())).all())
    kind = kernel_type("matmul")
    module.has_float8 = lambda: False
    for axes, options in kind.sweep[:3]:
        workload = kind.build(axes, "float8_e4m3fn", options)
        args = make_inputs(kind, workload, 1)
        outcome = check_values((module.kernel_fn(**args),), expect(kind, workload, args), kind, workload)
        yield f"{workload.label} float8: {outcome.problem}", not outcome.problem


WIDEN = """

@triton.jit
def widen(bits_ptr, out_ptr):
    lane = tl.arange(0, 256)
    tl.store(out_ptr + lane, float8(tl.load(bits_ptr + lane), False).to(tl.float32))
"""


def special_reduce(module: Any) -> Iterator[tuple[str, bool]]:
    for op in ("max", "min"):
        try:
            module.kernel_fn(torch.zeros(3, 0), op=op)
        except IndexError:
            yield op, True
        else:
            yield f"the {op} of nothing", False


SPECIAL: dict[str, Callable[[Any], Iterator[tuple[str, bool]]]] = {
    "flash_attention": special_attention,
    "matmul": special_matmul,
    "reduce": special_reduce,
}


def interpret() -> dict[str, Any]:
    warnings.simplefilter("ignore")  # numpy's, about the divisions by zero that give the NaN asked for
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return {name: examine(name, Path(folder)) for name in TYPES}


# --- compiled -----------------------------------------------------------------------------------------------------

SQUARE = {"M": 2048, "N": 2048, "K": 2048}
HEADS = {"B": 1, "Hq": 12, "Sq": 1024, "D": 64}

# (type, axes, dtype, options, compute capabilities)
COMPILED: tuple[tuple[str, dict[str, int], str, dict[str, Any], tuple[int, ...]], ...] = (
    ("matmul", SQUARE, "float16", {}, (80, 90, 100)),
    ("matmul", SQUARE, "float8_e4m3fn", {}, (80, 90)),
    ("matmul", {"M": 256, "N": 256, "K": 256}, "float32", {"nt": True}, (90,)),
    ("matmul", {"M": 16, "N": 8192, "K": 2048}, "bfloat16", {"nt": True, "with_bias": True}, (90,)),
    ("flash_attention", HEADS, "bfloat16", {"causal": True}, (80, 90, 100)),
    ("flash_attention", {**HEADS, "Hk": 4, "D": 128}, "float16", {"mask_kind": "padding"}, (90,)),
    (
        "flash_attention",
        {**HEADS, "D": 40},
        "bfloat16",
        {"sequences": 3, "window": 64, "causal": True},
        (90,),
    ),
    ("flash_attention", {**HEADS, "D": 32}, "float32", {"mask_kind": "additive"}, (90,)),
    ("fused_mlp", {"M": 512, "D": 2048, "H": 8192}, "bfloat16", {}, (80, 90, 100)),
    ("fused_mlp", {"M": 64, "D": 512, "H": 1024}, "float32", {"gated": False, "activation": "gelu"}, (90,)),
    ("cross_entropy", {"N": 4096, "V": 32000}, "bfloat16", {}, (80, 90, 100)),
    ("cross_entropy", {"N": 8192, "V": 50257}, "bfloat16", {"label_smoothing": 0.1}, (90,)),
    ("rotary_embedding", {"B": 1, "Hq": 32, "Hk": 8, "S": 2048, "D": 128}, "bfloat16", {}, (80, 90, 100)),
    ("rotary_embedding", {"B": 1, "Hq": 8, "Hk": 8, "S": 64, "D": 256}, "float32", {"rotary_dim": 64}, (90,)),
    (
        "rotary_embedding",
        {"B": 1, "Hq": 32, "Hk": 8, "S": 64, "D": 128},
        "bfloat16",
        {"interleaved": True},
        (90,),
    ),
    ("reduce", {"M": 64, "N": 1048576}, "bfloat16", {}, (80, 90, 100)),
    ("reduce", {"M": 4096, "N": 4096}, "float32", {"dim": 0, "op": "max"}, (90,)),
)


def compiled() -> list[dict[str, Any]]:
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from autokernel_hf.triton_compile import _Driver, _empty

    warnings.simplefilter("ignore")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    kernels: dict[str, Any] = {}
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_instead
    report = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, axes, dtype, options, capabilities) in enumerate(COMPILED):
            workload = kernel_type(name).build(axes, dtype, options)
            for capability in capabilities:
                driver.set_active(_Driver(capability))
                kernels.clear()
                # A module of its own: a function keeps what it was compiled for.
                module = load(source_of(name), Path(folder), f"{name}_{i}_{capability}")
                module.kernel_fn(**{k: _empty(v) if hasattr(v, "shape") else v for k, v in workload.args})
                for kernel in kernels.values():
                    binary = Path(folder) / "kernel.cubin"
                    binary.write_bytes(kernel.asm["cubin"])
                    told = subprocess.run(
                        [tool, "-res-usage", binary], capture_output=True, text=True, check=True
                    )
                    use = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", told.stdout)
                    assert use is not None, told.stdout
                    ptx = kernel.asm["ptx"]
                    report.append(
                        {
                            "type": name,
                            "label": workload.label,
                            "dtype": dtype,
                            "capability": capability,
                            "kernel": kernel.metadata.name,
                            "stack_bytes": int(use[2]) + int(use[3]),
                            "shared_bytes": kernel.metadata.shared,
                            "tf32": "tf32" in ptx,
                            "tensor_cores": any(word in ptx for word in ("wgmma", "mma.sync", "tcgen05.mma")),
                            "float8": "e4m3" in ptx,
                            "wide_loads": len(re.findall(r"ld\.global\S*\.v(?:4|8)\.b(?:32|64)", ptx)),
                        }
                    )
    return report


if __name__ == "__main__":
    json.dump(interpret() if sys.argv[1] == "interpret" else compiled(), sys.stdout)
