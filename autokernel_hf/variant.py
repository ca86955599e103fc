"""The generated Python of a package variant: `_ops.py` and `__init__.py`.

What is written here ships: it imports torch and the variant's own files, nothing else.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf.binding import NO_GRAD, default_code, fit, is_dimension, shape_legend
from autokernel_hf.kernels.base import REQUIRED, Dims, KernelType, Output, Reduced
from autokernel_hf.records import Backend

ID = "{id}"  # stands in the generated Python until the content, and so the id, is known
UNSUPPORTED_PREFIX = "autokernel unsupported: "  # these two as in binding.h
OUT_OF_MEMORY_PREFIX = "autokernel out of memory: "

# What transformers looks for in a package that is named as `attn_implementation`, in place of flash-attn's own functions.
_ATTENTION_HOOKS = frozenset({"flash_attn_forward", "supports_flash_attn"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What a candidate says it supports: the dtypes of the leading argument, and values of scalar arguments.

    An argument that is not listed is supported whole.
    """

    dtypes: tuple[str, ...]
    values: Mapping[str, tuple[str | int | bool, ...]]

    @property
    def text(self) -> str:
        listed = {"dtype": self.dtypes, **self.values}
        return "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in listed.items())


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


def init_source(kernel_type: KernelType, layers: str | None) -> str:
    """`__init__.py` of a variant.

    Args:
        layers: Source of its `layers.py`, if it has one.
    """
    name = kernel_type.name
    lines = [f'"""{kernel_type.schema.text}"""', ""]
    if layers is not None:
        lines.append("from . import layers")
    lines.append(f"from ._ops import {name}")
    hooks = attention_hooks(layers or "")
    if hooks:
        # Not in __all__: these are for transformers, whose interface they follow, not for a caller.
        lines.append(f"from .layers import {', '.join(hooks)}  # noqa: F401")
    exported = sorted([name, *(["layers"] if layers is not None else [])])
    lines += ["", "__all__ = " + _quoted(exported)]
    return "\n".join(lines) + "\n"


CONFIGS_RUNTIME = Path(__file__).parent / "kernels" / "_configs.py"


def config_files(kernel_type: KernelType, configs: Sequence[Mapping[str, object]] = ()) -> dict[str, str]:
    """`configs.json` of a Triton variant, and `configs.py`, which reads it.

    Args:
        configs: Entries, as `configs.py` describes them.
    """
    data = {"rows": kernel_type.merges_rows, "configs": list(configs)}
    return {
        "configs.py": CONFIGS_RUNTIME.read_text(encoding="utf-8"),
        "configs.json": json.dumps(data, indent=2) + "\n",
    }


def attention_hooks(layers: str) -> list[str]:
    """What of a `layers.py` transformers looks for in the package itself, to take it as `attn_implementation`."""
    return sorted(_ATTENTION_HOOKS & _defined(layers))


def _defined(source: str) -> set[str]:
    """Names of the functions and constants at the top level of a Python source."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def with_backward(layers: str) -> str:
    """A `layers.py` whose classes say that they can be trained."""
    return layers.replace("    has_backward = False\n", "    has_backward = True\n")


def ops_source(
    kernel_type: KernelType, backend: Backend, domain: Domain, derivative: Derivative | None = None
) -> str:
    """`_ops.py` of a variant, with `ID` where the id belongs: the public function and all that torch must know of it.

    Args:
        derivative: What computes the gradients; without it a call that needs one raises.
    """
    parts = [
        _head(kernel_type, backend, domain),
        _refusals(kernel_type),
        *([_triton_operators(kernel_type)] if backend == "triton" else [_TRANSLATE]),
        _fake(kernel_type, backend),
        _autograd(kernel_type, derivative),
        _public(kernel_type, backend, domain, derivative is not None),
    ]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def _head(kernel_type: KernelType, backend: Backend, domain: Domain) -> str:
    name = kernel_type.name
    if backend == "triton":
        source = "from .configs import selector as _selector\nfrom .op import kernel_fn as _kernel"
    else:
        source = f"from . import {ID} as _extension  # noqa: F401  (its import registers the operators)"
    lines = [
        f'"""{name} as a torch operator, generated by autokernel_hf from the operator\'s schema."""',
        "",
        "from __future__ import annotations",
        "",
        "import torch",
        "",
        source,
        "",
        f'_NAMESPACE = "{ID}"',
        f'_DOMAIN = "{domain.text}"',
        '_library = torch.library.Library(_NAMESPACE, "FRAGMENT")',
        f"_DTYPES = frozenset(({', '.join(f'torch.{d}' for d in domain.dtypes)},))",
    ]
    if backend == "triton":
        lines.append("_select = _selector(_kernel)  # None where configs.json says nothing")
    for arg in kernel_type.schema.args:
        if arg.type == "str":
            codes = kernel_type.codes[arg.name]
            supported = domain.values.get(arg.name, tuple(codes))
            table = {
                word: word if backend == "triton" else code
                for word, code in codes.items()
                if word in supported
            }
            lines.append(f"_{arg.name.upper()} = {_quoted(table)}")
            lines.append(f"_{arg.name.upper()}_WORDS = {_quoted(tuple(codes))}")
        elif arg.name in domain.values:
            lines.append(f"_{arg.name.upper()} = {_quoted(domain.values[arg.name])}")
    lines += [
        "",
        "",
        "def add_op_namespace_prefix(name: str) -> str:",
        '    return f"{_NAMESPACE}::{name}"',
    ]
    return "\n".join(lines)


