"""Compile a Triton candidate for a GPU that is not here. A program of its own: `python -m autokernel_hf.triton_compile`.

The candidate's `kernel_fn` is called on empty CPU tensors of its type's workloads, with a driver that only names the
target and launches that only compile: so the signatures, constants and options are the ones that it would launch with.
The request and the answer are JSON files; the process takes the candidate's code in, and ends with it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from autokernel_hf.records import Record, TensorSpec, Workload
from autokernel_hf.toolchain import ptxas_uses


class Request(Record):
    """What to compile: the candidate's file, its type, the compute capability times ten, and its dtypes."""

    file: str
    kernel_type: str
    capability: int
    dtypes: tuple[str, ...]


class KernelUse(Record):
    """One compiled kernel and what it takes."""

    name: str
    num_warps: int
    registers: int
    spill_bytes: int  # stores and loads
    shared_bytes: int


class Answer(Record):
    """The kernels that the candidate would launch, or why it does not compile."""

    kernels: tuple[KernelUse, ...] = ()
    error: str = ""


def main() -> int:
    request = Request.load(Path(sys.argv[1]))
    try:
        answer = Answer(kernels=tuple(_compile(request)))
    except Exception as error:  # noqa: BLE001  (the wall of this process: whatever the candidate raises is the answer)
        answer = Answer(error=_explain(error, Path(request.file)))
    answer.save(Path(sys.argv[2]))
    return 0


class _Driver:
    """The part of a Triton driver that compiling needs, for a GPU that is not here."""

    class utils:  # noqa: N801  (Triton's name)
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "max_shared_mem": 232448,
                "multiprocessor_count": 132,
                "max_num_regs": 65536,
                "warpSize": 32,
                "sm_clock_rate": 1980000,
                "mem_clock_rate": 2619000,
                "mem_bus_width": 5120,
            }

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


def _compile(request: Request) -> list[KernelUse]:
    import torch
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from autokernel_hf.kernels import kernel_type

    driver.set_active(_Driver(request.capability))
    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_instead
    module = _import(Path(request.file))
    type_ = kernel_type(request.kernel_type)
    workloads = [_in_domain(w, request.dtypes) for w in type_.workloads["cuda"]]
    refused = ""
    with torch.no_grad():
        for workload in workloads:
            arguments = {
                name: _empty(value) if hasattr(value, "shape") else value for name, value in workload.args
            }
            try:
                module.kernel_fn(**arguments)
            except NotImplementedError as error:
                refused = str(error)
    if not compiled:
        raise RuntimeError(f"kernel_fn launched no kernel on any workload. {refused}".strip())
    return [_use(kernel) for kernel in compiled.values()]


def _in_domain(workload: Workload, dtypes: tuple[str, ...]) -> Workload:
    """The same call in a dtype that the candidate supports."""
    if workload.dtype in dtypes:
        return workload
    args = tuple(
        (name, value.model_copy(update={"dtype": dtypes[0]}))
        if isinstance(value, TensorSpec) and value.dtype == workload.dtype
        else (name, value)
        for name, value in workload.args
    )
    return workload.model_copy(update={"args": args})


def _import(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("candidate", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module
    spec.loader.exec_module(module)
    return module


def _empty(spec: Any) -> Any:
    """A tensor of a spec whose memory nobody has touched: only its shape, strides and alignment matter here."""
    import torch

    from autokernel_hf.kernels.base import DTYPES

    dtype = DTYPES[spec.dtype]
    if spec.strides is None and spec.offset == 0:
        return torch.empty(spec.shape, dtype=dtype)
    strides = spec.strides if spec.strides is not None else torch.empty(spec.shape, device="meta").stride()
    extent = 0 if 0 in spec.shape else 1 + sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True))
    return torch.empty(spec.offset + extent, dtype=dtype).as_strided(spec.shape, strides, spec.offset)


def _use(kernel: Any) -> KernelUse:
    """Triton keeps no register count of a kernel that was not loaded: its own ptxas tells it from the PTX."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel.asm["ptx"]
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    if target is None:
        raise RuntimeError("Triton's PTX names no target.")
    done = subprocess.run(
        [
            get_ptxas(kernel.metadata.target.arch).path,
            "-v",
            f"--gpu-name={target[1]}",
            "-",
            "-o",
            "/dev/null",
        ],
        input=ptx,
        capture_output=True,
        text=True,
        timeout=120,
    )
    uses = ptxas_uses(done.stdout + done.stderr)
    if len(uses) != 1:
        raise RuntimeError(f"ptxas tells nothing of {kernel.metadata.name}: {done.stderr.strip()[:500]}")
    (use,) = uses
    return KernelUse(
        name=kernel.metadata.name,
        num_warps=kernel.metadata.num_warps,
        registers=use.registers,
        spill_bytes=use.spill_bytes,
        shared_bytes=kernel.metadata.shared,
    )


def _explain(error: BaseException, file: Path) -> str:
    """The innermost line of the candidate that an error is about, and the error's words."""
    from triton.compiler.errors import CompilationError

    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    while isinstance(error, CompilationError) and isinstance(error.__cause__, CompilationError):
        error = error.__cause__  # a call of another jit function failed inside of that
    number = 0
    words = str(error)
    if isinstance(error, CompilationError) and error.src is not None and error.node is not None:
        start = source.find(error.src.strip())
        number = source[: max(start, 0)].count("\n") + error.node.lineno
        words = str(error.error_message or error.__cause__ or error).strip()
    else:
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename) == file:
                number = frame.lineno or 0
        words = f"{type(error).__name__}: {error}"
    if 0 < number <= len(lines):
        return f"kernel.py:{number}: error: {words}\n{number:6} | {lines[number - 1]}"
    return words


if __name__ == "__main__":
    sys.exit(main())
