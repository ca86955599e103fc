"""Runs CUDA C++ candidates on the CPU through cuda_emulation.h, with every tensor between unreadable pages."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import autokernel_hf.kernels
from autokernel_hf.kernels.base import KernelType, output_specs

HERE = Path(__file__).parent
HEADER = HERE / "cuda_emulation.h"
RUNTIME = HERE / "cuda_emulation_runtime.h"
TENSOR_MAPS = HERE / "cuda_emulation_tensor_maps.h"
HOPPER = HERE / "cuda_emulation_hopper.h"
CONTRACT = Path(autokernel_hf.kernels.__file__).parent / "autokernel.h"

# Traps, not messages: a trap inside a fiber becomes an error of the launch.
FLAGS = (
    *("-std=c++20", "-O1", "-g1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    *(
        "-ffp-contract=off",
        "-fno-gnu-unique",
        "-Wl,-Bsymbolic",
        "-fsanitize=alignment,bounds,integer-divide-by-zero,shift",
    ),
    "-fsanitize-undefined-trap-on-error",
)

CODES = {
    torch.uint8: 0,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e4m3fn: 24,
}
PARAMETERS = ("weight", "bias")  # have no rows
OK, UNSUPPORTED, NEED_CONTIGUOUS = 0, -1, -2
PAGE = mmap.PAGESIZE
STREAM = 0x5EAF00D  # never dereferenced; a launch on any other is an error


class AkTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class AkContext(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class EmulationError(Exception):
    """The launch did what no GPU would let pass, or what only luck would."""


class Unsupported(Exception):
    """The candidate returned AK_UNSUPPORTED."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """Memory between two unreadable pages, filled with 0xFF: NaN in every floating dtype.

    Args:
        size: Bytes.
        at_end: Lies against the page behind it (up to the alignment), else against the page before it.
        phase: The start's address modulo 16.
    """

    def __init__(self, size: int, *, at_end: bool, phase: int = 0) -> None:
        inner = (size + 16 + PAGE - 1) // PAGE * PAGE
        self._length = inner + 2 * PAGE
        base = _libc.mmap(None, self._length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap")
        self._base, self._inner = base, inner
        self.protect(mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(base + PAGE, 0xFF, inner)
        last = base + PAGE + inner - size
        self.address = last - (last - phase) % 16 if at_end else base + PAGE + phase
        self.size = size

    def protect(self, rights: int) -> None:
        if _libc.mprotect(self._base + PAGE, self._inner, rights) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def bytes(self) -> Tensor:
        """The memory as a uint8 tensor, not a copy."""
        if self.size == 0:
            return torch.empty(0, dtype=torch.uint8)
        array = (ctypes.c_uint8 * self.size).from_address(self.address)
        return torch.frombuffer(array, dtype=torch.uint8)

    def slack(self) -> bytes:
        """What lies between the guard pages and is not the tensor's."""
        before = self.address - self._base - PAGE
        after = self._inner - before - self.size
        return ctypes.string_at(self._base + PAGE, before) + ctypes.string_at(self.address + self.size, after)

    def close(self) -> None:
        _libc.munmap(self._base, self._length)


