"""What the tests of the judge share: the files of `mutants/` and `honest/`, and how a mutant is held to what it says."""

from __future__ import annotations

import re
from pathlib import Path

from autokernel_hf.candidates import read_candidate
from autokernel_hf.evaluate import Judge, decide
from autokernel_hf.kernels import kernel_type
from autokernel_hf.records import Workload

MUTANTS = Path(__file__).parent / "mutants"
HONEST = Path(__file__).parent / "honest"


def rms(rows: int, columns: int, dtype: str = "float32") -> Workload:
    return kernel_type("rmsnorm").build({"M": rows, "N": columns}, dtype, {})


def header(path: Path, key: str) -> str | None:
    """A line such as `// expect: incorrect` or `# expect: incorrect` of a file's first ones."""
    match = re.search(rf"^(?://|#) {key}: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def mutants(suffix: str, *, gpu: bool = False, other_types: bool = False) -> list[str]:
    """The names of the mutants of a backend; those that need a GPU only where one is there.

    Nearly all are for rmsnorm, so that they share a session; `other_types` names the others.
    """
    found = [p for p in sorted(MUTANTS.glob(f"*{suffix}")) if gpu or header(p, "needs") is None]
    return [p.name for p in found if (read_candidate(p).kernel_type != "rmsnorm") == other_types]


def check_mutant(judge: Judge, name: str) -> None:
    """Judge a mutant: it must get the status that it names, for the reason that it names, and never be kept."""
    path = MUTANTS / name
    expected, because = header(path, "expect"), header(path, "because")
    assert expected is not None and because is not None
    evaluation = judge.one_shot(read_candidate(path), peers=False)
    assert re.fullmatch(expected, evaluation.status), evaluation.reason
    assert re.search(because, evaluation.reason), evaluation.reason
    assert decide(evaluation)[0] == ("quarantine" if evaluation.status == "rejected" else "revert")
