"""What torch.compile makes of a model: its graphs, where and why they break, and the code that is generated."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from autokernel_hf.errors import UsageError
from autokernel_hf.models import LoadedModel

logger = logging.getLogger(__name__)


def write_compile_log(loaded: LoadedModel, folder: Path) -> None:
    """Write `explain.txt` (graphs, breaks and their reasons), `graph_<n>.txt` and `code_<n>.py` into a folder.

    Where code cannot be generated (no compiler), `code_error.txt` says why.

    Raises:
        UsageError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(loaded, folder)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.strerror or error}).", remedy="Name a writable folder."
        ) from error


def _write(loaded: LoadedModel, folder: Path) -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            explained = torch._dynamo.explain(loaded.model)(**loaded.inputs)
            (folder / "explain.txt").write_text(str(explained), encoding="utf-8")
            for number, graph in enumerate(explained.graphs):
                text = graph.print_readable(print_output=False)
                (folder / f"graph_{number}.txt").write_text(text, encoding="utf-8")
            torch._dynamo.reset()
            try:
                _, sources = run_and_get_code(torch.compile(loaded.model, dynamic=False), **loaded.inputs)
            except RuntimeError as error:  # every failure of the compiler is one
                logger.warning("torch.compile generates no code here: see %s", folder / "code_error.txt")
                (folder / "code_error.txt").write_text(str(error), encoding="utf-8")
            else:
                for number, source in enumerate(sources):
                    (folder / f"code_{number}.py").write_text(source, encoding="utf-8")
    finally:
        torch._dynamo.reset()