@dataclass
class _Call:
    """What one call of the C interface holds: it must outlive the call."""

    at_end: bool
    memory: list[Guarded] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)

    def tensor(self, tensor: Tensor, merge: bool) -> Any:
        """A read-only guarded copy with the same strides and the same misalignment."""
        size = tensor.element_size()
        extent = (
            0
            if tensor.numel() == 0
            else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        memory = Guarded(extent * size, at_end=self.at_end, phase=tensor.data_ptr() % 16)
        if extent:
            raw = memory.bytes().view(tensor.dtype)
            target = torch.as_strided(raw, tensor.shape, tensor.stride())
            index = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())
            target[index].copy_(tensor[index])
        memory.protect(mmap.PROT_READ)
        self.memory.append(memory)
        sizes, strides = list(tensor.shape), list(tensor.stride())
        if merge:
            sizes, strides = merged(sizes, strides) or (sizes, strides)
        return self.describe(memory.address, sizes, strides, tensor.dtype)

    def output(self, shape: tuple[int, ...], dtype: torch.dtype, merge: bool) -> tuple[Any, Guarded]:
        strides = list(torch.empty(shape, device="meta").stride())
        size = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
        memory = Guarded(size, at_end=self.at_end)
        self.memory.append(memory)
        sizes = list(shape)
        if merge:
            sizes, strides = merged(sizes, strides) or (sizes, strides)
        return self.describe(memory.address, sizes, strides, dtype), memory

    def describe(self, address: int, sizes: list[int], strides: list[int], dtype: torch.dtype) -> Any:
        n = len(sizes)
        c_sizes, c_strides = (ctypes.c_int64 * max(n, 1))(*sizes), (ctypes.c_int64 * max(n, 1))(*strides)
        record = AkTensor(address, c_sizes, c_strides, n, CODES[dtype])
        self.arrays += [c_sizes, c_strides, record]
        return ctypes.pointer(record)

    def close(self) -> None:
        for memory in self.memory:
            memory.close()


def merged(sizes: list[int], strides: list[int]) -> tuple[list[int], list[int]] | None:
    """As (M, N), or None where no single stride walks the leading dimensions."""
    columns, step = (sizes[-1], strides[-1]) if sizes else (1, 1)
    rows, stride = 1, columns
    for n, s in zip(reversed(sizes[:-1]), reversed(strides[:-1]), strict=True):
        if n == 1:
            continue
        if rows == 1:
            rows, stride = n, s
        elif s == rows * stride:
            rows *= n
        else:
            return None
    return [rows, columns], [stride, step]


def as_cpp(source: str, clusters: bool = False) -> str:
    """A candidate in the words of a C++ compiler: launches, shared memory and PTX go to the emulation.

    Args:
        clusters: The emulated device is one of compute capability 9.0, of which the emulation knows clusters, and what
            attention needs; else one of 8.0.
    """
    source = re.sub(r"#include\s*<(cuda|mma)[^>]*>", "", source)
    source = re.sub(
        r"#if defined\(__CUDA_ARCH__\) && __CUDA_ARCH__ >= 900\b[^\n]*\n(.*?)(?:#else[^\n]*\n(.*?))?#endif",
        lambda match: match[1] if clusters else match[2] or "",
        source,
        flags=re.DOTALL,
    )
    # wgmma stands in macros with hundreds of registers.
    source = re.sub(r"#define AK_WGMMA_S_64.*?#undef AK_WGMMA\n", _PRODUCTS, source, flags=re.DOTALL)
    count = iter(range(1 << 20))
    source = re.sub(
        r"extern\s+__shared__\s+(?:alignas\(\d+\)\s+|__align__\(\d+\)\s+)?((?:unsigned )?[\w:]+)\s+(\w+)\s*\[\s*\]\s*;",
        r"\1 *\2 = reinterpret_cast<\1 *>(emu::dynamic_shared());",
        source,
    )

    def shared(match: re.Match[str]) -> str:
        align, kind, name, dims = match.groups()
        return f"auto &{name} = emu::shared<{kind}{dims or ''}>({next(count)}, {align or 1});"

    source = re.sub(
        r"__shared__\s+(?:(?:alignas|__align__)\((\d+)\)\s+)?([\w:]+(?:<[^;>]*>)?)\s+(\w+)((?:\[[^\];]+\])*)\s*;",
        shared,
        source,
    )
    source = re.sub(r"(\w+(?:<[^;<>]*>)?)\s*<<<([^;]*?)>>>\(", r"emu::launch(emu::Config(\2), \1, ", source)
    source = re.sub(r"\basm\s*(?:volatile\s*)?\((.*?)\)\s*;", _ptx, source, flags=re.DOTALL)
    return ("#define EMU_CLUSTERS\n" if clusters else "") + f'#include "{RUNTIME.name}"\n{source}'


