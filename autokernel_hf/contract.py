"""What a candidate file says of itself, and whether it keeps the candidate contract, before anything is compiled."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence

from autokernel_hf.binding import launcher_prototype
from autokernel_hf.errors import CandidateError
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.kernels.base import REQUIRED, Arg, KernelType
from autokernel_hf.records import Candidate
from autokernel_hf.variant import Domain

ALLOWED_IMPORTS = ("torch", "triton", "math")
_HEADER_LINES = 20

Values = dict[str, tuple[str | int | bool, ...]]


def check(candidate: Candidate, kernel_type: KernelType) -> Domain:
    """Hold a candidate's text against the contract; return its domain.

    Raises:
        CandidateError: It breaks the contract, with the line and what it should be.
    """
    if candidate.backend == "triton":
        listed = _check_python(candidate.source, kernel_type)
    else:
        listed = _check_c(candidate, kernel_type)
    return _domain(listed, kernel_type)


def check_backward(candidate: Candidate, domain: Domain, backward: Candidate) -> None:
    """Hold a kernel of gradients against the kernel that it is for.

    Args:
        domain: What the candidate supports.

    Raises:
        CandidateError: It is of another kernel or backend, or supports less than the kernel does.
    """
    kernel_type = find_type(backward.kernel_type)
    gradients = kernel_type.gradients
    if gradients is None or gradients.forward != candidate.kernel_type:
        raise CandidateError(
            f"A {backward.kernel_type} computes no gradients of {candidate.kernel_type}.",
            remedy=f"Use one of type {candidate.kernel_type}_backward.",
        )
    if backward.backend != candidate.backend:
        raise CandidateError(
            f"The kernel is a {candidate.backend} one, and that of its gradients a {backward.backend} one.",
            remedy="Both must be of the same backend: they ship in one build variant.",
        )
    own = check(backward, kernel_type)
    lacking = [f"dtype {d}" for d in domain.dtypes if d not in own.dtypes]
    for name, supported in own.values.items():
        wanted = domain.values.get(name, tuple(kernel_type.codes.get(name, ())))
        lacking += [f"{name} {value}" for value in wanted if value not in supported]
        if not wanted:
            lacking.append(f"some {name}")
    if lacking:
        raise CandidateError(
            f"The kernel of the gradients supports less than the kernel: not {', '.join(lacking)}.",
            remedy="Narrow the kernel's own domain to what both support.",
        )


def declared_type(source: str, backend: str) -> str | None:
    """The kernel type that a file names in its first lines, or None."""
    if backend == "triton":
        match = re.search(r"^KERNEL_TYPE\s*(?::\s*str\s*)?=\s*[\"'](\w+)[\"']", source, re.MULTILINE)
        return match[1] if match else None
    return _comment(source, "kernel_type")


def _comment(source: str, key: str) -> str | None:
    for line in source.splitlines()[:_HEADER_LINES]:
        match = re.fullmatch(rf"\s*//\s*{key}\s*:\s*(.*?)\s*", line)
        if match:
            return match[1]
    return None


def _domain(listed: Values, kernel_type: KernelType) -> Domain:
    args = {a.name: a for a in kernel_type.schema.args}
    dtypes = kernel_type.dtypes
    values: Values = {}
    for name, entries in listed.items():
        if not entries:
            raise CandidateError(
                f"The domain lists no value for {name}.", remedy="List at least one, or leave it out."
            )
        if name == "dtype":
            unknown = [e for e in entries if e not in kernel_type.dtypes]
            if unknown:
                raise CandidateError(
                    f"The domain lists the dtype {unknown[0]}, which {kernel_type.name} does not have.",
                    remedy=f"Choose from {', '.join(kernel_type.dtypes)}.",
                )
            dtypes = tuple(d for d in kernel_type.dtypes if d in entries)
            continue
        arg = args.get(name)
        if arg is None or arg.type not in ("str", "bool", "int"):
            allowed = [n for n, a in args.items() if a.type in ("str", "bool", "int")]
            raise CandidateError(
                f"The domain of a {kernel_type.name} cannot be narrowed by {name}.",
                remedy=f"It can by dtype{''.join(f', {n}' for n in allowed)}.",
            )
        values[name] = tuple(_value(arg, entry, kernel_type) for entry in entries)
    return Domain(dtypes=dtypes, values=values)


def _value(arg: Arg, entry: str | int | bool, kernel_type: KernelType) -> str | int | bool:
    if arg.type == "str":
        words = kernel_type.codes[arg.name]
        if entry not in words:
            raise CandidateError(
                f"The domain lists {entry!r} for {arg.name}, which is not one of its words.",
                remedy=f"Choose from {', '.join(words)}.",
            )
        return entry
    text = str(entry)
    if arg.type == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if arg.type == "int" and re.fullmatch(r"-?\d+", text):
        return int(text)
    raise CandidateError(
        f"The domain lists {entry!r} for {arg.name}, which is a{'n int' if arg.type == 'int' else ' bool'}."
    )


def _wrong_type(named: str | None, kernel_type: KernelType, wanted: str) -> CandidateError:
    said = "does not name its kernel type" if named is None else f"says it is a {named}"
    return CandidateError(
        f"The candidate {said}; it should be a {kernel_type.name}.", remedy=f"Begin the file with: {wanted}"
    )


# --- C++ and CUDA -------------------------------------------------------------------------------------------------


def _check_c(candidate: Candidate, kernel_type: KernelType) -> Values:
    source, name = candidate.source, kernel_type.name
    named = _comment(source, "kernel_type")
    if named != name:
        raise _wrong_type(named, kernel_type, f"// kernel_type: {name}")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    if not re.search(rf"\b{name}\s*\(", text):
        raise CandidateError(
            f"The candidate defines no launcher {name}.", remedy=f"Define: {launcher_prototype(kernel_type)}"
        )
    listed: Values = {}
    line = _comment(source, "supports")
    for part in filter(None, (p.strip() for p in (line or "").split(";"))):
        key, equals, entries = part.partition("=")
        if not equals:
            raise CandidateError(
                f"The line '// supports: {line}' cannot be read.",
                remedy="Write it as: // supports: dtype=float32,float16; kind=gelu_new",
            )
        listed[key.strip()] = tuple(filter(None, (e.strip() for e in entries.split(","))))
    return listed


# --- Triton -------------------------------------------------------------------------------------------------------


def _check_python(source: str, kernel_type: KernelType) -> Values:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        lines = source.splitlines()
        number = error.lineno or 0
        quoted = f"\n{number:6} | {lines[number - 1]}" if 0 < number <= len(lines) else ""
        raise CandidateError(f"The candidate is not Python: line {number}: {error.msg}{quoted}") from None
    constants = _constants(tree)
    named = constants.get("KERNEL_TYPE")
    if named != kernel_type.name:
        raise _wrong_type(
            named if isinstance(named, str) else None, kernel_type, f'KERNEL_TYPE = "{kernel_type.name}"'
        )
    _check_imports(tree)
    _check_autotune(tree)
    _check_signature(tree, kernel_type)
    supports = constants.get("SUPPORTS", {})
    if not isinstance(supports, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Sequence) and not isinstance(v, str) for k, v in supports.items()
    ):
        raise CandidateError(
            "SUPPORTS cannot be read.", remedy='Write it as a literal: SUPPORTS = {"dtype": ["float32"]}'
        )
    return {k: tuple(v) for k, v in supports.items()}


def _constants(tree: ast.Module) -> dict[str, object]:
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            name, value = node.target.id, node.value
        else:
            continue
        if name in ("KERNEL_TYPE", "SUPPORTS"):
            try:
                found[name] = ast.literal_eval(value)
            except ValueError:
                raise CandidateError(
                    f"Line {node.lineno}: {name} is not a literal.", remedy="Write the value itself."
                ) from None
    return found


def _check_imports(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        else:
            continue
        for module in modules:
            if module != "__future__" and module.split(".")[0] not in ALLOWED_IMPORTS:
                raise CandidateError(
                    f"Line {node.lineno}: a candidate may not import {module}.",
                    remedy=f"Import only {', '.join(ALLOWED_IMPORTS)}.",
                )


def _check_autotune(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", []):
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(called).split(".")[-1] == "autotune":
                raise CandidateError(
                    f"Line {decorator.lineno}: @triton.autotune is not allowed.",
                    remedy="Make the configuration constants at the top of the file.",
                )


def _check_signature(tree: ast.Module, kernel_type: KernelType) -> None:
    wanted = python_signature(kernel_type)
    remedy = f"Define: def kernel_fn{wanted}"
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "kernel_fn"]
    if not functions:
        raise CandidateError("The candidate defines no kernel_fn.", remedy=remedy)
    function = functions[-1]
    given = function.args
    if given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg:
        raise CandidateError(
            f"Line {function.lineno}: kernel_fn must take the schema's arguments and no other.", remedy=remedy
        )
    names = [a.arg for a in given.args]
    try:
        literals = [ast.literal_eval(d) for d in given.defaults]
    except ValueError:
        raise CandidateError(
            f"Line {function.lineno}: the defaults of kernel_fn must be literals.", remedy=remedy
        ) from None
    defaults = [inspect.Parameter.empty] * (len(names) - len(literals)) + literals
    parameters = list(wanted.parameters.values())
    same = names == [p.name for p in parameters] and all(
        d == p.default and isinstance(d, bool) == isinstance(p.default, bool)
        for d, p in zip(defaults, parameters, strict=True)
    )
    if not same:
        raise CandidateError(
            f"Line {function.lineno}: kernel_fn has another signature than the schema.", remedy=remedy
        )


def python_signature(kernel_type: KernelType) -> inspect.Signature:
    """Names, order and defaults that `kernel_fn` must have."""
    return inspect.Signature(
        [
            inspect.Parameter(
                a.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if a.default is REQUIRED else a.default,
            )
            for a in kernel_type.schema.args
        ]
    )
