"""Reading a language model's answer: edits or a whole file, and nothing that only looks like one.

An answer holds one line `Hypothesis: ...`, and then either edits of the file that was shown,

    <<<<<<< SEARCH
    lines of the file, exactly as they stand there, enough of them to occur once
    =======
    the lines that take their place
    >>>>>>> REPLACE

one block a place, applied in order, or the whole new file in one code block between lines of three backticks. What
cannot be used is told by its fault and in words that a model can act on; half a file is never taken for a whole one.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autokernel_hf import tunables
from autokernel_hf.contract import declared_type
from autokernel_hf.errors import CandidateError

Fault = Literal["empty", "refused", "no_code", "cut_off", "bad_edit", "not_whole", "unchanged", "contract"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an answer holds: a source, or the fault that leaves it without one.

    Args:
        words: For a fault, what is wrong, for the model and for the run's story.
    """

    source: str | None = None
    hypothesis: str = ""
    fault: Fault | None = None
    words: str = ""


def read(text: str, *, parent: str, backend: str, cut_off: bool = False) -> Reading:
    """The new source that an answer proposes.

    Args:
        text: The answer.
        parent: The file that the model was shown, which edits apply to.
        cut_off: Whether the answer ended at its token limit.
    """
    text, thinking = _without_thoughts(text.replace("\r\n", "\n"))
    hypothesis = hypothesis_of(text)

    def faulty(fault: Fault, words: str) -> Reading:
        return Reading(hypothesis=hypothesis, fault=fault, words=words)

    if cut_off or thinking:
        return faulty("cut_off", "The answer ended before it was complete.")
    if not text.strip():
        return faulty("empty", "The answer was empty.")
    if _START.search(text):
        blocks, closed = _blocks(text)
        if not closed:
            return faulty("cut_off", "The last edit block has no >>>>>>> REPLACE line.")
        try:
            source = apply(parent, blocks)
        except EditError as error:
            return faulty("bad_edit", str(error))
    else:
        found, closed = _whole_file(text, parent, backend)
        if found is None and not closed:
            return faulty("cut_off", "The code block is not closed: the file is not complete.")
        if found is None:
            return faulty(
                "no_code", "The answer holds neither an edit block nor a whole file in a code block."
            )
        source = found
    if normalised(source, backend) == normalised(parent, backend):
        return faulty("unchanged", "The new file does the same as the one that was shown.")
    missing = _incomplete(source, backend)
    if missing is not None:
        return faulty("not_whole", missing)
    return Reading(source=source, hypothesis=hypothesis)


def hypothesis_of(text: str) -> str:
    """The line `Hypothesis: ...` of an answer, else its first line of prose, clipped; empty where there is none."""
    stated = re.search(r"^[\W_]*hypothesis\**\s*:\**\s*(\S.*)$", text, re.IGNORECASE | re.MULTILINE)
    if stated:
        return _clipped(stated[1].strip().removesuffix("**"))
    prose = re.sub(r"```.*?(```|\Z)", "", text, flags=re.DOTALL)
    prose = re.sub(r"<{5,} SEARCH.*?(>{5,} REPLACE|\Z)", "", prose, flags=re.DOTALL)
    first = next((line.strip(" #*_-") for line in prose.splitlines() if re.search(r"\w{3}", line)), "")
    return _clipped(first)


def _clipped(text: str, most: int = 200) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 3] + "..."


def _without_thoughts(text: str) -> tuple[str, bool]:
    """The text without a reasoning model's thoughts, and whether it ends within them."""
    text = re.sub(r"<think(?:ing)?>.*?</think(?:ing)?>", "", text, flags=re.DOTALL)
    # Some servers leave the opening tag to the template, so that only the closing one is seen.
    text = re.sub(r"\A.*?</think(?:ing)?>", "", text, flags=re.DOTALL)
    if (opened := re.search(r"<think(?:ing)?>", text)) is not None:
        return text[: opened.start()], True
    return text, False


# --- edits --------------------------------------------------------------------------------------------------------

