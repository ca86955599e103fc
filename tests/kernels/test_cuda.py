"""The CUDA C++ starters: compiled by nvcc, run on the CPU through an emulation of the machine, and on a GPU in full.

The emulation (cuda_emulation.h) checks what needs no GPU: indexing, masking, barriers, numerics, every byte's bounds.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from autokernel_hf import build, contract, toolchain, tunables
from autokernel_hf.errors import ToolMissingError
from autokernel_hf.judge.cases import Case, Scope, Stage, cases_of
from autokernel_hf.judge.checks import check_values, expect
from autokernel_hf.kernels import kernel_type, kernel_types, starter
from autokernel_hf.kernels.base import KernelType, make_inputs
from autokernel_hf.records import Candidate, CompileReport, Scalar, Workload
from autokernel_hf.variant import Domain
from tests.kernels.cuda_emulation import Emulated, EmulationError, Unsupported

TYPES = (
    "activation",
    "gated_activation",
    "rmsnorm",
    "layernorm",
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
    "matmul",
    "fused_mlp",
    "flash_attention",
)
# Their speed is that of memory: a spill would cost it.
MEMORY_BOUND = TYPES[:16]
ARCHS = ("sm_80", "sm_90a", "sm_100")
STAGES: tuple[Stage, ...] = ("shapes", "numerics", "edges")
# Emulation takes its time, of products most: every n-th call is run.
EVERY = (
    dict.fromkeys(MEMORY_BOUND[:9], 2)
    | dict.fromkeys(MEMORY_BOUND[9:], 5)
    | {"matmul": 3, "fused_mlp": 5, "flash_attention": 6}
)


def source_of(name: str) -> str:
    source = starter(name, "cuda")
    assert source is not None
    return source


def candidate_of(name: str, source: str | None = None) -> Candidate:
    return Candidate(kernel_type=name, backend="cuda", source=source or source_of(name))


def has_nvcc() -> bool:
    try:
        toolchain.nvcc()
    except ToolMissingError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="nvcc is not installed here")


def domain_of(kind: KernelType) -> Domain:
    return contract.check(candidate_of(kind.name), kind)


def cases(kind: KernelType, stages: tuple[Stage, ...] = STAGES) -> list[Case]:
    """The judge's own calls of a starter."""
    scope = Scope(kernel_type=kind, workloads=(), dtypes=kind.dtypes, backend="cuda")
    return [case for stage in stages for case in cases_of(stage, scope, domain_of(kind))]


def problem(kind: KernelType, workload: Workload, args: dict[str, Any], outputs: tuple[Tensor, ...]) -> str:
    """What is wrong with outputs by the judge's rule; empty where nothing is."""
    expected = expect(kind, workload, args)
    forms = tuple((tuple(o.shape), o.dtype) for o in outputs)
    if forms != expected.specs:
        return f"outputs {forms}, not {expected.specs}"
    return check_values(outputs, expected, kind, workload).problem


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(
        torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )


# --- what is compiled, ahead of the tests that ask for it, two at a time --------------------------------------------


