"""What callers of a kernel package rely on, read without importing it, and what a change of it would break.

On the Kernel Hub a version is a promise: `get_kernel("ns/name", version=1)` keeps working, whatever is published later.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

from autokernel_hf import packages


def breaking_changes(old: Path, new: Path) -> list[str]:
    """What of a variant `old` its callers would miss in a variant `new`; empty where nothing is."""
    untrained = [
        f"{name} has no gradients any more"
        for name in sorted(set(packages.exported_names(old)) & set(packages.exported_names(new)))
        if name != "layers"
        and packages.has_gradients(packages.part_of(old, name))
        and not packages.has_gradients(packages.part_of(new, name))
    ]
    return api_changes(api(old), api(new)) + _narrowed(old, new) + untrained


def _narrowed(old: Path, new: Path) -> list[str]:
    """Dtypes and words that a function took and would refuse now."""
    changes = []
    for name in sorted(set(packages.exported_names(old)) & set(packages.exported_names(new))):
        before = packages.domain(packages.part_of(old, name))
        after = packages.domain(packages.part_of(new, name))
        for key, values in after.items():
            if key not in before and before:
                changes.append(f"{name} takes only some {key} now ({', '.join(values)})")
            lost = [value for value in before.get(key, ()) if value not in values]
            if lost:
                changes.append(f"{name} does not take {key} {', '.join(lost)} any more")
    return changes


def api(variant: Path) -> dict[str, tuple[str, ...]]:
    """What callers of a variant rely on: each function and each layer's forward, with its parameters, as `eps=1e-06`.

    Read without importing; parameters are empty where a function is made in a way that cannot be read.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in packages.exported_names(variant):
        if name != "layers":
            found[name] = _parameters_of(packages.part_of(variant, name), name)
    for part in packages.parts(variant):
        tree = packages.parse_module(part / "layers.py")
        names = packages.layer_names(part)
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef) and node.name in names:
                forward = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "forward"]
                found[f"layers.{node.name}"] = _parameters(forward[0]) if forward else ()
    return found


def _parameters_of(part: Path, function: str) -> tuple[str, ...]:
    for file in sorted(part.glob("*.py")):
        tree = packages.parse_module(file)
        for node in tree.body if tree else ():
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return _parameters(node)
    return ()


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    """A function's parameters without their types: `self`, `x`, `eps=1e-06`, `*`, `mask=None`."""
    arguments = function.args
    bare = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in arguments.posonlyargs],
        args=[ast.arg(a.arg) for a in arguments.args],
        vararg=ast.arg(arguments.vararg.arg) if arguments.vararg else None,
        kwonlyargs=[ast.arg(a.arg) for a in arguments.kwonlyargs],
        kw_defaults=arguments.kw_defaults,
        kwarg=ast.arg(arguments.kwarg.arg) if arguments.kwarg else None,
        defaults=arguments.defaults,
    )
    # Split at the top level only: a default may be a tuple.
    whole = ast.unparse(bare)
    found, depth, start = [], 0, 0
    for at, character in enumerate(whole + ","):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(whole[start:at].strip())
            start = at + 1
    return tuple(word for word in found if word)


def api_changes(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> list[str]:
    """What would break callers of `old` with `new`; new names, and new parameters with a default at the end, do not."""
    changes = []
    for name, before in old.items():
        if name not in new:
            changes.append(f"{name} is gone")
            continue
        after = new[name]
        added = after[len(before) :]
        if tuple(after[: len(before)]) != tuple(before) or any(
            "=" not in word and not word.startswith("*") for word in added
        ):
            changes.append(f"{name}({', '.join(before)}) is now {name}({', '.join(after)})")
    return changes
