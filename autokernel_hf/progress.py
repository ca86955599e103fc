"""How the stages tell what they are doing, without knowing who listens."""

from __future__ import annotations

import logging
from typing import Protocol

NOTE = 25
"""The level of log records that a user wants to see without asking: what a long step is doing, what it waits for.

Processes pass records of this level and above on to the one that started them.
"""
logging.addLevelName(NOTE, "NOTE")


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
