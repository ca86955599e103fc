"""Reading answers: what is taken, what is not, and in which words a fault is told."""

from __future__ import annotations

import re

import pytest

from autokernel_hf.kernels import backends, kernel_types, starter
from autokernel_hf.llm_edits import Edit, apply, difference, hypothesis_of, normalised, read, structure

PARENT = """// kernel_type: rmsnorm
#include "autokernel.h"
constexpr int kA = 1;  // tune(compute): 1, 2

extern "C" int rmsnorm(const AkTensor *x) {
  int total = 0;
  for (int i = 0; i < 4; ++i) total += i;
  for (int j = 0; j < 4; ++j) total += j;
  return total;
}
"""
WHOLE = PARENT.replace("total += j", "total += 2 * j")
PYTHON = """import torch

KERNEL_TYPE = "softmax"
BLOCK = 4  # tune(block): 4, 8


def kernel_fn(x, dim=-1):
    return torch.empty_like(x)
"""


def edit(search: str, replace: str) -> str:
    return f"<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE\n"


def fault(text: str, **more: object) -> str | None:
    found = read(text, parent=PARENT, backend="cpp", **more)
    assert (found.source is None) == (found.fault is not None)
    assert found.fault is None or found.words
    return found.fault


def test_edits_are_applied_in_order_to_the_file_that_was_shown() -> None:
    text = (
        "Hypothesis: twice the work, half the time.\n\n"
        + edit("  int total = 0;", "  int total = 1;")
        + "\nand then\n\n"
        + edit("  int total = 1;\n  for (int i = 0; i < 4; ++i) total += i;", "  int total = 1;")
    )
    found = read(text, parent=PARENT, backend="cpp")
    assert found.fault is None
    assert found.source == PARENT.replace(
        "  int total = 0;\n  for (int i = 0; i < 4; ++i) total += i;\n", "  int total = 1;\n"
    )
    assert found.hypothesis == "twice the work, half the time."


def test_lines_can_be_deleted_and_blanks_at_their_ends_do_not_matter() -> None:
    found = read(edit("  for (int j = 0; j < 4; ++j) total += j;   ", ""), parent=PARENT, backend="cpp")
    assert found.source == PARENT.replace("  for (int j = 0; j < 4; ++j) total += j;\n", "")
    fenced = f"```cpp\n{edit('  int total = 0;', '  int total = 5;')}```"
    assert "total = 5" in str(read(fenced, parent=PARENT, backend="cpp").source)
    windows = edit("  int total = 0;", "  int total = 6;").replace("\n", "\r\n")
    assert "\r" not in str(read(windows, parent=PARENT, backend="cpp").source)


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("  int totals = 0;", r"do not occur.*'int totals = 0;'.*Most like it: 'int total = 0;'"),
        ("  return total;\n  int total = 0;", "but not one after the other"),
        ("", "empty SEARCH"),
    ],
)
def test_an_edit_that_cannot_be_applied_says_why(search: str, words: str) -> None:
    found = read(edit(search, "x"), parent=PARENT, backend="cpp")
    assert found.fault == "bad_edit"
    assert re.search(words, found.words), found.words


def test_an_edit_that_fits_in_two_places_is_not_guessed() -> None:
    parent = PARENT.replace("total += j", "total += i").replace(
        "int j = 0; j < 4; ++j", "int i = 0; i < 4; ++i"
    )
    found = read(edit("  for (int i = 0; i < 4; ++i) total += i;", "x"), parent=parent, backend="cpp")
    assert found.fault == "bad_edit"
    assert "occur 2 times" in found.words
    with pytest.raises(ValueError, match="Edit 2"):
        apply("a\nb", [Edit(search=("a",), replace=("c",)), Edit(search=("a",), replace=("d",))])


def test_a_whole_file_is_taken_from_its_code_block() -> None:
    found = read(
        f"Hypothesis: more.\n```cpp\n{WHOLE}```\nUse it:\n```sh\nmake\n```", parent=PARENT, backend="cpp"
    )
    assert found.source == WHOLE
    shown_first = read(f"Before:\n```\n{PARENT}```\nAfter:\n```\n{WHOLE}```", parent=PARENT, backend="cpp")
    assert shown_first.source == WHOLE, "not the file that was there before"
    assert read(WHOLE, parent=PARENT, backend="cpp").source == WHOLE, "a bare file, without a code block"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("I would unroll the loop, since that hides latency.", "no_code"),
        ("```sh\nmake\n```", "no_code"),
        (f"```cpp\n{WHOLE[:150]}", "cut_off"),
        (f"```cpp\n{WHOLE}", "cut_off"),
        ("<<<<<<< SEARCH\n  int total = 0;\n=======\n  int tot", "cut_off"),
        ("<think>Let me see. The loop", "cut_off"),
        (f"```cpp\n{WHOLE[:170]}\n```", "not_whole"),
        (f"```cpp\n{PARENT}```", "unchanged"),
        ("```cpp\n" + PARENT.replace("// tune", "//  tune") + "```", "unchanged"),
        (
            "```cpp\n" + PARENT.replace("  int total", "    /* so */ int   total") + "// done\n```",
            "unchanged",
        ),
    ],
)
def test_what_is_no_whole_candidate_is_told_by_its_fault(text: str, expected: str) -> None:
    assert fault(text) == expected