_START = re.compile(r"^[ \t]*<{5,9} ?SEARCH[ \t]*$", re.MULTILINE)
_MIDDLE = re.compile(r"[ \t]*={5,9}[ \t]*")
_END = re.compile(r"[ \t]*>{5,9} ?REPLACE[ \t]*")


class EditError(ValueError):
    """An edit cannot be applied; the words say which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replace lines that occur once by others."""

    search: tuple[str, ...]
    replace: tuple[str, ...]


def _blocks(text: str) -> tuple[list[Edit], bool]:
    """All edit blocks, and whether the last one is closed."""
    edits: list[Edit] = []
    search: list[str] = []
    replacement: list[str] = []
    into: list[str] | None = None
    for line in text.split("\n"):
        if into is None:
            if _START.match(line):
                search, replacement = [], []
                into = search
        elif into is search and _MIDDLE.fullmatch(line):
            into = replacement
        elif into is replacement and _END.fullmatch(line):
            edits.append(Edit(search=tuple(search), replace=tuple(replacement)))
            into = None
        else:
            into.append(line)
    return edits, into is None


def apply(source: str, edits: Sequence[Edit]) -> str:
    """The source after all edits, one after the other.

    Raises:
        EditError: The lines of one do not occur, or occur more than once.
    """
    lines = source.split("\n")
    for number, edit in enumerate(edits, start=1):
        wanted = _bare(edit.search)
        if not wanted:
            raise EditError(f"Edit {number} has an empty SEARCH part: it must quote lines of the file.")
        places = _places(lines, wanted)
        loose = False
        if not places:
            # Blanks at the ends of lines are not what an edit is about.
            places = _places([line.rstrip() for line in lines], [line.rstrip() for line in wanted])
            loose = True
        if not places:
            raise EditError(
                f"Edit {number}: its SEARCH lines do not occur in the file.{_nearest(lines, wanted)}"
            )
        if len(places) > 1:
            raise EditError(
                f"Edit {number}: its SEARCH lines occur {len(places)} times in the file"
                f"{' (blanks at line ends aside)' if loose else ''}; quote more lines around the place."
            )
        at = places[0]
        lines[at : at + len(wanted)] = _bare(edit.replace)
    return "\n".join(lines)


def _bare(lines: Sequence[str]) -> list[str]:
    """Lines without empty ones at both ends, and without a code fence around them."""
    kept = list(lines)
    while kept and (not kept[0].strip() or kept[0].strip().startswith("```")):
        kept.pop(0)
    while kept and (not kept[-1].strip() or kept[-1].strip() == "```"):
        kept.pop()
    return kept


def _places(lines: Sequence[str], wanted: Sequence[str]) -> list[int]:
    span = len(wanted)
    return [i for i in range(len(lines) - span + 1) if list(lines[i : i + span]) == list(wanted)]


def _nearest(lines: Sequence[str], wanted: Sequence[str]) -> str:
    """The line of the file that is most like the first wanted one that does not occur, as a hint."""
    present = {line.strip() for line in lines}
    absent = next((w for w in wanted if w.strip() and w.strip() not in present), None)
    if absent is None:
        return " Each of these lines occurs, but not one after the other."
    close = difflib.get_close_matches(absent.strip(), sorted(present - {""}), n=1, cutoff=0.6)
    return f" Not in the file: {absent.strip()!r}." + (f" Most like it: {close[0]!r}." if close else "")


# --- whole files --------------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^[ \t]*```")


def _whole_file(text: str, parent: str, backend: str) -> tuple[str | None, bool]:
    """The last code block that is a candidate and not what was shown; and whether every block is closed."""
    blocks: list[str] = []
    inside: list[str] | None = None
    for line in text.split("\n"):
        if _FENCE.match(line):
            if inside is None:
                inside = []
            else:
                blocks.append("\n".join(inside) + "\n")
                inside = None
        elif inside is not None:
            inside.append(line)
    if inside is None and not blocks and declared_type(text, backend) and _begins_as_code(text, backend):
        blocks = [text.strip("\n") + "\n"]  # the bare file, without a code block
    candidates = [b for b in blocks if _entry(b, backend)]
    new = [b for b in candidates if normalised(b, backend) != normalised(parent, backend)]
    chosen = (new or candidates)[-1:]
    return (chosen[0] if chosen else None), inside is None


