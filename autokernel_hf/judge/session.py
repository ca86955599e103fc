"""A session's settings and requests: what the orchestrator sends to the referee."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autokernel_hf.records import Backend, Candidate, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a session judges, and how.

    Args:
        workloads: The timed calls; None for the type's own on this kind of device.
        dtypes: The dtypes that the stages run in; None for all of the type.
        device: auto, cpu, cuda or cuda:N. C++ candidates always run on the CPU.
        seed: Fixes the secret seeds, to reproduce a verdict; None in earnest.
        epsilon: A difference below it is none.
        delta: What no workload may lose, however much the others gain.
        quick: The smoke stage and few rounds only; nothing judged so is kept.
        timeout_s: The longest that one command to a candidate may take, building apart.
        launch_bound: Whether the calls come from a pass in which a GPU waits for the host: a call then takes as long
            as the slower of the two.
        opened_at: When the session was opened, by the system's monotonic clock, which all processes share.
    """

    kernel_type: str
    backend: Backend
    workloads: tuple[Workload, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    device: str = "auto"
    seed: int | None = None
    epsilon: float = 0.01
    delta: float = 0.02
    quick: bool = False
    timeout_s: float = 60.0
    launch_bound: bool = False
    opened_at: float = 0.0

    @property
    def on_cpu(self) -> bool:
        """Whether it is settled, without looking for a GPU, that kernels run on the CPU."""
        return self.backend == "cpp" or (self.backend == "triton" and self.device == "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to do.

    Args:
        peers: Whether to time every peer, not only eager and the incumbent.
        known: Machine code (`Evaluation.machine_code`) that was judged before and is not to be judged again.
        asked_at: When it was asked for, by the system's monotonic clock: what passes before the referee takes it up is
            part of what an evaluation takes.
    """

    action: Literal["measure_peers", "evaluate"]
    candidate: Candidate | None = None
    incumbent: Candidate | None = None
    all_stages: bool = False
    peers: bool = False
    confirm: bool = False
    known: frozenset[str] = frozenset()
    asked_at: float = 0.0
