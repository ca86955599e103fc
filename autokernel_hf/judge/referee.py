"""The referee: the trusted process that holds seeds, oracle, peers and verdict for the length of a session.

It is started by the orchestrator and ends with it. It commands children (see `remote`), which it starts from a fork
server, and times its own peers against what they hold. Whatever a child does, the worst is that it is ended.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from autokernel_hf import contract, gpu
from autokernel_hf.errors import (
    AutokernelError,
    CandidateError,
    DeviceError,
    JudgeError,
    UsageError,
)
from autokernel_hf.judge import cases, checks, roofline, statistics, timing
from autokernel_hf.judge.arena import Pool
from autokernel_hf.judge.cases import STAGES, Case, Scope, Stage, cases_of, holds
from autokernel_hf.judge.quiet import family, wait_for_quiet
from autokernel_hf.judge.remote import Child, Failed
from autokernel_hf.judge.seeds import Seeds
from autokernel_hf.judge.server import Server
from autokernel_hf.judge.session import Request, Settings
from autokernel_hf.judge.stages import Passed, StageFailed, audit, room_for, run_case
from autokernel_hf.judge.turn import as_tuple
from autokernel_hf.judge.verdict import gain_of, why_not_keep
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.kernels.base import make_inputs
from autokernel_hf.records import (
    BenchStatus,
    Candidate,
    Evaluation,
    Resources,
    Stages,
    StageStatus,
    TensorSpec,
    Workload,
    WorkloadResult,
)
from autokernel_hf.variant import Domain

log = logging.getLogger(__name__)

_CANDIDATE, _INCUMBENT = "candidate", "incumbent"
_KEPT_CHILDREN = 2
_STILL_WORKING_S = 2.0  # the spinning of an OpenMP pool ends long before


class _Verdict(Exception):  # noqa: N818 - the end of an evaluation
    """An evaluation ends here."""

    def __init__(self, status: BenchStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(slots=True)
class _Sheet:
    """What is known of a candidate so far."""

    started: float
    stages: dict[Stage, StageStatus]
    results: tuple[WorkloadResult, ...] = ()
    smoke: dict[str, Passed] | None = None
    resources: Resources = Resources()
    built_id: str | None = None
    peak_bytes: int | None = None
    confirmed: bool = False

    def evaluation(self, status: BenchStatus, reason: str) -> Evaluation:
        return Evaluation(
            status=status,
            stages=Stages(**{stage: self.stages[stage] for stage in STAGES}),
            reason=reason,
            workloads=self.results,
            resources=self.resources,
            peak_vram_mb=None if self.peak_bytes is None else self.peak_bytes / 2**20,
            seconds=time.monotonic() - self.started,
            built_id=self.built_id,
            confirmed=self.confirmed,
        )


class Referee:
    """A session.

    Raises:
        DeviceError: The device that was asked for is not there.
        UsageError: There is no such kernel type.
    """

    def __init__(self, settings: Settings, server: Server | None) -> None:
        self.settings = settings
        self.kernel_type = find_type(settings.kernel_type)
        self.device = device_of(settings)
        self.interpret = settings.backend == "triton" and self.device.type == "cpu"
        kind = self.device.type
        workloads = settings.workloads or self.kernel_type.workloads[kind]
        if settings.workloads is None and settings.dtypes is not None:
            workloads = tuple(w for w in workloads if w.dtype in settings.dtypes) or tuple(
                _in_dtype(w, settings.dtypes[0]) for w in workloads
            )
        dtypes = settings.dtypes or self.kernel_type.dtypes
        self.scope = Scope(
            kernel_type=self.kernel_type,
            workloads=_distinct(workloads),
            dtypes=tuple(d for d in dtypes if not self.interpret or d in cases.INTERPRETER_DTYPES),
            interpret=self.interpret,
        )
        self.seeds = Seeds(settings.seed)
        self.server = server
        self.isolate = True
        self.spare: Child | None = None
        self.kept: dict[str, Child] = {}
        self.baselines: dict[str, WorkloadResult] = {}
        self.pool: Pool | None = None
        self.ceilings: gpu.Ceilings | None = None

    @property
    def can_run(self) -> bool:
        """Whether candidates of this backend can run here at all."""
        return self.settings.backend != "cuda" or self.device.type == "cuda"

    def close(self) -> None:
        for child in (*self.kept.values(), *([self.spare] if self.spare else [])):
            child.end()
        if self.pool is not None:
            self.pool.close()
        if self.server is not None:
            self.server.close()

    def do(self, request: Request) -> Evaluation | tuple[WorkloadResult, ...]:
        if request.action == "measure_peers":
            return self.measure_peers()
        assert request.candidate is not None
        return self.evaluate(request)

    # --- judging ---------------------------------------------------------------------------------------------------

    def evaluate(self, request: Request) -> Evaluation:
        """Judge a candidate: see `evaluate.Judge`."""
        candidate = request.candidate
        assert candidate is not None
        sheet = _Sheet(
            started=time.monotonic(),
            stages=dict.fromkeys(STAGES, "skipped"),
            results=tuple(_untimed(w) for w in self.scope.workloads),
            confirmed=request.confirm,
        )
        child: Child | None = None
        try:
            domain = self._domain(candidate)
            child = self._child()
            built = child.build(candidate, str(self.device))
            sheet.resources, sheet.built_id = built.resources, built.id
            reason = self._judge(child, domain, request, sheet)
            status: BenchStatus = "passed"
        except Failed as failed:
            status, reason = failed.status, f"The candidate {failed.what}"
        except StageFailed as failed_stage:
            status, reason = failed_stage.status, failed_stage.reason
        except _Verdict as verdict:
            status, reason = verdict.status, verdict.reason
        if child is not None:
            if not child.ended and self.device.type == "cuda":
                with contextlib.suppress(Failed):
                    sheet.peak_bytes = child.peak_bytes()
            self._retire(candidate, child, keep=status == "passed" and not request.confirm)
        if status in ("crashed", "timeout", "out_of_memory"):
            self._probe_device()
        result = sheet.evaluation(status, reason)
        if self.device.type == "cuda" and self.spare is None:
            self.spare = self._new_child()
        return result

    def _judge(self, child: Child, domain: Domain, request: Request, sheet: _Sheet) -> str:
        """The cascade; the reason of a pass."""
        child.inspect()
        sheet.smoke = self._stage(child, "smoke", domain, sheet)
        self._must_be_at_rest(child)
        if self.settings.backend == "triton":
            for case in cases_of("smoke", self.scope, domain):
                audit(child, self.kernel_type, case.workload, self.seeds, self.device)
        if self.interpret:
            if not self.settings.quick:
                self._remaining_stages(child, domain, sheet)
            return "Right in the interpreter; it has no timing without a GPU."
        if request.all_stages and not self.settings.quick:
            self._remaining_stages(child, domain, sheet)
        sheet.results = self._time(child, domain, request, sheet)
        if request.all_stages:
            return self._summary(sheet)
        reason = why_not_keep(sheet.results, epsilon=self.settings.epsilon, delta=self.settings.delta)
        if reason or self.settings.quick:
            return reason or self._summary(sheet)
        self._remaining_stages(child, domain, sheet)
        return self._summary(sheet)

    def _must_be_at_rest(self, child: Child) -> None:
        """After its calls have returned a candidate has nothing left to do.

        Raises:
            Failed: Its threads work on, or it has started processes.
        """
        if self.device.type == "cpu" and not wait_for_quiet([child.pid], limit_s=_STILL_WORKING_S):
            raise Failed("rejected", "goes on working after its call returned")
        processes = len(family(child.pid)) - (2 if child.spawned.isolated else 1)
        if processes > 0:
            raise Failed("rejected", f"left {processes} process{'es' if processes > 1 else ''} behind")

    def _summary(self, sheet: _Sheet) -> str:
        done = "All stages passed" if set(sheet.stages.values()) == {"passed"} else "The smoke stage passed"
        gain = gain_of(sheet.results)
        if gain is None:
            return f"{done}."
        over = "the incumbent" if gain.over == "incumbent" else "eager torch"
        low, high = gain.interval
        return f"{done}; {gain.speedup:.3f}x the speed of {over} ({low:.3f} to {high:.3f} at 95 %)."

    def _domain(self, candidate: Candidate) -> Domain:
        """The candidate's domain, once it is clear that it can serve here at all."""
        if not self.can_run:
            raise _Verdict("unsupported", "A CUDA candidate needs an NVIDIA GPU, and there is none here.")
        if candidate.backend != self.settings.backend or candidate.kernel_type != self.kernel_type.name:
            raise UsageError(
                f"This session judges {self.settings.backend} candidates for {self.kernel_type.name}, not "
                f"{candidate.backend} ones for {candidate.kernel_type}.",
                remedy="Start a session of its own.",
            )
        try:
            domain = contract.check(candidate, self.kernel_type)
        except CandidateError as error:
            raise _Verdict("rejected", f"It breaks the candidate contract: {error}") from None
        dtypes = [d for d in domain.dtypes if d in self.scope.dtypes]
        outside = [w for w in self.scope.workloads if not holds(domain, w)]
        if not dtypes:
            raise _Verdict(
                "unsupported",
                f"It supports {', '.join(domain.dtypes)}; asked for was {', '.join(self.scope.dtypes)}.",
            )
        # A model's workloads must all be served; of a type's own, those in the domain are enough.
        if outside and (self.settings.workloads is not None or len(outside) == len(self.scope.workloads)):
            raise _Verdict(
                "unsupported",
                f"{outside[0].label} ({outside[0].dtype}) is outside of its domain: {domain.text}.",
            )
        return domain

    def _remaining_stages(self, child: Child, domain: Domain, sheet: _Sheet) -> None:
        for stage in STAGES[1:]:
            self._stage(child, stage, domain, sheet)
        child.inspect()

    def _stage(self, child: Child, stage: Stage, domain: Domain, sheet: _Sheet) -> dict[str, Passed]:
        """Run a stage.

        Raises:
            StageFailed: A case of it failed.
        """
        seen: dict[str, Passed] = {}
        sheet.stages[stage] = "failed"
        threads = torch.get_num_threads()
        # The oracle works while the child does, and the calls are small: more threads would only disturb.
        torch.set_num_threads(1)
        try:
            for case in cases_of(stage, self.scope, domain):
                seen[_key(case.workload)] = run_case(child, self.kernel_type, case, self.seeds, self.device)
        finally:
            torch.set_num_threads(threads)
        sheet.stages[stage] = "passed"
        return seen

    # --- timing ----------------------------------------------------------------------------------------------------

    def measure_peers(self) -> tuple[WorkloadResult, ...]:
        """Time what a user would pick instead, on every workload."""
        if self.interpret or not self.can_run:
            return tuple(_untimed(w) for w in self.scope.workloads)
        measured = []
        for workload in self.scope.workloads:
            values = self._values(workload)
            peers = self._peers(values)
            rounds = self._rounds(values, peers, (0.0,) * len(values.outputs))
            with gpu.device_lock(self.device):
                columns = rounds.run(self._budget(peers=True), lambda columns: False)
            result = self._baseline_of(_untimed(workload), columns)
            self.baselines[_key(workload)] = result
            measured.append(result)
        return tuple(measured)

    def _time(
        self, child: Child, domain: Domain, request: Request, sheet: _Sheet
    ) -> tuple[WorkloadResult, ...]:
        """Time the candidate on every workload in its domain; stop early once it cannot be kept any more."""
        results = {_key(w): _untimed(w) for w in self.scope.workloads}
        holder = self._holder(request.incumbent) if request.incumbent is not None else None
        for workload in self.scope.workloads:
            if not holds(domain, workload):
                continue
            assert sheet.smoke is not None
            passed = sheet.smoke[_key(workload)]
            result = self._time_one(child, holder, workload, passed, request)
            results[_key(workload)] = result
            sheet.results = tuple(results.values())
            if request.incumbent is not None and self._is_hopeless(result):
                break
        return tuple(results.values())

    def _time_one(
        self, child: Child, holder: Child | None, workload: Workload, passed: Passed, request: Request
    ) -> WorkloadResult:
        values = self._values(workload)
        peers = self._peers(values) if request.peers else self._peers(values)[:1]
        contenders: list[timing.Contender] = [*peers, timing.Remote(_CANDIDATE, child, values)]
        if holder is not None:
            contenders.append(timing.Remote(_INCUMBENT, holder, values))
        against = _INCUMBENT if holder is not None else timing.EAGER
        epsilon = self.settings.epsilon

        def decided(columns: Mapping[str, timing.Column]) -> bool:
            return statistics.decided(
                columns[against].device_us, columns[_CANDIDATE].device_us, epsilon=epsilon
            )

        rounds = self._rounds(values, contenders, passed.torch_error)
        try:
            with gpu.device_lock(self.device):
                columns = rounds.run(self._budget(peers=request.peers), decided)
        except Failed as failed:
            if rounds.failed_contender == _INCUMBENT:
                raise JudgeError(
                    f"The incumbent, which had passed, failed as the opponent of a candidate: it {failed.what}.",
                    remedy="Judge the incumbent again on its own (bench); it may be unstable.",
                ) from None
            raise Failed(
                failed.status, f"{failed.what} (while timed on {workload.label}, {workload.dtype})"
            ) from None
        result = self._result(workload, columns, passed, with_peers=request.peers)
        assert result.latency_us is not None
        fault = roofline.beats_hardware(self.kernel_type, workload, result.latency_us, self._ceilings())
        if fault:
            raise Failed("rejected", f"{fault} (on {workload.label}, {workload.dtype})")
        return result

    def _ceilings(self) -> gpu.Ceilings:
        if self.ceilings is None:
            self.ceilings = gpu.measure_ceilings(self.device)
        return self.ceilings

    def _is_hopeless(self, result: WorkloadResult) -> bool:
        interval = result.ci95_vs_incumbent
        return interval is not None and interval[1] < 1 - self.settings.delta

    def _values(self, workload: Workload) -> timing.Values:
        return timing.Values(self.kernel_type, workload, self.device, [self.seeds.next() for _ in range(2)])

    def _rounds(
        self,
        values: timing.Values,
        contenders: Sequence[timing.Contender],
        torch_error: Sequence[float],
    ) -> timing.Rounds:
        return timing.Rounds(
            values,
            contenders,
            torch_error=torch_error,
            seed=self.seeds.next(),
            epsilon=self.settings.epsilon,
        )

    def _budget(self, *, peers: bool) -> timing.Budget:
        if self.settings.quick:
            return timing.Budget(seconds=1.0, least=statistics.EARLY_ROUNDS, most=2 * statistics.EARLY_ROUNDS)
        seconds = 3.0 if self.device.type == "cpu" else 1.0
        if peers:
            return timing.Budget(seconds=2 * seconds, least=statistics.FULL_ROUNDS, most=60)
        return timing.Budget(seconds=seconds, least=statistics.EARLY_ROUNDS, most=100)

    def _peers(self, values: timing.Values) -> list[timing.Local]:
        """The peers that can do this workload here, and do it right; eager first, which defines the op."""
        workload, kernel_type = values.workload, self.kernel_type
        args = make_inputs(kernel_type, workload, self.seeds.next(), self.device)
        expected = checks.expect(kernel_type, workload, args)
        found = []
        for peer in kernel_type.peers:
            try:
                function = peer.make(workload, self.device)
                if function is None:
                    continue
                outputs = as_tuple(function(**args))
            except Exception as error:  # noqa: BLE001 - foreign code; a peer that cannot do it is none
                log.warning("peer %s cannot do %s: %s", peer.name, workload.label, error)
                continue
            problem = checks.form_of(outputs, expected) or (
                checks.check_values(outputs, expected, kernel_type, workload).problem
            )
            if problem and peer.name != timing.EAGER:
                log.warning("peer %s is wrong on %s: %s", peer.name, workload.label, problem)
                continue
            found.append(timing.Local(peer.name, function, values))
        if not found or found[0].name != timing.EAGER:
            raise JudgeError(
                f"The plain torch expression of {kernel_type.name} does not run {workload.label}."
            )
        return found

    def _baseline_of(self, result: WorkloadResult, columns: Mapping[str, timing.Column]) -> WorkloadResult:
        """Fill in the peers' times, and which of them is the fastest."""
        peers = {
            name: median(column.device_us)
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

    def _result(
        self,
        workload: Workload,
        columns: Mapping[str, timing.Column],
        passed: Passed,
        *,
        with_peers: bool,
    ) -> WorkloadResult:
        own = columns[_CANDIDATE].device_us
        epsilon = self.settings.epsilon
        latency_us = median(own)
        eager = statistics.compare(columns[timing.EAGER].device_us, own, epsilon=epsilon)
        result = _untimed(workload)
        seconds = latency_us / 1e6
        update: dict[str, Any] = {
            "latency_us": latency_us,
            "host_us": median(columns[_CANDIDATE].host_us),
            "eager_us": median(columns[timing.EAGER].device_us),
            "speedup_vs_eager": eager.speedup,
            "ci95_vs_eager": eager.interval,
            "gb_s": self.kernel_type.bytes_moved(workload) / seconds / 1e9,
            "tflops": self.kernel_type.flops(workload) / seconds / 1e12,
            "pct_peak": roofline.pct_peak(self.kernel_type, workload, latency_us, self._ceilings()),
            "max_abs_error": passed.max_abs_error,
            "error_ratio": passed.error_ratio,
        }
        if _INCUMBENT in columns:
            incumbent = statistics.compare(columns[_INCUMBENT].device_us, own, epsilon=epsilon)
            update["incumbent_us"] = median(columns[_INCUMBENT].device_us)
            update["speedup_vs_incumbent"] = incumbent.speedup
            update["ci95_vs_incumbent"] = incumbent.interval
        if with_peers:
            result = self._baseline_of(result, columns)
            assert result.baseline is not None
            fastest = statistics.compare(columns[result.baseline].device_us, own, epsilon=epsilon)
            update["speedup"], update["ci95"] = fastest.speedup, fastest.interval
        elif _key(workload) in self.baselines:
            # The peers were timed when the session began; eager, timed now as well, carries the comparison over.
            known = self.baselines[_key(workload)]
            assert known.eager_us is not None and known.baseline_us is not None
            update["baseline"] = known.baseline
            update["baseline_us"] = known.baseline_us / known.eager_us * update["eager_us"]
            update["speedup"] = eager.speedup * known.baseline_us / known.eager_us
            update["peers_us"] = known.peers_us
        return result.model_copy(update=update)

    # --- children --------------------------------------------------------------------------------------------------

    def _child(self) -> Child:
        child, self.spare = self.spare, None
        return child if child is not None and not child.ended else self._new_child()

    def _new_child(self) -> Child:
        """A fresh child with an arena large enough for whatever it will be asked."""
        if self.server is None:
            self.server = Server(interpret=self.interpret, device=self.device.type)
        if self.isolate:
            try:
                return self._opened(isolate=True)
            except JudgeError as error:
                log.warning("children run without namespaces of their own: %s", error)
                self.isolate = False
        return self._opened(isolate=False)

    def _opened(self, *, isolate: bool) -> Child:
        assert self.server is not None
        spawned = self.server.spawn(isolate=isolate)
        if spawned is None:
            raise JudgeError("the system refuses them")
        if self.pool is None:
            self.pool = Pool(self._arena_bytes(), self.device)
        child = Child(spawned, self.pool, timeout_s=self.settings.timeout_s)
        child.open()
        return child

    def _arena_bytes(self) -> int:
        """The most that any case or timed workload takes, in any domain."""
        whole = Domain(dtypes=self.kernel_type.dtypes, values={})
        made = [case for stage in STAGES for case in cases_of(stage, self.scope, whole)]
        made += [Case(stage="smoke", workload=w, repeats=cases.REPEATS) for w in self.scope.workloads]
        needed = [room_for(self.kernel_type, case) for case in made]
        needed += [timing.room_for(self.kernel_type, w, self.device) for w in self.scope.workloads]
        return max(needed)

    def _holder(self, incumbent: Candidate) -> Child:
        """The child that holds the incumbent, started again if need be."""
        child = self.kept.get(incumbent.digest)
        if child is not None and not child.ended:
            return child
        child = self._new_child()
        try:
            child.build(incumbent, str(self.device))
        except Failed as failed:
            child.end()
            raise JudgeError(
                f"The incumbent, which had passed, {failed.what}.",
                remedy="Judge it again on its own (bench).",
            ) from None
        self._keep(incumbent, child)
        return child

    def _retire(self, candidate: Candidate, child: Child, *, keep: bool) -> None:
        if keep and not child.ended:
            self._keep(candidate, child)
        else:
            child.end()

    def _keep(self, candidate: Candidate, child: Child) -> None:
        """Keep a child alive: the candidate may be the next one's opponent."""
        old = self.kept.pop(candidate.digest, None)
        if old is not None and old is not child:
            old.end()
        self.kept[candidate.digest] = child
        while len(self.kept) > _KEPT_CHILDREN:
            self.kept.pop(next(iter(self.kept))).end()

    def _probe_device(self) -> None:
        """After a crash: is the device still sane?

        Raises:
            DeviceError: It is not; nothing that follows could be judged.
        """
        if self.device.type != "cuda":
            return
        try:
            canary = torch.arange(1 << 16, dtype=torch.float64, device=self.device)
            right = float(canary.sum()) == ((1 << 16) - 1) * (1 << 15)
        except RuntimeError as error:
            raise DeviceError(
                f"The GPU no longer answers after a candidate failed: {error}",
                remedy="Reset it, then resume.",
            ) from None
        if not right:
            raise DeviceError(
                "The GPU computes wrong sums after a candidate failed.", remedy="Reset it, then resume."
            )


def device_of(settings: Settings) -> torch.device:
    """The device of a session.

    Raises:
        DeviceError: A GPU was asked for, and there is none.
    """
    if settings.backend == "cpp" or settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return (
            torch.device("cuda", torch.device(settings.device).index or 0)
            if settings.device != "auto"
            else (torch.device("cuda", 0))
        )
    if settings.device == "auto" or settings.backend == "cuda":
        return torch.device("cpu")
    raise DeviceError(
        f"There is no GPU here for --device {settings.device}.",
        remedy="Use --device cpu: Triton's interpreter.",
    )


def _in_dtype(workload: Workload, dtype: str) -> Workload:
    """The same call in another dtype: every tensor that has the first one's."""
    old = workload.dtype
    args = tuple(
        (name, value.model_copy(update={"dtype": dtype}))
        if isinstance(value, TensorSpec) and value.dtype == old
        else (name, value)
        for name, value in workload.args
    )
    return workload.model_copy(update={"args": args})


def _distinct(workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    return tuple({_key(w): w for w in workloads}.values())


def _key(workload: Workload) -> str:
    """What makes two calls the same call."""
    return workload.model_copy(update={"label": "", "calls": 0, "share": 0.0}).model_dump_json()


def _untimed(workload: Workload) -> WorkloadResult:
    return WorkloadResult(
        label=workload.label, shape=workload.shape, dtype=workload.dtype, share=workload.share
    )


# --- the process ----------------------------------------------------------------------------------------------------


def serve(channel: Connection, settings: Settings, server: Server | None) -> None:
    """Answer requests until the orchestrator closes the channel."""
    torch.set_grad_enabled(False)
    referee: Referee | None = None
    try:
        referee = _answer(channel, partial(Referee, settings, server))
        while referee is not None:
            request = channel.recv()
            _answer(channel, partial(referee.do, request), reply=True)
    except (EOFError, OSError):
        pass
    finally:
        if referee is not None:
            referee.close()
        elif server is not None:
            server.close()


def _answer(channel: Connection, action: Callable[[], Any], *, reply: bool = False) -> Any:
    """Do it, and tell the orchestrator how it went."""
    try:
        result = action()
    except AutokernelError as error:
        channel.send(("error", type(error).__name__, error.message, error.remedy))
        return None
    except Exception:  # noqa: BLE001
        # The wall of this process: a fault of the judge goes to the orchestrator with its traceback.
        channel.send(("fault", traceback.format_exc()))
        return None
    channel.send(("done", result if reply else None))
    return result