class Workshop:
    """Compilations under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(2)
        self.reports: dict[tuple[str, str], Future[CompileReport]] = {}
        self.emulated: dict[str, Future[Emulated]] = {}

    def compile(self, name: str, arch: str) -> Future[CompileReport]:
        if (name, arch) not in self.reports:
            self.reports[name, arch] = self.pool.submit(build.compile_only, candidate_of(name), arch)
        return self.reports[name, arch]

    def emulate(self, name: str) -> Future[Emulated]:
        if name not in self.emulated:
            self.emulated[name] = self.pool.submit(Emulated, kernel_type(name), source_of(name), self.folder)
        return self.emulated[name]


@pytest.fixture(scope="module")
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    shop = Workshop(tmp_path_factory.mktemp("emulation"))
    if "PYTEST_XDIST_WORKER" not in os.environ:  # each worker sees all tests, and runs some
        for item in request.session.items:
            asked = getattr(item, "callspec", None)
            if getattr(item, "module", None) is not request.module or asked is None:
                continue
            if "arch" in asked.params:
                shop.compile(asked.params["name"], asked.params["arch"])
            elif "workshop" in item.fixturenames and "name" in asked.params:
                shop.emulate(asked.params["name"])
    yield shop
    shop.pool.shutdown(cancel_futures=True)


# --- the sources ----------------------------------------------------------------------------------------------------


def test_every_kernel_type_has_a_cuda_starter() -> None:
    assert set(TYPES) == set(kernel_types())
    for name in TYPES:
        assert (
            domain_of(kernel_type(name)).dtypes == kernel_type(name).dtypes
        )  # no starter narrows its domain


@pytest.mark.parametrize("name", TYPES)
def test_starter_keeps_to_its_stream_and_its_libraries(name: str) -> None:
    source = source_of(name)
    for forbidden in ("cublas", "cudnn", "<torch", "cudaMalloc", "cudaMemcpy", "Synchronize", "atomicAdd"):
        assert forbidden not in source
    assert source.count("<<<") == source.count("stream>>>")
    assert 2 <= len(tunables.parse(source)) <= 8


NORMS = ("rmsnorm", "layernorm", "add_norm")
ELEMENTWISE = ("activation", "gated_activation", "activation_backward", "gated_activation_backward")
GRADIENTS_OF_ROWS = ("softmax_backward", "rmsnorm_backward", "layernorm_backward")
ROTARY = ("rotary_embedding", "rotary_embedding_backward")
CROSS_ENTROPY = ("cross_entropy", "cross_entropy_backward")
SOFTMAX = ("softmax", "softmax_backward")
CLUSTERS = ("rmsnorm", "layernorm", *SOFTMAX)
# What stands in several starters: from where to where, and in which.
SHARED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "// A 32-bit word of elements",
        "template <typename T>\nconstexpr int kPack",
        (*NORMS, "softmax", "reduce", *ELEMENTWISE, *GRADIENTS_OF_ROWS, *ROTARY, *CROSS_ENTROPY),
    ),
    ("template <typename T>\nconstexpr int kPack", "// A row cut where", (*NORMS, "softmax")),
    ("// V elements as they lie in memory", "\n};\n", SOFTMAX),
    ("// A row cut where memory has", "\n};\n", (*NORMS, *SOFTMAX)),
    ("// A weight or bias of x's dtype", "constexpr int kSlots", NORMS),
    ("constexpr int kSlots", "__device__ __forceinline__ float row_sum", (*NORMS, "softmax")),
    ("// Clusters of blocks, on devices", "#endif", CLUSTERS),
    ("// What the blocks of a cluster tell", "\n}\n", CLUSTERS),
    ("// As __expf, but", "\n}\n", SOFTMAX),
    ("// A parameter's packs for those", "\n};\n", NORMS),
    ("bool rows_of(", "\n}\n", NORMS),
    ("bool rows_of(", "\n}\n", ELEMENTWISE),
    ("bool rows_of(", "\n}\n", GRADIENTS_OF_ROWS),
    ("bool parameter_of(", "\n}\n", NORMS),
    ("int lanes_for(", "\n}\n", (*NORMS, "softmax", "reduce")),
    ("bool has_clusters(", "\n}\n", (*NORMS, *SOFTMAX, "reduce")),
    ("int launch_clusters(", "\n}\n", (*NORMS, *SOFTMAX, "reduce")),
    ("bool same_phase(", "\n}\n", NORMS),
    ("// Adds the squares of deviations", "\n}\n", ("layernorm", "add_norm")),
)


@pytest.mark.parametrize(("first", "end", "names"), SHARED)
def test_what_starters_share_is_the_same_text_in_all_of_them(
    first: str, end: str, names: tuple[str, ...]
) -> None:
    """A candidate is one file, so the starters repeat what they share; a repair must reach them all."""

    def part(name: str) -> str:
        source = source_of(name)
        start = source.index(first)
        return source[start : source.index(end, start)]

    assert len({part(name) for name in names}) == 1


# What another starter that is compiled here has too: the rows of norms, the packs of activations, the gradients of rows.
# Their own lines are compiled by g++, for the emulation.
COMPILED_BY_OTHERS = (
    "add_norm",
    "gated_activation",
    *(name for name in TYPES if name.endswith("_backward") and name != "layernorm_backward"),
)


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(
            name, arch, marks=[] if arch == "sm_90a" and name not in COMPILED_BY_OTHERS else pytest.mark.slow
        )
        for arch in ARCHS
        for name in TYPES
    ],
)
def test_starter_compiles(workshop: Workshop, name: str, arch: str) -> None:
    report = workshop.compile(name, arch).result()
    assert report.registers is not None and 16 <= report.registers <= 255
    assert report.spill_bytes is not None and report.spill_bytes <= (0 if name in MEMORY_BOUND else 128)
    assert report.shared_bytes is not None and report.shared_bytes <= 48 * 1024


# Kernels that a file is compiled to: what a changed candidate waits for.
MOST_KERNELS = {"matmul": 24, "fused_mlp": 15, "flash_attention": 28}


@needs_nvcc
@pytest.mark.parametrize("name", MOST_KERNELS)
def test_matrix_starters_are_few_kernels(workshop: Workshop, name: str) -> None:
    kernels = workshop.compile(name, "sm_90a").result().log.splitlines()
    assert 10 <= len(set(kernels)) <= len(kernels) <= MOST_KERNELS[name]


# --- emulated -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_starter_is_right_in_emulation(workshop: Workshop, name: str) -> None:
    kind, kernel = kernel_type(name), workshop.emulate(name).result()
    problems = []
    for i, case in enumerate(cases(kind)[:: EVERY[name]]):
        args = make_inputs(kind, case.workload, seed=i)
        # Orders of threads, guard pages and merged rows in turn.
        outputs = kernel(args, schedule=i % 3, at_end=i % 2 == 0, merge=i % 5 != 0)
        wrong = problem(kind, case.workload, args, outputs)
        if wrong:
            problems.append(f"{case.workload.label} {case.workload.dtype} {case.workload.shape}: {wrong}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", TYPES)
def test_result_does_not_depend_on_the_order_of_threads(workshop: Workshop, name: str) -> None:
    kind, kernel = kernel_type(name), workshop.emulate(name).result()
    for axes, options in (*kind.sweep[:2], *kind.sweep[-1:]):
        for dtype in ("float32", "float16"):
            args = make_inputs(kind, kind.build(axes, dtype, options), seed=5)
            first, *others = (kernel(args, schedule=schedule) for schedule in range(3))
            assert all(same_bits(first, other) for other in others), f"{axes} {dtype}"


LARGE: dict[str, tuple[dict[str, int], dict[str, Scalar], dict[str, Scalar]]] = {
    # More tiles down than a group has, ragged on every side, through the large tiles.
    "matmul": ({"M": 1300, "N": 450, "K": 72}, {"nt": True, "with_bias": True}, {"kLargeFrom": 32}),
    "fused_mlp": ({"M": 1300, "D": 72, "H": 450}, {}, {"kLargeFrom": 32}),
    # Long rows: past what registers hold, and split among blocks.
    "softmax": ({"M": 2, "N": 70001}, {}, {}),
    "layernorm": ({"M": 2, "N": 40000}, {}, {}),
    "rmsnorm": ({"M": 2, "N": 40000}, {}, {}),
    "add_norm": ({"M": 2, "N": 40000}, {"kind": "layer"}, {}),
    "reduce": ({"M": 3, "N": 200001}, {"op": "mean"}, {}),
    "cross_entropy": ({"N": 3, "V": 128256}, {"label_smoothing": 0.1}, {}),
    "softmax_backward": ({"M": 2, "N": 20000}, {}, {}),
    "layernorm_backward": ({"M": 3, "N": 20000}, {}, {}),
    "rmsnorm_backward": ({"M": 3, "N": 20000}, {}, {}),
    "cross_entropy_backward": ({"N": 3, "V": 128256}, {"label_smoothing": 0.1}, {}),
    "flash_attention": ({"B": 1, "Hq": 2, "Hk": 1, "Sq": 300, "Sk": 330, "D": 72}, {"causal": True}, {}),
}


@pytest.mark.parametrize("name", LARGE)
def test_starter_is_right_on_large_calls(workshop: Workshop, name: str) -> None:
    kind = kernel_type(name)
    axes, options, settings = LARGE[name]
    kernel = workshop.emulate(name).result()
    if settings:
        kernel = Emulated(kind, tunables.substitute(source_of(name), settings), workshop.folder)
    for i, dtype in enumerate(("float32", "bfloat16")):
        workload = kind.build(axes, dtype, options)
        args = make_inputs(kind, workload, seed=7)
        assert not problem(kind, workload, args, kernel(args, schedule=i)), dtype


# Calls that a device with clusters splits among the blocks of one.
CLUSTERED: dict[str, tuple[tuple[dict[str, int], dict[str, Scalar]], ...]] = {
    "rmsnorm": (({"M": 3, "N": 40003}, {}), ({"M": 2, "N": 65536}, {"offset": 1.0})),
    "layernorm": (({"M": 3, "N": 40003}, {}), ({"M": 2, "N": 65536}, {"bias": None})),
    "add_norm": (({"M": 3, "N": 40003}, {"kind": "layer"}), ({"M": 2, "N": 65536}, {})),
    "softmax": (
        ({"M": 3, "N": 70001}, {}),
        ({"M": 2, "N": 131072}, {}),
        # Columns: in packs and one by one, held and read twice, a short dimension between two others.
        ({"M": 3000, "N": 64}, {"dim": 0}),
        ({"B": 2, "M": 1500, "N": 33}, {"dim": 1}),
        ({"M": 17000, "N": 16}, {"dim": 0}),
        ({"B": 3, "M": 40, "N": 1000}, {"dim": 1}),
    ),
    "softmax_backward": (({"M": 2, "N": 50257}, {}), ({"M": 3, "N": 65536}, {})),
    "reduce": (({"M": 3000, "N": 64}, {"op": "prod", "dim": 0}), ({"L": 2, "M": 1500, "N": 33}, {"dim": 1})),
}


@pytest.mark.parametrize("name", CLUSTERED)
def test_what_a_cluster_shares_is_right(name: str, workshop: Workshop) -> None:
    kind = kernel_type(name)
    kernel = Emulated(kind, source_of(name), workshop.folder, clusters=True)
    for i, (axes, options) in enumerate(CLUSTERED[name]):
        for dtype in ("float32", "bfloat16"):
            args = make_inputs(kind, kind.build(axes, dtype, options), seed=i)
            results = [kernel(args, schedule=schedule) for schedule in range(3)]
            workload = kind.build(axes, dtype, options)
            assert not problem(kind, workload, args, results[0]), f"{axes} {dtype}"
            assert all(same_bits(results[0], other) for other in results[1:]), f"{axes} {dtype}"


def test_rows_that_begin_far_from_their_mean_keep_their_digits(workshop: Workshop) -> None:
    """Deviations are taken from a row's first elements, which may be anywhere."""
    kind, kernel = kernel_type("layernorm_backward"), workshop.emulate("layernorm_backward").result()
    rows: dict[str, Tensor] = {
        "first ones large": torch.cat([torch.full((2, 16), 3e4), torch.randn(2, 4080)], 1),
        "first ones 0": torch.cat([torch.zeros(2, 16), torch.randn(2, 4080) + 1000], 1),
        "one large": torch.randn(2, 4096).index_fill(1, torch.tensor([9]), -6e4),
        "all far from 0": torch.randn(2, 4096) + 2000,
        "from one end to the other": torch.linspace(-6e4, 6e4, 4096).repeat(2, 1),
    }
    for dtype in ("float16", "bfloat16"):
        workload = kind.build({"M": 2, "N": 4096}, dtype, {})
        args = make_inputs(kind, workload, seed=1)
        for what, x in rows.items():
            args["x"] = x.to(args["x"].dtype)
            assert not problem(kind, workload, args, kernel(args)), f"{dtype}, {what}"