_PRODUCTS = """
template <bool BRAIN, int SUMS>
void multiply_shared(float (&d)[SUMS], uint64_t a, uint64_t b, uint32_t add) {
  emu::multiply_shared(d, a, b, add, BRAIN);
}
template <bool BRAIN, int SUMS>
void multiply_registers(float (&d)[SUMS], const uint32_t (&a)[4], uint64_t b, uint32_t add) {
  emu::multiply_registers(d, a, b, add, BRAIN);
}
"""
# The first words of an instruction of Hopper's, and what the emulation does with its operands.
_HOPPER = (
    ("mbarrier.arrive.shared::cta.b64 _,", "emu::arrive_and_expect({}, 0);"),
    ("prefetch.tensormap", ";"),
    ("setmaxnreg.", ";"),
    ("wgmma.fence", "emu::group_begins();"),
    ("wgmma.commit_group", "emu::end_products();"),
    ("wgmma.wait_group", "emu::wait_for_products({});"),
    ("bar.sync", "emu::named_sync({}, {});"),
    ("bar.arrive", "emu::named_arrive({}, {});"),
    ("cp.async.bulk.tensor.4d.", "emu::copy_box({}, {}, {}, {}, {}, {}, {});"),
    (
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait",
        "emu::cluster_arrive(); emu::cluster_wait();",
    ),
    (
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32",
        "{} = emu::of_cluster<float>(emu::in_cluster({}, {}));",
    ),
    (
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32",
        "emu::of_cluster4({}, {}, {}, {}, emu::in_cluster({}, {}));",
    ),
)
_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.\1\.f32")
_CLUSTER_REGISTERS = {
    "mov.u32 %0, %%cluster_ctarank;": "emu::current->rank",
    "mov.u32 %0, %%cluster_nctarank;": "emu::cluster",
}
_BULK = (
    (r"mbarrier\.init\.shared::cta\.b64 \[%0\], (1|%1);", "make_mbarrier"),
    (r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%0\], %1;", "arrive_and_expect"),
    (
        r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes \[%0\], \[%1\], %2, \[%3\];",
        "copy_bulk",
    ),
    (r"\{ ?\.reg \.pred p; mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[%1\], %2; selp.*\}", "is_over"),
    (
        r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.v4\.f32 \[%0\], \{%2, %3, %4, %5\}, \[%1\];",
        "store_async",
    ),
)
_LDMATRIX = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")


