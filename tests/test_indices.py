"""What is told, from a source alone, of index arithmetic that overflows in tensors of more than 2^31 elements."""

from __future__ import annotations

from pathlib import Path

import pytest

from autokernel_hf.candidates import read_candidate
from autokernel_hf.evaluate import evaluate
from autokernel_hf.judge.indices import notes_on
from autokernel_hf.records import Candidate
from tests.judge_files import HONEST, rms

STARTERS = Path(__file__).parent.parent / "autokernel_hf" / "kernels"
SOURCES = [
    p for d in ("triton", "cuda", "cpp") for p in sorted((STARTERS / d).glob("*.*")) if p.suffix != ".h"
]


def narrow_row() -> Candidate:
    """A right kernel whose row's offset is a product in 32 bits."""
    source = (HONEST / "rmsnorm_row.py").read_text()
    assert ".to(tl.int64)" in source
    return Candidate(kernel_type="rmsnorm", backend="triton", source=source.replace(".to(tl.int64)", ""))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_no_starter_is_accused(path: Path) -> None:
    assert notes_on(read_candidate(path)) == ()


def test_a_product_of_a_programs_number_with_a_length_is_named() -> None:
    (note,) = notes_on(narrow_row())
    assert "2^31" in note and "row * " in note


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("int at = blockIdx.x * n + threadIdx.x;", ["at"]),
        ("const unsigned int row = blockIdx.x * x->sizes[1];", ["row"]),
        ("int at = blockIdx.y * n;", ["at"]),
        ("int64_t at = (int64_t)blockIdx.x * n;", []),
        ("int head = blockIdx.y * blockDim.z + threadIdx.z;", []),
        ("int block = blockIdx.x;", []),
        ("const int tile = (int)blockIdx.x / splits, within = tile % (tiles_m * tiles_n);", []),
        ("const int tile = blockIdx.x, at = max(blockIdx.x, 0) * n, other = f(a, b);", ["at"]),
        ("int count = (int)x->sizes[0];", []),
        ("// int at = blockIdx.x * n;", []),
    ],
)
def test_products_in_c_are_named(line: str, named: list[str]) -> None:
    notes = notes_on(Candidate(kernel_type="rmsnorm", backend="cuda", source=line))
    assert [n for n in named if n in notes[0]] == named if named else notes == ()


def test_an_evaluation_carries_the_note_where_the_call_cannot_be_run() -> None:
    evaluation = evaluate(
        narrow_row(), device="cpu", workloads=(rms(4, 128),), dtypes=("float32",), peers=False
    )
    assert evaluation.status == "passed", evaluation.reason
    assert len(evaluation.notes) == 1 and "64 bits" in evaluation.notes[0]
