"""The referee's end of the channel to the orchestrator: requests in, answers, errors and remarks out."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from autokernel_hf.errors import AutokernelError
from autokernel_hf.judge.referee import Referee
from autokernel_hf.judge.server import Server
from autokernel_hf.judge.session import Settings
from autokernel_hf.judge.sheet import Step
from autokernel_hf.progress import NOTE


class _Relay(logging.Handler):
    """Passes what a user should see on to the orchestrator."""

    def __init__(self, channel: Connection) -> None:
        super().__init__(NOTE)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # it is gone; the next answer will find out
            self._channel.send(("log", record.levelno, record.getMessage()))


def serve(
    channel: Connection, settings: Settings, server: Server | None, opening: Sequence[Step] = ()
) -> None:
    """Answer requests until the orchestrator closes the channel.

    Args:
        opening: What opening the session took so far.
    """
    began = time.monotonic()
    logging.getLogger("autokernel_hf").addHandler(_Relay(channel))
    torch.set_grad_enabled(False)
    referee: Referee | None = None
    try:
        referee = _answer(channel, partial(Referee, settings, server))
        if referee is not None:
            referee.opening = (*opening, ("device", began, time.monotonic()))
        while referee is not None:
            request = channel.recv()
            _answer(channel, partial(referee.do, request), reply=True)
            referee.prepare()
    except (EOFError, OSError):
        pass
    finally:
        if referee is not None:
            referee.close()
        elif server is not None:
            server.close()


def _answer(channel: Connection, action: Callable[[], Any], *, reply: bool = False) -> Any:
    """Do it, and tell the orchestrator how it went."""
    try:
        result = action()
    except AutokernelError as error:
        channel.send(("error", type(error).__name__, error.message, error.remedy))
        return None
    except Exception:  # noqa: BLE001
        # The wall of this process: a fault of the judge goes to the orchestrator with its traceback.
        channel.send(("fault", traceback.format_exc()))
        return None
    channel.send(("done", result if reply else None))
    return result