def _ptx(match: re.Match[str]) -> str:
    text = match[1]
    # Operands are behind a colon of its own.
    code = "".join(re.findall(r'"([^"]*)"', re.split(r"(?<!:):(?!:)", text)[0]))
    operands = re.findall(r'"[+=]?[dfhrln]"\((.*?)\)(?=\s*(?:,|:|$))', text, flags=re.DOTALL)
    if mma := _MMA.match(code):
        order = re.findall(r"%(\d+)", code)
        assert len(operands) == 10 and order[:10] == [str(i) for i in range(10)], text
        kind = {"f16": "__half", "bf16": "__nv_bfloat16"}[mma[1]]
        return f"emu::mma<{kind}>({', '.join(operands)});"
    if load := _LDMATRIX.match(code):
        n = int(load[1])
        assert len(operands) == n + 1 and re.findall(r"%(\d+)", code) == [str(i) for i in range(n + 1)], text
        out = "; ".join(f"{operand} = emu_r[{i}]" for i, operand in enumerate(operands[:-1]))
        transposed = "true" if load[2] else "false"
        return f"{{ uint32_t emu_r[{n}]; emu::ldmatrix<{n}, {transposed}>(emu_r, {operands[-1]}); {out}; }}"
    if code == "cp.async.cg.shared.global [%0], [%1], 16, %2;":
        return f"emu::copy_async({', '.join(operands)});"
    if re.match(r"ld\.global\.nc\.[\w.:]*\bv4\.u32 \{%0, %1, %2, %3\}, \[%4\];", code):
        out = " ".join(f"{operand} = emu_r[{i}];" for i, operand in enumerate(operands[:-1]))
        return f"{{ uint32_t emu_r[4]; memcpy(emu_r, {operands[-1]}, 16); {out} }}"
    if code == "cp.async.commit_group;":
        return "emu::commit_copies();"
    if code == "cp.async.wait_group %0;":
        return f"emu::wait_for_copies({operands[0]});"
    if re.fullmatch(r"ex2\.approx\.ftz\.f32 %0, %1;", code.strip()):
        return f"{operands[0]} = emu::exp2_flushed({operands[1]});"
    if code == "prefetch.global.L2 [%0];":
        return "(void)0;"
    if re.fullmatch(r"cvt\.f32\.f16 %0, %1;", code):
        return f"{{ const uint16_t emu_bits = {operands[1]}; __half emu_h; memcpy(&emu_h, &emu_bits, 2); {operands[0]} = __half2float(emu_h); }}"
    if rounding := re.fullmatch(r"cvt\.rn\.(f16|bf16)x2\.f32 %0, %1, %2;", code):
        pair = {"f16": "__floats2half2_rn", "bf16": "__floats2bfloat162_rn"}[rounding[1]]
        return f"{{ const auto emu_p = {pair}({operands[2]}, {operands[1]}); memcpy(&{operands[0]}, &emu_p, 4); }}"
    if re.fullmatch(r"rcp\.approx\.ftz\.f32 %0, %1;", code.strip()):
        return f"{operands[0]} = emu::reciprocal_flushed({operands[1]});"
    if special := _CLUSTER_REGISTERS.get(code):
        return f"{operands[0]} = {special};"
    if barrier := re.match(r"barrier\.cluster\.(arrive|wait)\.[\w.]+;(?! barrier)", code):
        return f"emu::cluster_{barrier[1]}();"
    if code == "mapa.shared::cluster.u32 %0, %1, %2;":
        return f"{operands[0]} = emu::in_cluster({operands[1]}, {operands[2]});"
    if load := re.fullmatch(r"ld\.shared::cluster\.f(32|64) %0, \[%1\];", code):
        return f"{operands[0]} = emu::of_cluster<{'float' if load[1] == '32' else 'double'}>({operands[1]});"
    for pattern, function in _BULK:
        if re.fullmatch(pattern, code):
            result = f"{operands[0]} = " if "try_wait" in code else ""
            constant = ", 1" if code.endswith("[%0], 1;") else ""
            given = operands[1:] if result else operands
            return f"{result}emu::{function}({', '.join(given)}{constant});"
    if code == "fence.mbarrier_init.release.cluster;":
        return ";"
    for words, call in _HOPPER:
        if code.startswith(words):
            assert call == ";" or call.count("{}") == len(operands), text
            return call.format(*operands)
    raise ValueError(f"PTX that the emulation does not know: {code}")


