"""What torch must know of an operator beside its code, as the generated Python of a variant tells it.

For all backends a fake and the autograd formula; for Triton also the operator itself, with the checks of shapes that
`binding.h` makes for compiled ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from autokernel_hf.binding import NO_GRAD, default_code, fit, is_dimension, shape_legend
from autokernel_hf.kernels.base import REQUIRED, Dims, KernelType, Output, Reduced
from autokernel_hf.records import Backend

ID = "{id}"  # stands in the generated Python until the content, and so the id, is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivative:
    """The kernel that computes a kernel's gradients.

    Args:
        kernel_type: Its type, `<type>_backward`.
        id: The id of its build, whose folder lies in the variant.
    """

    kernel_type: KernelType
    id: str


# How a variant, or a bundle, reaches the folder of another kernel in its own.
LOADER = '''
import importlib.util
import sys
from pathlib import Path


def _load(name):
    """A kernel under its own name, by which it is loaded already where a package of its own brought it here."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / name / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
'''


def triton_operators(kernel_type: KernelType) -> str:
    name = kernel_type.name
    schema = kernel_type.schema.text.removeprefix(name)
    names = ", ".join(a.name for a in kernel_type.schema.args)
    tensors = ", ".join(a.name for a in kernel_type.schema.args if a.is_tensor)
    first = _first(kernel_type)
    parameters = _parameter_list(kernel_type, "triton")
    dims = "".join(
        f"    if not -max({first}.dim(), 1) <= {a.name} < max({first}.dim(), 1):\n"
        f'        raise IndexError(f"{name}: dimension {{{a.name}}} is out of range for {{{first}.dim()}} dimensions")\n'
        for a in kernel_type.schema.args
        if is_dimension(a)
    )
    checks = "\n".join(f"    {line}" for line in _shape_checks(kernel_type)) or "    return"
    return f'''
def _bad_shape(what, tensor, wanted, first):
    raise RuntimeError(
        f"{name}: {{what}} has shape {{tuple(tensor.shape)}}, which does not fit {{wanted}} "
        f"where {first} has shape {{tuple(first.shape)}}"
    )


def _check_shapes({tensors}):
{checks}


def _run({parameters}):
    _check_shapes({tensors})
{dims}    kernel = _kernel if _select is None else _select({tensors})
    if {first}.is_cuda and {first}.device.index != torch.cuda.current_device():
        with torch.cuda.device({first}.device):
            return kernel({names})
    return kernel({names})


@torch.library.custom_op(
    add_op_namespace_prefix("{name}"), mutates_args=(), schema={quoted(schema)}
)
def _operator({parameters}):
    return _run({names})


