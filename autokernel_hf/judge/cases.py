"""What the five stages run: the calls of each, in the dtypes and the domain that a candidate claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autokernel_hf.errors import UsageError
from autokernel_hf.kernels.base import KernelType, with_layout
from autokernel_hf.records import Backend, Scalar, TensorSpec, Workload
from autokernel_hf.variant import Domain

Stage = Literal["smoke", "shapes", "numerics", "determinism", "edges"]
STAGES: tuple[Stage, ...] = ("smoke", "shapes", "numerics", "determinism", "edges")

REPEATS = 3
# The interpreter runs a program at a time, in Python: calls must be small there.
INTERPRETER_ELEMENTS = 1 << 14
INTERPRETER_DTYPES = ("float32", "float16")  # its bfloat16 is wrong

Axes = tuple[Mapping[str, int], Mapping[str, Scalar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call to check.

    `repeats` above 1 asks for the same bits each time; `refuse` for a NotImplementedError instead of an answer.
    """

    stage: Stage
    workload: Workload
    repeats: int = 1
    refuse: bool = False


def key_of(workload: Workload) -> str:
    """What makes two calls the same call."""
    return workload.model_copy(update={"label": "", "calls": 0, "share": 0.0}).model_dump_json()


def holds(domain: Domain, workload: Workload) -> bool:
    """Whether a call lies in a candidate's domain."""
    if workload.dtype not in domain.dtypes:
        return False
    return all(workload.arg(name) in allowed for name, allowed in domain.values.items())


def narrowed(workload: Workload, domain: Domain) -> Workload:
    """A call that is no model's, with values that a candidate's domain allows for the arguments that it lists."""
    changed = {n: v[0] for n, v in domain.values.items() if workload.arg(n) not in v}
    if workload.calls or not changed or workload.dtype not in domain.dtypes:
        return workload
    args = tuple((name, changed.get(name, value)) for name, value in workload.args)
    label = "/".join([workload.label, *(f"{n}={v}" for n, v in changed.items())])
    return workload.model_copy(update={"args": args, "label": label})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a session judges: the timed workloads, and the dtypes that the stages run in.

    `backend` is that of the candidate at hand; None where there is none yet.
    """

    kernel_type: KernelType
    workloads: tuple[Workload, ...]
    dtypes: tuple[str, ...]
    interpret: bool = False
    backend: Backend | None = None

    @property
    def edges(self) -> tuple[Axes, ...]:
        """The type's edge shapes, as far as they are asked of this backend."""
        return self.kernel_type.edges + (self.kernel_type.long if self.backend in ("cpp", "cuda") else ())

    def admits(self, workload: Workload) -> bool:
        """Whether a call can be run here at all."""
        if not self.interpret:
            return True
        return workload.dtype in INTERPRETER_DTYPES and _largest(workload) <= INTERPRETER_ELEMENTS


def _largest(workload: Workload) -> int:
    return max((math.prod(spec.shape) for _, spec in workload.tensors), default=0)


def cases_of(stage: Stage, scope: Scope, domain: Domain) -> list[Case]:
    """The calls of a stage, in the candidate's domain; the edge stage also asks for refusals outside of it."""
    makers: dict[Stage, Callable[[Scope, Domain], Iterable[Case]]] = {
        "smoke": _smoke,
        "shapes": _shapes,
        "numerics": _numerics,
        "determinism": _determinism,
        "edges": _edges,
    }
    made = [c for c in makers[stage](scope, domain) if scope.admits(c.workload)]
    if stage == "smoke" and not made:
        # Every timed workload is too large for the interpreter: the smallest calls of the sweep stand in.
        made = [
            Case(stage="smoke", workload=w)
            for w in sorted(_built(scope, scope.kernel_type.sweep, domain), key=_largest)[:2]
            if scope.admits(w)
        ]
    return made


def _smoke(scope: Scope, domain: Domain) -> Iterable[Case]:
    for workload in scope.workloads:
        if holds(domain, workload):
            yield Case(stage="smoke", workload=workload)


def _shapes(scope: Scope, domain: Domain) -> Iterable[Case]:
    for workload in _built(scope, scope.kernel_type.sweep, domain):
        yield Case(stage="shapes", workload=workload)


def _numerics(scope: Scope, domain: Domain) -> Iterable[Case]:
    """Every adversarial regime in every dtype, on two calls of the sweep in turn."""
    for dtype in scope.dtypes:
        built = [w for w in _built(scope, scope.kernel_type.sweep, domain) if w.dtype == dtype]
        built = [w for w in built if scope.admits(w)]
        for i, values in enumerate(scope.kernel_type.adversarial):
            for workload in _in_turn(built, i, 1 if scope.interpret else 2):
                label = f"{workload.label}/{values}"
                yield Case(
                    stage="numerics", workload=workload.model_copy(update={"values": values, "label": label})
                )


def _in_turn(built: Sequence[Workload], turn: int, count: int) -> Sequence[Workload]:
    """`count` of the calls, others each time."""
    return [built[(turn + i) % len(built)] for i in range(min(count, len(built)))]


