"""When an output is right: the tolerance rule, its special values, the form of outputs, and the impostors."""

from __future__ import annotations

import math

import pytest
import torch

from autokernel_hf.judge import checks
from autokernel_hf.judge.arena import Arena, Layout
from autokernel_hf.judge.cases import STAGES, Scope, cases_of, holds
from autokernel_hf.kernels import kernel_type, kernel_types
from autokernel_hf.kernels.base import make_inputs
from autokernel_hf.records import TensorSpec, Workload
from autokernel_hf.variant import Domain

RMS = kernel_type("rmsnorm")


def rms(rows: int, columns: int, dtype: str = "float32", values: str = "normal") -> Workload:
    workload = RMS.build({"M": rows, "N": columns}, dtype, {})
    return workload.model_copy(update={"values": values})


def problem_of(output: torch.Tensor, exact: torch.Tensor, *, torch_error: float = 0.0) -> str:
    expected = checks.Expected(
        outputs=(exact,), torch_error=(torch_error,), specs=((tuple(exact.shape), output.dtype),)
    )
    dtype = str(output.dtype).removeprefix("torch.")
    return checks.check_values([output], expected, RMS, rms(1, 64, dtype)).problem


def bound_of(exact: torch.Tensor, dtype: torch.dtype, torch_error: float = 0.0) -> torch.Tensor:
    name = str(dtype).removeprefix("torch.")
    return checks.allowed(exact, torch_error, dtype, RMS, rms(1, 64, name))


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_error_up_to_the_bound_passes_and_a_larger_one_fails(dtype: torch.dtype) -> None:
    exact = torch.full((8,), 1.0, dtype=torch.float64)
    bound = float(bound_of(exact, dtype)[0])
    step = torch.finfo(dtype).eps
    inside = 1.0 + math.floor(bound / step) * step
    output = exact.to(dtype)
    output[3] = inside
    assert problem_of(output, exact) == ""
    output[3] = inside + 2 * step
    assert "element (3,)" in problem_of(output, exact)


def test_the_bound_grows_with_torchs_own_error() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert bound_of(exact, torch.float32, 1.0)[0] == pytest.approx(
        RMS.tolerance.k + float(bound_of(exact, torch.float32)[0])
    )


def test_small_elements_are_held_to_the_size_of_the_whole() -> None:
    exact = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    bounds = bound_of(exact, torch.float32)
    assert bounds[0] == pytest.approx(float(bounds[1]) * math.sqrt(0.75))


def test_denormals_are_held_to_their_own_spacing() -> None:
    exact = torch.full((4,), 1e-40, dtype=torch.float64)
    assert problem_of(exact.to(torch.float32), exact) == ""
    assert problem_of(torch.zeros(4), exact) != ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_stand_where_the_oracle_has_them_and_nowhere_else(value: float) -> None:
    exact = torch.tensor([1.0, value, 2.0], dtype=torch.float64)
    assert problem_of(exact.float(), exact) == ""
    assert "element (1,)" in problem_of(torch.tensor([1.0, 1.5, 2.0]), exact)
    assert "element (2,)" in problem_of(torch.tensor([1.0, value, value]), exact)


def test_an_infinity_of_the_wrong_sign_is_wrong() -> None:
    exact = torch.tensor([math.inf], dtype=torch.float64)
    assert problem_of(torch.tensor([-math.inf]), exact) != ""


def test_beyond_the_range_of_the_dtype_an_infinity_is_right() -> None:
    exact = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert problem_of(torch.tensor([math.inf, 1.0], dtype=torch.float16), exact) == ""
    assert problem_of(torch.tensor([60000.0, 1.0], dtype=torch.float16), exact) != ""
    assert problem_of(torch.tensor([math.nan, 1.0], dtype=torch.float16), exact) != ""


def test_on_the_edge_of_the_range_both_are_right() -> None:
    exact = torch.tensor([65519.0, 65519.0], dtype=torch.float64)
    assert problem_of(torch.tensor([math.inf, 65504.0], dtype=torch.float16), exact) == ""


def test_the_error_ratio_is_against_torch() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    expected = checks.Expected(outputs=(exact,), torch_error=(1e-3,), specs=(((4,), torch.float32),))
    outcome = checks.check_values([torch.full((4,), 1.002)], expected, RMS, rms(1, 4))
    assert outcome.max_abs_error == pytest.approx(2e-3, rel=1e-3)
    assert outcome.error_ratio == pytest.approx(2.0, rel=1e-3)


def test_torchs_own_answer_passes() -> None:
    workload = rms(64, 768, "bfloat16")
    args = make_inputs(RMS, workload, 5)
    outcome = checks.check_values(RMS.reference(**args), checks.expect(RMS, workload, args), RMS, workload)
    assert outcome.problem == ""
    assert outcome.error_ratio == pytest.approx(1.0)


