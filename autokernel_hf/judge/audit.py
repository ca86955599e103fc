"""What a Triton candidate may not do in Python: let torch compute, or replace parts of torch.

Both are looked at from inside the child, where a determined candidate could lie; they catch the careless and the
desperate. What counts in the end, values and time, is checked from outside.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Allocating, viewing, copying: all that a launcher needs of torch.
_ALLOWED = frozenset(
    {
        "_local_scalar_dense",
        "_reshape_alias",
        "_reshape_copy",
        "_to_copy",
        "_unsafe_view",
        "alias",
        "as_strided",
        "clone",
        "copy_",
        "detach",
        "detach_",
        "diagonal",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "expand",
        "fill",
        "fill_",
        "full",
        "full_like",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "permute",
        "record_stream",
        "reshape",
        "resize_",
        "select",
        "set_",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view",
        "zero",
        "zero_",
        "zeros",
        "zeros_like",
    }
)


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, as torch's own modes say it: hiding this mode from the compiler would import it, in 3 s a child."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(str(func.name()))
        return func(*args, **(kwargs or {}))


def operators_of(function: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    """The operators that a call runs, beyond allocating, viewing and copying."""
    with Recorder() as recorder:
        function(**arguments)
    return sorted(name for name in recorder.names if not _is_allowed(name))


def _is_allowed(name: str) -> bool:
    namespace, _, operator = name.partition("::")
    return namespace == "aten" and operator.partition(".")[0] in _ALLOWED


_TORCH = Path(torch.__file__).parent
_WATCHED: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.Tensor", Tensor),
    ("torch.cuda", torch.cuda),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.testing", torch.testing),
    ("time", time),
    ("gc", gc),
    ("os", os),
)


class Watch:
    """Remembers what torch and the clocks are made of, to see what was replaced later."""

    def __init__(self) -> None:
        self._before = {name: _parts(owner) for name, owner in _WATCHED}

    def replaced(self) -> list[str]:
        """Names of functions and classes that are another now, or gone."""
        found = []
        for name, owner in _WATCHED:
            now = _parts(owner)
            found += [
                f"{name}.{key}"
                for key, value in self._before[name].items()
                if now.get(key) is not value and not _wraps(now.get(key), value)
            ]
        return found


def _wraps(now: Any, before: Any) -> bool:
    """Whether torch itself has wrapped a function of its own, as its compiler does when it is first imported."""
    code = getattr(now, "__code__", None)
    if code is None or not Path(code.co_filename).is_relative_to(_TORCH):
        return False
    return getattr(now, "_torchdynamo_orig_callable", getattr(now, "__wrapped__", None)) is before


def _parts(owner: Any) -> dict[str, Any]:
    """The functions and classes of a module, or of a class with what it inherits."""
    if isinstance(owner, type):
        parts = {key: value for cls in reversed(owner.__mro__) for key, value in vars(cls).items()}
    else:
        parts = vars(owner)
    return {key: value for key, value in parts.items() if callable(value)}