def _determinism(scope: Scope, domain: Domain) -> Iterable[Case]:
    """The timed workloads, and in each dtype the largest call of the sweep."""
    for workload in scope.workloads:
        if holds(domain, workload):
            yield Case(stage="determinism", workload=workload, repeats=REPEATS)
    for dtype in scope.dtypes:
        built = [w for w in _built(scope, scope.kernel_type.sweep, domain) if w.dtype == dtype]
        admitted = [w for w in built if scope.admits(w)]
        if admitted:
            yield Case(stage="determinism", workload=max(admitted, key=_largest), repeats=REPEATS)


def _edges(scope: Scope, domain: Domain) -> Iterable[Case]:
    """Edge shapes, layouts of two ordinary and one odd call, and what the candidate must refuse."""
    kernel_type = scope.kernel_type
    for workload in _built(scope, scope.edges, domain):
        yield Case(stage="edges", workload=workload)
    for dtype in scope.dtypes:
        sweep = [w for w in _built(scope, kernel_type.sweep, domain) if w.dtype == dtype and scope.admits(w)]
        odd = [w for w in _built(scope, scope.edges, domain) if w.dtype == dtype and scope.admits(w)]
        odd = [w for w in odd if all(0 not in spec.shape for _, spec in w.tensors)]
        chosen = [*sweep[:1], *sweep[-1:], *sorted(odd, key=_largest)[-1:]][: 1 if scope.interpret else None]
        for workload in {w.label: w for w in chosen}.values():
            for layout, names in kernel_type.layouts.items():
                present = [n for n in names if isinstance(workload.arg(n), TensorSpec)]
                laid_out = with_layout(workload, layout, present)
                if laid_out.args != workload.args:
                    yield Case(stage="edges", workload=laid_out)
    yield from _outside(scope, domain)


def _outside(scope: Scope, domain: Domain) -> Iterable[Case]:
    """One call for every dtype, and for every listed argument, that the candidate's domain leaves out."""
    kernel_type = scope.kernel_type
    seen: set[str] = set()
    for dtype in kernel_type.dtypes:
        for axes, options in kernel_type.sweep:
            workload = _build(kernel_type, axes, dtype, options)
            if workload is None or holds(domain, workload):
                continue
            wrong = [f"dtype {dtype}"] if dtype not in domain.dtypes else []
            wrong += [f"{n} {workload.arg(n)}" for n, v in domain.values.items() if workload.arg(n) not in v]
            if len(wrong) == 1 and wrong[0] not in seen:
                seen.add(wrong[0])
                yield Case(stage="edges", workload=workload, refuse=True)


def _built(scope: Scope, entries: Sequence[Axes], domain: Domain) -> list[Workload]:
    """The calls of a list in all dtypes of the scope, as far as they lie in the domain.

    Where the domain narrows an argument so that the list has no such call, the calls get an allowed value instead.
    """
    kernel_type = scope.kernel_type
    made = []
    for dtype in scope.dtypes:
        if dtype not in domain.dtypes:
            continue
        for axes, options in entries:
            workload = _build(kernel_type, axes, dtype, options)
            if workload is None:
                continue
            if holds(domain, workload):
                made.append(workload)
                continue
            for values in _allowed(domain):
                narrowed = _build(kernel_type, axes, dtype, {**options, **values})
                if narrowed is not None and holds(domain, narrowed):
                    made.append(narrowed)
    return made


def build_in(scope: Scope, entries: Sequence[Axes], domain: Domain, dtype: str) -> list[Workload]:
    """As `_built`, in one dtype; empty where the scope or the domain does not have it."""
    return _built(replace(scope, dtypes=(dtype,)), entries, domain) if dtype in scope.dtypes else []


def _allowed(domain: Domain) -> list[dict[str, Scalar]]:
    """Settings that lie in the domain: each listed value once, the first value of the other arguments."""
    first: dict[str, Scalar] = {name: values[0] for name, values in domain.values.items()}
    return [{**first, name: value} for name, values in domain.values.items() for value in values] or [first]


def _build(
    kernel_type: KernelType, axes: Mapping[str, int], dtype: str, options: Mapping[str, Scalar]
) -> Workload | None:
    """A call of the type; None where these options do not exist in this dtype (float8 wants scales)."""
    try:
        return kernel_type.build(axes, dtype, options)
    except (UsageError, ValueError):
        return None


def in_dtype(workload: Workload, dtype: str) -> Workload:
    """The same call in another dtype: every tensor that has the first one's."""
    old = workload.dtype
    args = tuple(
        (name, value.model_copy(update={"dtype": dtype}))
        if isinstance(value, TensorSpec) and value.dtype == old
        else (name, value)
        for name, value in workload.args
    )
    return workload.model_copy(update={"args": args})


def distinct(workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    """The same call once, with the calls and the share of all of them."""
    found: dict[str, Workload] = {}
    for workload in workloads:
        key = key_of(workload)
        if key in found:
            old = found[key]
            more = {"calls": old.calls + workload.calls, "share": old.share + workload.share}
            found[key] = old.model_copy(update=more)
        else:
            found[key] = workload
    return tuple(found.values())
