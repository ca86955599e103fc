"""A judge that knows the answer, for tests of the loop: the time of a candidate is a formula over its tunables."""

from __future__ import annotations

from collections.abc import Callable

from autokernel_hf import tunables
from autokernel_hf.kernels import kernel_type
from autokernel_hf.records import (
    Candidate,
    Decision,
    DeviceInfo,
    Evaluation,
    ModelSpec,
    Stages,
    Target,
    WorkloadResult,
)
from autokernel_hf.runs import RunSettings

SOURCE = """// kernel_type: rmsnorm
constexpr int kUnroll = 1;  // tune(compute): 1, 2, 4, 8
constexpr int kChunk = 1024;  // tune(memory): 512, 1024, 2048, 4096
constexpr int kMode = 0;  // tune(algorithm): 0, 1, 2
"""
EAGER_US = 100.0
PASSED = Stages(smoke="passed", shapes="passed", numerics="passed", determinism="passed", edges="passed")


def formula(values: dict[str, object]) -> float:
    """Microseconds; least (20) at kUnroll 4, kChunk 2048, kMode 1."""
    return (
        20.0
        * (1 + 0.4 * (values["kUnroll"] != 4))
        * (1 + 0.3 * (values["kChunk"] != 2048))
        * (1 + 0.5 * (values["kMode"] != 1))
    )


class KnownJudge:
    """Judges by a formula; candidates for which `wrong` is true are incorrect."""

    def __init__(
        self,
        time_us: Callable[[dict[str, object]], float] = formula,
        wrong: Callable[[dict[str, object]], bool] = lambda values: False,
        pct_peak: Callable[[float], float | None] = lambda us: None,
    ) -> None:
        self.time_us = time_us
        self.pct_peak = pct_peak
        self.wrong = wrong
        self.judged: list[str] = []
        self.opponents: list[str | None] = []

    def us(self, candidate: Candidate) -> float:
        return self.time_us(dict(tunables.values(candidate.source)))

    def measure_peers(self) -> tuple[WorkloadResult, ...]:
        return ()

    def evaluate(self, candidate: Candidate, incumbent: Candidate | None = None) -> Evaluation:
        self.judged.append(candidate.digest)
        self.opponents.append(incumbent.digest if incumbent else None)
        values = dict(tunables.values(candidate.source))
        if self.wrong(values):
            return Evaluation(
                status="incorrect", stages=Stages(smoke="failed"), reason="element 0 is 1, not 2"
            )
        us = self.us(candidate)
        figures: dict[str, object] = {"latency_us": us, "pct_peak": self.pct_peak(us)}
        if incumbent is None:
            figures |= _against("eager", EAGER_US, us)
        else:
            figures |= _against("incumbent", self.us(incumbent), us)
        return Evaluation(status="passed", stages=PASSED, workloads=(_result(figures),))

    def confirm(self, candidate: Candidate) -> Evaluation:
        us = self.us(candidate)
        figures = {"latency_us": us, **_against("eager", EAGER_US, us)}
        return Evaluation(status="passed", stages=PASSED, workloads=(_result(figures),), confirmed=True)


def _against(name: str, other_us: float, us: float) -> dict[str, object]:
    ratio = other_us / us
    return {
        f"{name}_us": other_us,
        f"speedup_vs_{name}": ratio,
        f"ci95_vs_{name}": (ratio * 0.995, ratio * 1.005),
    }


def _result(figures: dict[str, object]) -> WorkloadResult:
    return WorkloadResult(label="32x64", shape="32x64,64", dtype="float32", share=0.1, **figures)


def decide(evaluation: Evaluation) -> tuple[Decision, str]:
    if evaluation.status != "passed":
        return "revert", evaluation.reason
    interval = evaluation.workloads[0].ci95_vs_incumbent or evaluation.workloads[0].ci95_vs_eager
    assert interval is not None
    return ("keep", "faster") if interval[0] > 1.01 else ("revert", "not faster")


def diagnose(target: Target, candidate: Candidate, evaluation: Evaluation) -> tuple[tuple[str, ...], str]:
    return ("memory",), "memory-bound in this test"


def target() -> Target:
    found = kernel_type("rmsnorm")
    workload = found.build({"M": 32, "N": 64}, "float32", {}).model_copy(update={"share": 0.1, "calls": 4})
    return Target(
        name="rmsnorm",
        kernel_type="rmsnorm",
        backend="cpp",
        share=0.1,
        attainable_speedup=1.1,
        sites=(),
        workloads=(workload,),
    )


def starter() -> Candidate:
    return Candidate(kernel_type="rmsnorm", backend="cpp", source=SOURCE)


def settings(**more: object) -> RunSettings:
    return RunSettings(spec=ModelSpec(model="llama", random_weights=True, device="cpu"), **more)


def device() -> DeviceInfo:
    return DeviceInfo(
        kind="cpu", name="a CPU", arch="x86-64-v3", units=2, memory_bytes=1, torch="2.13.0", date="2026-11-29"
    )
