"""Which values the constants on top of `op.py` have in a call: data in `configs.json`, over those in the file.

    {"rows": true, "configs": [
      {"device": "NVIDIA H200", "dtype": "float16", "shapes": [[4096, 768], [768]], "values": {"TILE": 4096}},
      {"device": "NVIDIA H200", "values": {"TILE": 2048}}]}

An entry without shapes is for all other calls on its device. Where no entry fits, the constants of the file hold. With
`rows`, leading dimensions count as one. `autokernel-hf tune` writes entries; the code stays as it is.
"""

from __future__ import annotations

import ast
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Kernel = Callable[..., Any]


def selector(plain: Kernel) -> Callable[..., Kernel] | None:
    """What picks the kernel for the tensors of a call; None where `configs.json` has no entries.

    Args:
        plain: `kernel_fn` of `op.py`, with the constants as they stand there.

    Raises:
        ValueError: `configs.json` names a constant that `op.py` does not have.
    """
    file = Path(str(sys.modules[plain.__module__].__file__))
    data = json.loads((file.parent / "configs.json").read_text(encoding="utf-8"))
    rows = bool(data.get("rows"))
    if not data["configs"]:
        return None
    kernels = [
        _with_values(file, plain.__module__, entry["values"], i) for i, entry in enumerate(data["configs"])
    ]
    tables: dict[torch.device, tuple[dict[Any, Kernel], Kernel]] = {}

    def table(device: torch.device) -> tuple[dict[Any, Kernel], Kernel]:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        exact: dict[Any, Kernel] = {}
        rest = plain
        for entry, kernel in zip(data["configs"], kernels, strict=True):
            if entry["device"] != name:
                continue
            if "shapes" in entry:
                shapes = tuple(None if s is None else tuple(s) for s in entry["shapes"])
                exact[getattr(torch, entry["dtype"]), shapes] = kernel
            else:
                rest = kernel
        return exact, rest

    def select(*tensors: torch.Tensor | None) -> Kernel:
        first = tensors[0]
        assert first is not None
        found = tables.get(first.device)
        if found is None:
            found = tables[first.device] = table(first.device)
        exact, rest = found
        if not exact:
            return rest
        shapes = tuple(None if t is None else _merged(t.shape) if rows else tuple(t.shape) for t in tensors)
        return exact.get((first.dtype, shapes), rest)

    return select


def _merged(shape: torch.Size) -> tuple[int, ...]:
    return tuple(shape) if len(shape) < 3 else (shape[:-1].numel(), shape[-1])


def _with_values(file: Path, name: str, values: dict[str, Any], number: int) -> Kernel:
    """`kernel_fn` of a file whose constants have other values; no line moves, so that sources are still found."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    left = dict(values)
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constant = node.targets[0].id
            if constant in left and isinstance(node.value, ast.Constant):
                node.value = ast.copy_location(ast.Constant(left.pop(constant)), node.value)
    if left:
        raise ValueError(f"configs.json names {', '.join(left)}, which {file.name} does not have")
    module = types.ModuleType(f"{name}_{number}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(tree, str(file), "exec"), module.__dict__)
    kernel: Kernel = module.__dict__["kernel_fn"]
    return kernel
