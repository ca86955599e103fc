"""Device memory that two processes share through a file descriptor.

CUDA's inter-process handles, which `torch.multiprocessing` uses, need a socket that is named after the pid namespace: they
do not open behind the walls of a child. A descriptor passes through any wall that lets it be handed over. See the
CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.errors import JudgeError

_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _AS_DESCRIPTOR, _READ_AND_WRITE = 1, 1, 1, 3
_RECOMMENDED = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """An address as torch takes it over without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class DeviceMemory:
    """A block of device memory, mapped into this process. Its descriptor stays open as long as it does."""

    def __init__(self, handle: int, descriptor: int, nbytes: int, device: torch.device) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.device = device
        self._handle = ctypes.c_uint64(handle)
        self._address = ctypes.c_uint64()
        size = ctypes.c_size_t(nbytes)
        _call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            size,
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            _0,
        )
        _call("cuMemMap", self._address, size, ctypes.c_size_t(0), self._handle, _0)
        access = _Access(_Location(_ON_DEVICE, _index(device)), _READ_AND_WRITE)
        _call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """New memory of at least `nbytes` (at least 1), with whatever is in it.

        Raises:
            OutOfMemoryError: torch's, if the device has too little.
            JudgeError: The driver cannot share memory in this way.
        """
        _start(device)
        properties = _Properties(
            type=_PINNED, handle_types=_AS_DESCRIPTOR, location=_Location(_ON_DEVICE, _index(device))
        )
        grain = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(properties), _RECOMMENDED)
        nbytes = -(-nbytes // grain.value) * grain.value
        handle = ctypes.c_uint64()
        arguments = (ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(properties), _0)
        try:
            _call("cuMemCreate", *arguments)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # torch holds what it has freed
            _call("cuMemCreate", *arguments)
        descriptor = ctypes.c_int(-1)
        _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _AS_DESCRIPTOR, _0)
        os.set_inheritable(descriptor.value, False)
        return cls(handle.value, descriptor.value, nbytes, device)

    @classmethod
    def open(cls, descriptor: int, nbytes: int, device: torch.device) -> DeviceMemory:
        """What another process has created, by its descriptor, which is owned from here on."""
        _start(device)
        handle = ctypes.c_uint64()
        _call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(descriptor),
            _AS_DESCRIPTOR,
        )
        return cls(handle.value, descriptor, nbytes, device)

    def tensor(self) -> Tensor:
        """All of it as bytes, of shape (nbytes,); not to be used after `close`."""
        return torch.as_tensor(_Bytes(self._address.value, self.nbytes), device=self.device)

    def close(self) -> None:
        """Unmap it; the memory is given back when no process holds it any more."""
        torch.cuda.synchronize(self.device)
        size = ctypes.c_size_t(self.nbytes)
        _call("cuMemUnmap", self._address, size)
        _call("cuMemAddressFree", self._address, size)
        _call("cuMemRelease", self._handle)
        os.close(self.descriptor)


_0 = ctypes.c_uint64(0)


def _start(device: torch.device) -> None:
    if torch.version.hip is not None:
        raise JudgeError(
            "Kernels cannot be judged on an AMD GPU yet.",
            remedy="Judge on an NVIDIA GPU, or with --device cpu.",
        )
    torch.empty(1, device=device)  # starts CUDA's context


def _index(device: torch.device) -> int:
    return int(torch.cuda.current_device()) if device.index is None else device.index


def _call(name: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    code = getattr(driver, name)(*arguments)
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory ({name})")
    if code != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown"
        raise JudgeError(
            f"Device memory cannot be shared with the process of a kernel: {name} says '{said}' ({code}).",
            remedy="Update the GPU's driver.",
        )