ROUTES = (("rmsnorm", {}), ("layernorm", {}), ("add_norm", {"kind": "layer"}))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), ROUTES)
def test_long_rows_are_right_by_every_algorithm(
    name: str, options: dict[str, Scalar], workshop: Workshop
) -> None:
    """By clusters of two, four or eight blocks, or read twice, as the constants say."""
    kind, source = kernel_type(name), source_of(name)
    algorithms = [t for t in tunables.parse(source) if t.acts_on == "algorithm"]
    assert "kLargestCluster" in {t.name for t in algorithms}
    for tunable in algorithms:
        for value in tunable.choices:
            settings = {tunable.name: value}
            kernel = Emulated(kind, tunables.substitute(source, settings), workshop.folder, clusters=True)
            for i, axes in enumerate(({"M": 3, "N": 9003}, {"M": 2, "N": 20000})):
                workload = kind.build(axes, "float32", options)
                args = make_inputs(kind, workload, seed=i)
                wrong = problem(kind, workload, args, kernel(args, schedule=i))
                assert not wrong, f"{settings} {axes}: {wrong}"


def test_columns_are_split_among_blocks_and_reduced_in_packs(workshop: Workshop) -> None:
    kind, kernel = kernel_type("reduce"), workshop.emulate("reduce").result()
    for op in ("sum", "min", "prod"):
        for axes, dim in (({"M": 3000, "N": 64}, 0), ({"L": 2, "M": 1500, "N": 33}, 1)):
            workload = kind.build(axes, "float16", {"op": op, "dim": dim})
            args = make_inputs(kind, workload, seed=3)
            assert not problem(kind, workload, args, kernel(args, schedule=2)), f"{op} {axes}"


