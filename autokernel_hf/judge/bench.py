"""Timing the workloads of a session: the candidate against the incumbent, eager torch and the peers."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from autokernel_hf import gpu
from autokernel_hf.ceilings import Ceilings, measure_ceilings
from autokernel_hf.errors import AutokernelError, JudgeError
from autokernel_hf.judge import checks, roofline, sandbox, statistics, timing
from autokernel_hf.judge.cases import Scope, key_of
from autokernel_hf.judge.crew import Crew
from autokernel_hf.judge.large import inputs_of
from autokernel_hf.judge.quiet import family, on_one_core
from autokernel_hf.judge.remote import Child, Failed
from autokernel_hf.judge.seeds import Seeds
from autokernel_hf.judge.session import Settings
from autokernel_hf.judge.stages import Passed, start_compile
from autokernel_hf.judge.turn import as_tuple
from autokernel_hf.kernels.base import Args
from autokernel_hf.records import Candidate, Workload, WorkloadResult

log = logging.getLogger(__name__)

_CANDIDATE, _INCUMBENT = "candidate", "incumbent"
_SECONDS = {"cpu": 4.0, "cuda": 1.0}  # of rounds, for all workloads of a candidate together
# Where processes differ (`Bench.blocks`): a loser is told after two blocks; a winner must win across all.
_BLOCKS, _FEWEST_BLOCKS, _BLOCK_ROUNDS = 5, 3, 8
_PATIENCE_S = 20.0  # for a workload; then the fewest blocks are enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Who is timed: a candidate, the child in which it was judged, and the incumbent if there is one."""

    candidate: Candidate
    child: Child
    incumbent: Candidate | None


def untimed(workload: Workload) -> WorkloadResult:
    """The result of a workload that was not timed."""
    return WorkloadResult(
        label=workload.label, shape=workload.shape, dtype=workload.dtype, share=workload.share
    )


