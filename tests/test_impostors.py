"""No call that the judge checks can be passed without computing: impostors fail on every one, of every type.

An impostor is a function that does not do the work: zeros, the input again, the mean of the right answer, the answer of
the call before, torch's result in the next lower precision. Where one of them is the right answer after all (no
elements, one column of a softmax), the type's file lists it, and that list must not be longer than it need be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from autokernel_hf.judge import checks
from autokernel_hf.judge.cases import STAGES, Scope, cases_of, key_of
from autokernel_hf.kernels import base, kernel_type, kernel_types
from autokernel_hf.kernels.base import KernelType, make_inputs, round_to_bits
from autokernel_hf.records import Workload
from autokernel_hf.variant import Domain

TYPES = sorted(kernel_types())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The calls are small: a pool of threads only waits for itself, the more so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Larger timed workloads take seconds in float64; a session holds each of its own against the impostors before it times.
LARGEST = 1 << 20
# Of calls with more elements, those in the other dtypes are slow: what is allowed grows with a sum's length, in float32 most.
LARGEST_IN_EVERY_DTYPE = 1 << 17


def calls_of(found: KernelType) -> list[Workload]:
    """Every call of every stage, in every dtype of the type, once."""
    scope = Scope(kernel_type=found, workloads=found.workloads["cpu"], dtypes=found.dtypes, backend="cuda")
    whole = Domain(dtypes=found.dtypes, values={})
    calls = [case.workload for stage in STAGES for case in cases_of(stage, scope, whole)]
    distinct = {key_of(w): w for w in calls}.values()
    return [w for w in distinct if max(math.prod(s.shape) for _, s in w.tensors) <= LARGEST]


def is_slow(workload: Workload) -> bool:
    largest = max(math.prod(s.shape) for _, s in workload.tensors)
    return largest > LARGEST_IN_EVERY_DTYPE and workload.dtype != "float32"


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "large"])
@pytest.mark.parametrize("name", TYPES)
def test_impostors_fail_on_every_call_that_the_judge_checks(name: str, slow: bool) -> None:
    found = kernel_type(name)
    calls = [w for w in calls_of(found) if is_slow(w) == slow]
    if slow and not calls:
        pytest.skip("no call of this type is larger")
    if not slow:
        assert {w.dtype for w in calls} == set(found.dtypes)
        assert {w.values for w in calls} >= set(found.adversarial)
    passed = {}
    for workload in calls:
        args, before = make_inputs(found, workload, 11), make_inputs(found, workload, 12)
        impostors = checks.admit(found, workload, (args, before))
        if impostors:
            passed[f"{workload.label} {workload.dtype} {workload.values}"] = impostors
    assert passed == {}


# Exempt on ordinary values of ordinary shapes: an activation that is none copies its input; one loss is its own mean.
EXEMPT_ON_ORDINARY_CALLS = {
    "activation": {"input"},
    "activation_backward": {"input"},
    "cross_entropy": {"mean"},
}
# The most calls of a type that an impostor is exempt from, as a share; half of the losses are one number.
MOST_EXEMPT = {("cross_entropy", "mean"): 0.5}


@pytest.mark.parametrize("name", TYPES)
def test_a_type_exempts_only_what_it_must(name: str) -> None:
    found = kernel_type(name)
    calls = calls_of(found)
    for impostor in checks.IMPOSTORS:
        exempt = [w for w in calls if found.impostors_exempt(impostor, w)]
        assert len(exempt) <= MOST_EXEMPT.get((name, impostor), 0.33) * len(calls), impostor
        ordinary = [w for w in exempt if key_of(w) in ordinary_calls(found)]
        assert not ordinary or impostor in EXEMPT_ON_ORDINARY_CALLS.get(name, set()), ordinary[0].label


def ordinary_calls(found: KernelType) -> set[str]:
    scope = Scope(kernel_type=found, workloads=(), dtypes=found.dtypes)
    whole = Domain(dtypes=found.dtypes, values={})
    return {key_of(case.workload) for case in cases_of("shapes", scope, whole)}


@pytest.mark.parametrize("name", TYPES)
def test_torchs_own_result_passes_where_its_narrow_one_fails(name: str) -> None:
    found = kernel_type(name)
    axes, options = found.sweep[0]
    for dtype in found.dtypes:
        workload = found.build(axes, dtype, options)
        args = make_inputs(found, workload, 3)
        expected = checks.expect(found, workload, args)
        right = found.reference(**args)
        narrow = checks.IMPOSTORS["narrow"](found, args, expected, expected)
        cast = [n.to(dtype_) for n, (_, dtype_) in zip(narrow, expected.specs, strict=True)]
        assert checks.check_values(right, expected, found, workload).problem == ""
        assert "wrong" in checks.check_values(cast, expected, found, workload).problem


def test_an_infinity_among_the_outputs_does_not_excuse_the_others() -> None:
    """The size of an output is that of its finite elements: one infinity must not make every error small."""
    found = kernel_type("activation")
    workload = found.build({"M": 8, "N": 64}, "float32", {"kind": "none"})
    exact = torch.ones(8, 64, dtype=torch.float64)
    exact[0, 0] = math.inf
    expected = checks.Expected(
        outputs=(exact,), torch_error=(0.0,), specs=((tuple(exact.shape), torch.float32),)
    )
    output = exact.float()
    assert checks.check_values([output], expected, found, workload).problem == ""
    output[3, 5] = 1.001
    assert "element (3, 5) is 1.001" in checks.check_values([output], expected, found, workload).problem


def test_narrow_loses_digits_but_not_range() -> None:
    x = torch.tensor([1.0, 1.0 + 2.0**-12, 3e38, 1e-38, math.inf, 0.0], dtype=torch.float32)
    rounded = round_to_bits(x, 11).float()
    assert rounded[0] == 1.0 and rounded[1] == 1.0
    assert rounded[2] == pytest.approx(3e38, rel=2.0**-11) and rounded[3] == pytest.approx(
        1e-38, rel=2.0**-11
    )
    assert rounded[4] == math.inf and rounded[5] == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_what_is_drawn_on_a_gpu_is_as_good(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large calls are drawn there: of the same form as those drawn here, and impostors fail on them too."""
    monkeypatch.setattr(base, "DRAWN_ON_CPU", 0)
    found = kernel_type(name)
    for workload in calls_of(found)[::3]:
        here, there = (make_inputs(found, workload, 11, device) for device in ("cpu", "cuda"))
        for key, value in here.items():
            if isinstance(value, torch.Tensor):
                other = there[key]
                assert other.device.type == "cuda" and other.dtype == value.dtype
                assert other.shape == value.shape and other.stride() == value.stride()
        before = make_inputs(found, workload, 12, "cuda")
        assert checks.admit(found, workload, (there, before)) == (), f"{workload.label} {workload.dtype}"
