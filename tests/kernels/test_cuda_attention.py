"""Attention in CUDA C++ as Hopper has it, through the emulation: masks ahead of wgmma, and decoding by a cluster."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autokernel_hf.kernels import kernel_type
from autokernel_hf.kernels.base import make_inputs
from autokernel_hf.records import Scalar
from tests.kernels.cuda_emulation import Emulated, EmulationError
from tests.kernels.test_cuda import problem, same_bits, source_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attention")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Emulated:
    return Emulated(kernel_type("flash_attention"), source_of("flash_attention"), folder, clusters=True)


def in_rows_of(mask: Tensor, length: int, start: int) -> Tensor:
    """A mask (B, H, Sq, Sk) whose rows are `length` elements apart, from element `start` of its memory on."""
    B, H, Sq, Sk = mask.shape
    memory = torch.ones(B * H * Sq * length + start, dtype=mask.dtype)
    view = memory.as_strided(mask.shape, (H * Sq * length, Sq * length, length, 1), start)
    view.copy_(mask)
    return view


def noise(*sizes: int) -> Tensor:
    """A mask that hides half of the keys."""
    return torch.rand(sizes, generator=torch.Generator().manual_seed(1)) < 0.5


def masks(dtype: torch.dtype, B: int, H: int, Sq: int, Sk: int) -> dict[str, Tensor]:
    """Masks as models have them, and as they could: what they hide, and how they lie in memory."""
    lower = torch.ones(1, 1, Sq, Sk, dtype=torch.bool).tril(Sk - Sq)
    blocks = torch.ones(B, H, Sq, Sk, dtype=torch.bool)
    blocks[:, 0, :, 64:] = False
    blocks[:, -1, 10:80, :64] = False
    blocks[:, -1, 5] = False
    zeros = torch.zeros(B, H, Sq, Sk, dtype=dtype)
    return {
        "causal": lower,
        "causal, two dimensions": lower[0, 0],
        "causal, -inf": zeros.masked_fill(~lower, -math.inf),
        "causal, lowest": zeros.masked_fill(~lower, torch.finfo(dtype).min),
        "blocks": blocks,
        "nothing": torch.zeros(1, 1, 1, Sk, dtype=torch.bool).expand(B, H, Sq, Sk),
        "everything": torch.ones(B, 1, Sq, Sk, dtype=torch.bool),
        "zeros": zeros,
        "noise, rows from any byte": in_rows_of(noise(B, H, Sq, Sk), Sk + 5, 3),
        "numbers, rows from any element": in_rows_of(
            torch.randn(zeros.shape).to(dtype).masked_fill(noise(B, H, Sq, Sk), -math.inf), Sk + 1, 5
        ),
        "numbers of another dtype": torch.randn(zeros.shape).to(
            torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
        ),
        "of keys": noise(B, H, 1, Sk).expand(B, H, Sq, Sk),
        "of queries": noise(B, H, Sq, 1).expand(B, H, Sq, Sk),
        "numbers of float32": torch.randn(zeros.shape),
    }


# Heads as wide as each of the kernels has them, whole tiles and not.
MASKED: tuple[tuple[dict[str, int], str, dict[str, Scalar], int], ...] = (
    ({"B": 1, "Hq": 2, "Sq": 100, "Sk": 200, "D": 64}, "float16", {}, 0),
    ({"B": 2, "Hq": 2, "Hk": 1, "Sq": 70, "Sk": 133, "D": 40}, "bfloat16", {"causal": True}, 1),
    ({"B": 1, "Hq": 2, "Sq": 100, "Sk": 200, "D": 128}, "float16", {"window": 60}, 2),
    ({"B": 1, "Hq": 2, "Sq": 140, "Sk": 200, "D": 256}, "bfloat16", {}, 2),
)


def threads_of(kernel: Emulated) -> int:
    """Of a block of the kernel that ran last: it tells which one that was."""
    return ctypes.c_uint.in_dll(kernel.library, "_ZN3emu9block_dimE").value


@pytest.mark.parametrize(("axes", "dtype", "options", "schedule"), MASKED)
def test_attention_on_hopper_is_right_under_every_mask(
    kernel: Emulated, axes: dict[str, int], dtype: str, options: dict[str, Scalar], schedule: int
) -> None:
    kind = kernel_type("flash_attention")
    workload = kind.build(axes, dtype, options)
    args = make_inputs(kind, workload, seed=4)
    sizes = (axes["B"], axes["Hq"], axes["Sq"], axes["Sk"])
    problems = []
    for i, (name, mask) in enumerate({"none": None, **masks(getattr(torch, dtype), *sizes)}.items()):
        asked = {**args, "mask": mask}
        wrong = problem(kind, workload, asked, kernel(asked, schedule=schedule, at_end=i % 2 == 0))
        problems += [f"{name}: {wrong}"] if wrong else []
        # Two warp groups and one that fetches, or one and its own; the path for older devices has four warps.
        wide = 384 if axes["D"] > 128 else 256 if mask is not None else 160
        assert threads_of(kernel) == (128 if name in ("of queries", "numbers of float32") else wide), name
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("queries", "dtype"),
    [(20, torch.bfloat16), (20, torch.float32), (1, torch.bfloat16), (1, torch.float32)],
    ids=["wgmma", "mma", "decode", "decode-float32"],
)
def test_keys_that_all_have_the_lowest_number_are_all_alike(
    kernel: Emulated, queries: int, dtype: torch.dtype
) -> None:
    """Their query gets the mean of the values, not 0, though that number times log2(e) is none."""
    axes = {"B": 1, "Hq": 2, "Sq": queries, "Sk": 70, "D": 64}
    kind = kernel_type("flash_attention")
    args = make_inputs(kind, kind.build(axes, "bfloat16", {}), seed=8)
    args["mask"] = torch.full((1, 1, queries, 70), torch.finfo(dtype).min, dtype=dtype)
    (out,) = kernel(args)
    mean = args["v"].double().mean(2, keepdim=True).expand(out.shape)
    torch.testing.assert_close(out.double(), mean, atol=4e-3, rtol=0)


def test_attention_on_hopper_does_not_depend_on_the_order_of_threads(kernel: Emulated) -> None:
    kind = kernel_type("flash_attention")
    for axes in ({"Sq": 80, "Sk": 330, "D": 64}, {"Sq": 1, "Sk": 2500, "D": 128}):  # the second is decoding
        args = make_inputs(kind, kind.build({"B": 1, "Hq": 2, "Hk": 1, **axes}, "float16", {}), seed=6)
        args["mask"] = in_rows_of(noise(1, 2, axes["Sq"], axes["Sk"]), axes["Sk"] + 5, 3)
        first, *others = (kernel(args, schedule=schedule) for schedule in range(3))
        assert all(same_bits(first, other) for other in others), str(axes)


@pytest.mark.parametrize("kept", ("full", pytest.param("empty", marks=pytest.mark.slow)))
def test_emulation_sees_a_mask_that_is_read_too_early_or_overwritten_too_early(
    folder: Path, kept: str
) -> None:
    waits = {
        "full": "barrier_wait(&barriers->mask_full[i % S::stages], i / S::stages % 2);",
        "empty": "barrier_wait(&barriers->mask_empty[stage], parity);",
    }
    kind, source = kernel_type("flash_attention"), source_of("flash_attention")
    assert source.count(waits[kept]) == 1
    kernel = Emulated(kind, source.replace(waits[kept], ""), folder, clusters=True)
    workload = kind.build({"B": 1, "Hq": 1, "Sq": 64, "Sk": 512, "D": 64}, "float16", {})
    args = make_inputs(kind, workload, seed=6)
    args["mask"] = noise(1, 1, 64, 512)

    def right(schedule: int) -> bool:
        try:
            return not problem(kind, workload, args, kernel(args, schedule=schedule))
        except EmulationError:
            return False

    assert not all(right(schedule) for schedule in range(3))