def test_a_narrower_type_is_caught() -> None:
    workload = rms(64, 768)
    args = make_inputs(RMS, workload, 5)
    expected = checks.expect(RMS, workload, args)
    narrow = [o.to(torch.float16).to(torch.float32) for o in expected.outputs]
    assert "elements are wrong" in checks.check_values(narrow, expected, RMS, workload).problem


@pytest.mark.parametrize("name", sorted(kernel_types()))
def test_a_large_call_in_parts_is_the_call(name: str) -> None:
    found = kernel_type(name)
    cut = 0
    for axes, options in found.sweep:
        workload = found.build(axes, "float32", options)
        args = make_inputs(found, workload, 5)
        oracle = checks.Oracle(found, workload, args, part_bytes=4096)
        cut += len(oracle.parts) > 1
        right = found.reference(**args)
        assert oracle.check(right).problem == "", workload.label
        whole = checks.expect(found, workload, args)
        for in_parts, at_once in zip(oracle.torch_error, whole.torch_error, strict=True):
            # Products of fewer rows may be added up in another order.
            assert at_once / 3 <= in_parts <= 3 * at_once
        wrong = [r.clone(memory_format=torch.contiguous_format) for r in right]
        spoiled = [w for w in wrong if w.numel()][-1]  # the gradient of an absent parameter is empty
        spoiled.view(-1)[-1] += 1 + spoiled.abs().max()
        assert "wrong" in oracle.check(wrong).problem, workload.label
    assert cut or name in (
        # Their oracles take a head, or an element, at a time.
        "flash_attention",
        "rotary_embedding",
        "rotary_embedding_backward",
        # A weight's gradient is a sum over all rows.
        "layernorm_backward",
        "rmsnorm_backward",
    )


# --- form -------------------------------------------------------------------------------------------------------------

GOOD = {
    "type": "Tensor",
    "shape": [2, 3],
    "dtype": "float32",
    "device": "cpu",
    "contiguous": True,
    "aliases_input": False,
    "aliases_last": False,
}
FORM = checks.Expected(outputs=(torch.zeros(2, 3),), torch_error=(0.0,), specs=(((2, 3), torch.float32),))


def test_good_form_has_no_problem() -> None:
    assert checks.check_form([GOOD], False, FORM, "cpu") == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": "Parameter"}, "not a plain tensor"),
        ({"dtype": "float16"}, "dtype float16 instead of float32"),
        ({"shape": [3, 2]}, "shape (3, 2) instead of (2, 3)"),
        ({"device": "cuda"}, "is on cuda"),
        ({"contiguous": False}, "not contiguous"),
        ({"aliases_input": True}, "shares memory with an input"),
        ({"aliases_last": True}, "not new"),
    ],
)
def test_bad_form_is_named(change: dict[str, object], said: str) -> None:
    assert said in checks.check_form([{**GOOD, **change}], False, FORM, "cpu")


def test_the_number_of_outputs_is_checked() -> None:
    assert "2 outputs instead of 1" in checks.check_form([GOOD, GOOD], False, FORM, "cpu")


# --- impostors and cases, of every type -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(kernel_types()))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_impostor_passes_a_call_of_the_sweep(name: str, dtype: str) -> None:
    found = kernel_type(name)
    for axes, options in found.sweep if dtype == "float32" else found.sweep[:2]:
        workload = found.build(axes, dtype, options)
        calls = (make_inputs(found, workload, 11), make_inputs(found, workload, 12))
        assert checks.admit(found, workload, calls) == (), workload.label


def test_an_impostor_that_passes_is_named() -> None:
    workload = rms(4, 64, values="normal")
    args = make_inputs(RMS, workload, 1)
    expected = checks.expect(RMS, workload, args)
    blank = checks.Expected(
        outputs=tuple(torch.zeros_like(o) for o in expected.outputs),
        torch_error=(1.0,),
        specs=expected.specs,
    )
    assert set(checks.passing_impostors(RMS, workload, args, blank, blank)) >= {"zeros", "mean", "previous"}


@pytest.mark.parametrize("name", sorted(kernel_types()))
def test_every_stage_of_every_type_has_cases(name: str) -> None:
    found = kernel_type(name)
    scope = Scope(kernel_type=found, workloads=found.workloads["cpu"], dtypes=found.dtypes)
    whole = Domain(dtypes=found.dtypes, values={})
    for stage in STAGES:
        cases = cases_of(stage, scope, whole)
        assert cases
        assert not any(case.refuse for case in cases)
    covered = {case.workload.dtype for case in cases_of("shapes", scope, whole)}
    assert {"float32", "float16", "bfloat16"} <= covered


