"""Errors that say what happened and what to do about it.

Every failure that a user can cause or cure is an `AutokernelError`; the command line prints it as one sentence and
the remedy, and exits with 1. Anything else is a fault of this program.
"""

from __future__ import annotations

import re

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?")


def last_words(text: str) -> str:
    """What a process that ended said, as one line: the exception of its traceback, or else its last line."""
    lines = text.strip().splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith("Traceback (")), default=None)
    if start is not None:
        for line in lines[start + 1 :]:
            if _EXCEPTION.fullmatch(line):
                return line
    return lines[-1].strip() if lines else ""


def first_line(error: BaseException) -> str:
    """What an exception of another library says, as one sentence: its first line, and the next where that ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].rstrip(".").endswith(":") else lines[0]
    return said[:300].rstrip(".") + "."


class AutokernelError(Exception):
    """A known failure.

    Args:
        message: What happened, with the values that matter.
        remedy: What the user can do about it, as an instruction.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class UsageError(AutokernelError):
    """The request makes no sense as given: exit code 2."""


class ModelError(AutokernelError):
    """A model cannot be found, fetched, built or run."""


class DeviceError(AutokernelError):
    """The device is missing, too small, or sick."""


class ToolMissingError(AutokernelError):
    """A compiler or another program is not installed."""


class CandidateError(AutokernelError):
    """A candidate file breaks the candidate contract (before anything is compiled)."""


class CompileError(AutokernelError):
    """A candidate does not compile; the message carries the compiler's words about the candidate's own lines."""


class JudgeError(AutokernelError):
    """The judge itself, not the candidate, failed."""


class RunError(AutokernelError):
    """A run folder is missing, locked, damaged or of another version."""


class RecordError(AutokernelError, ValueError):
    """A file of this program cannot be read: damaged, of another version, or another kind of file."""


class PackageError(AutokernelError):
    """A kernel package is invalid, or does not load."""


class HubError(AutokernelError):
    """The Hub refused or could not be reached."""