# custom_op enters Python for autograd at every call; this operator is for calls that need no gradient.
_library.define({quoted(f"{name}{NO_GRAD}{schema}")})
_library.impl("{name}{NO_GRAD}", _run, "CompositeExplicitAutograd")
'''


def _shape_checks(kernel_type: KernelType) -> Iterable[str]:
    """What `binding.h` does for compiled kernels, as straight-line Python: it runs at every call."""
    rules = fit(kernel_type)
    bound: set[str] = set()  # sizes known by now
    maybe: set[str] = set()  # sizes known if an optional tensor was given, or a rank; None otherwise
    leader = ""
    tensors = [a for a in kernel_type.schema.args if a.is_tensor]
    for arg in sorted(tensors, key=lambda a: a.type == "Tensor?"):  # what is always given says more
        name, shape = arg.name, rules.shapes[arg.name]
        bad = f'_bad_shape("{name}", {name}, "{shape_legend(shape)}", {_first(kernel_type)})'
        indent = ""
        alternatives = [part.split() for part in shape.split("|")]
        new = {w for words in alternatives for w in words if w.isalpha() and w not in bound | maybe}
        uncertain = arg.type == "Tensor?" or len(alternatives) > 1
        if uncertain:
            yield from (f"{symbol} = None" for symbol in sorted(new))
        if arg.type == "Tensor?":
            yield f"if {name} is not None:"
            indent = "    "
        if shape.startswith("~"):
            sizes = ", ".join(alternatives[0][1:])
            yield f"{indent}if torch.broadcast_shapes({name}.shape, ({sizes})) != ({sizes}):"
            yield f"{indent}    {bad}"
            continue
        for i, words in enumerate(alternatives):
            inner = indent
            tests = []
            trailing = [w for w in words if w != "*"]
            if len(alternatives) > 1:
                yield f"{indent}{'if' if i == 0 else 'elif'} {name}.dim() == {len(trailing)}:"
                inner += "    "
            elif "*" not in words:
                tests.append(f"{name}.dim() != {len(trailing)}")
            elif trailing:
                tests.append(f"{name}.dim() < {len(trailing)}")
            if "*" in words:
                stop = f":-{len(trailing)}" if trailing else ":"
                if leader:
                    tests.append(f"{name}.shape[{stop}] != {leader}")
            for k, word in enumerate(trailing):
                size = f"{name}.shape[{k - len(trailing)}]"
                if word.isdigit():
                    tests.append(f"{size} != {word}")
                elif word.endswith("~"):
                    tests.append(f"{size} not in (1, {word[:-1]})")
                elif word in bound:
                    tests.append(f"{size} != {word}")
                elif word in maybe:
                    tests.append(f"{word} not in (None, {size})")
            if tests:
                yield f"{inner}if {' or '.join(tests)}:"
                yield f"{inner}    {bad}"
            elif not any(w in new for w in words) and "*" not in words:
                yield f"{inner}pass"
            if "*" in words and not leader:
                leader = "leading"
                yield f"{inner}leading = {name}.shape[{stop}]"
            for k, word in enumerate(trailing):
                if word in new or word in maybe:
                    yield f"{inner}{word} = {name}.shape[{k - len(trailing)}]"
        if len(alternatives) > 1:
            yield f"{indent}else:"
            yield f"{indent}    {bad}"
        (maybe if uncertain else bound).update(new)
    yield from _rule_checks(kernel_type, maybe)


def _rule_checks(kernel_type: KernelType, maybe: set[str]) -> Iterable[str]:
    absent = maybe | {a.name for a in kernel_type.schema.args if a.type == "Tensor?"}
    for relation, a, b in fit(kernel_type).rules:
        given = "".join(f"{s} is not None and " for s in (a, b) if s in absent)
        if relation == "same_rank":
            yield f"if {given}{a}.dim() != {b}.dim():"
            words = f"{a} and {b} have different ranks"
        elif relation == "with_float8":
            yield f"if {a}.dtype == torch.float8_e4m3fn and {b} is None:"
            words = f"float8 needs {b}"
        elif relation == "at_most":
            yield f"if {given}{a} > {b}:"
            words = f"{a} must be at most {b}"
        else:
            yield f"if {given}{a} % {b}:" if b.isdigit() else f"if {given}({a} % {b} if {b} else {a}):"
            words = f"{a} must be a multiple of {b}"
        yield f'    raise RuntimeError("{kernel_type.name}: {words}")'


def fake(kernel_type: KernelType, backend: Backend) -> str:
    name = kernel_type.name
    lines = [
        f'@torch.library.register_fake(add_op_namespace_prefix("{name}{NO_GRAD}"))',
        f'@torch.library.register_fake(add_op_namespace_prefix("{name}"))',
        f"def _fake({_parameter_list(kernel_type, backend)}):",
    ]
    for i, output in enumerate(kernel_type.outputs):
        lines += [f"    {line}" for line in _fake_output(kernel_type, backend, output, i)]
    lines.append(f"    return {', '.join(f'out{i}' for i in range(len(kernel_type.outputs)))}")
    return "\n".join(lines)


def _fake_output(kernel_type: KernelType, backend: Backend, output: Output, i: int) -> Iterable[str]:
    first = _first(kernel_type)
    terms = []
    for term in output.shape:
        if isinstance(term, Dims):
            start = "" if term.start == 0 else str(term.start)
            stop = "" if term.stop is None else str(term.stop)
            sizes = f"{term.arg}.shape[{start}:{stop}]"
            terms.append(
                f"*((0,) if {term.arg} is None else {sizes})"
                if _is_optional(kernel_type, term.arg)
                else f"*{sizes}"
            )
        elif isinstance(term, Reduced):
            yield f"kept{i} = list({term.arg}.shape)"
            yield f"if kept{i}:  # a scalar has no dimension to drop"
            yield f"    kept{i}[{term.dim}] = 1"
            yield f"    if not {term.keepdim}:"
            yield f"        del kept{i}[{term.dim}]"
            terms.append(f"*kept{i}")
        else:
            none = '"none"' if backend == "triton" else kernel_type.codes[term.reduction]["none"]
            terms.append(f"*({term.arg}.shape[:1] if {term.reduction} == {none} else ())")
    if output.dtype:
        dtype = f"torch.{output.dtype}"
    elif output.dtype_of:
        dtype = f"{output.dtype_of}.dtype"
        if _is_optional(kernel_type, output.dtype_of):
            dtype = f"{first}.dtype if {output.dtype_of} is None else {dtype}"
    elif "float8_e4m3fn" in kernel_type.dtypes:
        dtype = f"torch.{output.float8_dtype} if {first}.dtype == torch.float8_e4m3fn else {first}.dtype"
    else:
        dtype = f"{first}.dtype"
    yield f"out{i} = {first}.new_empty(({', '.join(terms)}{',' if terms else ''}), dtype={dtype})"


def autograd(kernel_type: KernelType, derivative: Derivative | None) -> str:
    """The autograd formula, and the operators with and without it."""
    name = kernel_type.name
    formula = _missing_formula(name) if derivative is None else _formula(kernel_type, derivative)
    return f'''{formula}

