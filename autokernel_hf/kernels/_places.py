"""Where a model computes a kernel type: the sites of modules and functions, and the layer classes that replace them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autokernel_hf.records import Site


def module_sites(
    model: nn.Module, kernel_type: str, layer: str, matches: Callable[[nn.Module], bool]
) -> Iterable[Site]:
    """Sites of all modules that match, in the model's order."""
    for name, module in model.named_modules():
        if name and matches(module):
            yield Site(name=name, kernel_type=kernel_type, layer=layer, attach="module", path=name)


def function_sites(model: nn.Module, kernel_type: str, layer: str, attribute: str) -> Iterable[Site]:
    """Sites of a function that the modeling files of a model's modules define at top level, once a file."""
    seen = dict.fromkeys(type(m).__module__ for m in model.modules())
    for module_name in seen:
        if callable(getattr(sys.modules.get(module_name), attribute, None)):
            path = f"{module_name}:{attribute}"
            yield Site(
                name=path.rsplit(".", 1)[-1],
                kernel_type=kernel_type,
                layer=layer,
                attach="function",
                path=path,
            )


def layer_class(kernel_type: str, name: str, op: Callable[..., Any]) -> type[nn.Module]:
    """A class of a type's layers file, with `op` in the place of its package's own `_ops.<kernel_type>`.

    So that `find` can ask whether the very class that ships computes what a model's own code computes.
    """
    path = Path(__file__).parent / "layers" / f"{kernel_type}.py"
    package = f"_autokernel_layers_{kernel_type}"
    ops = ModuleType(f"{package}._ops")
    setattr(ops, kernel_type, op)
    module = ModuleType(f"{package}.layers")
    module.__package__ = package
    # The source's `from ._ops import ...` looks in sys.modules first; the entries go once it has run.
    names = {package: ModuleType(package), f"{package}._ops": ops}
    sys.modules.update(names)
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    finally:
        for entry in names:
            sys.modules.pop(entry, None)
    found: type[nn.Module] = getattr(module, name)
    return found