def _entry(source: str, backend: str) -> bool:
    """Whether a block looks like a candidate: it names a kernel type, or defines the entry point."""
    mark = r"^def kernel_fn\b" if backend == "triton" else r'extern\s+"C"'
    return declared_type(source, backend) is not None or re.search(mark, source, re.MULTILINE) is not None


def _begins_as_code(text: str, backend: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    if backend == "triton":
        return first.startswith(("KERNEL_TYPE", "import ", "from ", '"""', "# "))
    return first.startswith(("//", "#include", "/*"))


def _incomplete(source: str, backend: str) -> str | None:
    """Why a source cannot be a whole candidate, in words; None where nothing speaks against it."""
    if backend == "triton":
        try:
            ast.parse(source)
        except SyntaxError as error:
            at_end = (error.lineno or 0) >= source.rstrip().count("\n") + 1
            where = "it breaks off" if at_end else f"line {error.lineno}"
            return f"The new file is not Python: {where}: {error.msg}."
    else:
        code = re.sub(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", "", normalised(source, backend))
        open_braces = code.count("{") - code.count("}")
        # Alternatives between #if and #else may each open a brace; but then the file ends as files do.
        ends = re.search(r"(^\}.*|^#endif.*|;)\s*\Z", source.rstrip(), re.MULTILINE)
        if open_braces > 0 and ends is None:
            return f"The new file is not complete: {open_braces} braces are not closed."
    return None


# --- is it new? ---------------------------------------------------------------------------------------------------

_C_PARTS = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))
    |(?P<directive>^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n/]|/(?![/*]))*)|(?P<blank>\s+)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def normalised(source: str, backend: str) -> str:
    """The source without comments and layout: two files with the same one do the same.

    The comments that name a C file's type and domain are part of what it does.
    """
    if backend == "triton":
        try:
            return ast.dump(_without_docstrings(ast.parse(source)))
        except SyntaxError:
            return " ".join(source.split())
    parts: list[str] = []
    at = 0
    for found in _C_PARTS.finditer(source):
        parts.append(source[at : found.start()])
        at = found.end()
        if found["text"]:
            parts.append(found["text"])
        elif found["directive"]:
            parts.append("\n" + " ".join(found["directive"].replace("\\\n", " ").split()) + "\n")
        elif found["comment"] and re.match(r"//\s*(kernel_type|supports)\s*:", found["comment"]):
            parts.append("\n#" + " ".join(found["comment"].split()) + "\n")
        else:
            parts.append(" ")
    parts.append(source[at:])
    lines = (_tight(line) for line in "".join(parts).split("\n"))
    return "\n".join(line for line in lines if line)


def _tight(line: str) -> str:
    """A line without blanks, except where they hold two words or operators apart."""
    flat = " ".join(line.split())
    if flat.startswith("#"):
        return flat  # in a macro a blank can mean something
    return re.sub(
        r"(?<![\w]) (?=[\w(\[{])|(?<=[\w)\]}]) (?![\w])|(?<=[;,(){}\[\]]) | (?=[;,(){}\[\]])", "", flat
    )


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) or not body:
            continue
        first = body[0]
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            node.body = body[1:] or [ast.Pass()]
    return tree


def structure(source: str, backend: str) -> str:
    """The normalised source with every tunable at its first choice: equal where two files differ in tunables alone."""
    try:
        firsts = {t.name: t.choices[0] for t in tunables.parse(source)}
        return normalised(tunables.substitute(source, firsts), backend)
    except CandidateError:
        return normalised(source, backend)


def difference(old: str, new: str, most: int = 80) -> str:
    """A unified diff without its header, of at most `most` lines."""
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2))[2:]
    if len(lines) > most:
        lines = [*lines[:most], f"... and {len(lines) - most} lines more"]
    return "\n".join(lines)
