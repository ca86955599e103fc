"""Tunables: parsed from a candidate's own lines, and substituted without touching anything else."""

from __future__ import annotations

import pytest

from autokernel_hf import tunables
from autokernel_hf.errors import CandidateError
from autokernel_hf.kernels import BACKENDS, kernel_types, starter

PYTHON = 'BLOCK = 1024  # tune(memory): 256, 512, 1024\nFAST = True  # tune(algorithm): True, False\nMODE = "a"  # tune(compute): a, b\n'
CPP = (
    "constexpr int kUnroll = 4;  // tune(compute): 1, 2, 4, 8\n"
    "static constexpr std::int64_t kChunk = 4096; // tune(memory): 2048, 4096\n"
    "#define STREAM 0  // tune(memory): 0, 1\n"
    "constexpr bool kTwoPass = false;  // tune(algorithm): true, false\n"
)


def test_parses_every_form_of_constant() -> None:
    found = {t.name: (t.value, t.choices, t.acts_on) for t in tunables.parse(CPP)}
    assert found == {
        "kUnroll": (4, (1, 2, 4, 8), "compute"),
        "kChunk": (4096, (2048, 4096), "memory"),
        "STREAM": (0, (0, 1), "memory"),
        "kTwoPass": (False, (True, False), "algorithm"),
    }
    assert tunables.values(PYTHON) == {"BLOCK": 1024, "FAST": True, "MODE": "a"}


def test_substitution_changes_the_literal_alone() -> None:
    changed = tunables.substitute(CPP, {"kUnroll": 8, "kTwoPass": True})
    assert changed == CPP.replace("kUnroll = 4", "kUnroll = 8").replace("kTwoPass = false", "kTwoPass = true")
    assert tunables.substitute(PYTHON, {"FAST": False, "MODE": "b"}) == PYTHON.replace(
        "True  #", "False  #"
    ).replace('"a"', '"b"')


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = y + 1  # tune(memory): 1, 2", "cannot be read"),
        ("X = 3  # tune(memory): 1, 2", "not among its choices"),
        ("X = 1  # tune(magic): 1, 2", "acts on 'magic'"),
    ],
)
def test_refuses_what_it_cannot_read(source: str, said: str) -> None:
    with pytest.raises(CandidateError, match=said):
        tunables.parse(source)


def test_refuses_values_outside_the_space() -> None:
    with pytest.raises(CandidateError, match="not among"):
        tunables.substitute(PYTHON, {"BLOCK": 3})
    with pytest.raises(CandidateError, match="unknown"):
        tunables.substitute(PYTHON, {"NOPE": 3})


def test_every_starter_has_tunables_that_parse() -> None:
    counted = 0
    for name in kernel_types():
        for backend in BACKENDS:
            source = starter(name, backend)
            if source is not None:
                counted += len(tunables.parse(source))
                for tunable in tunables.parse(source):
                    for choice in tunable.choices:
                        again = tunables.substitute(source, {tunable.name: choice})
                        assert tunables.values(again)[tunable.name] == choice
    assert counted >= 20


def test_a_file_whose_comments_cannot_be_read_counts_as_without_tunables(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert tunables.values_if_readable(PYTHON) == tunables.values(PYTHON) != {}
    assert tunables.values_if_readable("BLOCK = 3  # tune(memory): 1, 2\n") == {}
    assert "not among its choices" in caplog.text
