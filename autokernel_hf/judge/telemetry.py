"""How a GPU was when something was timed on it: clocks, power, temperature, and what held its clocks down.

Read from the driver's own library (NVML), which comes with every driver; it takes a millisecond, where the program
`nvidia-smi` takes half a second. Without it, or on a CPU, nothing is known.
Source: NVML API reference, device queries.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache

import torch

from autokernel_hf.records import DeviceState

_SM, _MEMORY = 1, 2  # nvmlClockType_t
_OF_THE_GPU = 0  # nvmlTemperatureSensors_t

# nvmlClocksEventReasons: why a clock is below the highest.
_REASONS = {
    0x1: "idle",
    0x2: "applications_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "hardware_power_brake",
    0x100: "display_clocks",
}


def device_state(device: torch.device) -> DeviceState | None:
    """The state of a GPU now; None on a CPU, or where the driver's library is missing or refuses."""
    if device.type != "cuda":
        return None
    nvml, handle = _nvml(), _handle(device.index or 0)
    if nvml is None or handle is None:
        return None
    reasons = _read(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=ctypes.c_ulonglong)
    power_mw = _read(nvml, "nvmlDeviceGetPowerUsage", handle)
    return DeviceState(
        sm_mhz=_read(nvml, "nvmlDeviceGetClockInfo", handle, _SM),
        memory_mhz=_read(nvml, "nvmlDeviceGetClockInfo", handle, _MEMORY),
        power_w=None if power_mw is None else power_mw / 1e3,
        temperature_c=_read(nvml, "nvmlDeviceGetTemperature", handle, _OF_THE_GPU),
        throttled=None if reasons is None else tuple(name for bit, name in _REASONS.items() if reasons & bit),
    )


@cache
def _nvml() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


@cache
def _handle(index: int) -> ctypes.c_void_p | None:
    """The driver's handle: by the device's own identity, since the driver counts devices that CUDA does not see."""
    nvml = _nvml()
    if nvml is None:
        return None
    properties = torch.cuda.get_device_properties(index)
    handle = ctypes.c_void_p()
    with contextlib.suppress(AttributeError):  # torch before 2.5 does not tell
        name = f"GPU-{properties.uuid}".encode()
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0:
            return handle
    return None


def _read(
    nvml: ctypes.CDLL, name: str, handle: ctypes.c_void_p, *more: int, kind: type = ctypes.c_uint
) -> int | None:
    value = kind(0)
    code = getattr(nvml, name)(handle, *(ctypes.c_int(m) for m in more), ctypes.byref(value))
    return int(value.value) if code == 0 else None