class Bench:
    """Times workloads; keeps their values and what is known of their peers for the session."""

    def __init__(self, scope: Scope, settings: Settings, device: torch.device, seeds: Seeds) -> None:
        self.scope = scope
        self.kernel_type = scope.kernel_type
        self.settings = settings
        self.device = device
        self.seeds = seeds
        self._known_values: dict[str, timing.Values] = {}
        self._baselines: dict[str, WorkloadResult] = {}
        self._eager_runs: set[str] = set()  # workloads that the plain torch expression has run
        self._measured_ceilings: Ceilings | None = None
        # Whether the candidate that was timed last is so much slower than the incumbent that no other workload can
        # make up for it.
        self.hopeless = False

    def prepare(self, workloads: Iterable[Workload]) -> None:
        """Make ahead what timing these workloads will need. What is wrong with one is told when it is timed."""
        with contextlib.suppress(AutokernelError, RuntimeError, MemoryError):
            for workload in workloads:
                self._values(workload)

    def peers(self, workload: Workload) -> WorkloadResult:
        """Time what a user would pick instead."""
        values = self._values(workload)
        local = self._peers(values)
        columns = self._columns(c.name for c in local)
        rounds = timing.Rounds(
            values, local, columns, torch_error=(0.0,) * len(values.outputs), seed=self.seeds.next()
        )
        with gpu.device_lock(self.device):
            rounds.run(self._budget(self._seconds(peers=True)), lambda: False)
        result = _with_baseline(untimed(workload), columns)
        self._baselines[key_of(workload)] = result
        return result

    def candidate(
        self, pair: Pair, crew: Crew, workload: Workload, passed: Passed, *, peers: bool
    ) -> WorkloadResult:
        """Time a candidate against the incumbent, or against eager torch, and against all peers if asked to.

        Raises:
            Failed: It crashed, was wrong, cheated, or is faster than the device can be.
            JudgeError: The incumbent failed.
        """
        values = self._values(workload)
        local = self._peers(values, eager_only=not peers)
        remote = (_CANDIDATE,) if pair.incumbent is None else (_CANDIDATE, _INCUMBENT)
        columns = self._columns((*(c.name for c in local), *remote))
        against = timing.EAGER if pair.incumbent is None else _INCUMBENT
        times = columns[against].cost_us, columns[_CANDIDATE].cost_us
        blocks = columns[_CANDIDATE].blocks
        count = self.blocks
        budget = self._budget(self._seconds(peers=peers) / count, blocks=count)
        decided = partial(statistics.decided, *times, epsilon=self.settings.epsilon)
        began = time.monotonic()
        with gpu.device_lock(self.device):
            for block in range(count):
                self._block(pair, crew, values, local, columns, passed, block, budget, decided)
                if count > 1 and statistics.lost(*times, blocks, margin=self.settings.delta):
                    break
                if count > 1 and not peers and self._is_futile(statistics.median_speedup(*times), block + 1):
                    break
                if time.monotonic() - began > _PATIENCE_S and block + 1 >= _FEWEST_BLOCKS:
                    break
        self.hopeless = pair.incumbent is not None and statistics.lost(
            *times, blocks, margin=self.settings.delta
        )
        result = self._result(workload, columns, passed, with_peers=peers)
        assert result.device_us is not None
        fault = roofline.beats_hardware(self.kernel_type, workload, result.device_us, self._ceilings())
        if fault:
            raise Failed("rejected", f"{fault} (on {workload.label}, {workload.dtype})")
        return result

    @property
    def blocks(self) -> int:
        """How many pairs of processes a comparison is made between.

        Two processes that run the same kernel may differ for as long as they live. On a CPU where their memory happens to
        lie makes a few per cent, and one that has run for longer has an advantage of a tenth. On a GPU that waits for the
        host it is what a launch costs them: of one RMS norm 14 us in one process and 37 in another was measured on an H200,
        so that a search kept eighteen candidates in a row that were no faster. Where the device's time is what counts, none
        of that matters.
        """
        differ = self.device.type == "cpu" or self.settings.launch_bound
        return _BLOCKS if differ and not self.settings.quick else 1

    def _columns(self, names: Iterable[str]) -> dict[str, timing.Column]:
        return {name: timing.Column(launch_bound=self.settings.launch_bound) for name in names}

    def _is_futile(self, speedup: float, blocks: int) -> bool:
        """Whether a candidate that is so far behind after some blocks will hardly be found faster by the others."""
        epsilon = self.settings.epsilon
        return speedup < 1 - epsilon if blocks == 2 else blocks >= 3 and speedup < 1 + epsilon / 2

    def _block(
        self,
        pair: Pair,
        crew: Crew,
        values: timing.Values,
        local: Sequence[timing.Local],
        columns: dict[str, timing.Column],
        passed: Passed,
        block: int,
        budget: timing.Budget,
        decided: Callable[[], bool],
    ) -> None:
        """One block of rounds.

        On a CPU each block has processes of its own, of the same age. On a GPU the first is between those that there are;
        where there are more they have their own, and all contenders of a block take turns on one core.
        """
        fresh = self.device.type == "cpu" or block > 0
        children: list[Child] = []
        rounds: timing.Rounds | None = None
        try:
            own = self._fresh(pair.candidate, crew, values.workload) if fresh else pair.child
            children.append(own)
            contenders: list[timing.Contender] = [*local, timing.Remote(_CANDIDATE, own, values)]
            if pair.incumbent is not None:
                rival = self._rival(pair.incumbent, crew, values.workload, fresh=fresh)
                children.append(rival)
                contenders.append(timing.Remote(_INCUMBENT, rival, values))
            rounds = timing.Rounds(
                values,
                contenders,
                columns,
                torch_error=passed.torch_error,
                seed=self.seeds.next(),
                block=block,
            )
            with self._placed(children):
                rounds.run(budget, decided)
            if self.device.type == "cuda" or block + 1 >= _FEWEST_BLOCKS:
                # A few rounds on a busy machine show anything; what could be kept has more.
                rounds.check_clocks()
        except Failed as failed:
            if rounds is not None and rounds.failed_contender == _INCUMBENT:
                raise JudgeError(
                    f"The incumbent, which had passed, failed as the opponent of a candidate: it {failed.what}.",
                    remedy="Judge the incumbent again on its own (bench); it may be unstable.",
                ) from None
            where = f"{values.workload.label}, {values.workload.dtype}"
            raise Failed(failed.status, f"{failed.what} (while timed on {where})") from None
        finally:
            if fresh:
                for child in children:
                    child.end()

    def _placed(self, children: Sequence[Child]) -> contextlib.AbstractContextManager[None]:
        """Where a GPU waits for the host, on one core: what a launch costs depends on the core and on who else uses it."""
        if self.device.type == "cpu" or not self.settings.launch_bound:
            return contextlib.nullcontext()
        members = [pid for child in children for pid in family(child.pid)]
        return on_one_core(members, random.Random(self.seeds.next()))

    def _fresh(self, candidate: Candidate, crew: Crew, workload: Workload) -> Child:
        """A new child that holds a candidate and, where Triton would do so in its first call, has compiled for the workload.

        Raises:
            Failed: It does not build, import or compile any more.
        """
        child = crew.fresh(candidate)
        if candidate.backend == "triton":
            try:
                start_compile(child, (workload,))
                child.finish_compile()
            except Failed:
                child.end()
                raise
        return child

    def _rival(self, incumbent: Candidate, crew: Crew, workload: Workload, *, fresh: bool) -> Child:
        try:
            return self._fresh(incumbent, crew, workload) if fresh else crew.holder(incumbent)
        except Failed as failed:
            raise JudgeError(
                f"The incumbent, which had passed, {failed.what}.",
                remedy="Judge it again on its own (bench).",
            ) from None

    def _ceilings(self) -> Ceilings:
        if self._measured_ceilings is None:
            self._measured_ceilings = measure_ceilings(self.device)
        return self._measured_ceilings

    def _values(self, workload: Workload) -> timing.Values:
        """The values of a timed workload: made once a session, and seen by no child but rotated.

        Raises:
            JudgeError: An impostor passes the workload, so that it says nothing about a kernel.
        """
        key = key_of(workload)
        if key not in self._known_values:
            values = timing.Values(
                self.kernel_type, workload, self.device, [self.seeds.next() for _ in range(2)]
            )
            first, second = (checks.first_part(self.kernel_type, workload, m) for m in values.masters)
            passing = checks.admit(self.kernel_type, workload, (first, second))
            if passing:
                raise JudgeError(
                    f"The workload {workload.label} ({workload.dtype}) cannot be judged by: impostors pass it "
                    f"({', '.join(passing)}).",
                    remedy="Use another shape or other values.",
                )
            self._known_values[key] = values
        return self._known_values[key]

    def fresh(self, workload: Workload) -> Args:
        """Arguments that no candidate has seen: for the large timed workloads by rotation, else drawn anew."""
        if not self.scope.interpret and any(
            key_of(workload) == key_of(timed) for timed in self.scope.workloads
        ):
            return self._values(workload).sample(random.Random(self.seeds.next()))
        return inputs_of(self.kernel_type, workload, self.seeds.next(), self.device)

    def _seconds(self, *, peers: bool) -> float:
        """How long the rounds of one workload should take."""
        if self.settings.quick:
            return 1.0
        total = _SECONDS[self.device.type]
        return 1.5 * total if peers else max(total / len(self.scope.workloads), 0.3 * total)

    def _budget(self, seconds: float, *, blocks: int = 1) -> timing.Budget:
        if blocks > 1:
            return timing.Budget(seconds=seconds, least=_BLOCK_ROUNDS, most=_BLOCK_ROUNDS)
        if self.settings.quick:
            # A GPU's times hardly vary; on a CPU other programs make some rounds say nothing.
            more = 1 if self.device.type == "cuda" else 2
            return timing.Budget(
                seconds=seconds, least=statistics.EARLY_ROUNDS, most=more * statistics.EARLY_ROUNDS
            )
        return timing.Budget(seconds=seconds, least=statistics.EARLY_ROUNDS, most=100)

    def _peers(self, values: timing.Values, *, eager_only: bool = False) -> list[timing.Local]:
        """The peers that can do this workload here, and do it right; eager first, which defines the op."""
        workload, kernel_type = values.workload, self.kernel_type
        if eager_only and key_of(workload) in self._eager_runs:
            return [timing.Local(timing.EAGER, kernel_type.reference, values)]
        args = inputs_of(kernel_type, workload, self.seeds.next(), self.device)
        oracle = checks.Oracle(kernel_type, workload, args)
        found = []
        for peer in kernel_type.peers[: 1 if eager_only else None]:
            try:
                with sandbox.on_all_cores():
                    function = peer.make(workload, self.device)
                    if function is None:
                        continue
                    outputs = as_tuple(function(**args))
            except Exception as error:  # noqa: BLE001 - foreign code; a peer that cannot do it is none
                log.info("peer %s cannot do %s: %s", peer.name, workload.label, error)
                continue
            problem = checks.form_of(outputs, oracle) or oracle.check(outputs).problem
            if problem and peer.name != timing.EAGER:
                log.info("peer %s is wrong on %s: %s", peer.name, workload.label, problem)
                continue
            found.append(timing.Local(peer.name, function, values))
        if not found or found[0].name != timing.EAGER:
            raise JudgeError(
                f"The plain torch expression of {kernel_type.name} does not run {workload.label}."
            )
        self._eager_runs.add(key_of(workload))
        return found

    def _result(
        self,
        workload: Workload,
        columns: Mapping[str, timing.Column],
        passed: Passed,
        *,
        with_peers: bool,
    ) -> WorkloadResult:
        own = columns[_CANDIDATE].cost_us
        epsilon = self.settings.epsilon
        latency_us = median(own)
        blocks = columns[_CANDIDATE].blocks
        eager = statistics.compare(columns[timing.EAGER].cost_us, own, blocks, epsilon=epsilon)
        result = untimed(workload)
        seconds = latency_us / 1e6
        update: dict[str, Any] = {
            "latency_us": latency_us,
            "device_us": median(columns[_CANDIDATE].device_us),
            "host_us": median(columns[_CANDIDATE].host_us),
            "eager_us": median(columns[timing.EAGER].cost_us),
            "speedup_vs_eager": eager.speedup,
            "ci95_vs_eager": eager.interval,
            "gb_s": self.kernel_type.bytes_moved(workload) / seconds / 1e9,
            "tflops": self.kernel_type.flops(workload) / seconds / 1e12,
            "pct_peak": roofline.pct_peak(self.kernel_type, workload, latency_us, self._ceilings()),
            "max_abs_error": passed.max_abs_error,
            "error_ratio": passed.error_ratio,
        }
        if _INCUMBENT in columns:
            incumbent = statistics.compare(columns[_INCUMBENT].cost_us, own, blocks, epsilon=epsilon)
            update["incumbent_us"] = median(columns[_INCUMBENT].cost_us)
            update["speedup_vs_incumbent"] = incumbent.speedup
            update["ci95_vs_incumbent"] = incumbent.interval
        if with_peers:
            result = _with_baseline(result, columns)
            assert result.baseline is not None
            fastest = statistics.compare(columns[result.baseline].cost_us, own, blocks, epsilon=epsilon)
            update["speedup"], update["ci95"] = fastest.speedup, fastest.interval
        elif key_of(workload) in self._baselines:
            # The peers were timed when the session began; eager, timed now as well, carries the comparison over.
            known = self._baselines[key_of(workload)]
            assert known.eager_us is not None and known.baseline_us is not None
            update["baseline"] = known.baseline
            update["baseline_us"] = known.baseline_us / known.eager_us * update["eager_us"]
            update["speedup"] = eager.speedup * known.baseline_us / known.eager_us
            update["peers_us"] = known.peers_us
        return result.model_copy(update=update)


def _with_baseline(result: WorkloadResult, columns: Mapping[str, timing.Column]) -> WorkloadResult:
    """Fill in the peers' times, and which of them is the fastest."""
    peers = {
        name: median(column.cost_us)
        for name, column in columns.items()
        if name not in (_CANDIDATE, _INCUMBENT)
    }
    fastest = min(peers, key=lambda name: peers[name])
    return result.model_copy(
        update={
            "baseline": fastest,
            "baseline_us": peers[fastest],
            "eager_us": peers[timing.EAGER],
            "peers_us": peers,
        }
    )
