"""Tunables: the constants at the top of a candidate, each with its search space in a comment behind it.

    BLOCK = 1024  # tune(memory): 256, 512, 1024, 2048          Python
    constexpr int kUnroll = 4;  // tune(compute): 1, 2, 4, 8     C++, also `#define UNROLL 4  // tune(...): ...`

The word in parentheses says what the constant acts on, which is how a diagnosis finds the right one. The space travels
with the constant, so a proposer needs no knowledge of the file, and one experiment is a diff of one line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from autokernel_hf.errors import CandidateError
from autokernel_hf.records import Scalar

logger = logging.getLogger(__name__)

ACTS_ON = ("block", "memory", "compute", "launch", "algorithm")

_LINE = re.compile(
    r"""^(?P<head>\s*(?:(?:static\s+|inline\s+)*constexpr\s+[\w:\s]+?\s(?P<cpp>\w+)\s*=\s*
        |\#define\s+(?P<macro>\w+)\s+
        |(?P<py>[A-Za-z_]\w*)\s*=\s*))
        (?P<value>[^;\s/#]+)
        (?P<tail>\s*;?\s*(?://|\#)\s*tune\((?P<acts_on>\w+)\):\s*(?P<choices>.+?)\s*)$""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """One tunable constant: its name, present value, and all values that it may take."""

    name: str
    value: Scalar
    choices: tuple[Scalar, ...]
    acts_on: str
    line: int  # from 0


@lru_cache(maxsize=4096)
def parse(source: str) -> tuple[Tunable, ...]:
    """The tunables of a candidate, in the order of the file.

    Raises:
        CandidateError: A `tune` comment that cannot be read, or a present value outside its own space.
    """
    found = []
    for number, line in enumerate(source.splitlines()):
        match = _LINE.match(line)
        if match is None:
            if re.search(r"(?://|#)\s*tune\(", line):
                raise CandidateError(
                    f"Line {number + 1} has a tune comment that cannot be read: {line.strip()}",
                    remedy="Write NAME = VALUE  # tune(memory): A, B, C on one line.",
                )
            continue
        name = match["cpp"] or match["macro"] or match["py"]
        value = _literal(match["value"])
        choices = tuple(_literal(c) for c in match["choices"].split(","))
        if value not in choices:
            raise CandidateError(
                f"Line {number + 1}: {name} is {match['value']}, which is not among its choices.",
                remedy=f"Add it to the list, or use one of {match['choices']}.",
            )
        if match["acts_on"] not in ACTS_ON:
            raise CandidateError(
                f"Line {number + 1}: {name} acts on {match['acts_on']!r}.",
                remedy=f"Use one of {', '.join(ACTS_ON)}.",
            )
        found.append(Tunable(name=name, value=value, choices=choices, acts_on=match["acts_on"], line=number))
    return tuple(found)


def substitute(source: str, values: Mapping[str, Scalar]) -> str:
    """The source with new values for some of its tunables; nothing else changes.

    Raises:
        CandidateError: A name that is no tunable, or a value outside its space.
    """
    lines = source.splitlines(keepends=True)
    known = {t.name: t for t in parse(source)}
    for name, value in values.items():
        tunable = known.get(name)
        if tunable is None or value not in tunable.choices:
            space = "unknown" if tunable is None else f"not among {tunable.choices}"
            raise CandidateError(
                f"{name} = {value} is {space}.", remedy="Use the names and values of the tune comments."
            )
        text = lines[tunable.line].rstrip("\r\n")
        ending = lines[tunable.line][len(text) :]
        match = _LINE.match(text)
        assert match is not None
        lines[tunable.line] = match["head"] + _spelled(value, match["value"]) + match["tail"] + ending
    return "".join(lines)


def values(source: str) -> dict[str, Scalar]:
    """The present values of a candidate's tunables."""
    return {t.name: t.value for t in parse(source)}


def values_if_readable(source: str) -> dict[str, Scalar]:
    """The same for a file that is judged as it is: one whose tune comments cannot be read counts as without tunables."""
    try:
        return values(source)
    except CandidateError as error:
        logger.warning("%s", error)
        return {}


def _literal(text: str) -> Scalar:
    text = text.strip()
    if text in {"True", "true"}:
        return True
    if text in {"False", "false"}:
        return False
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text.strip("\"'")


def _spelled(value: Scalar, old: str) -> str:
    """A literal in the language of the one that it replaces."""
    if isinstance(value, bool):
        return str(value) if old in {"True", "False"} else str(value).lower()
    if isinstance(value, str) and old[:1] in {'"', "'"}:
        return f"{old[0]}{value}{old[0]}"
    return str(value)
