"""The C++ starters, judged by their types' own oracles: every CPU level that this machine has, every tunable value.

The source is called through the C contract directly, with every tensor between unreadable pages and every output and
scratch byte preset, so that a read or a write out of bounds cannot go unseen; one test goes through the real build.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autokernel_hf import build, tunables
from autokernel_hf.binding import CPU_LEVELS
from autokernel_hf.gpu import device_info
from autokernel_hf.judge.checks import check_values, expect
from autokernel_hf.kernels import kernel_type, starter
from autokernel_hf.kernels.base import KernelType, make_inputs, output_specs, with_layout
from autokernel_hf.native import CPP_FLAGS
from autokernel_hf.records import Candidate, Scalar, Workload
from tests.kernels.cuda_emulation import CODES, CONTRACT, AkContext, AkTensor, Guarded

TYPES = (
    "activation",
    "gated_activation",
    "layernorm",
    "rmsnorm",
    "add_norm",
    "softmax",
    "cross_entropy",
    "rotary_embedding",
    "reduce",
    "rmsnorm_backward",
    "layernorm_backward",
    "activation_backward",
    "gated_activation_backward",
    "cross_entropy_backward",
    "softmax_backward",
    "rotary_embedding_backward",
)
PARAMETERS = ("weight", "bias")  # have no rows
OK, UNSUPPORTED, NEED_CONTIGUOUS = 0, -1, -2
LEVELS = CPU_LEVELS[: CPU_LEVELS.index(device_info("cpu").arch) + 1]


def as_rows(shape: Iterable[int], strides: Iterable[int]) -> tuple[list[int], list[int]]:
    """Sizes and strides with the leading dimensions as one, where that is possible."""
    sizes, steps = list(shape), list(strides)
    rows, step, following = 1, sizes[-1], 0
    for size, stride in reversed(list(zip(sizes[:-1], steps[:-1], strict=True))):
        if size == 1:
            continue
        if rows == 1:
            step = stride
        elif stride != following:
            return sizes, steps
        rows, following = rows * size, stride * size
    return [rows, sizes[-1]], [step, steps[-1]]


class Unsupported(Exception):
    """The starter returned AK_UNSUPPORTED."""


class Native:
    """A C++ candidate as a Python function, through the C contract alone."""

    def __init__(self, kind: KernelType, source: str, folder: Path, level: str, settings: str = "") -> None:
        self.kind = kind
        self.name = f"{kind.name} {level} {settings}"
        self.contiguous_calls = 0
        path = folder / f"{kind.name}-{level}-{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
        if not path.exists():
            unit = path.with_suffix(".cpp")
            # The real build makes the launcher visible in its own way.
            visible = '__attribute__((visibility("default")))'
            unit.write_text(source.replace('extern "C" int', f'extern "C" {visible} int'), encoding="utf-8")
            command = [
                "g++",
                *CPP_FLAGS,
                "-fPIC",
                "-shared",
                f"-march={level}",
                f"-I{CONTRACT.parent}",
                str(unit),
            ]
            done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
        self.library = ctypes.CDLL(str(path))

    def __call__(
        self, args: Mapping[str, Any], *, threads: int = 1, at_end: bool = True, merge: bool = True
    ) -> tuple[Tensor, ...]:
        outputs, code = self._call(args, threads, at_end, merge)
        if code == NEED_CONTIGUOUS:
            self.contiguous_calls += 1
            packed = {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in args.items()}
            outputs, code = self._call(packed, threads, at_end, merge)
        if code == UNSUPPORTED:
            raise Unsupported(self.kind.name)
        assert code == OK, f"code {code}"
        return outputs

    def _call(
        self, args: Mapping[str, Any], threads: int, at_end: bool, merge: bool
    ) -> tuple[tuple[Tensor, ...], int]:
        specs = output_specs(self.kind.outputs, args)
        if all(0 in shape for shape, _ in specs):
            return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in specs), OK
        first = next(v for v in args.values() if isinstance(v, Tensor))
        rowed = [v for k, v in args.items() if isinstance(v, Tensor) and k not in PARAMETERS]
        # All tensors are handed over merged, or none.
        rows = (
            merge and self.kind.merges_rows and all(len(as_rows(v.shape, v.stride())[0]) == 2 for v in rowed)
        )
        memory: list[Guarded] = []
        keep: list[Any] = []

        def describe(
            address: int, shape: Iterable[int], strides: Iterable[int], dtype: torch.dtype, row: bool
        ) -> Any:
            sizes, steps = as_rows(shape, strides) if row else (list(shape), list(strides))
            n = len(sizes)
            arrays = (ctypes.c_int64 * max(n, 1))(*sizes), (ctypes.c_int64 * max(n, 1))(*steps)
            keep.extend(arrays)
            record = AkTensor(address, *arrays, n, CODES[dtype])
            keep.append(record)
            return ctypes.pointer(record)

        def guarded(tensor: Tensor) -> int:
            extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            extent = extent if tensor.numel() else 0
            block = Guarded(extent * tensor.element_size(), at_end=at_end, phase=tensor.data_ptr() % 16)
            memory.append(block)
            if extent:
                view = torch.as_strided(block.bytes().view(tensor.dtype), tensor.shape, tensor.stride())
                once = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())
                view[once].copy_(tensor[once])
            block.protect(1)  # PROT_READ
            return block.address

        c_args: list[Any] = []
        for arg in self.kind.schema.args:
            value = args[arg.name]
            if arg.is_tensor:
                if value is None:
                    c_args.append(None)
                    continue
                row = rows and arg.name not in PARAMETERS
                c_args.append(describe(guarded(value), value.shape, value.stride(), value.dtype, row))
            elif arg.type.startswith("float"):
                c_args.append(ctypes.c_double(value))
            elif arg.type == "int":
                value = value % max(first.dim(), 1) if arg.name == "dim" else value
                c_args.append(ctypes.c_int64(value))
            else:
                c_args.append(
                    ctypes.c_int32(self.kind.codes[arg.name][value] if arg.type == "str" else int(value))
                )
        blocks = []
        for shape, dtype in specs:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            block = Guarded(empty.numel() * dtype.itemsize, at_end=at_end)
            blocks.append(block)
            c_args.append(describe(block.address, shape, empty.stride(), dtype, rows))
        scratch = Guarded(0, at_end=at_end)
        size = getattr(self.library, f"{self.kind.name}_workspace", None)
        if size is not None:
            size.restype = ctypes.c_int64
            scratch = Guarded(size(*c_args[: len(self.kind.schema.args)]), at_end=at_end)
        context = AkContext(None, scratch.address, scratch.size, 0, threads)
        code = getattr(self.library, self.kind.name)(*c_args, ctypes.byref(context))
        outputs = tuple(
            block.bytes().view(dtype).reshape(shape).clone()
            for (shape, dtype), block in zip(specs, blocks, strict=True)
        )
        for block in (*blocks, scratch):
            assert not block.slack().strip(b"\xff"), "wrote outside an output or the workspace"
        for block in (*memory, *blocks, scratch):
            block.close()
        return outputs, code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cpp")


def source_of(name: str) -> str:
    source = starter(name, "cpp")
    assert source is not None
    return source


def variants(source: str) -> list[dict[str, Scalar]]:
    """Settings in which every value of every tunable occurs."""
    found = tunables.parse(source)
    count = max(len(t.choices) for t in found)
    return [{t.name: t.choices[(i + j) % len(t.choices)] for j, t in enumerate(found)} for i in range(count)]


def cases(kind: KernelType, dtype: str) -> Iterator[Workload]:
    """Everything that the judge's later stages would run, small."""
    for axes, options in (*kind.sweep, *kind.edges, *kind.long):
        yield kind.build(axes, dtype, options)
    for values in kind.adversarial:
        for axes, options in kind.sweep:
            workload = kind.build(axes, dtype, options)
            if elements(workload) <= 20_000:
                yield workload.model_copy(update={"values": values})
    for layout, names in kind.layouts.items():
        for axes, options in (kind.sweep[-1], kind.edges[-1], kind.edges[len(kind.edges) // 2]):
            workload = kind.build(axes, dtype, options)
            present = [n for n in names if n in dict(workload.tensors)]
            yield with_layout(workload, layout, present)


def few_cases(kind: KernelType, dtype: str) -> Iterator[Workload]:
    """Every kind of argument, an odd shape, numbers that are none, rows with gaps."""
    for axes, options in (*kind.sweep, kind.edges[-1]):
        yield kind.build(axes, dtype, options)
    axes, options = min(kind.sweep, key=lambda entry: elements(kind.build(entry[0], dtype, entry[1])))
    for values in {"nonfinite", "large_offset"} & set(kind.adversarial):
        yield kind.build(axes, dtype, options).model_copy(update={"values": values})
    workload = kind.build(axes, dtype, options)
    yield with_layout(workload, "padded", [kind.schema.args[0].name])


def elements(workload: Workload) -> int:
    return math.prod(workload.tensors[0][1].shape)


def failures(native: Native, workloads: Iterable[Workload], **how: Any) -> list[str]:
    found = []
    for seed, workload in enumerate(workloads):
        args = make_inputs(native.kind, workload, seed)
        expected = expect(native.kind, workload, args)
        outcome = check_values(native(args, **how), expected, native.kind, workload)
        if outcome.problem:
            found.append(
                f"{native.name} {workload.label} {workload.dtype} {workload.values}: {outcome.problem}"
            )
    return found


@pytest.mark.parametrize("name", TYPES)
def test_starter_is_right_in_all_that_the_judge_asks(name: str, folder: Path) -> None:
    native = Native(kernel_type(name), source_of(name), folder, LEVELS[-1])
    found = [f for dtype in native.kind.dtypes for f in failures(native, cases(native.kind, dtype))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name",
    [
        # A file of gradients is compiled once here, for the test above; its vectors are those of the others.
        pytest.param(name, marks=pytest.mark.slow if name.endswith("_backward") else [])
        for name in TYPES
    ],
)
def test_every_tunable_value_is_right_at_every_cpu_level(name: str, folder: Path) -> None:
    kind, source = kernel_type(name), source_of(name)
    settings = variants(source)
    settings += settings[: max(0, len(LEVELS) - len(settings))]

    def compiled(i: int) -> Native:
        text = tunables.substitute(source, settings[i])
        return Native(kind, text, folder, LEVELS[i % len(LEVELS)], str(settings[i]))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        natives = list(pool.map(compiled, range(len(settings))))
    found = [
        failure
        for i, native in enumerate(natives)
        for dtype in kind.dtypes
        for failure in failures(native, few_cases(kind, dtype), at_end=i % 2 == 0)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", TYPES)
def test_the_answer_is_the_same_for_every_number_of_threads(name: str, folder: Path) -> None:
    native = Native(kernel_type(name), source_of(name), folder, LEVELS[-1])
    workload = max((native.kind.build(a, "float32", o) for a, o in native.kind.sweep), key=elements)
    args = make_inputs(native.kind, workload, 5)
    first = native(args, threads=1)
    for threads in (1, 2, 3):
        for one, other in zip(first, native(args, threads=threads), strict=True):
            assert torch.equal(one, other)


def test_long_reductions_are_cut_into_pieces_that_do_not_depend_on_the_threads(folder: Path) -> None:
    native = Native(kernel_type("reduce"), source_of("reduce"), folder, LEVELS[-1])
    generator = torch.Generator().manual_seed(1)
    for shape, dim in (((3, 200_001), 1), ((5_001, 70), 0), ((2, 3_001, 33), 1)):
        x = torch.randn(shape, generator=generator)
        for op in ("sum", "mean", "max", "min", "prod"):
            values = torch.exp2(x / 64) * x.sign() if op == "prod" else x
            args = {"x": values, "dim": dim, "keepdim": False, "op": op}
            (one,), (three,) = native(args, threads=1), native(args, threads=3)
            assert torch.equal(one, three)
            (exact,) = native.kind.oracle(**{**args, "x": values.double()})
            torch.testing.assert_close(one.double(), exact, rtol=1e-6, atol=2e-5)


def test_sums_of_equal_numbers_keep_their_digits(folder: Path) -> None:
    # Added one after another in a few lanes, 50000 equal numbers lose five digits of seven.
    cross_entropy = Native(kernel_type("cross_entropy"), source_of("cross_entropy"), folder, LEVELS[0])
    logits = torch.full((2, 50_000), 0.1)
    args = {"logits": logits, "target": torch.zeros(2, dtype=torch.int64), "ignore_index": -100}
    for smoothing in (0.0, 0.3):
        (loss,) = cross_entropy({**args, "label_smoothing": smoothing, "reduction": "none"})
        assert loss.double() == pytest.approx(math.log(50_000), rel=2e-7)
    softmax = Native(kernel_type("softmax"), source_of("softmax"), folder, LEVELS[0])
    x = torch.full((1, 50_000), 0.1)
    x[0, 0] = 5.0
    (y,) = softmax({"x": x, "dim": -1})
    torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), rtol=5e-7, atol=0.0)


def test_a_target_outside_of_the_classes_is_refused(folder: Path) -> None:
    native = Native(kernel_type("cross_entropy"), source_of("cross_entropy"), folder, LEVELS[-1])
    args = {"logits": torch.randn(4, 9), "ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
    for wrong in (9, -1):
        with pytest.raises(Unsupported):
            native({**args, "target": torch.tensor([0, 1, wrong, 3])})


@pytest.mark.parametrize("name", ["activation", "gated_activation", "layernorm", "rmsnorm", "add_norm"])
def test_rows_with_gaps_and_heads_out_of_order_are_read_in_place(name: str, folder: Path) -> None:
    native = Native(kernel_type(name), source_of(name), folder, LEVELS[-1])
    kind = native.kind
    axes, options = next(entry for entry in kind.sweep if "B" in entry[0])
    for layout in ("padded", "expanded"):
        names = [arg for arg, spec in kind.build(axes, "float32", options).tensors if len(spec.shape) > 1]
        workload = with_layout(kind.build(axes, "float32", options), layout, names)
        for merge in (True, False):
            assert not failures(native, [workload], merge=merge)
    assert native.contiguous_calls == 0


def test_a_models_queries_and_keys_are_rotated_where_they_lie(folder: Path) -> None:
    native = Native(kernel_type("rotary_embedding"), source_of("rotary_embedding"), folder, LEVELS[-1])
    found = [native.kind.build(axes, "float32", options) for axes, options in native.kind.sweep]
    assert all(workload.tensor("q").strides is not None for workload in found)
    assert not failures(native, found)
    assert native.contiguous_calls == 0


def test_exponentials_are_right_to_the_last_digits_and_at_the_ends(folder: Path) -> None:
    """Through silu(x)/x = 1/(1 + exp(-x)) and softmax([x, 0]), over the whole range of float32."""
    native = Native(kernel_type("activation"), source_of("activation"), folder, LEVELS[-1])
    x = torch.cat(
        [torch.linspace(-88, 88, 40_001), torch.tensor([-3e38, -200.0, -1e-40, 0.0, 1e-40, 200.0, 3e38])]
    )
    (y,) = native({"x": x, "kind": "silu"})
    exact = x.double() * torch.sigmoid(x.double())
    error = (y.double() - exact).abs()
    assert bool((error <= 4 * 2.0**-24 * exact.abs() + 2.0**-140).all())
    (gelu,) = native({"x": x, "kind": "gelu"})
    exact = 0.5 * x.double() * torch.special.erfc(-x.double() / math.sqrt(2))
    error = (gelu.double() - exact).abs()
    assert bool((error <= 8 * 2.0**-24 * exact.abs() + 2.0**-120).all())  # of the far left side, too


def test_what_starters_share_is_the_same_text_in_all_of_them() -> None:
    """A candidate is one file, so the starters repeat their vector types and functions; a repair must reach them all."""

    def part(name: str, first: str, end: str) -> str:
        source = source_of(name)
        return source[source.index(first) : source.index(end, source.index(first))]

    vectors = {part(name, "namespace {", "template <typename T>\ninline void store_part") for name in TYPES}
    assert len(vectors) == 1
    with_exp = [name for name in TYPES if "inline F exponential" in source_of(name)]
    assert len(with_exp) == 8
    assert len({part(name, "// e^t to about", "\n}\n") for name in with_exp}) == 1
    with_sums = [name for name in TYPES if "accumulate(int64_t" in source_of(name)]
    assert len(with_sums) == 9
    assert len({part(name, "// K sums over a row", "\n}\n") for name in with_sums}) == 1


@pytest.mark.parametrize("name", ["activation", "add_norm", "reduce"])
def test_starter_is_right_as_it_is_built_and_loaded(name: str) -> None:
    kind = kernel_type(name)
    built = build.build(Candidate(kernel_type=name, backend="cpp", source=source_of(name)))
    function = getattr(build.load(built.path), name)
    for dtype in kind.dtypes:
        for seed, workload in enumerate(few_cases(kind, dtype)):
            args = make_inputs(kind, workload, seed)
            result = function(**args)
            outputs = result if isinstance(result, tuple) else (result,)
            outcome = check_values(outputs, expect(kind, workload, args), kind, workload)
            assert not outcome.problem, f"{workload.label} {dtype}: {outcome.problem}"
