"""Seeds that a candidate cannot know."""

from __future__ import annotations

import hashlib
import os


class Seeds:
    """A source of seeds: from the system, or, to reproduce a verdict, from one given seed."""

    def __init__(self, seed: int | None) -> None:
        self._key = os.urandom(16) if seed is None else f"given {seed}".encode()
        self._count = 0

    def next(self) -> int:
        """A new seed, 63 bits."""
        self._count += 1
        digest = hashlib.sha256(self._key + self._count.to_bytes(8, "big")).digest()
        return int.from_bytes(digest[:8], "big") >> 1
