"""Index arithmetic in 32 bits, told from a candidate's source: what overflows in tensors of more than 2^31 elements.

A reading, not a proof: it names products that are likely to overflow, and is a note in the verdict where the dynamic test
(`huge`) has no memory to run. What it names may be right, where a size is bounded elsewhere.
"""

from __future__ import annotations

import ast
import re

from autokernel_hf.records import Candidate

_INT = r"(?:unsigned\s+int|unsigned|int32_t|uint32_t|int)"
# A declaration of ints; and what each is made from: a block's number, or a tensor's sizes or strides.
_C_INTS = re.compile(rf"\b(?:const\s+)?{_INT}\s+(\w+\s*=[^;]*);")
_C_ORIGIN = re.compile(r"\b(?:blockIdx|sizes|strides)\b")

# A thread's number in a dimension of the grid that has at most 65535 blocks, of at most 1024 threads.
_SMALL = re.compile(r"\bblockIdx\.[yz]\s*\*\s*blockDim\.[xyz]")
# How strides and lengths of rows are called; a count of keys or heads is of one dimension, and does not say.
_LENGTH = re.compile(r"(?i:stride|step|pitch|size|len|width|row|col)|^[A-Za-z]$")


def notes_on(candidate: Candidate) -> tuple[str, ...]:
    """Sentences on products that may overflow; none where nothing was found."""
    if candidate.backend == "triton":
        found = _in_python(candidate.source)
    else:
        found = _in_c(_SMALL.sub("0", _without_comments(candidate.source)))
    if not found:
        return ()
    names = ", ".join(dict.fromkeys(found))
    return (
        f"Index arithmetic in 32 bits may overflow in tensors of more than 2^31 elements: {names}. Compute offsets in "
        "64 bits.",
    )


def _in_c(source: str) -> list[str]:
    """Names of ints that are made by a product in 32 bits: `int at = blockIdx.x * n, other = ...;`."""
    found = []
    for declaration in _C_INTS.finditer(source):
        for part in _at_top_level(declaration[1]):
            name, _, value = part.partition("=")
            if "*" in value and _C_ORIGIN.search(value) and "int64_t)" not in value:
                found.append(name.strip())
    return found


def _at_top_level(text: str) -> list[str]:
    """The parts between commas that no bracket encloses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)


def _in_python(source: str) -> list[str]:
    """Products of a program's number, in 32 bits, with an argument or a constant, in functions that are compiled."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    found: list[str] = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and any(
            "jit" in ast.unparse(d) for d in function.decorator_list
        ):
            found += _products_in(function)
    return found


def _products_in(function: ast.FunctionDef) -> list[str]:
    pairs = [pair for node in ast.walk(function) if isinstance(node, ast.Assign) for pair in _assigned(node)]
    # A name that is ever given a number of 64 bits is taken to be one: leaving out a warning is better than a false one.
    wide: set[str] = set()
    for _ in pairs:  # what is made from a wide one is wide, however far down
        wide |= {name for name, value in pairs if _is_wide(value, wide)}
    narrow: set[str] = set()  # names that hold a program's number, or are made from it, in 32 bits
    for _ in pairs:
        narrow |= {name for name, value in pairs if name not in wide and _is_narrow(value, narrow, wide)}
    found = []
    for node in ast.walk(function):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        sides = (node.left, node.right)
        if any(_is_wide(s, wide) for s in sides):
            continue
        others = [s for s in sides if not _is_narrow(s, narrow, wide)]
        if len(others) == 1 and any(_is_length(n) for n in ast.walk(others[0])):
            found.append(ast.unparse(node))
    return found


def _assigned(node: ast.Assign) -> list[tuple[str, ast.expr]]:
    """Names and what they are given, those of a tuple one by one."""
    pairs: list[tuple[str, ast.expr]] = []
    for target in node.targets:
        if isinstance(target, ast.Name):
            pairs.append((target.id, node.value))
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs += [
                (t.id, v)
                for t, v in zip(target.elts, node.value.elts, strict=False)
                if isinstance(t, ast.Name)
            ]
    return pairs


def _is_narrow(node: ast.expr, narrow: set[str], wide: set[str]) -> bool:
    if _is_wide(node, wide):
        return False
    if isinstance(node, ast.Name):
        return node.id in narrow
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).endswith("program_id")
    if isinstance(node, ast.BinOp):
        return _is_narrow(node.left, narrow, wide) or _is_narrow(node.right, narrow, wide)
    return isinstance(node, ast.Subscript) and _is_narrow(node.value, narrow, wide)


def _is_wide(node: ast.AST, wide: set[str]) -> bool:
    return any(
        (isinstance(n, ast.Attribute) and n.attr in ("int64", "uint64"))
        or (isinstance(n, ast.Name) and n.id in wide)
        for n in ast.walk(node)
    )


def _is_length(node: ast.AST) -> bool:
    """A size or a stride, by its name: not the size of a block, with which a number counts in one dimension."""
    if not isinstance(node, ast.Name) or (node.id.isupper() and len(node.id) > 1):
        return False
    return _LENGTH.search(node.id) is not None
