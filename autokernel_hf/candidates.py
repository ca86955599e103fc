"""Candidate files: which type and backend they are for."""

from __future__ import annotations

import re
from pathlib import Path

from autokernel_hf.errors import CandidateError
from autokernel_hf.records import Backend, Candidate

_BACKEND_OF: dict[str, Backend] = {".py": "triton", ".cu": "cuda", ".cpp": "cpp", ".cc": "cpp"}


def read_candidate(path: Path) -> Candidate:
    """Read a candidate file; its type stands in its first lines, its backend in its suffix.

    Raises:
        CandidateError: No such file, an unknown suffix, or no kernel type in the first lines.
    """
    backend = _BACKEND_OF.get(path.suffix)
    if backend is None:
        if not path.exists():
            raise CandidateError(f"There is no file {path}.", remedy="Check the path.")
        raise CandidateError(
            f"{path} is no candidate file: its suffix is {path.suffix!r}.",
            remedy="Use .py (Triton), .cu (CUDA C++) or .cpp (C++).",
        )
    try:
        source = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise CandidateError(f"There is no file {path}.", remedy="Check the path.") from None
    except UnicodeDecodeError:
        raise CandidateError(f"{path} is not UTF-8 text.", remedy="Name a source file.") from None
    return candidate_from(source, backend, str(path))


def candidate_from(source: str, backend: Backend, where: str = "the source") -> Candidate:
    """A candidate from its source text. Raises CandidateError where its first lines name no kernel type."""
    head = "\n".join(source.splitlines()[:30])
    if backend == "triton":
        match = re.search(r"^KERNEL_TYPE\s*=\s*[\"'](\w+)[\"']", head, re.MULTILINE)
        wanted = 'KERNEL_TYPE = "rmsnorm"'
    else:
        match = re.search(r"^\s*//\s*kernel_type:\s*(\w+)", head, re.MULTILINE)
        wanted = "// kernel_type: rmsnorm"
    if match is None:
        raise CandidateError(
            f"{where} does not name its kernel type.", remedy=f"Add a first line such as {wanted}."
        )
    return Candidate(kernel_type=match[1], backend=backend, source=source)