def test_cross_entropy_of_a_target_outside_the_classes_is_nan_and_no_access(workshop: Workshop) -> None:
    kernel = workshop.emulate("cross_entropy").result()
    args = {
        "logits": torch.randn(3, 8),
        "target": torch.tensor([1, 8, -3]),
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "reduction": "none",
    }
    (losses,) = kernel(args)
    assert losses.isnan().tolist() == [False, True, True]


def test_packed_attention_survives_a_wrong_maximum_and_leftover_tokens(workshop: Workshop) -> None:
    """A longest sequence understated by the caller, and tokens behind the last sequence, which see no key."""
    kind, kernel = kernel_type("flash_attention"), workshop.emulate("flash_attention").result()
    workload = kind.build({"B": 1, "Hq": 1, "Sq": 200, "D": 64}, "float16", {"sequences": 1})
    args = make_inputs(kind, workload, seed=1)
    args |= {"cu_seqlens_q": torch.tensor([0, 170], dtype=torch.int32), "max_seqlen_q": 3}
    args |= {"cu_seqlens_k": torch.tensor([0, 170], dtype=torch.int32), "max_seqlen_k": 3}
    (out,) = kernel(args)
    assert bool((out[0, 0, 170:] == 0).all())
    q, k, v = (args[name][:, :, :170].double() for name in ("q", "k", "v"))
    torch.testing.assert_close(
        out[:, :, :170].double(),
        torch.nn.functional.scaled_dot_product_attention(q, k, v),
        atol=2e-3,
        rtol=0,
    )


