"""The memory that the referee and a child share: inputs, and places for the child's outputs.

One arena a child: the referee owns it, writes the inputs, and finds the outputs in it. On a CPU it is an anonymous
file, on a GPU a block of device memory; the descriptor of either is handed over. Arenas are kept and handed to the next
child, since a new one costs time. Expected results never lie in an arena, and no two children share one.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.judge.device_memory import DeviceMemory
from autokernel_hf.kernels.base import DTYPE_NAMES, DTYPES, Args, KernelType, itemsize, output_specs
from autokernel_hf.records import TensorSpec, Workload

ALIGNMENT = 256
GUARD_BYTES = 256
POISON = 0xFF  # NaN in every floating dtype, -1 in every integer one
GUARD = 0xA5


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a tensor lies: `start` is a byte offset into the arena, aligned; the spec's own offset comes on top."""

    start: int
    spec: TensorSpec

    @property
    def nbytes(self) -> int:
        """Bytes from `start` to the end of the last element, the gaps of a strided view included."""
        return extent(self.spec)

    def to_json(self) -> dict[str, Any]:
        return {"start": self.start, "spec": self.spec.model_dump()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Slot:
        return cls(start=int(data["start"]), spec=TensorSpec.model_validate(data["spec"]))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(spec: TensorSpec) -> int:
    """Bytes that a tensor of this spec spans in its storage, from the storage's start."""
    if 0 in spec.shape:
        return 0
    strides = spec.strides if spec.strides is not None else contiguous_strides(spec.shape)
    reach = 1 + sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True))
    return (spec.offset + reach) * itemsize(spec.dtype)


class Layout:
    """Hands out places, one after the other, with guard bands between them."""

    def __init__(self, start: int = 0) -> None:
        self.end = start

    def place(self, spec: TensorSpec) -> Slot:
        start = -(-(self.end + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        self.end = start + extent(spec) + GUARD_BYTES
        return Slot(start=start, spec=spec)


class Arena:
    """Shared memory as one byte tensor, and views into it."""

    def __init__(self, memory: Tensor, *, descriptor: int, device_memory: DeviceMemory | None = None) -> None:
        self.memory = memory
        self.descriptor = descriptor
        self._device_memory = device_memory

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> Arena:
        """A new arena of at least `nbytes`."""
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if device.type == "cuda":
            return cls._on_device(DeviceMemory.create(nbytes, device))
        descriptor = os.memfd_create("autokernel_arena", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        return cls(_mapped(descriptor, nbytes), descriptor=descriptor)

    def handle(self) -> dict[str, Any]:
        """What a child needs to open it beside the descriptor, which travels with the message."""
        return {"device": str(self.memory.device), "nbytes": self.nbytes}

    @classmethod
    def open(cls, handle: dict[str, Any], descriptor: int) -> Arena:
        """Open in a child what the referee created."""
        device = torch.device(handle["device"])
        if device.type == "cuda":
            return cls._on_device(DeviceMemory.open(descriptor, handle["nbytes"], device))
        return cls(_mapped(descriptor, handle["nbytes"]), descriptor=descriptor)

    @classmethod
    def _on_device(cls, memory: DeviceMemory) -> Arena:
        return cls(memory.tensor(), descriptor=memory.descriptor, device_memory=memory)

    @property
    def nbytes(self) -> int:
        return int(self.memory.numel())

    def view(self, slot: Slot) -> Tensor:
        """The tensor of a slot, without copying."""
        spec = slot.spec
        dtype = DTYPES[spec.dtype]
        strides = spec.strides if spec.strides is not None else contiguous_strides(spec.shape)
        tensor = torch.empty(0, dtype=dtype, device=self.memory.device)
        first = slot.start // dtype.itemsize + spec.offset
        return tensor.set_(self.memory.untyped_storage(), first, spec.shape, strides)

    def write(self, slot: Slot, data: Tensor) -> None:
        """Write values into a slot; of an expanded dimension, which holds one value, the first slice."""
        view = self.view(slot)
        if view.numel() == 0:
            return
        index = tuple(
            slice(0, 1) if s == 0 and n > 1 else slice(None)
            for n, s in zip(view.shape, view.stride(), strict=True)
        )
        view[index].copy_(data[index])

    def span(self, first: Slot, last: Slot) -> Tensor:
        """The bytes from the guard band before one slot to the one behind another."""
        return self.memory[first.start - GUARD_BYTES : last.start + last.nbytes + GUARD_BYTES]

    def fill(self, slot: Slot, value: int) -> None:
        """Fill a slot and the guard bands around it with one byte value."""
        self.memory[slot.start - GUARD_BYTES : slot.start + slot.nbytes + GUARD_BYTES].fill_(value)

    def close(self) -> None:
        """Give the memory back (views must not be used any more)."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._device_memory is not None:
            self._device_memory.close()
        elif self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._device_memory = -1, None


class Pool:
    """The arenas of a session that no child uses at the moment, all of one size."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._free: list[Arena] = []

    def reserve(self) -> None:
        """Have one ready; on a GPU this also starts CUDA."""
        self.give(self.take())

    def take(self) -> Arena:
        return self._free.pop() if self._free else Arena.create(self._nbytes, self._device)

    def give(self, arena: Arena) -> None:
        self._free.append(arena)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor's elements as bytes, in order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(bits_of(a), bits_of(b)))


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def outputs_of(kernel_type: KernelType, workload: Workload) -> tuple[TensorSpec, ...]:
    """Shapes and dtypes of a workload's outputs, without making its inputs."""
    fake: Args = {
        name: torch.empty_strided(
            value.shape,
            value.strides or contiguous_strides(value.shape),
            dtype=DTYPES[value.dtype],
            device="meta",
        )
        if isinstance(value, TensorSpec)
        else value
        for name, value in workload.args
    }
    return tuple(
        TensorSpec(shape=shape, dtype=DTYPE_NAMES[dtype])
        for shape, dtype in output_specs(kernel_type.outputs, fake)
    )