@pytest.mark.parametrize("name", ["add_norm", "layernorm", "rmsnorm", "softmax", "softmax_backward"])
def test_rows_that_a_triton_program_could_not_hold_are_asked_of_compiled_code_alone(name: str) -> None:
    found = kernel_type(name)
    whole = Domain(dtypes=found.dtypes, values={})
    longest = {}
    for backend in ("triton", "cpp", "cuda"):
        scope = Scope(kernel_type=found, workloads=(), dtypes=("float16",), backend=backend)
        longest[backend] = max(c.workload.tensor("x").shape[-1] for c in cases_of("edges", scope, whole))
    assert longest["cpp"] == longest["cuda"] == 131_077
    # On its usual four warps a program with a row of 2^16 elements has 512 a thread, which takes the assembler seconds.
    assert 16384 < longest["triton"] <= 1 << 16


def test_a_domain_narrows_the_cases_and_asks_for_refusals() -> None:
    found = kernel_type("activation")
    scope = Scope(kernel_type=found, workloads=found.workloads["cpu"], dtypes=found.dtypes)
    narrow = Domain(dtypes=("float32",), values={"kind": ("silu", "gelu")})
    for stage in STAGES:
        for case in cases_of(stage, scope, narrow):
            assert holds(narrow, case.workload) != case.refuse
    edges = cases_of("edges", scope, narrow)
    refused = [case.workload for case in edges if case.refuse]
    assert {w.dtype for w in refused} == {"float32", "float16", "bfloat16"}
    assert "gelu_new" in {w.arg("kind") for w in refused}


@pytest.mark.parametrize("ops", [("max",), ("min", "max")])
def test_no_call_asks_for_the_largest_or_least_of_no_element(ops: tuple[str, ...]) -> None:
    found = kernel_type("reduce")
    scope = Scope(kernel_type=found, workloads=(), dtypes=("float32",), backend="cpp")
    calls = [c.workload for c in cases_of("edges", scope, Domain(dtypes=found.dtypes, values={"op": ops}))]
    asked = [w for w in calls if w.arg("op") in ops]
    assert asked
    for workload in asked:
        shape, dim = workload.tensor("x").shape, workload.arg("dim")
        assert isinstance(dim, int)
        assert not shape or shape[dim] > 0


def test_the_interpreter_gets_small_calls_in_two_dtypes() -> None:
    found = kernel_type("rmsnorm")
    scope = Scope(
        kernel_type=found,
        workloads=found.workloads["cpu"],
        dtypes=("float32", "float16"),
        interpret=True,
    )
    whole = Domain(dtypes=found.dtypes, values={})
    for stage in STAGES:
        cases = cases_of(stage, scope, whole)
        assert cases
        assert {c.workload.dtype for c in cases} <= {"float32", "float16"}
        assert max(math.prod(s.shape) for c in cases for _, s in c.workload.tensors) <= 1 << 14


# --- the arena --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(shape=(3, 5), dtype="float32"),
        TensorSpec(shape=(3, 5), dtype="float16", strides=(10, 2)),
        TensorSpec(shape=(4, 6), dtype="bfloat16", strides=(1, 4)),
        TensorSpec(shape=(4, 6), dtype="float32", strides=(0, 1)),
        TensorSpec(shape=(7,), dtype="float32", strides=(1,), offset=1),
        TensorSpec(shape=(0, 4), dtype="float32"),
        TensorSpec(shape=(), dtype="int64"),
    ],
)
def test_an_arena_holds_any_layout_and_another_process_sees_it(spec: TensorSpec) -> None:
    arena = Arena.create(1 << 16, torch.device("cpu"))
    slot = Layout(512).place(spec)
    data = torch.arange(math.prod(spec.shape)).reshape(spec.shape).to(getattr(torch, spec.dtype))
    if spec.strides is not None and 0 in spec.strides:
        data = data[:1].expand(spec.shape)
    arena.write(slot, data)
    other = Arena.open(arena.handle(), arena.descriptor).view(slot)
    assert torch.equal(other, data)
    assert other.stride() == (spec.strides if spec.strides is not None else data.contiguous().stride())
    assert other.data_ptr() % 16 == (spec.offset * other.element_size()) % 16


def test_guard_bands_part_the_slots_of_an_arena() -> None:
    layout = Layout()
    first, second = (layout.place(TensorSpec(shape=(5,), dtype="float32")) for _ in range(2))
    assert second.start - (first.start + first.nbytes) >= 2 * 256
    assert layout.end >= second.start + second.nbytes + 256
