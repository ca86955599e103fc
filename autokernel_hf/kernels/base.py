"""What a kernel type is.

A type's file holds the whole truth about it; this module holds what all types share: the schema parser, the axes'
legend, how inputs are made, how an output is held against the float64 oracle.

Axes: B batch, H heads (Hq of queries, Hk of keys), S sequence, D head or model dimension, R rotary dimension,
M rows, N columns, K inner dimension of a product, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf.records import Scalar, Site, TensorSpec, Workload

Args: TypeAlias = dict[str, Any]
"""The arguments of one call by schema name, in schema order, all of them."""
Outputs: TypeAlias = tuple[Tensor, ...]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    "uint8": torch.uint8,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# How strings reach C (the candidate contract).
ACTIVATIONS: dict[str, int] = {
    "none": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "gelu_new": 3,
    "quick_gelu": 4,
    "silu": 5,
    "relu": 6,
    "relu2": 7,
}
NORMS: dict[str, int] = {"rms": 0, "layer": 1}
REDUCTIONS: dict[str, int] = {"none": 0, "mean": 1, "sum": 2}
OPS: dict[str, int] = {"sum": 0, "mean": 1, "max": 2, "min": 3, "prod": 4}


# --- schema -------------------------------------------------------------------------------------------------------


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """One schema argument. `type` is Tensor, Tensor?, float, float?, int, bool or str."""

    name: str
    type: str
    default: Any = REQUIRED

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A torch operator schema, parsed: `rmsnorm(Tensor x, Tensor weight, float eps) -> Tensor`."""

    text: str
    name: str
    args: tuple[Arg, ...]
    returns: int

    @classmethod
    def parse(cls, text: str) -> Schema:
        match = re.fullmatch(r"(\w+)\((.*)\)\s*->\s*(.+)", text.strip(), re.DOTALL)
        if match is None:
            raise ValueError(f"not an operator schema: {text!r}")
        name, arguments, returned = match.groups()
        args = []
        for part in filter(None, (p.strip() for p in arguments.split(","))):
            declaration, _, default = part.partition("=")
            kind, argument = declaration.split()
            args.append(
                Arg(name=argument, type=kind, default=_default(kind, default) if default else REQUIRED)
            )
        return cls(text=" ".join(text.split()), name=name, args=tuple(args), returns=returned.count("Tensor"))

    def bind(self, args: Mapping[str, Any]) -> Args:
        """All arguments in schema order, defaults filled in.

        Raises:
            TypeError: An argument is missing or unknown.
        """
        unknown = set(args) - {a.name for a in self.args}
        if unknown:
            raise TypeError(f"{self.name}() has no argument {', '.join(sorted(unknown))}")
        bound: Args = {}
        for arg in self.args:
            if arg.name in args:
                bound[arg.name] = args[arg.name]
            elif arg.default is REQUIRED:
                raise TypeError(f"{self.name}() needs {arg.name}")
            else:
                bound[arg.name] = arg.default
        return bound


def _default(kind: str, text: str) -> Scalar:
    if text == "None":
        return None
    if kind == "str":
        return text.strip("\"'")
    if kind == "bool":
        return text == "True"
    if kind == "int":
        return int(text)
    return float(text)


# --- outputs, in a form that both Python and the generated C++ binding can evaluate --------------------------------


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes `start:stop` of a tensor argument."""

    arg: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """The sizes of `arg` without dimension `dim` (an int argument), or with 1 there where `keepdim` is true."""

    arg: str
    dim: str
    keepdim: str


@dataclass(frozen=True, slots=True)
class RowsIfNone:
    """The first size of `arg` where the string argument `reduction` is "none", nothing otherwise."""

    arg: str
    reduction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """An output: new and contiguous. `dtype` is empty for the first argument's, else a dtype's name.

    `dtype_of` names the tensor argument whose dtype it has instead. `float8_dtype` is the output's dtype where the first
    argument is float8. The sizes of an absent tensor are (0,): an output that has them is empty, and stands for none.
    """

    shape: tuple[Dims | Reduced | RowsIfNone, ...]
    dtype: str = ""
    dtype_of: str = ""
    float8_dtype: str = "bfloat16"


def output_specs(
    outputs: tuple[Output, ...], args: Mapping[str, Any]
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and dtypes of the outputs of a call.

    Args:
        args: The call's arguments; tensors need only `shape` and `dtype` (fake tensors serve).
    """
    first = next(v for v in args.values() if hasattr(v, "dtype"))
    specs = []
    for output in outputs:
        sizes: list[int] = []
        for term in output.shape:
            shape = [0] if args[term.arg] is None else list(args[term.arg].shape)
            if isinstance(term, Dims):
                sizes += shape[term.start : term.stop]
            elif isinstance(term, Reduced):
                if not shape:  # a scalar has no dimension to drop
                    continue
                dim = args[term.dim] % len(shape)
                sizes += shape[:dim] + ([1] if args[term.keepdim] else []) + shape[dim + 1 :]
            elif args[term.reduction] == "none":
                sizes += shape[:1]
        if output.dtype:
            dtype = DTYPES[output.dtype]
        elif output.dtype_of and args[output.dtype_of] is not None:
            dtype = args[output.dtype_of].dtype
        elif first.dtype == torch.float8_e4m3fn:
            dtype = DTYPES[output.float8_dtype]
        else:
            dtype = first.dtype
        specs.append((tuple(sizes), dtype))
    return tuple(specs)


