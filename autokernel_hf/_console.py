"""The command line's one sink: results on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import json as json_module
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

from autokernel_hf.errors import AutokernelError, UsageError
from autokernel_hf.progress import NOTE

T = TypeVar("T")


class Console:
    """Prints for people, or one JSON document for programs; a `Progress` for the stages."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.terminal = sys.stderr.isatty()
        self.told = False  # whether stdout has its JSON document
        self._bar: Any = None
        self._task: Any = None

    # Progress -----------------------------------------------------------------------------------------------------

    def stage(self, text: str) -> None:
        if not self.terminal:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
            return
        self.stop()
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=RichConsole(stderr=True),
        )
        self._task = self._bar.add_task(text, total=None)
        self._bar.start()

    def step(self, done: int, total: int, text: str) -> None:
        if not self.terminal or self._bar is None:
            sys.stderr.write(f"  [{done}/{total}] {text}\n")
            sys.stderr.flush()
            return
        self._bar.update(self._task, completed=done, total=total)
        self._bar.console.print(f"  {text}", markup=False, highlight=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    # Results ------------------------------------------------------------------------------------------------------

    def result(self, value: T, text: Callable[[Console, T], None]) -> None:
        """The command's result: JSON of a record or a plain document, or text for people."""
        self.stop()
        if not self.json:
            text(self, value)
            return
        document = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
        sys.stdout.write(json_module.dumps(document, indent=2, allow_nan=False) + "\n")
        self.told = True

    def line(self, text: str) -> None:
        if not self.json:
            sys.stdout.write(text + "\n")

    def raw(self, text: str) -> None:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table, as wide as a terminal allows; tab-separated where stdout is none, for other programs."""
        if not rows:
            return
        if not sys.stdout.isatty():
            for row in [columns, *rows]:
                sys.stdout.write("\t".join(row) + "\n")
            return
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        table = Table(show_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        RichConsole().print(table)


def fail(message: str, remedy: str) -> None:
    """One sentence and the remedy, on stderr."""
    text = f"Error: {message.strip()}"
    sys.stderr.write(text + "\n")
    if remedy:
        sys.stderr.write(f"  {remedy}\n")


class _StderrOfNow(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is when a line comes: a progress bar puts itself in its place, to make room for lines."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def guarded(command: str, json: bool, debug: bool) -> Iterator[Console]:
    """The wall around a command: known failures become a sentence and an exit code, tracebacks need --debug."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        handlers=[_StderrOfNow()],
        format="%(levelname)s %(name)s: %(message)s" if debug else "%(message)s",
    )
    if not debug:
        logging.getLogger("autokernel_hf").setLevel(NOTE)
    for noisy in ("urllib3", "httpx", "httpcore", "filelock", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    console = Console(json=json)
    try:
        yield console
    except typer.Exit:
        raise
    except KeyboardInterrupt as interrupt:
        console.stop()
        hint = f"Go on with: autokernel-hf optimize --resume {interrupt.args[0]}" if interrupt.args else ""
        _fail(console, "Interrupted.", hint, debug)
        raise typer.Exit(130) from None
    except UsageError as error:
        console.stop()
        _fail(console, error.message, error.remedy, debug)
        raise typer.Exit(2) from None
    except AutokernelError as error:
        console.stop()
        _fail(console, error.message, error.remedy, debug)
        raise typer.Exit(1) from None
    except BrokenPipeError:
        raise typer.Exit(1) from None
    except OSError as error:
        console.stop()
        remedy = {
            errno.ENOSPC: "Free some disk space and run it again.",
            errno.EACCES: "Choose a folder that you may write.",
            errno.EROFS: "Choose a folder on a file system that can be written.",
            errno.EPERM: "Choose a file or folder of your own.",
            errno.EDQUOT: "Free some of your disk quota and run it again.",
            errno.ENOENT: "Check the path.",
            errno.EISDIR: "Name a file, not a folder.",
            errno.ENOTDIR: "Check the path: a part of it is a file, not a folder.",
            errno.ENAMETOOLONG: "Choose a shorter name.",
            errno.EEXIST: "Remove what is there, or choose another name.",
        }.get(error.errno or 0, "")
        # Of a copy the second name is where it went: the place that is full or not to be written.
        where = error.filename2 or error.filename
        what = f"{error.strerror or error}" + (f": {where}" if where else "")
        _fail(console, what, remedy, debug)
        raise typer.Exit(1) from None
    except Exception as error:  # noqa: BLE001 - one of the two walls: what got here is a fault of this program
        console.stop()
        _fail(
            console,
            f"{type(error).__name__} in {command}: {error}",
            "This is a fault of autokernel-hf: please report it with the output of --debug.",
            debug,
        )
        raise typer.Exit(1) from None
    finally:
        console.stop()


def _fail(console: Console, message: str, remedy: str, debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exc()
    fail(message, remedy)
    if console.json and not console.told:  # a result that is told already stays the one document
        document = {"error": {"message": message, "remedy": remedy}}
        sys.stdout.write(json_module.dumps(document, indent=2) + "\n")