class Emulated:
    """A CUDA C++ candidate as a Python function.

    Args:
        folder: Where the library is built, or found if built before.
        clusters: See `as_cpp`.
    """

    def __init__(self, kernel_type: KernelType, source: str, folder: Path, *, clusters: bool = False) -> None:
        self.kernel_type = kernel_type
        text = as_cpp(source, clusters)
        digest = hashlib.sha256(
            "\0".join(
                [text, *(p.read_text() for p in (HEADER, RUNTIME, TENSOR_MAPS, HOPPER, CONTRACT)), *FLAGS]
            ).encode()
        ).hexdigest()[:16]
        path = folder / f"{kernel_type.name}-{digest}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            cpp = path.with_suffix(".cpp")
            cpp.write_text(text, encoding="utf-8")
            partial = path.with_suffix(f".{os.getpid()}")
            command = ["g++", *FLAGS, f"-I{HERE}", f"-I{CONTRACT.parent}", str(cpp), "-o", str(partial)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                raise EmulationError(result.stderr[-6000:])
            partial.replace(path)
        self.library = ctypes.CDLL(str(path))
        self.calls_contiguous = 0

    def __call__(
        self, args: Mapping[str, Any], *, schedule: int = 0, at_end: bool = True, merge: bool = True
    ) -> tuple[Tensor, ...]:
        """One call through the C contract, as the generated binding makes it.

        Args:
            args: All schema arguments.
            schedule: The order in which the threads of a block run: 0 forward, 1 backward, 2 shuffled.
            at_end: Tensors lie against the unreadable page behind them, else against the one before them.
            merge: Whether leading dimensions are merged for the types that ask for it.

        Raises:
            EmulationError: An access out of bounds or misaligned, a deadlock, a launch that a device refuses.
            Unsupported: The candidate refuses.
        """
        outputs, code = self._call(args, schedule, at_end, merge)
        if code == NEED_CONTIGUOUS:
            self.calls_contiguous += 1
            packed = {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in args.items()}
            changed = [k for k, v in args.items() if isinstance(v, Tensor) and not v.is_contiguous()]
            if not changed:
                raise EmulationError("asks for contiguous tensors, and all of them are")
            outputs, code = self._call(packed, schedule, at_end, merge)
        if code == UNSUPPORTED:
            raise Unsupported(self.kernel_type.name)
        if code != OK:
            text = (ctypes.c_char * 512).in_dll(self.library, "emu_message").value.decode()
            raise EmulationError(f"code {code}: {text}")
        return outputs

    def _call(
        self, args: Mapping[str, Any], schedule: int, at_end: bool, merge: bool
    ) -> tuple[tuple[Tensor, ...], int]:
        kind = self.kernel_type
        specs = output_specs(kind.outputs, args)
        if all(0 in shape for shape, _ in specs):
            return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in specs), OK
        call = _Call(at_end)
        first = next(v for v in args.values() if isinstance(v, Tensor))
        rows = {
            k
            for k, v in args.items()
            if isinstance(v, Tensor) and v.shape == first.shape and k not in PARAMETERS
        }
        mergeable = [merged(list(args[k].shape), list(args[k].stride())) for k in rows]
        merge = merge and kind.merges_rows and None not in mergeable
        c_args: list[Any] = []
        for arg in kind.schema.args:
            value = args[arg.name]
            if arg.is_tensor:
                c_args.append(None if value is None else call.tensor(value, merge and arg.name in rows))
            elif arg.type.startswith("float"):
                if value is None:
                    value = default_scale(args)
                c_args.append(ctypes.c_double(value))
            elif arg.type == "int":
                if arg.name == "dim":
                    value = value % max(first.dim(), 1)
                c_args.append(ctypes.c_int64(value))
            else:
                c_args.append(
                    ctypes.c_int32(kind.codes[arg.name][value] if arg.type == "str" else int(value))
                )
        made = [call.output(shape, dtype, merge) for shape, dtype in specs]
        scratch = Guarded(0, at_end=at_end)
        workspace = getattr(self.library, f"{kind.name}_workspace", None)
        if workspace is not None:
            workspace.restype = ctypes.c_int64
            scratch = Guarded(workspace(*c_args), at_end=at_end)
        call.memory.append(scratch)
        context = AkContext(STREAM, scratch.address, scratch.size, 0, 1)
        self.library.emu_prepare(ctypes.c_int(schedule), ctypes.c_void_p(STREAM))
        launcher = getattr(self.library, kind.name)
        code = launcher(*c_args, *(pointer for pointer, _ in made), ctypes.byref(context))
        outputs = tuple(
            memory.bytes().view(dtype).reshape(shape).clone()
            for (shape, dtype), (_, memory) in zip(specs, made, strict=True)
        )
        if code == OK:
            for memory in (*(memory for _, memory in made), scratch):
                if memory.slack().strip(b"\xff"):
                    raise EmulationError("wrote outside an output or the workspace")
        call.close()
        return outputs, code


def default_scale(args: Mapping[str, Any]) -> float:
    return float(args["q"].shape[-1]) ** -0.5