def variants(name: str) -> list[dict[str, Scalar]]:
    """Settings in which every value of every tunable occurs."""
    found = tunables.parse(source_of(name))
    count = max(len(t.choices) for t in found)
    return [{t.name: t.choices[i % len(t.choices)] for t in found} for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_every_value_of_every_tunable_is_right(workshop: Workshop, name: str) -> None:
    """Right, or refused: tiles that the smallest device has no room for."""
    kind = kernel_type(name)
    for settings in variants(name):
        if "kLargeFrom" in settings:  # else no call here is large enough for the large tiles
            settings["kLargeFrom"] = 32
        kernel, made = Emulated(kind, tunables.substitute(source_of(name), settings), workshop.folder), 0
        extra = [kind.build(LARGE[name][0], "float16", LARGE[name][1])] if name in LARGE else []
        for i, workload in enumerate([*(c.workload for c in cases(kind)[:: 5 * EVERY[name]]), *extra]):
            args = make_inputs(kind, workload, seed=i)
            try:
                outputs = kernel(args, schedule=i % 3)
            except Unsupported:
                assert name in ("matmul", "fused_mlp", "flash_attention")
                continue
            made += 1
            wrong = problem(kind, workload, args, outputs)
            assert not wrong, f"{settings} {workload.label} {workload.dtype}: {wrong}"
        assert made >= 3


_BULK_COPIES = """
#include "autokernel.h"
#include <cuda_runtime.h>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void make(uint64_t *barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
__device__ void expect(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ void copy(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               : : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ bool arrived(uint64_t *barrier, uint32_t parity) {
  uint32_t yes;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(yes) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return yes != 0;
}
#endif
__global__ void twice(const float *x, float *y) {
  __shared__ alignas(16) float row[256];
  __shared__ alignas(8) uint64_t full[2];
  const int t = threadIdx.x;
  if (t == 0) {
    make(full);
    make(full + 1);
    expect(full, 1024);
    copy(row, x, 1024, full);
  }
  __syncthreads();
  while (!arrived(full, 0)) continue;
  const float first = row[t];
  __syncthreads();  // all have read
  if (t == 0) {
    expect(full + 1, 1024);
    copy(row + 4, x, 1008, full + 1);
    copy(row, x + 252, 16, full + 1);
  }
  while (!arrived(full + 1, 0)) continue;
  y[t] = first + row[t];
}
extern "C" int rmsnorm(const AkTensor *x, const AkTensor *, double, double, const AkTensor *out, const AkContext *ctx) {
  cudaStream_t stream = (cudaStream_t)ctx->stream;
  twice<<<1, 256, 0, stream>>>((const float *)x->data, (float *)out->data);
  return (int)cudaGetLastError();
}
"""


# --- the emulation itself: it must see what is wrong ----------------------------------------------------------------


def mutant(name: str, old: str, new: str, folder: Path) -> Emulated:
    source = source_of(name)
    assert old in source
    return Emulated(kernel_type(name), source.replace(old, new), folder)


def inputs(name: str, dtype: str = "float32", **axes: int) -> dict[str, Any]:
    kind = kernel_type(name)
    return make_inputs(kind, kind.build(axes, dtype, {}), seed=2)


def test_emulation_sees_a_missing_barrier(workshop: Workshop) -> None:
    kernel = mutant("rmsnorm", "  __syncthreads();\n  value = mine", "  value = mine", workshop.folder)
    args = inputs("rmsnorm", M=2, N=2048)
    results = [kernel(args, schedule=schedule) for schedule in range(3)]
    assert not all(same_bits(results[0], other) for other in results[1:])


def test_emulation_sees_a_block_that_ends_while_its_cluster_reads_from_it(workshop: Workshop) -> None:
    source = source_of("add_norm")
    last = "if constexpr (CLUSTER) cluster_wait();  // none may end while others read its share"
    assert source.count(last) == 1
    kernel = Emulated(kernel_type("add_norm"), source.replace(last, ""), workshop.folder, clusters=True)
    with pytest.raises(EmulationError, match="of which a thread has returned"):
        kernel(inputs("add_norm", M=2, N=32768))


def test_emulation_sees_a_bulk_copy_over_what_is_still_read_and_a_wait_for_nothing(tmp_path: Path) -> None:
    """A block copies its row twice: over the first copy, after a barrier or before all have read it."""
    source = _BULK_COPIES
    kind = kernel_type("rmsnorm")
    args = inputs("rmsnorm", M=1, N=256)
    (right,) = Emulated(kind, source, tmp_path, clusters=True)(args)
    assert torch.equal(right, args["x"] + args["x"].roll(4, -1))
    early = Emulated(
        kind, source.replace("  __syncthreads();  // all have read", ""), tmp_path, clusters=True
    )
    assert not all(torch.equal(early(args, schedule=schedule)[0], right) for schedule in range(3))
    never = Emulated(
        kind, source.replace("expect(full, 1024);", "expect(full, 1040);"), tmp_path, clusters=True
    )
    with pytest.raises(EmulationError, match="nothing completes"):
        never(args)


def test_emulation_sees_an_access_past_the_end(workshop: Workshop) -> None:
    # The element behind the row is within a group of loads that the row's last element begins, not the first of one.
    load = "raw[u].load(in + column + u * step, false)"
    kernel = mutant("rmsnorm", f"u * step < N) {load}", f"u * step <= N) {load}", workshop.folder)
    with pytest.raises(EmulationError, match="outside every tensor"):
        kernel(inputs("rmsnorm", M=4, N=64 * 1024 + 513), at_end=True)


def test_emulation_sees_a_misaligned_access(workshop: Workshop) -> None:
    kernel = mutant("rmsnorm", "(uintptr_t)p % 16 == 0", "true", workshop.folder)
    args = inputs("rmsnorm", M=2, N=256)
    args["x"] = torch.randn(2 * 256 + 1)[1:].view(2, 256)
    with pytest.raises(EmulationError, match="misaligned"):
        kernel(args)


def test_emulation_sees_a_barrier_that_some_threads_never_reach(workshop: Workshop) -> None:
    kernel = mutant(
        "rmsnorm",
        "  __syncthreads();\n  value = mine",
        "  if (threadIdx.x % 32 == 0) __syncthreads();\n  value = mine",
        workshop.folder,
    )
    with pytest.raises(EmulationError, match="deadlock|different operations|has returned"):
        kernel(inputs("rmsnorm", M=2, N=2048))


def test_emulation_sees_work_on_another_stream(workshop: Workshop) -> None:
    kernel = mutant("rmsnorm", "(cudaStream_t)ctx->stream", "(cudaStream_t) nullptr", workshop.folder)
    with pytest.raises(EmulationError, match="another stream"):
        kernel(inputs("rmsnorm", M=2, N=64))


def test_emulation_sees_a_copy_that_nobody_waited_for(workshop: Workshop) -> None:
    kernel = mutant("fused_mlp", "wait_for_groups<C::stages - 2>();", "", workshop.folder)
    (out,) = kernel(inputs("fused_mlp", "float16", M=16, D=64, H=64))
    assert bool(out.isnan().any())


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, ModuleType]:
    return {}


