"""Guard bands around what a call allocates, so that a write beside its output or its scratch memory is seen.

A candidate's outputs are new memory of the process that it runs in, allocated by torch, which packs tensors next to each
other. Within `Bands` each such tensor lies in the middle of a larger one, between bands of a known pattern. A Triton
candidate allocates in Python, where a dispatch mode steps in. A compiled one allocates in its binding, through one C
function of torch that the library imports: for the length of the call the library's own entry for that function points
here instead. Its file, which is what ships, is not touched, and what torch returns has the same alignment.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autokernel_hf.judge.arena import GUARD, contiguous_strides

_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 20  # of a band: as large as the tensor between these
_ALIGNMENT = 512  # of memory that torch gives on a GPU; on a CPU it is less


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that was allocated between two bands: all of its memory, as bytes."""

    memory: Tensor
    band: int
    nbytes: int


class Bands:
    """As a context manager: what is allocated within it on the device gets bands.

    Args:
        library: A compiled candidate's shared library, which is loaded already; None for a Triton candidate.
    """

    def __init__(self, device: torch.device, library: Path | None) -> None:
        self._device = device
        self._made: list[_Made] = []
        self._step_in: TorchDispatchMode | _Import = (
            _Factories(device, self._allocate) if library is None else _Import(library, self._allocate)
        )

    def __enter__(self) -> Bands:
        self._step_in.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._step_in.__exit__(kind, error, trace)

    def written(self, outputs: tuple[object, ...]) -> str:
        """What the call wrote beside, as a phrase whose subject is the candidate; empty where nothing is."""
        homes = {o.untyped_storage().data_ptr() for o in outputs if isinstance(o, Tensor)}
        for made in self._made:
            what = "its output" if made.memory.data_ptr() in homes else "its scratch memory"
            sides = {
                "before the start": made.memory[: made.band],
                "behind the end": made.memory[made.band + made.nbytes :],
            }
            for side, band in sides.items():
                count = _others(band)
                if count:
                    return f"writes beside {what}: {count} bytes {side} of {made.nbytes}"
        return ""

    @property
    def count(self) -> int:
        """How many tensors got bands."""
        return len(self._made)

    def _allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor between two bands, whose memory is that of a larger one."""
        reach = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        nbytes = reach * dtype.itemsize
        band = -(-min(max(nbytes, _LEAST_BYTES), _MOST_BYTES) // _ALIGNMENT) * _ALIGNMENT
        memory = torch.empty(2 * band + nbytes, dtype=torch.uint8, device=self._device)
        for part in (memory[:band], memory[band + nbytes :]):
            # Not by torch on a CPU: its pool of threads would spin while the candidate's work.
            part.fill_(GUARD) if part.is_cuda else part.numpy().fill(GUARD)
        self._made.append(_Made(memory, band, nbytes))
        view = torch.empty(0, dtype=dtype, device=self._device)
        return view.set_(memory.untyped_storage(), band // dtype.itemsize, shape, strides)


def _others(band: Tensor) -> int:
    """How many bytes of a band are not the pattern any more."""
    return int((band != GUARD).sum() if band.is_cuda else np.count_nonzero(band.numpy() != GUARD))


_Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


# --- in Python ----------------------------------------------------------------------------------------------------

# Operators that return new memory, by the beginnings of their names.
_MAKERS = ("empty", "new_", "zeros", "ones", "full", "clone", "rand", "arange", "_to_copy")


class _Factories(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, device: torch.device, allocate: _Allocate) -> None:
        super().__init__()
        self._device = device
        self._allocate = allocate

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: see `audit.Recorder`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        namespace, _, operator = func.name().partition("::")
        if namespace != "aten" or not operator.startswith(_MAKERS) or type(made) is not Tensor:
            return made
        # What is copied to another device, to be read by the host, stays there.
        if made.layout is not torch.strided or made.device != self._device:
            return made
        banded = self._allocate(tuple(made.shape), tuple(made.stride()), made.dtype)
        return banded if operator.startswith(("empty", "new_empty")) else banded.copy_(made)


# --- in a library -------------------------------------------------------------------------------------------------

_SYMBOL = b"aoti_torch_empty_strided"
_DTYPES = {  # the codes of torch's C functions (`AK_*` in the candidates' header)
    0: torch.uint8,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
    24: torch.float8_e4m3fn,
}
_SUCCESS, _FAILURE = 0, 1
_Prototype = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_void_p),
)
_libc = ctypes.CDLL(None, use_errno=True)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Import:
    """Points a library's import of torch's allocating function to us, and back."""

    def __init__(self, library: Path, allocate: _Allocate) -> None:
        self._allocate = allocate
        self._function = _Prototype(self._empty_strided)
        self._slots = _slots_of(library, _SYMBOL)
        self._before: list[int] = []

    def __enter__(self) -> None:
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        self._before = [_exchange(slot, address) for slot in self._slots]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for slot, before in zip(self._slots, self._before, strict=True):
            _exchange(slot, before)

    def _empty_strided(
        self,
        rank: int,
        sizes: Any,
        strides: Any,
        dtype: int,
        device_type: int,
        device_index: int,
        result: Any,
    ) -> int:
        try:
            shape, steps = tuple(sizes[:rank]), tuple(strides[:rank])
            made = self._allocate(shape, steps or contiguous_strides(shape), _DTYPES[dtype])
            result[0] = _pointer_of(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(made), None)
        except Exception:  # noqa: BLE001 - no exception may cross into C; the binding says that it got no memory
            return _FAILURE
        return _SUCCESS


class _LinkMap(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_uint64))


_RTLD_DI_LINKMAP = 2
_STRTAB, _SYMTAB, _RELA, _RELASZ, _PLTRELSZ, _JMPREL = 5, 6, 7, 8, 2, 23
_SYMBOL_BYTES, _RELOCATION_BYTES = 24, 24
_PROT_READ_WRITE = 3


def _slots_of(library: Path, symbol: bytes) -> list[int]:
    """The addresses at which a loaded ELF library keeps the address of a function that it imports.

    Source: System V ABI, chapter 5 (dynamic section, relocation table), in its 64-bit form with addends.
    """
    handle = ctypes.CDLL(str(library))._handle  # loaded already: this counts it once more
    found = ctypes.POINTER(_LinkMap)()
    if _libc.dlinfo(ctypes.c_void_p(handle), _RTLD_DI_LINKMAP, ctypes.byref(found)) != 0:
        return []
    tags: dict[int, int] = {}
    at = found.contents.dynamic
    while True:
        tag, value = _words(at, 2)
        if tag == 0:
            break
        tags[tag] = value
        at += 16
    slots = []
    for table, size in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
        for entry in range(tags.get(table, 0), tags.get(table, 0) + tags.get(size, 0), _RELOCATION_BYTES):
            offset, info = _words(entry, 2)
            name = _words(tags[_SYMTAB] + (info >> 32) * _SYMBOL_BYTES, 1)[0] & 0xFFFFFFFF
            if info >> 32 and ctypes.string_at(tags[_STRTAB] + name) == symbol:
                slots.append(found.contents.base + offset)
    return slots


def _words(address: int, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_uint64 * count).from_address(address))


def _exchange(slot: int, address: int) -> int:
    """Write an address into a slot, which the loader may have made read-only; what was there before."""
    page = slot & -mmap.PAGESIZE
    if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), _PROT_READ_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "the memory of a library cannot be made writable")
    place = ctypes.c_uint64.from_address(slot)
    before = int(place.value)
    place.value = address
    return before
