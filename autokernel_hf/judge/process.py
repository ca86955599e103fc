"""The referee's entry point. It starts the fork server first, so that both import torch at the same time."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from autokernel_hf.judge.server import Server
from autokernel_hf.judge.session import Settings

_NVIDIA = Path("/dev/nvidiactl")  # the driver's device, without starting CUDA


def main(descriptor: str) -> None:
    """Serve one session over an inherited descriptor."""
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Connection(int(descriptor))
    try:
        settings = channel.recv()
    except EOFError:
        return
    assert isinstance(settings, Settings)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    server = None
    if settings.on_cpu:
        server = Server(interpret=settings.backend == "triton", device="cpu")
    elif _NVIDIA.exists():
        server = Server(
            interpret=False, device="cuda"
        )  # the referee ends it where CUDA finds no GPU after all

    from autokernel_hf.judge import service

    steps = (("interpreter", settings.opened_at, began), ("imports", began, time.monotonic()))
    service.serve(channel, settings, server, steps)
    os._exit(0)  # all that it started has ended; taking torch apart would only take time


def _end_with(parent: int) -> None:
    """End this process, and so the server and all children, when the orchestrator has ended."""
    wait = threading.Event()
    while os.getppid() == parent:
        wait.wait(0.5)
    os._exit(1)