def _refusals(kernel_type: KernelType) -> str:
    name = kernel_type.name
    text = f'''
def _refuse(what, value):
    raise NotImplementedError(f"{name}: {{what}} {{value}} is outside of this kernel's domain ({{_DOMAIN}})")
'''
    if any(a.type == "str" for a in kernel_type.schema.args):
        text += f'''

def _refuse_word(what, word, known):
    if word in known:
        _refuse(what, word)
    raise ValueError(f"{name}: {{what}} must be one of {{', '.join(known)}}, not {{word!r}}")
'''
    return text


_TRANSLATE = f'''
def _translated(error):
    """The compiled part can only raise RuntimeError; it marks what is really something else."""
    text = str(error)
    if text.startswith("{UNSUPPORTED_PREFIX}"):
        return NotImplementedError(f"{{text[{len(UNSUPPORTED_PREFIX)}:]}} (domain: {{_DOMAIN}})")
    if text.startswith("{OUT_OF_MEMORY_PREFIX}"):
        return torch.OutOfMemoryError(text[{len(OUT_OF_MEMORY_PREFIX)}:])
    return error
'''


def _triton_operators(kernel_type: KernelType) -> str:
    name = kernel_type.name
    schema = kernel_type.schema.text.removeprefix(name)
    names = ", ".join(a.name for a in kernel_type.schema.args)
    tensors = ", ".join(a.name for a in kernel_type.schema.args if a.is_tensor)
    first = _first(kernel_type)
    parameters = _parameters(kernel_type, "triton")
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
    add_op_namespace_prefix("{name}"), mutates_args=(), schema={_quoted(schema)}
)
def _operator({parameters}):
    return _run({names})


# custom_op enters Python for autograd at every call; this operator is for calls that need no gradient.
_library.define({_quoted(f"{name}{NO_GRAD}{schema}")})
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


def _fake(kernel_type: KernelType, backend: Backend) -> str:
    name = kernel_type.name
    lines = [
        f'@torch.library.register_fake(add_op_namespace_prefix("{name}{NO_GRAD}"))',
        f'@torch.library.register_fake(add_op_namespace_prefix("{name}"))',
        f"def _fake({_parameters(kernel_type, backend)}):",
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


def _autograd(kernel_type: KernelType, derivative: Derivative | None) -> str:
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


def _public(kernel_type: KernelType, backend: Backend, domain: Domain, trained: bool) -> str:
    schema = kernel_type.schema
    compiled = backend != "triton"
    first = kernel_type.lead
    result = (
        "torch.Tensor" if schema.returns == 1 else f"tuple[{', '.join(['torch.Tensor'] * schema.returns)}]"
    )
    typed = ", ".join(
        f"{a.name}: {_PYTHON_TYPES[a.type]}" + ("" if a.default is REQUIRED else f" = {_quoted(a.default)}")
        for a in schema.args
    )
    lines = [
        f"def {schema.name}({typed}) -> {result}:",
        f'    """{schema.text}',
        "",
        f"    Outputs are new and contiguous. {'Gradients come from a kernel, too' if trained else 'Without a backward'}.",
        "",
        "    Raises:",
        f"        NotImplementedError: Outside of the kernel's domain ({domain.text}).",
        '    """',
    ]
    # The compiled part holds the leading argument against all dtypes of the type by itself.
    if not compiled or set(domain.dtypes) != set(kernel_type.dtypes):
        lines += [f"    if {first}.dtype not in _DTYPES:", f'        _refuse("dtype", {first}.dtype)']
    for arg in schema.args:
        table = f"_{arg.name.upper()}"
        if arg.type == "str":
            lines += [
                f"    if {arg.name} not in {table}:",
                f'        _refuse_word("{arg.name}", {arg.name}, {table}_WORDS)',
            ]
        elif arg.name in domain.values:
            lines += [f"    if {arg.name} not in {table}:", f'        _refuse("{arg.name}", {arg.name})']
    differentiable = " or ".join(
        f"{a.name}.requires_grad"
        if a.type == "Tensor"
        else f"({a.name} is not None and {a.name}.requires_grad)"
        for a in schema.args
        if a.is_tensor
    )
    call = ", ".join(
        f"_{a.name.upper()}[{a.name}]" if a.type == "str" and compiled else a.name for a in schema.args
    )
    body = [
        f"if torch.is_grad_enabled() and ({differentiable}):",
        f"    return _op({call})",
        f"return _op_no_grad({call})",
    ]
    if compiled:
        lines += [
            "    try:",
            *(f"        {line}" for line in body),
            "    except RuntimeError as error:",
            "        raise _translated(error) from None",
        ]
    else:
        lines += [f"    {line}" for line in body]
    return "\n".join(lines)


_PYTHON_TYPES = {
    "Tensor": "torch.Tensor",
    "Tensor?": "torch.Tensor | None",
    "float": "float",
    "float?": "float | None",
    "int": "int",
    "bool": "bool",
    "str": "str",
}


def _parameters(kernel_type: KernelType, backend: Backend) -> str:
    return ", ".join(
        a.name
        if a.default is REQUIRED
        else f"{a.name}={_quoted(a.default if backend == 'triton' else default_code(kernel_type, a))}"
        for a in kernel_type.schema.args
    )


def _first(kernel_type: KernelType) -> str:
    return next(a.name for a in kernel_type.schema.args if a.is_tensor)


def _is_optional(kernel_type: KernelType, name: str) -> bool:
    return any(a.name == name and a.type == "Tensor?" for a in kernel_type.schema.args)


def _quoted(value: object) -> str:
    """A literal with double quotes, as the rest of the file; in a table all strings are names."""
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')
