"""How the stages tell what they are doing, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener. The command line shows a bar on a terminal and plain lines elsewhere."""

    def stage(self, text: str) -> None:
        """A stage begins: one short sentence."""

    def step(self, done: int, total: int, text: str) -> None:
        """A step within the stage is done."""


class Silent:
    """Listens to nothing."""

    def stage(self, text: str) -> None:
        del text

    def step(self, done: int, total: int, text: str) -> None:
        del done, total, text