torch.library.register_autograd(add_op_namespace_prefix("{name}"), _backward, setup_context=_setup_context)
# The formula is Python that torch enters at every call; the second operator is for calls that need no gradient.
_library.impl("{name}{NO_GRAD}", torch.library.fallthrough_kernel, "Autograd")

_op = torch.ops.{ID}.{name}.default
_op_no_grad = torch.ops.{ID}.{name}{NO_GRAD}.default
'''


def _formula(kernel_type: KernelType, derivative: Derivative) -> str:
    """A formula that calls the backward kernel, an operator as well, so that torch.compile traces it."""
    gradients = derivative.kernel_type.gradients
    assert gradients is not None and gradients.forward == kernel_type.name
    args = kernel_type.schema.args
    taken = derivative.kernel_type.schema.args
    grads = [a.name for a in taken[: len(taken) - len(args)]]
    kept = [a.name for a in args if a.is_tensor and a.name not in gradients.unread]
    others = [a.name for a in args if not a.is_tensor]
    passed = ", ".join([*grads, *(gradients.unread.get(a.name, a.name) for a in args)])
    results = [f"d{name}" for name in gradients.of]
    floating = {a.name for a in args if a.is_tensor} - set(gradients.of)
    positions = {a.name: i for i, a in enumerate(args)}
    lines = [
        LOADER.strip("\n"),
        "",
        "",
        f'_load("{derivative.id}")',
        f"_gradients = torch.ops.{derivative.id}.{derivative.kernel_type.name}.default",
        f"_gradients_no_grad = torch.ops.{derivative.id}.{derivative.kernel_type.name}{NO_GRAD}.default",
        "",
        "",
        "def _setup_context(ctx, inputs, output):",
        f"    {', '.join(a.name for a in args)}{',' if len(args) == 1 else ''} = inputs",
        f"    ctx.save_for_backward({', '.join(kept)})",
    ]
    if others:
        lines.append(f"    ctx.others = ({', '.join(others)},)")
    lines += ["", "", f"def _backward(ctx, {', '.join(grads)}):"]
    for name in sorted(floating, key=positions.__getitem__):
        lines += [
            f"    if ctx.needs_input_grad[{positions[name]}]:",
            f'        raise RuntimeError("{kernel_type.name}: this kernel has no gradient for {name}")',
        ]
    lines.append(f"    {', '.join(kept)}{',' if len(kept) == 1 else ''} = ctx.saved_tensors")
    if others:
        lines.append(f"    {', '.join(others)}{',' if len(others) == 1 else ''} = ctx.others")
    if gradients.unread:
        lines.append(
            f"    # Of {' and '.join(gradients.unread)} only shape and dtype matter: their gradients have the same."
        )
    returned = ", ".join(
        f"d{a.name} if ctx.needs_input_grad[{i}] else None" if a.name in gradients.of else "None"
        for i, a in enumerate(args)
    )
    lines += [
        "    operator = _gradients if torch.is_grad_enabled() else _gradients_no_grad",
        f"    {', '.join(results)} = operator({passed})",
        f"    return {returned}",
        "",
    ]
    return "\n".join(lines)


def _missing_formula(name: str) -> str:
    """A formula that raises: as an operator, so that torch.compile can trace it without running it."""
    return f'''
# Without a formula, gradients would be silently wrong.
_library.define("missing_backward(Tensor grad, SymInt[] size, ScalarType dtype) -> Tensor")


def _missing_backward(grad, size, dtype):
    raise RuntimeError(
        "{name}: this kernel has no backward. Call it under torch.no_grad(), or use the original code for training."
    )


_library.impl("missing_backward", _missing_backward, "CompositeExplicitAutograd")


@torch.library.register_fake(add_op_namespace_prefix("missing_backward"))
def _missing_backward_fake(grad, size, dtype):
    return grad.new_empty(size, dtype=dtype)


def _setup_context(ctx, inputs, output):
    ctx.likes = [(i.shape, i.dtype) if isinstance(i, torch.Tensor) else None for i in inputs]


def _backward(ctx, *grads):
    return tuple(
        torch.ops.{ID}.missing_backward.default(grads[0], *like) if like is not None and needed else None
        for like, needed in zip(ctx.likes, ctx.needs_input_grad)
    )
'''


def _parameter_list(kernel_type: KernelType, backend: Backend) -> str:
    return ", ".join(
        a.name
        if a.default is REQUIRED
        else f"{a.name}={quoted(a.default if backend == 'triton' else default_code(kernel_type, a))}"
        for a in kernel_type.schema.args
    )


def _first(kernel_type: KernelType) -> str:
    return next(a.name for a in kernel_type.schema.args if a.is_tensor)


def _is_optional(kernel_type: KernelType, name: str) -> bool:
    return any(a.name == name and a.type == "Tensor?" for a in kernel_type.schema.args)


def quoted(value: object) -> str:
    """A literal with double quotes, as the rest of the file; in a table all strings are names."""
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')
