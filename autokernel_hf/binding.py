"""The generated C++ between a candidate and torch.

It comes from a kernel type alone (its schema, its outputs, the shapes that fit together), never from a candidate: one
binding serves all candidates of its type, and is compiled once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf.errors import UsageError
from autokernel_hf.kernels.base import REQUIRED, Arg, Dims, KernelType, Output, Reduced
from autokernel_hf.records import Backend

_KERNELS = Path(__file__).parent / "kernels"
HEADER = _KERNELS / "autokernel.h"
RUNTIME = _KERNELS / "binding.h"
CPU_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")

# The operator comes twice: under the type's name with an autograd formula, which torch runs through Python (several
# microseconds a call), and with this suffix without one, for calls that need no gradient.
NO_GRAD = "_no_grad"

DTYPE_CODES = {
    "uint8": "AK_U8",
    "int32": "AK_I32",
    "int64": "AK_I64",
    "float16": "AK_F16",
    "float32": "AK_F32",
    "float64": "AK_F64",
    "bool": "AK_BOOL",
    "bfloat16": "AK_BF16",
    "float8_e4m3fn": "AK_F8E4M3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Which shapes and dtypes of a type's tensors fit together.

    Args:
        shapes: For each tensor argument its sizes: `*` any leading sizes (the same wherever it stands), a name a size
            (the same wherever it stands), `B~` that size or 1, a number itself; ` | ` parts alternatives; `~` before
            the whole makes it broadcast to it.
        dtypes: For each tensor argument its dtypes: `x` the leading argument's, other words their own; the leading
            argument itself is not listed (the type's `dtypes` are its domain).
        rules: (relation, a, b): `multiple` size a is a multiple of b (a size or a number), `at_most` size a <= b,
            `same_rank` for tensors, `with_float8` where tensor a is float8, b must be given.
    """

    shapes: Mapping[str, str]
    dtypes: Mapping[str, str]
    rules: tuple[tuple[str, str, str], ...] = ()


_ROWS = {"x": "* N", "weight": "N", "bias": "N"}
_PARAMETERS = {"weight": "x float32", "bias": "x float32"}

