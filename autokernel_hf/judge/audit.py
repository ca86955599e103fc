"""What a Triton candidate may not do in Python: let torch compute, or replace parts of torch.

Both are looked at from inside the child, where a determined candidate could lie; they catch the careless and the
desperate. What counts in the end, values and time, is checked from outside.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
    found = {name for name in recorder.names if not _is_allowed(name)}
    if _COMPILER in sys.modules and not _COMPILES_ANYWAY:
        found.add("torch.compile")  # what it has compiled runs past the recorder
    return sorted(found)


_COMPILER = "torch._inductor.compile_fx"
_COMPILES_ANYWAY = _COMPILER in sys.modules


def _is_allowed(name: str) -> bool:
    namespace, _, operator = name.partition("::")
    return namespace == "aten" and operator.partition(".")[0] in _ALLOWED


_TORCH = Path(torch.__file__).parent
_JUDGE = __package__
_HARNESS = (
    "arena",
    "audit",
    "bands",
    "child",
    "compiled",
    "device_memory",
    "graphs",
    "l2",
    "launches",
    "messages",
    "turn",
)
# Modules that must stay in their places: a candidate that swaps one is found by the next who imports it.
_ROOTS = frozenset(
    {"autokernel_hf", "builtins", "gc", "json", "os", "socket", "struct", "sys", "time", "torch", "triton"}
)
_LOADER = ("LD_", "PYTHON")  # settings that act on the processes to come


def _watched() -> dict[str, Any]:
    """What torch, the clocks and the judge's own side of a child are made of."""
    owners: dict[str, Any] = {
        "torch": torch,
        "torch.Tensor": Tensor,
        "torch.cuda": torch.cuda,
        "torch.nn.functional": torch.nn.functional,
        "torch.testing": torch.testing,
        "time": time,
        "gc": gc,
        "os": os,
        "json": json,
        "socket": socket,
        "builtins": builtins,
    }
    owners |= {f"{_JUDGE}.{name}": importlib.import_module(f"{_JUDGE}.{name}") for name in _HARNESS}
    if "triton" in sys.modules:
        owners["triton.testing"] = importlib.import_module("triton.testing")
    return owners


def _settings() -> dict[str, object]:
    """What a candidate would change for the whole process."""
    settings: dict[str, object] = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
    }
    settings |= {
        n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")
    }
    return settings | {f"os.environ[{k!r}]": v for k, v in os.environ.items() if k.startswith(_LOADER)}


class Watch:
    """Remembers what a process is made of and how it is set, to see what was replaced later."""

    def __init__(self) -> None:
        self._owners = _watched()
        self._before = {name: _parts(owner) for name, owner in self._owners.items()}
        self._modules = _modules()
        self._set = _settings()

    def replaced(self) -> list[str]:
        """Names of functions, classes, modules and settings that are others now, or gone."""
        found = []
        for name, owner in self._owners.items():
            now = _parts(owner)
            found += [
                f"{name}.{key}"
                for key, value in self._before[name].items()
                if now.get(key) is not value and not _wraps(now.get(key), value)
            ]
        modules, settings = _modules(), _settings()
        found += [f"sys.modules[{k!r}]" for k, v in self._modules.items() if modules.get(k) is not v]
        return found + sorted(
            key for key in self._set.keys() | settings.keys() if self._set.get(key) != settings.get(key)
        )


def _modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _ROOTS}


# Not constants, which the compiler of this file would have worked out by itself.
_one, _tenth, _smallest = float("1"), float("0.1"), float("5e-324")


def floating_point_is_sound() -> bool:
    """Whether this thread keeps denormal numbers and rounds to the nearest, as every process begins."""
    small = _one - _tenth * 1e-16 == _one == _one + _tenth * 1e-16
    return small and _smallest * _one > 0 and 2.2250738585072014e-308 * _tenth > 0


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
