"""The kernel types: every module of this package that defines `KERNEL_TYPE`, found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from autokernel_hf.errors import UsageError
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import SOURCE_SUFFIX, Backend

_FOLDER = Path(__file__).parent
BACKENDS: tuple[Backend, ...] = ("triton", "cuda", "cpp")


@cache
def kernel_types() -> dict[str, KernelType]:
    """All kernel types by name."""
    found = {}
    for module in pkgutil.iter_modules([str(_FOLDER)]):
        if module.ispkg or module.name == "base" or module.name.startswith("_"):
            continue
        kernel_type = importlib.import_module(f"{__name__}.{module.name}").KERNEL_TYPE
        found[kernel_type.name] = kernel_type
    return found


def kernel_type(name: str) -> KernelType:
    """The kernel type of a name.

    Raises:
        UsageError: There is none of that name.
    """
    types = kernel_types()
    if name not in types:
        raise UsageError(
            f"There is no kernel type {name!r}.", remedy=f"Known types: {', '.join(sorted(types))}."
        )
    return types[name]


def starter(name: str, backend: Backend) -> str | None:
    """The source of a type's starter for a backend, or None where there is none."""
    path = _FOLDER / backend / f"{name}{SOURCE_SUFFIX[backend]}"
    return path.read_text(encoding="utf-8") if path.exists() else None


def backends(name: str) -> tuple[Backend, ...]:
    """The backends for which a type has a starter."""
    return tuple(b for b in BACKENDS if starter(name, b) is not None)


def layers_source(name: str) -> str | None:
    """The source of the layer classes that ship with a type, or None where it has none."""
    path = _FOLDER / "layers" / f"{name}.py"
    return path.read_text(encoding="utf-8") if path.exists() else None