# The comments of the schemas in the candidate contract, in a form that can be checked.
FITS: dict[str, Fit] = {
    "matmul": Fit(
        shapes={
            "a": "M K | B M K",
            "b": "K N | B K N",
            "bias": "N",
            "residual": "M N | B M N",
            "scale_a": "",
            "scale_b": "",
        },
        dtypes={
            "b": "x",
            "bias": "out float32",
            "residual": "out",
            "scale_a": "float32",
            "scale_b": "float32",
        },
        rules=(
            ("same_rank", "a", "b"),
            ("same_rank", "a", "residual"),
            ("with_float8", "a", "scale_a"),
            ("with_float8", "a", "scale_b"),
        ),
    ),
    "softmax": Fit(shapes={"x": "*"}, dtypes={}),
    "layernorm": Fit(shapes=_ROWS, dtypes=_PARAMETERS),
    "rmsnorm": Fit(shapes={"x": "* N", "weight": "N"}, dtypes={"weight": "x float32"}),
    "add_norm": Fit(shapes={**_ROWS, "residual": "* N"}, dtypes={**_PARAMETERS, "residual": "x"}),
    "flash_attention": Fit(
        shapes={
            "q": "B Hq Sq D",
            "k": "B Hk Sk D",
            "v": "B Hk Sk Dv",
            "mask": "~ B Hq Sq Sk",
            "cu_seqlens_q": "P",
            "cu_seqlens_k": "P",
        },
        dtypes={
            "k": "x",
            "v": "x",
            "mask": "bool x float32",
            "cu_seqlens_q": "int32",
            "cu_seqlens_k": "int32",
        },
        rules=(("multiple", "Hq", "Hk"),),
    ),
    "fused_mlp": Fit(
        shapes={
            "x": "* D",
            "w_gate": "H D",
            "w_up": "H D",
            "w_down": "D H",
            "b_gate": "H",
            "b_up": "H",
            "b_down": "D",
        },
        dtypes=dict.fromkeys(("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"), "x float32"),
    ),
    "cross_entropy": Fit(shapes={"logits": "N V", "target": "N"}, dtypes={"target": "int64"}),
    "rotary_embedding": Fit(
        shapes={"q": "B Hq S D", "k": "B Hk S D", "cos": "B~ S R", "sin": "B~ S R"},
        dtypes={"k": "x", "cos": "x float32", "sin": "x float32"},
        rules=(("at_most", "R", "D"), ("multiple", "R", "2")),
    ),
    "reduce": Fit(shapes={"x": "*"}, dtypes={}),
    "activation": Fit(shapes={"x": "*"}, dtypes={}),
    "gated_activation": Fit(shapes={"gate": "*", "up": "*"}, dtypes={"up": "x"}),
    "rmsnorm_backward": Fit(
        shapes={"grad": "* N", "x": "* N", "weight": "N"}, dtypes={"x": "x", "weight": "x float32"}
    ),
    "layernorm_backward": Fit(shapes={"grad": "* N", **_ROWS}, dtypes={"x": "x", **_PARAMETERS}),
    "activation_backward": Fit(shapes={"grad": "*", "x": "*"}, dtypes={"x": "x"}),
    "gated_activation_backward": Fit(
        shapes={"grad": "*", "gate": "*", "up": "*"}, dtypes={"gate": "x", "up": "x"}
    ),
    "softmax_backward": Fit(shapes={"grad": "*", "x": "*"}, dtypes={"x": "x"}),
    # A gradient of one number goes with "mean" and "sum", of N with "none": a candidate reads it with stride 0 or its own.
    "cross_entropy_backward": Fit(
        shapes={"grad": "N | ", "logits": "N V", "target": "N"},
        dtypes={"grad": "float32", "target": "int64"},
    ),
    "rotary_embedding_backward": Fit(
        shapes={
            "grad_q": "B Hq S D",
            "grad_k": "B Hk S D",
            "q": "B Hq S D",
            "k": "B Hk S D",
            "cos": "B~ S R",
            "sin": "B~ S R",
        },
        dtypes={"grad_k": "x", "q": "x", "k": "x", "cos": "x float32", "sin": "x float32"},
        rules=(("at_most", "R", "D"), ("multiple", "R", "2")),
    ),
}


def fit(kernel_type: KernelType) -> Fit:
    """Which shapes and dtypes of a type's tensors fit together.

    Raises:
        UsageError: The type says nothing of its shapes: a binding that checks none would let a kernel read anywhere.
    """
    if kernel_type.name not in FITS:
        raise UsageError(
            f"No shapes are declared for the kernel type {kernel_type.name}.",
            remedy="Add them to FITS in autokernel_hf/binding.py.",
        )
    return FITS[kernel_type.name]


# --- C++ ----------------------------------------------------------------------------------------------------------

_C_TYPES = {"float": "double", "float?": "double", "int": "int64_t", "bool": "int32_t", "str": "int32_t"}


def launcher_parameters(kernel_type: KernelType) -> tuple[str, ...]:
    """The C parameters of a type's launcher, without the outputs and the context: schema arguments in order."""
    return tuple(
        f"const AkTensor *{a.name}" if a.is_tensor else f"{_C_TYPES[a.type]} {a.name}"
        for a in kernel_type.schema.args
    )


def launcher_prototype(kernel_type: KernelType) -> str:
    """What a C++ or CUDA candidate must define."""
    outputs = [f"const AkTensor *{name}" for name in _output_names(kernel_type)]
    parameters = ", ".join([*launcher_parameters(kernel_type), *outputs, "const AkContext *ctx"])
    return f'extern "C" int {kernel_type.name}({parameters})'


def code_schema(kernel_type: KernelType, suffix: str = "") -> str:
    """The schema of the compiled operator: as the type's, with strings as integer codes."""
    parts = []
    for arg in kernel_type.schema.args:
        kind = "int" if arg.type == "str" else arg.type
        default = "" if arg.default is REQUIRED else f"={default_code(kernel_type, arg)!r}"
        parts.append(f"{kind} {arg.name}{default}")
    returned = ", ".join(["Tensor"] * kernel_type.schema.returns)
    if kernel_type.schema.returns > 1:
        returned = f"({returned})"
    return f"{kernel_type.name}{suffix}({', '.join(parts)}) -> {returned}"