def built(on_gpu: dict[str, ModuleType], name: str) -> Any:
    if name not in on_gpu:
        on_gpu[name] = build.load(build.build(candidate_of(name), device="cuda").path)
    return getattr(on_gpu[name], name)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_starter_is_right_on_the_gpu(on_gpu: dict[str, ModuleType], name: str) -> None:
    kind, function = kernel_type(name), built(on_gpu, name)
    problems = []
    for i, case in enumerate(cases(kind)):
        args = make_inputs(kind, case.workload, i, "cuda")
        wrong = problem(kind, case.workload, args, as_tuple(function(**args)))
        if wrong:
            problems.append(f"{case.workload.label} {case.workload.dtype} {case.workload.shape}: {wrong}")
    assert not problems, "\n".join(problems)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_starter_gives_the_same_bits_twice_and_in_a_graph(on_gpu: dict[str, ModuleType], name: str) -> None:
    kind, function = kernel_type(name), built(on_gpu, name)
    axes, options = LARGE[name][:2] if name in LARGE else kind.sweep[0]
    args = make_inputs(kind, kind.build(axes, "float16", options), 3, "cuda")
    first = as_tuple(function(**args))
    assert same_bits(first, as_tuple(function(**args)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = as_tuple(function(**args))
    for output in captured:
        output.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(first, captured)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ("activation", "gated_activation", "rmsnorm", "layernorm", "softmax", "reduce")
)
def test_starter_is_right_past_two_to_the_31_elements(on_gpu: dict[str, ModuleType], name: str) -> None:
    """The last rows of more elements than 32 bits count must be those of a small call."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    kind, function = kernel_type(name), built(on_gpu, name)
    M, N = (1 << 17) + 3, 16392
    small = make_inputs(kind, kind.build({"M": 5, "N": N}, "bfloat16", dict(kind.sweep[0][1])), 9, "cuda")
    large = {
        k: v.repeat((M + 4) // 5, 1)[:M].contiguous() if isinstance(v, Tensor) and v.shape == (5, N) else v
        for k, v in small.items()
    }
    assert large[next(iter(large))].numel() > 1 << 31
    last = [(M - 5 + i) % 5 for i in range(5)]
    for few, many in zip(as_tuple(function(**small)), as_tuple(function(**large)), strict=True):
        torch.testing.assert_close(many[-5:], few[last], atol=0, rtol=0)
    del large, many
    torch.cuda.empty_cache()


@pytest.mark.slow
def test_the_check_of_all_starters_runs_and_tells(repository_root: Path, tmp_path: Path) -> None:
    """The script for a GPU machine, here with the one backend that runs without."""
    out = tmp_path / "starters.json"
    command = [sys.executable, "benchmarks/check_starters.py", "--out", str(out), "--types", "rmsnorm"]
    command += ["--device", "cpu", "--backends", "cpp", "--no-timing"]
    environment = {**os.environ, "PYTHONPATH": str(repository_root)}
    done = subprocess.run(command, cwd=repository_root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (checked,) = json.loads(out.read_text(encoding="utf-8"))["checked"]
    assert checked["calls"] == checked["done"] > 50 and checked["failed"] == 0
    assert "rmsnorm" in done.stdout and "ok" in done.stdout