def test_an_answer_at_its_token_limit_is_never_used_even_if_it_looks_whole() -> None:
    assert fault(f"```cpp\n{WHOLE}```", cut_off=True) == "cut_off"


def test_half_a_python_file_is_not_whole() -> None:
    new = PYTHON.replace("empty_like(x)", "zeros_like(x)")
    assert read(f"```python\n{new}```", parent=PYTHON, backend="triton").source == new
    half = read("```python\n" + new[: new.index("(x)") + 2] + "\n```", parent=PYTHON, backend="triton")
    assert half.fault == "not_whole"
    assert "breaks off" in half.words
    wrong = read(f"```python\nx = = 1\n{new}```", parent=PYTHON, backend="triton")
    assert "line 1" in wrong.words


def test_a_models_thoughts_are_not_its_answer() -> None:
    thought = f"<think>First I tried\n```cpp\n{PARENT.replace('4', '5')}```\n</think>\nHypothesis: so.\n```\n{WHOLE}```"
    found = read(thought, parent=PARENT, backend="cpp")
    assert (found.source, found.hypothesis) == (WHOLE, "so.")
    without_opening = thought.removeprefix("<think>")
    assert read(without_opening, parent=PARENT, backend="cpp").source == WHOLE


def test_braces_that_alternatives_open_twice_do_not_make_a_file_incomplete() -> None:
    both = WHOLE.replace(
        "  int total = 0;",
        "#if defined(__AVX2__)\n  if (kA) {\n#else\n  if (!kA) {\n#endif\n  }\n  int total = 0;",
    )
    assert both.count("{") != both.count("}")
    assert read(f"```\n{both}```", parent=PARENT, backend="cpp").source == both


def test_the_hypothesis_is_found_as_models_write_it() -> None:
    assert hypothesis_of("**Hypothesis:** wider loads.\n```x```") == "wider loads."
    assert hypothesis_of("# Hypothesis: *wider* loads") == "*wider* loads"
    assert hypothesis_of("Wider loads help.\n" + edit("a", "b")) == "Wider loads help."
    assert hypothesis_of(edit("a_long_name", "b")) == ""
    assert len(hypothesis_of("Hypothesis: " + "long " * 100)) == 200


def test_files_are_the_same_where_only_comments_and_layout_differ() -> None:
    same = PARENT.replace("  int total = 0;", "  int   total=0 ;  // start").replace(
        "\n\n", "\n\n/* a\n b */\n"
    )
    assert normalised(same, "cpp") == normalised(PARENT, "cpp")
    for old, new in (("total = 0", "total = 1"), ("++i", "i++"), ('"C"', '"C++"'), ("#include", "#  import")):
        assert normalised(PARENT.replace(old, new), "cpp") != normalised(PARENT, "cpp"), new
    domain = PARENT.replace("#include", "// supports: dtype=float32\n#include")
    assert normalised(domain, "cpp") != normalised(PARENT, "cpp")
    assert normalised('f("a // b"); // c', "cpp") == normalised('f("a // b");', "cpp")
    assert normalised("a - -b", "cpp") != normalised("a --b", "cpp")
    assert normalised("#define F (x)\nint a;", "cpp") != normalised("#define F(x)\nint a;", "cpp")
    spaced = PYTHON.replace("    return", '    """Says."""\n    # so\n    return')
    assert normalised(spaced, "triton") == normalised(PYTHON, "triton")
    assert normalised(PYTHON.replace("4  #", "8  #"), "triton") != normalised(PYTHON, "triton")


def test_a_structure_is_what_is_left_without_the_values_of_tunables() -> None:
    assert structure(PARENT.replace("kA = 1", "kA = 2"), "cpp") == structure(PARENT, "cpp")
    assert structure(WHOLE, "cpp") != structure(PARENT, "cpp")
    unreadable = PARENT.replace("tune(compute): 1, 2", "tune(speed): 1, 2")
    assert structure(unreadable, "cpp") == normalised(unreadable, "cpp")


def test_every_starter_reads_as_a_whole_file() -> None:
    """Guards the checks of wholeness against real files: none may be taken for half a one."""
    checked = 0
    for name in kernel_types():
        for backend in backends(name):
            source = starter(name, backend)
            found = read(f"Hypothesis: h\n```\n{source}```", parent="// none", backend=backend)
            assert found.source == source, (name, backend, found.words)
            assert (
                read(f"```\n{source[: len(source) * 2 // 3]}", parent="", backend=backend).fault == "cut_off"
            )
            checked += 1
    assert checked >= 20


def test_a_difference_is_clipped() -> None:
    old = "\n".join(map(str, range(300)))
    told = difference(old, old.replace("1", "x"), most=10)
    assert len(told.splitlines()) == 11
    assert told.endswith("lines more")
    assert difference("a", "a") == ""