# --- the kernel type ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far an output may lie from the float64 oracle.

    An element passes where |out - oracle| <= k * E + ulps * growth(workload) * eps(dtype) * max(|oracle|, rms(oracle)),
    with E the largest error of the plain torch expression in the same dtype on the same inputs (a user who runs torch
    accepts E already; k allows another order of summation).

    Args:
        k: Factor on torch's own error.
        ulps: Roundings that a correct kernel cannot avoid.
        growth: Extra factor from the length of the reduction, from the workload; 1 for elementwise types.
        why: The derivation, in a sentence; shown with a failure.
    """

    k: float
    ulps: float
    why: str
    growth: Callable[[Workload], float] = field(default=lambda workload: 1.0)


def growth_in_fp32(roundings: Callable[[Workload], float]) -> Callable[[Workload], float]:
    """`Tolerance.growth` of a kernel that computes in fp32 and rounds to the output's dtype once, at the end.

    Args:
        roundings: How many roundings in fp32 come before, from the workload. A 16-bit output hardly sees them.
    """
    return lambda workload: 1.0 + roundings(workload) * _EPS_FP32 / torch.finfo(DTYPES[workload.dtype]).eps


def sum_roundings(terms: int, *, alike: bool = False) -> float:
    """By how many eps of its size a sum in fp32 may be off, in the worst order: one term after the other.

    Each addition rounds to the nearest, so it is off by at most eps / 2 of the partial sum that it makes (Higham,
    Accuracy and Stability of Numerical Algorithms, 4.2), and partial sums grow up to the whole. Terms that are `alike`
    may all be rounded the same way: eps / 2 times 1/terms + ... + terms/terms is terms / 4. The roundings of other
    terms are independent, and spread evenly over their range: each has a deviation of 0.22 eps of its partial sum, all
    together of 0.15 sqrt(terms) where those grow as a walk does (0.13 where they grow evenly). Among thousands of sums
    some lie four deviations off, and some walks stray to half as much again: sqrt(terms).
    """
    return terms / 4 if alike else math.sqrt(terms)


_EPS_FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a user would pick instead of a kernel of ours.

    Args:
        name: eager, fused, compile, sdpa, cudnn, liger, ...
        make: Returns the callable for a workload (schema arguments by keyword), or None where the peer cannot do it
            (the device, the dtype, a missing package). Anything it prepares (compiling) happens here, untimed.
    """

    name: str
    make: Callable[[Workload, torch.device], Callable[..., Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A class of the type's layers file, and the places that it fits.

    Args:
        name: Class in `kernels/layers/<type>.py`, stateless as the Hub demands.
        hook: The name by which `kernelize` knows such modules (RMSNorm, SiLU, ...), or ours where it has none.
        find: Sites of a model that this layer can replace exactly: same result, no state of its own, in eval mode.
    """

    name: str
    hook: str
    find: Callable[[nn.Module], Iterable[Site]]


Fill: TypeAlias = Callable[[str, TensorSpec, Workload, torch.Generator], Tensor]
"""Values of one tensor argument: (argument, spec, workload, generator) -> float64 or integer tensor of spec.shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Of what the outputs of a backward type are the gradients.

    Its arguments are the gradients of the forward type's outputs, then the forward type's arguments.

    Args:
        forward: Name of the forward type.
        of: The forward's tensor arguments whose gradients the outputs are, in order. Gradients of other arguments do not
            exist: a call that needs one raises.
        unread: Forward tensors of which only shape and dtype matter, each with the argument that has the same: so the
            forward need not keep them until the backward.
    """

    forward: str
    of: tuple[str, ...]
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelType:
    """The whole truth about a kernel type.

    Args:
        schema: The operator schema, as in the candidate contract.
        outputs: Shapes and dtypes of the outputs, from the arguments.
        codes: For each str argument, its words and the codes by which they reach C.
        dtypes: Dtypes of the leading argument that a candidate must handle unless its domain says otherwise.
        leading: The tensor argument whose dtype the domain is about, where it is not the first.
        gradients: Of what the outputs are gradients; None for a forward type.
        oracle: The exact answer: called with floating tensors in float64; returns a tuple of float64 tensors.
        reference: The plain torch expression that a model runs, in the tensors' own dtype; returns a tuple.
        peers: What a user would pick instead; the first is always `eager`, the reference itself.
        axes: Names of the axes that `build` takes, in the order in which `--shape` gives them.
        build: (axes, dtype, options) -> Workload; options override scalar arguments.
        workloads: Timed workloads for `bench` without a target, by device kind ("cpu", "cuda"); small on a CPU.
        sweep: Shapes for the sweep over dtypes (dtype-less: (axes, options)).
        edges: Edge shapes: 0, 1, odd, prime, 2^n +- 1 (same form).
        long: Edge shapes with rows that are asked of C++ and CUDA only (same form): a Triton program that holds a row has
            its length as a constant, and the assembler takes minutes over one with 2^18 elements.
        adversarial: Value regimes (of `VALUES`) that the numerics stage runs.
        layouts: Layouts (of `LAYOUTS`) and the arguments they apply to, for the edge stage.
        fills: How particular arguments are filled, where the regime of the workload does not apply to them.
        tolerance: How far an output may lie from the oracle.
        impostors_exempt: Whether an impostor (zeros, input, mean, previous, narrow: see `judge.checks`) is the right
            answer on a workload, or as good as right.
        flops, bytes_moved: Least work of a call; `bytes_moved` defaults to every tensor once.
        layers: Where models compute this type, and what replaces it there.
        merges_rows: Whether the binding hands leading dimensions to C merged, as (M, N), wherever strides allow.
        cut: The tensor arguments that are cut along their first dimension where a call is taken in parts, whose outputs
            laid one after the other along theirs are the call's: rows. None of them: it is taken whole.
        huge: Calls with tensors, or hidden values, of more than 2^31 elements (same form as `sweep`), whose first axis
            is the one along which tensors are cut.
        source: Paper or specification of the op.
    """

    name: str
    schema: Schema
    outputs: tuple[Output, ...]
    oracle: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    peers: tuple[Peer, ...]
    axes: tuple[str, ...]
    build: Callable[[Mapping[str, int], str, Mapping[str, Scalar]], Workload]
    workloads: Mapping[str, tuple[Workload, ...]]
    sweep: tuple[tuple[Mapping[str, int], Mapping[str, Scalar]], ...]
    edges: tuple[tuple[Mapping[str, int], Mapping[str, Scalar]], ...]
    adversarial: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]
    tolerance: Tolerance
    flops: Callable[[Workload], float]
    bytes_moved: Callable[[Workload], float] = field(default=lambda workload: tensor_bytes(workload))
    fills: Mapping[str, Fill] = field(default_factory=dict)
    codes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    leading: str = ""
    gradients: Gradients | None = None
    long: tuple[tuple[Mapping[str, int], Mapping[str, Scalar]], ...] = ()
    impostors_exempt: Callable[[str, Workload], bool] = field(default=lambda impostor, workload: False)
    layers: tuple[Layer, ...] = ()
    merges_rows: bool = False
    cut: Callable[[Workload], tuple[str, ...]] = field(default=lambda workload: ())
    huge: tuple[tuple[Mapping[str, int], Mapping[str, Scalar]], ...] = ()
    source: str = ""

    @property
    def lead(self) -> str:
        """The tensor argument whose dtype the domain is about."""
        return self.leading or next(a.name for a in self.schema.args if a.is_tensor)

    def find(self, model: nn.Module) -> list[Site]:
        """All sites of a model that a layer of this type can replace, each once, in the model's order."""
        sites: dict[str, Site] = {}
        for layer in self.layers:
            for site in layer.find(model):
                sites.setdefault(f"{site.attach}:{site.path}", site)
        return list(sites.values())


def tensor_bytes(workload: Workload) -> float:
    """Bytes of every tensor argument once, plus an output as large as the first: the floor of an elementwise type.

    A dimension with stride 0 (expanded) is read once.
    """
    first = workload.tensors[0][1]
    return input_bytes(workload) + math.prod(first.shape) * itemsize(first.dtype)


def input_bytes(workload: Workload) -> float:
    """Bytes of every tensor argument once; a dimension with stride 0 (expanded) is read once."""
    total = 0.0
    for _, spec in workload.tensors:
        distinct = spec.shape
        if spec.strides is not None:
            distinct = tuple(n for n, s in zip(spec.shape, spec.strides, strict=True) if s != 0)
        total += math.prod(distinct) * itemsize(spec.dtype)
    return total


def itemsize(dtype: str) -> int:
    return int(DTYPES[dtype].itemsize)


def workload_from(
    schema: Schema,
    label: str,
    tensors: Mapping[str, TensorSpec | None],
    scalars: Mapping[str, Scalar],
    **more: Any,
) -> Workload:
    """A workload from its arguments, in schema order, defaults filled in."""
    bound = schema.bind({**tensors, **scalars})
    return Workload(label=label, args=tuple(bound.items()), **more)


# Of fewer numbers of 16 bits each may by chance have few digits, so that a narrower precision looks right.
ENOUGH_TO_TELL_DIGITS = 64


def tells_no_digits(impostor: str, workload: Workload, outputs: int) -> bool:
    """Whether `outputs` numbers cannot tell the impostor "narrow", torch in the next lower precision, from the answer.

    That is so for a few numbers of 16 bits, and for denormal ones: in float16 those of size 1e-6 have four bits.
    """
    if impostor != "narrow" or workload.dtype == "float32":
        return False
    return outputs < ENOUGH_TO_TELL_DIGITS or (workload.dtype == "float16" and workload.values == "tiny")


# --- inputs -------------------------------------------------------------------------------------------------------

VALUES: dict[str, str] = {
    "normal": "standard normal",
    "uniform": "uniform on [-3, 3]",
    "large_offset": "normal around 100, spread 1: a one-pass variance in fp32 loses digits here",
    "tiny": "normal times 1e-6",
    "denormal": "magnitudes below the smallest normal number of the dtype",
    "large": "normal times a value whose square overflows float16 but not float32",
    "wide": "magnitudes log-uniform over six decades, both signs",
    "equal": "all elements of a row equal",
    "one_hot": "one element of each row at 30, the rest near 0",
    "nonfinite": "normal, with a few inf, -inf and NaN in every second row",
}


def fill_values(spec: TensorSpec, values: str, generator: torch.Generator) -> Tensor:
    """Float64 values of a regime of `VALUES`, shape `spec.shape`, on the CPU."""
    shape = spec.shape
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if values == "normal" or x.numel() == 0:
        return x
    if values == "uniform":
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 6 - 3
    if values == "large_offset":
        return x + 100
    if values == "tiny":
        return x * 1e-6
    if values == "denormal":
        info = torch.finfo(DTYPES[spec.dtype])
        return x.clamp(-2, 2) / 2 * info.tiny
    if values == "large":
        return x * 300.0
    if values == "wide":
        exponent = torch.rand(shape, generator=generator, dtype=torch.float64) * 6 - 4
        return torch.sign(x) * 10**exponent
    if values == "equal":
        return x[..., :1].expand(shape).clone() if x.dim() else x
    if values == "one_hot":
        x = x * 0.1
        hot = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
        return x.scatter(-1, hot, 30.0)
    if values == "nonfinite":
        mask = torch.rand(shape, generator=generator)
        x[mask < 0.003] = math.inf
        x[(mask >= 0.003) & (mask < 0.006)] = -math.inf
        x[(mask >= 0.006) & (mask < 0.009)] = math.nan
        if x.dim() > 1:  # rows without any, beside those that a norm turns to NaN as a whole
            x[..., ::2, :] = torch.randn(x[..., ::2, :].shape, generator=generator, dtype=torch.float64)
        return x
    raise ValueError(f"unknown value regime {values!r}; known: {', '.join(VALUES)}")


def fill_parameter(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    """A weight or bias far from 1 and 0, whatever the regime: a kernel that skips it must fail."""
    return torch.rand(spec.shape, generator=generator, dtype=torch.float64) * 1.5 + 0.25


DRAWN_ON_CPU = 1 << 20  # elements of a call, at most, that are drawn on the CPU whatever the device


def make_inputs(
    kernel_type: KernelType, workload: Workload, seed: int, device: torch.device | str = "cpu"
) -> Args:
    """The arguments of one call: fresh tensors with the workload's shapes, strides, offsets and values.

    Args:
        seed: The same seed gives the same values on every device, since they are drawn on the CPU; but for large calls
            on a GPU, which are drawn there: a processor takes seconds for them.
    """
    there = torch.device(device)
    elements = sum(math.prod(spec.shape) for _, spec in workload.tensors)
    drawn_on = there if there.type == "cuda" and elements > DRAWN_ON_CPU else torch.device("cpu")
    generator = torch.Generator(drawn_on).manual_seed(seed)
    args: Args = {}
    # What fills a tensor makes new ones without naming a device.
    with contextlib.nullcontext() if drawn_on.type == "cpu" else drawn_on:
        for name, value in workload.args:
            if not isinstance(value, TensorSpec):
                args[name] = value
                continue
            fill = kernel_type.fills.get(name)
            data = (
                fill(name, value, workload, generator)
                if fill is not None
                else fill_values(value, workload.values, generator)
            )
            args[name] = materialize(data, value, device)
    return args


def materialize(data: Tensor, spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    """`data` as a tensor with exactly the dtype, strides and storage offset of `spec`."""
    dtype = DTYPES[spec.dtype]
    typed = data.to(dtype).to(device)
    if spec.strides is None and spec.offset == 0:
        return typed.contiguous()
    strides = spec.strides if spec.strides is not None else typed.contiguous().stride()
    extent = 0 if 0 in spec.shape else 1 + sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True))
    storage = torch.empty(spec.offset + extent, dtype=dtype, device=device)
    view = torch.as_strided(storage, spec.shape, strides, spec.offset)
    if extent == 0:
        return view
    # An expanded dimension holds one value: write its first slice only.
    index = tuple(
        slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(spec.shape, strides, strict=True)
    )
    view[index].copy_(typed[index])
    return view


def upcast(args: Args, dtype: torch.dtype = torch.float64) -> Args:
    """The arguments with all floating tensors in a higher precision, for the oracle."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in args.items()}


def round_to_bits(x: Tensor, bits: int) -> Tensor:
    """Rounded to so many significant bits, in float64; infinities and NaN stay."""
    x = x.double()
    mantissa, exponent = torch.frexp(x)
    rounded = torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)
    return torch.where(torch.isfinite(x) & (x != 0), rounded, x)


LAYOUTS: dict[str, str] = {
    "contiguous": "as allocated",
    "sliced": "every second column of a wider tensor",
    "padded": "rows of a wider tensor: unit last stride, gaps between rows",
    "transposed": "the last two dimensions swapped in memory",
    "expanded": "leading dimension with stride 0",
    "offset": "starts one element into its storage: misaligned",
}


def with_layout(workload: Workload, layout: str, names: Iterable[str]) -> Workload:
    """The same call with the named tensors laid out otherwise in memory."""
    chosen = set(names)
    args = tuple(
        (k, _laid_out(v, layout) if k in chosen and isinstance(v, TensorSpec) else v)
        for k, v in workload.args
    )
    return workload.model_copy(update={"args": args, "label": f"{workload.label}/{layout}"})


def _laid_out(spec: TensorSpec, layout: str) -> TensorSpec:
    shape = list(spec.shape)
    rank = len(shape)
    if layout == "contiguous" or rank == 0:
        return spec
    if layout == "offset":
        return spec.model_copy(update={"offset": 1, "strides": tuple(_contiguous(shape))})
    if layout == "sliced":
        strides = [2 * s for s in _contiguous(shape)]
    elif layout == "padded":
        strides = _contiguous([*shape[:-1], shape[-1] + 3])
    elif layout == "transposed":
        if rank < 2:
            return spec
        order = [*shape[:-2], shape[-1], shape[-2]]
        strides = _contiguous(order)
        strides[-1], strides[-2] = strides[-2], strides[-1]
    elif layout == "expanded":
        strides = _contiguous(shape)
        strides[0] = 0
    else:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    return spec.model_copy(update={"strides": tuple(strides)})


def _contiguous(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return strides


def describe(tensor: Tensor) -> TensorSpec:
    """The spec of a tensor as it occurs."""
    contiguous = tensor.is_contiguous()
    return TensorSpec(
        shape=tuple(tensor.shape),
        dtype=DTYPE_NAMES[tensor.dtype],
        strides=None if contiguous else tuple(tensor.stride()),
        # Only misalignment matters; the distance from the start of a large storage does not.
        offset=0 if tensor.data_ptr() % 16 == 0 else 1,
    )


# --- activations --------------------------------------------------------------------------------------------------


def activate(x: Tensor, kind: str) -> Tensor:
    """An activation of `ACTIVATIONS`, as transformers computes it: the same ops, so the same roundings.

    Raises:
        ValueError: There is no such activation.
    """
    if kind == "none":
        return x
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "gelu_new":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return torch.square(F.relu(x))
    raise ValueError(f"unknown activation {kind!r}; known: {', '.join(ACTIVATIONS)}")