def binding_source(kernel_type: KernelType, backend: Backend, levels: tuple[str, ...] = ()) -> str:
    """The C++ binding of all candidates of a type: one translation unit, to be compiled beside `binding.h`.

    Args:
        levels: The instruction sets that a cpp candidate is compiled for, lowest first; empty for one build only.
    """
    name = kernel_type.name
    args = kernel_type.schema.args
    tensors = [a for a in args if a.is_tensor]
    outputs = _output_names(kernel_type)
    first = tensors[0].name
    key = "CUDA" if backend == "cuda" else "CPU"
    parameters = ", ".join(launcher_parameters(kernel_type))
    out_parameters = ", ".join(["const AkTensor *"] * len(outputs))
    symbols = [f"ak_{name}_{level.rsplit('-', 1)[-1]}" for level in levels] or [name]

    lines = [
        f"// Binding of {name} candidates to torch ({backend}), generated from the operator's schema.",
        '#include "binding.h"',
        "",
        'extern "C" {',
    ]
    for symbol in symbols:
        hidden = '__attribute__((visibility("hidden")))'
        weak = '__attribute__((visibility("hidden"), weak))'
        lines += [
            f"{hidden} int {symbol}({parameters}, {out_parameters}, const AkContext *ctx);",
            f"{weak} int64_t {symbol}_workspace({parameters});",
        ]
    lines += [
        "}",
        "",
        "namespace {",
        "",
        f'constexpr char kOp[] = "{name}";',
        f'constexpr char kSchema[] = "{code_schema(kernel_type)}";',
        f'constexpr char kNoGradOp[] = "{name}{NO_GRAD}";',
        f'constexpr char kNoGradSchema[] = "{code_schema(kernel_type, NO_GRAD)}";',
        "",
        "struct Kernel {",
        f"  int (*launch)({parameters}, {out_parameters}, const AkContext *ctx);",
        f"  int64_t (*workspace)({parameters});",
        "};",
        "",
        *_pick_kernel(symbols, levels),
        "",
        "void boxed(StableIValue *stack, uint64_t, uint64_t) {",
    ]
    lines += [f"  {line}" for line in _unbox(args)]
    lines += [f"  {t.name}.read();" for t in tensors]
    lines += [f'  ak::same_device(kOp, "{t.name}", {t.name}, {first});' for t in tensors[1:]]
    lines += [f"  {line}" for line in _check_dtypes(kernel_type)]
    lines += [f"  {line}" for line in _check_shapes(kernel_type)]
    lines += [f"  {a.name} = ak::dimension(kOp, {a.name}, {first});" for a in args if is_dimension(a)]
    for arg in (a for a in args if a.type == "float?"):  # an attention's scale, the only one there is
        given = f"{arg.name}_given ? ak::number({arg.name}_value)"
        lines.append(f"  const double {arg.name} = {given} : 1.0 / sqrt((double){first}.back(1));")
    if backend == "cuda":
        lines.append(f"  ak::DeviceGuard guard({first}.device_index);")
    for output, output_name in zip(kernel_type.outputs, outputs, strict=True):
        lines += [f"  {line}" for line in _allocate(kernel_type, output, output_name)]
    arguments = ", ".join(f"{a.name}.pointer()" if a.is_tensor else a.name for a in args)
    out_arguments = ", ".join(f"&{o}.view" for o in outputs)
    lines += [
        f"  if ({' || '.join(f'{o}.count() > 0' for o in outputs)}) {{",
        "    AkContext ctx;",
        "    ak::Tensor memory;",
        "    auto attempt = [&]() -> int {",
    ]
    if kernel_type.merges_rows:
        rows = ", ".join(
            [f"&{t.name}" for t in tensors if _leading(kernel_type, t.name)]
            + [
                f"&{o}"
                for o, output in zip(outputs, kernel_type.outputs, strict=True)
                if _has_rows(kernel_type, output)
            ]
        )
        lines += [
            f"      ak::Tensor *rows[] = {{{rows}}};",
            "      ak::merge_rows(rows, sizeof rows / sizeof *rows);",
        ]
    lines += [
        f"      ak::context(&ctx, {first});",
        "      if (kernel.workspace != nullptr)",
        f"        ak::workspace(&ctx, &memory, kernel.workspace({arguments}), {first});",
        f"      return kernel.launch({arguments}, {out_arguments}, &ctx);",
        "    };",
        "    int code = attempt();",
        "    if (code == AK_NEED_CONTIGUOUS) [[unlikely]] {",
        *[f"      {t.name}.make_contiguous();" for t in tensors],
        *[f"      {o}.read();" for o in outputs],
        "      code = attempt();",
        "    }",
        "    ak::finish(kOp, code);",
        "  }",
        *[f"  stack[{i}] = (StableIValue){o}.release();" for i, o in enumerate(outputs)],
        "}",
        "",
        "}  // namespace",
        "",
        "// Called once, when the module is imported. Returns 0, or not, and torch has said why.",
        'extern "C" __attribute__((visibility("hidden"))) int ak_register(const char *name_space) {',
        "  if (!ak::codes_hold()) return 1;",
        "  TorchLibraryHandle library;  // torch keeps both for good: an operator is never taken back",
        "  if (aoti_torch_library_init_def(name_space, __FILE__, __LINE__, &library)) return 1;",
        "  if (aoti_torch_library_def(library, kSchema)) return 1;",
        "  if (aoti_torch_library_def(library, kNoGradSchema)) return 1;",
        f'  if (aoti_torch_library_init_impl(name_space, "{key}", __FILE__, __LINE__, &library)) return 1;',
        "  if (torch_library_impl(library, kOp, &boxed, ak::kTorchTarget)) return 1;",
        "  return torch_library_impl(library, kNoGradOp, &boxed, ak::kTorchTarget);",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _pick_kernel(symbols: list[str], levels: tuple[str, ...]) -> Iterable[str]:
    if not levels:
        yield f"const Kernel kernel = {{&{symbols[0]}, &{symbols[0]}_workspace}};"
        return
    yield "Kernel pick() {"
    for level, symbol in reversed(list(zip(levels, symbols, strict=True))[1:]):
        yield f'  if (__builtin_cpu_supports("{level}")) return {{&{symbol}, &{symbol}_workspace}};'
    yield f"  return {{&{symbols[0]}, &{symbols[0]}_workspace}};"
    yield "}"
    yield "const Kernel kernel = pick();"


def _unbox(args: tuple[Arg, ...]) -> Iterable[str]:
    yield f"ak::Tensor {', '.join(a.name for a in args if a.is_tensor)};"
    # Everything is taken before anything can fail, so that nothing is lost.
    for i, arg in enumerate(args):
        if arg.type == "Tensor":
            yield f"{arg.name}.take(stack[{i}]);"
        elif arg.type == "Tensor?":
            yield f"{arg.name}.take_optional(stack[{i}]);"
        elif arg.type == "float":
            yield f"const double {arg.name} = ak::number(stack[{i}]);"
        elif arg.type == "float?":
            yield f"StableIValue {arg.name}_value;"
            yield f"const bool {arg.name}_given = ak::optional(stack[{i}], &{arg.name}_value);"
        elif arg.type == "bool":
            yield f"const int32_t {arg.name} = ak::boolean(stack[{i}]);"
        elif arg.type == "str":
            yield f"const int32_t {arg.name} = (int32_t)ak::integer(stack[{i}]);"
        else:
            yield f"int64_t {arg.name} = ak::integer(stack[{i}]);"


def _check_dtypes(kernel_type: KernelType) -> Iterable[str]:
    first = kernel_type.lead
    known = " || ".join(f"{first}.view.dtype == {DTYPE_CODES[d]}" for d in kernel_type.dtypes)
    yield f"if (!({known})) [[unlikely]]"
    yield f'  ak::fail(AK_UNSUPPORTED_PREFIX "%s: {first} must be one of {", ".join(kernel_type.dtypes)}", kOp);'
    for name, words in fit(kernel_type).dtypes.items():
        allowed = []
        for word in words.split():
            if word == "x":
                allowed.append(f"{first}.view.dtype")
            elif word == "out":
                allowed.append(_output_dtype(kernel_type, kernel_type.outputs[0]))
            else:
                allowed.append(DTYPE_CODES[word])
        test = " || ".join(f"{name}.view.dtype == {code}" for code in allowed)
        legend = words.replace("out", "the output's").replace("x", f"{first}'s").replace(" ", " or ")
        yield f"if ({name}.present() && !({test})) [[unlikely]]"
        yield f'  ak::fail(AK_UNSUPPORTED_PREFIX "%s: the dtype of {name} must be {legend}", kOp);'


def _check_shapes(kernel_type: KernelType) -> Iterable[str]:
    rules = fit(kernel_type)
    first = next(a.name for a in kernel_type.schema.args if a.is_tensor)
    symbols = sorted({w.rstrip("~") for s in rules.shapes.values() for w in s.split() if w[0].isalpha()})
    if symbols:
        yield f"int64_t {', '.join(f'{s} = -1' for s in symbols)};"
    leader = next((name for name, shape in rules.shapes.items() if shape.startswith("*")), "")
    for arg in kernel_type.schema.args:
        if not arg.is_tensor:
            continue
        name, shape = arg.name, rules.shapes[arg.name]
        if shape.startswith("~"):
            sizes = ", ".join(shape.split()[1:])
            test = f"ak::broadcasts({name}, {{{sizes}}})"
        else:
            test = " || ".join(f"({_alternative(name, a.split(), leader)})" for a in shape.split("|"))
        yield f"if ({name}.present() && !({test})) [[unlikely]]"
        yield f'  ak::bad_shape(kOp, "{name}", {name}, "{shape_legend(shape)}", "{first}", {first});'
    for relation, a, b in rules.rules:
        if relation == "same_rank":
            yield f"if ({a}.present() && {b}.present() && {a}.rank() != {b}.rank()) [[unlikely]]"
            yield f'  ak::fail("%s: {a} and {b} have different ranks", kOp);'
            continue
        if relation == "with_float8":
            yield f"if ({a}.view.dtype == AK_F8E4M3 && !{b}.present()) [[unlikely]]"
            yield f'  ak::fail("%s: float8 needs {b}", kOp);'
            continue
        test = f"{a} <= {b}" if relation == "at_most" else f"({b} == 0 ? {a} == 0 : {a} % {b} == 0)"
        words = "at most" if relation == "at_most" else "a multiple of"
        yield f"if ({a} >= 0 && {b} >= 0 && !({test})) [[unlikely]]"
        yield f'  ak::fail("%s: {a} must be {words} {b}", kOp);'


def _alternative(name: str, words: list[str], leader: str) -> str:
    trailing = [w for w in words if w != "*"]
    tests = [f"{name}.rank() {'>=' if '*' in words else '=='} {len(trailing)}"]
    if "*" in words and name != leader:
        tests.append(f"ak::same_leading({leader}, {name}, {len(trailing)})")
    for k, word in enumerate(reversed(trailing), 1):
        size = f"{name}.back({k})"
        if word.isdigit():
            tests.append(f"{size} == {word}")
        elif word.endswith("~"):
            tests.append(f"({size} == 1 || ak::bind({word[:-1]}, {size}))")
        else:
            tests.append(f"ak::bind({word}, {size})")
    return " && ".join(tests)


def shape_legend(shape: str) -> str:
    parts = []
    for part in shape.removeprefix("~").split("|"):
        words = ["..." if w == "*" else f"1|{w[:-1]}" if w.endswith("~") else w for w in part.split()]
        parts.append(f"({', '.join(words)})")
    return ("anything that broadcasts to " if shape.startswith("~") else "") + " or ".join(parts)


def _allocate(kernel_type: KernelType, output: Output, name: str) -> Iterable[str]:
    first = next(a.name for a in kernel_type.schema.args if a.is_tensor)
    yield f"ak::Tensor {name};"
    yield "{"
    yield "  ak::Sizes sizes;"
    for term in output.shape:
        if isinstance(term, Dims):
            start, stop = (_index(term.arg, i) for i in (term.start, term.stop))
            if _is_optional(kernel_type, term.arg):
                yield f"  if (!{term.arg}.present()) sizes.push(0);"
            yield f"  for (int i = {start or '0'}; i < {stop or f'{term.arg}.rank()'}; ++i) sizes.push({term.arg}.size(i));"
        elif isinstance(term, Reduced):
            yield f"  for (int i = 0; i < {term.arg}.rank(); ++i)"
            yield f"    if (i != {term.dim})"
            yield f"      sizes.push({term.arg}.size(i));"
            yield f"    else if ({term.keepdim})"
            yield "      sizes.push(1);"
        else:
            code = kernel_type.codes[term.reduction]["none"]
            yield f"  if ({term.reduction} == {code}) sizes.push({term.arg}.size(0));"
    dtype = _output_dtype(kernel_type, output)
    yield f"  {name}.allocate(sizes.rank, sizes.values, {dtype}, {first});"
    yield "}"


def _index(arg: str, index: int | None) -> str:
    if index is None:
        return ""
    return str(index) if index >= 0 else f"{arg}.rank() - {-index}"


def _output_dtype(kernel_type: KernelType, output: Output) -> str:
    first = next(a.name for a in kernel_type.schema.args if a.is_tensor)
    if output.dtype:
        return DTYPE_CODES[output.dtype]
    if output.dtype_of:
        own = f"{output.dtype_of}.view.dtype"
        optional = _is_optional(kernel_type, output.dtype_of)
        return f"({output.dtype_of}.present() ? {own} : {first}.view.dtype)" if optional else own
    if "float8_e4m3fn" in kernel_type.dtypes:
        return f"({first}.view.dtype == AK_F8E4M3 ? {DTYPE_CODES[output.float8_dtype]} : {first}.view.dtype)"
    return f"{first}.view.dtype"


def _output_names(kernel_type: KernelType) -> list[str]:
    n = len(kernel_type.outputs)
    return ["out"] if n == 1 else [f"out{i}" for i in range(n)]


def _leading(kernel_type: KernelType, name: str) -> bool:
    return fit(kernel_type).shapes[name].startswith("*")


def _has_rows(kernel_type: KernelType, output: Output) -> bool:
    """Whether an output has the leading dimensions of an argument."""
    return any(isinstance(term, Dims) and _leading(kernel_type, term.arg) for term in output.shape)


def _is_optional(kernel_type: KernelType, name: str) -> bool:
    return any(a.name == name and a.type == "Tensor?" for a in kernel_type.schema.args)


def is_dimension(arg: Arg) -> bool:
    return arg.name == "dim" and arg.type == "int"


def default_code(kernel_type: KernelType, arg: Arg) -> object:
    return kernel_type.codes[arg.name][arg.default] if arg.type == "str" else arg.default


MODULE_SOURCE = """\
/* The Python module of a variant: its import registers the operator under the module's own name. */
#define Py_LIMITED_API 0x03090000
#include <Python.h>

#define AK_JOIN_(a, b) a##b
#define AK_JOIN(a, b) AK_JOIN_(a, b)
#define AK_TEXT_(a) #a
#define AK_TEXT(a) AK_TEXT_(a)

/* glibc 2.32 and later export this; code compiled there would ask for it and not load on older systems. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

int ak_register(const char *name_space);

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, AK_TEXT(TORCH_EXTENSION_NAME), NULL, 0, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC AK_JOIN(PyInit_, TORCH_EXTENSION_NAME)(void) {
  if (ak_register(AK_TEXT(TORCH_EXTENSION_NAME)) != 0) {
    PyErr_SetString(PyExc_ImportError, "torch refused to register the operator of " AK_TEXT(TORCH_EXTENSION_NAME));
    return NULL;
  }
  return PyModule_Create(&module);
}
"""

PRELUDE_SOURCE = """\
// Included before everything else, so that the library also loads on systems as old as manylinux_2_28.
#ifndef AK_PRELUDE
#define AK_PRELUDE
#ifdef __cplusplus
// Templates of the standard library are made here and not taken from a newer libstdc++.
#include <bits/c++config.h>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#endif
#if defined(__x86_64__) && defined(__linux__) && !defined(__CUDA_ARCH__)
// glibc 2.29 gave these new versions, which differ only in errno.
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver exp2,exp2@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver log2,log2@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
#endif
#endif
"""
