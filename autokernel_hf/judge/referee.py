"""The referee: the trusted process that holds seeds, oracle, peers and verdict for the length of a session.

It is started by the orchestrator and ends with it. It commands children (see `remote`), which it starts from a fork
server, and times its own peers against what they hold. Whatever a child does, the worst is that it is ended.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from autokernel_hf import contract, gpu
from autokernel_hf.errors import CandidateError, DeviceError, UsageError
from autokernel_hf.judge import cases, huge, indices, replays, timing
from autokernel_hf.judge.arena import Pool
from autokernel_hf.judge.bench import Bench, Pair, untimed
from autokernel_hf.judge.cases import (
    STAGES,
    Case,
    Scope,
    Stage,
    cases_of,
    distinct,
    holds,
    in_dtype,
    key_of,
    narrowed,
)
from autokernel_hf.judge.child import MEMORY_WORDS
from autokernel_hf.judge.crew import Crew
from autokernel_hf.judge.quiet import family, wait_for_quiet
from autokernel_hf.judge.remote import Child, Failed
from autokernel_hf.judge.seeds import Seeds
from autokernel_hf.judge.server import Server
from autokernel_hf.judge.session import Request, Settings
from autokernel_hf.judge.sheet import Sheet, Step
from autokernel_hf.judge.stages import Passed, StageFailed, room_for, run_case, start_compile, write_calls
from autokernel_hf.judge.telemetry import device_state
from autokernel_hf.judge.verdict import gain_of, why_not_keep
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.kernels.base import tensor_bytes
from autokernel_hf.records import (
    BenchStatus,
    Candidate,
    Evaluation,
    Workload,
    WorkloadResult,
)
from autokernel_hf.variant import Domain

# What judging needs of a GPU: so many times the tensors of its largest call, and some processes' contexts.
_MEMORY_FACTOR, _CONTEXTS_BYTES = 20.0, 2 << 30
_STILL_WORKING_S = 2.0  # the spinning of an OpenMP pool ends long before


class _Verdict(Exception):  # noqa: N818 - the end of an evaluation
    """An evaluation ends here."""

    def __init__(self, status: BenchStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Referee:
    """A session.

    Raises:
        DeviceError: The device that was asked for is not there.
        UsageError: There is no such kernel type.
    """

    def __init__(self, settings: Settings, server: Server | None) -> None:
        self.settings = settings
        self.opening: tuple[Step, ...] = ()  # until the first evaluation has told of it
        self.kernel_type = find_type(settings.kernel_type)
        self.device = device_of(settings)
        if self.device.type == "cuda":
            # Events and streams are the current device's: on another one, peers would be timed by a clock that does not
            # see them.
            torch.cuda.set_device(self.device)
        self.interpret = settings.backend == "triton" and self.device.type == "cpu"
        kind = self.device.type
        workloads = settings.workloads or self.kernel_type.workloads[kind]
        if settings.workloads is None and settings.dtypes is not None:
            workloads = tuple(w for w in workloads if w.dtype in settings.dtypes) or tuple(
                in_dtype(w, settings.dtypes[0]) for w in workloads
            )
        dtypes = settings.dtypes or self.kernel_type.dtypes
        self.scope = Scope(
            kernel_type=self.kernel_type,
            workloads=distinct(workloads),
            dtypes=tuple(d for d in dtypes if not self.interpret or d in cases.INTERPRETER_DTYPES),
            interpret=self.interpret,
        )
        self._wanted = self.scope.workloads
        self.bench = Bench(self.scope, settings, self.device, Seeds(settings.seed))
        self.crew: Crew | None = None
        if server is not None and server.device != self.device.type:
            server.close()
            server = None
        self._server = server

    @property
    def can_run(self) -> bool:
        """Whether candidates of this backend can run here at all."""
        return self.settings.backend != "cuda" or self.device.type == "cuda"

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()
        elif self._server is not None:
            self._server.close()

    def _crew(self) -> Crew:
        if self.crew is None:
            pool = Pool(self._arena_bytes(), self.device)
            pool.reserve()  # while the server is still importing
            self.crew = Crew(
                device=str(self.device),
                interpret=self.interpret,
                timeout_s=self.settings.timeout_s,
                server=self._server,
                pool=pool,
            )
        return self.crew

    def _arena_bytes(self) -> int:
        """The most that any case or timed workload takes, in any domain."""
        whole = Domain(dtypes=self.kernel_type.dtypes, values={})
        widest = replace(self.scope, backend="cuda")  # whose calls are also those of all others
        made = [case for stage in STAGES for case in cases_of(stage, widest, whole)]
        made += [Case(stage="smoke", workload=w, repeats=cases.REPEATS) for w in self.scope.workloads]
        needed = [room_for(self.kernel_type, case) for case in made]
        needed += [timing.room_for(self.kernel_type, w, self.device) for w in self.scope.workloads]
        return max(needed)

    def do(self, request: Request) -> Evaluation | tuple[WorkloadResult, ...]:
        """Do what the orchestrator asks.

        Raises:
            DeviceError: The GPU is sick, or others hold its memory.
            UsageError: The calls to be judged do not fit in memory.
        """
        try:
            return self._do(request)
        except (RuntimeError, MemoryError) as error:
            # The referee's own: a candidate's is its verdict.
            if not isinstance(error, MemoryError) and not any(w in str(error) for w in MEMORY_WORDS):
                raise
            self._must_have_memory()
            largest = max(self.scope.workloads, key=lambda w: tensor_bytes(w))
            raise UsageError(
                f"{largest.label} ({largest.shape}, {largest.dtype}) does not fit in memory with its float64 oracle: "
                f"{str(error).splitlines()[0][:200]}",
                remedy="Judge on a smaller shape, or on a machine with more memory.",
            ) from None

    def _do(self, request: Request) -> Evaluation | tuple[WorkloadResult, ...]:
        if request.action == "measure_peers":
            return self.measure_peers()
        assert request.candidate is not None
        return self.evaluate(request)

    # --- judging ---------------------------------------------------------------------------------------------------

    def evaluate(self, request: Request) -> Evaluation:
        """Judge a candidate: see `evaluate.Judge`."""
        candidate = request.candidate
        assert candidate is not None
        sheet = Sheet.begun(request, self.opening)
        self.opening = ()
        sheet.results = {key_of(w): untimed(w) for w in self.scope.workloads}
        child: Child | None = None
        try:
            domain = self._domain(candidate)
            sheet.results = {key_of(w): untimed(w) for w in self.scope.workloads}
            with sheet.phase("start"):
                crew = self._crew()
                crew.start_build(candidate)
                fresh = crew.take()
            with sheet.phase("build"):
                if candidate.backend != "triton":
                    self._while_others_compile(domain)
                try:
                    built = crew.finish_build(candidate)
                except BaseException:
                    crew.put_back(fresh)
                    raise
                child = fresh
                child.load(built)
            sheet.resources, sheet.built_id = built.resources, built.id
            sheet.machine_code = built.machine_code
            reason = self._judge(child, domain, request, sheet)
            status: BenchStatus = "passed"
        except Failed as failed:
            status, reason = failed.status, f"The candidate {failed.what}"
        except StageFailed as failed_stage:
            status, reason = failed_stage.status, failed_stage.reason
        except _Verdict as verdict:
            status, reason = verdict.status, verdict.reason
        with sheet.phase("end"):
            self._let_go(child, candidate, status, request, sheet)
        return sheet.evaluation(status, reason)

    def _let_go(
        self,
        child: Child | None,
        candidate: Candidate,
        status: BenchStatus,
        request: Request,
        sheet: Sheet,
    ) -> None:
        """Keep or end the child of a candidate that was judged, and look at the device.

        Raises:
            DeviceError: The GPU is sick, or others hold its memory.
        """
        if child is not None:
            if not child.ended and self.device.type == "cuda":
                with contextlib.suppress(Failed):
                    sheet.peak_bytes = child.peak_bytes()
            won = set(sheet.stages.values()) == {"passed"} and not request.confirm
            if won and self.device.type == "cuda" and not child.ended:
                self._crew().keep(candidate, child)
            else:
                child.end()
        if status in ("crashed", "timeout", "out_of_memory"):
            self._probe_device()
        if status == "out_of_memory":
            self._must_have_memory()

    def prepare(self) -> None:
        """What can be done for the next candidate while nobody waits."""
        if self.device.type == "cuda" and self.crew is not None:
            torch.cuda.empty_cache()  # what the oracle took in float64 is others' to use
            self.crew.prepare()

    def _while_others_compile(self, domain: Domain) -> None:
        """What this candidate and the next will need, done while the processors of this process have nothing to do."""
        if self.device.type == "cuda":
            self._crew().prepare()
        if self.can_run and not self.interpret:
            self.bench.prepare([w for w in self.scope.workloads if holds(domain, w)])

    def _judge(self, child: Child, domain: Domain, request: Request, sheet: Sheet) -> str:
        """The cascade; the reason of a pass."""
        child.inspect()
        assert request.candidate is not None
        if request.candidate.backend == "triton" and not self.interpret:
            with sheet.phase("compile"):
                timed = [w for w in self.scope.workloads if holds(domain, w)]
                self._compile(child, timed, partial(self._while_others_compile, domain))
        sheet.smoke = self._stage(child, "smoke", domain, sheet)
        self._must_be_at_rest(child)
        if self.interpret:
            if not self.settings.quick:
                self._remaining_stages(child, request.candidate, domain, sheet)
            return "Right in the interpreter; it has no timing without a GPU."
        if not request.all_stages:
            self._must_be_new(child, domain, request, sheet)
        if request.all_stages and not self.settings.quick:
            self._remaining_stages(child, request.candidate, domain, sheet)
        self._time(child, domain, request, sheet)
        if request.all_stages:
            self._hold_device_times(child, sheet)
            return self._summary(sheet)
        reason = why_not_keep(
            tuple(sheet.results.values()), epsilon=self.settings.epsilon, delta=self.settings.delta
        )
        if reason or self.settings.quick:
            return reason or self._summary(sheet)
        self._remaining_stages(child, request.candidate, domain, sheet)
        self._hold_device_times(child, sheet)
        return self._summary(sheet)

    def _must_be_new(self, child: Child, domain: Domain, request: Request, sheet: Sheet) -> None:
        """Tell the candidate's machine code on the timed calls.

        Raises:
            _Verdict: It is known: there is nothing left to judge.
        """
        if request.candidate is not None and request.candidate.backend == "triton":
            with sheet.phase("machine code"):
                sheet.machine_code = self._launches(child, domain)
        if sheet.machine_code in request.known:
            raise _Verdict("passed", "The same machine code as one that was judged before.")

    def _launches(self, child: Child, domain: Domain) -> str | None:
        """The digest of what a Triton candidate launches in the timed calls; None where that cannot be told."""
        whole = hashlib.sha256()
        for workload in self.scope.workloads:
            if not holds(domain, workload):
                continue
            placed = write_calls(child, [(workload, self.bench.fresh(workload))])
            digest = child.launches([p.arguments for p in placed]) if placed else None
            if digest is None:
                return None
            whole.update(digest.encode())
        return whole.hexdigest()

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

    def _summary(self, sheet: Sheet) -> str:
        done = "All stages passed" if set(sheet.stages.values()) == {"passed"} else "The smoke stage passed"
        gain = gain_of(tuple(sheet.results.values()))
        if gain is None:
            return f"{done}."
        over = "the incumbent" if gain.over == "incumbent" else "eager torch"
        low, high = gain.interval
        return f"{done}; {gain.speedup:.3f}x the speed of {over} ({low:.3f} to {high:.3f} at 95 %)."

    def _domain(self, candidate: Candidate) -> Domain:
        """The candidate's domain, once it is clear that it can serve here at all."""
        if not self.can_run:
            raise _Verdict("unsupported", "A CUDA candidate needs an NVIDIA GPU, and there is none here.")
        # On a GPU one session judges both kinds, so that each can be timed against the best of the other.
        backends = {"triton", "cuda"} if self.device.type == "cuda" else {self.settings.backend}
        if candidate.backend not in backends or candidate.kernel_type != self.kernel_type.name:
            raise UsageError(
                f"This session judges {self.settings.backend} candidates for {self.kernel_type.name}, not "
                f"{candidate.backend} ones for {candidate.kernel_type}.",
                remedy="Start a session of its own.",
            )
        try:
            domain = contract.check(candidate, self.kernel_type)
        except CandidateError as error:
            raise _Verdict("rejected", f"It breaks the candidate contract: {error}") from None
        wanted = distinct([narrowed(w, domain) for w in self._wanted])
        self.scope = self.bench.scope = replace(self.scope, workloads=wanted, backend=candidate.backend)
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

    def _remaining_stages(self, child: Child, candidate: Candidate, domain: Domain, sheet: Sheet) -> None:
        if candidate.backend == "triton" and not self.interpret:
            made = [case for stage in STAGES[1:] for case in cases_of(stage, self.scope, domain)]
            timed = {w.args for w in self.scope.workloads}
            with sheet.phase("compile"):
                needed = [c.workload for c in made if not c.refuse and c.workload.args not in timed]
                needed += [call.alike for call in huge.calls_of(self.scope, domain)]
                self._compile(child, needed, lambda: None)
        for stage in STAGES[1:]:
            self._stage(child, stage, domain, sheet)
        self._more_than_32_bits(child, candidate, domain, sheet)
        child.inspect()

    def _hold_device_times(self, child: Child, sheet: Sheet) -> None:
        """The device's own times against the referee's clock, once both are known.

        Raises:
            Failed: They contradict each other.
        """
        for key, warm in sheet.warm_times.items():
            device_us = sheet.results[key].device_us
            problem = replays.contradiction(device_us, warm) if device_us is not None else ""
            if problem:
                child.end()
                raise Failed("rejected", f"{problem} (on {sheet.results[key].label})")

    def _more_than_32_bits(self, child: Child, candidate: Candidate, domain: Domain, sheet: Sheet) -> None:
        """Tensors of more than 2^31 elements where memory allows, else a reading of the source.

        Raises:
            StageFailed: It is wrong there.
        """
        calls = huge.calls_of(self.scope, domain)
        if self.device.type != "cuda":
            sheet.notes = indices.notes_on(candidate)
            return
        left_out = []
        # One at a time on a device: what is free is free for one.
        with sheet.phase("huge"), gpu.device_lock(self.device):
            sheet.stages["edges"] = "failed"
            for call in calls:
                if not self._ran(child, call):
                    left_out.append(f"{call.workload.label} ({call.workload.dtype})")
        if left_out:
            reading = indices.notes_on(candidate)
            if reading:
                # What memory happens to be free must not decide: with enough of it, it would most likely have failed.
                raise StageFailed(
                    "incorrect",
                    f"Stage edges, {left_out[0]}: could not be run in the memory that was free, and its source says that "
                    f"it would fail. {reading[0]}",
                )
            sheet.notes = (
                f"More than 2^31 elements did not fit in the memory that was free: {', '.join(left_out)}.",
            )
        elif not calls:
            sheet.notes = indices.notes_on(candidate)
        sheet.stages["edges"] = "passed"

    def _ran(self, child: Child, call: huge.Huge) -> bool:
        """Run a call of more than 2^31 elements; False where there was no memory for it.

        Raises:
            StageFailed: It is wrong.
        """
        if not huge.fits(call, self.kernel_type, self.device):
            return False
        try:
            huge.run(child, self.kernel_type, call, self.bench.seeds.next(), self.device)
        except (StageFailed, torch.OutOfMemoryError) as failed:
            # It has its memory for every other call; somebody else may have taken what was free for this one.
            if isinstance(failed, StageFailed) and failed.status != "out_of_memory":
                raise
            return False
        return True

    def _compile(self, child: Child, workloads: Sequence[Workload], meanwhile: Callable[[], None]) -> None:
        """Have what these calls need compiled side by side: one after the other, the stages' take ten seconds.

        Args:
            meanwhile: What this process does while they are compiled, beside drawing the calls' values.
        """
        distinct = {w.args: w for w in workloads}.values()
        try:
            start_compile(child, distinct)
            meanwhile()
            if len(distinct) > 1:  # one alone might as well be the call that counts
                placed = write_calls(child, ((w, self.bench.fresh(w)) for w in distinct))
            child.finish_compile()
            if len(distinct) > 1:
                child.warm([p.arguments for p in placed])
        except Failed as failed:
            raise Failed(failed.status, f"{failed.what} (while its variants were compiled)") from None

    def _stage(self, child: Child, stage: Stage, domain: Domain, sheet: Sheet) -> dict[str, Passed]:
        """Run a stage.

        Raises:
            StageFailed: A case of it failed.
        """
        seen: dict[str, Passed] = {}
        sheet.stages[stage] = "failed"
        # The oracle works while the child does, and the calls are small: more threads would only disturb.
        with sheet.phase(stage), timing.threads(1):
            for case in cases_of(stage, self.scope, domain):
                args = self.bench.fresh(case.workload)
                seen[key_of(case.workload)] = run_case(child, self.kernel_type, case, args, self.device)
            if stage == "edges" and self.device.type == "cuda":
                self._time_warm(child, domain, sheet)
        sheet.stages[stage] = "passed"
        return seen

    # --- timing ----------------------------------------------------------------------------------------------------

    def measure_peers(self) -> tuple[WorkloadResult, ...]:
        """Time what a user would pick instead, on every workload."""
        if self.interpret or not self.can_run:
            return tuple(untimed(w) for w in self.scope.workloads)
        return tuple(self.bench.peers(w) for w in self.scope.workloads)

    def _time(self, child: Child, domain: Domain, request: Request, sheet: Sheet) -> None:
        """Time the candidate on every workload in its domain; stop early once it cannot be kept any more."""
        assert request.candidate is not None
        pair = Pair(candidate=request.candidate, child=child, incumbent=request.incumbent)
        self._note_state(sheet)
        for workload in self.scope.workloads:
            if not holds(domain, workload):
                continue
            assert sheet.smoke is not None
            passed = sheet.smoke[key_of(workload)]
            with sheet.phase("timing"):
                result = self.bench.candidate(pair, self._crew(), workload, passed, peers=request.peers)
            sheet.results[key_of(workload)] = result
            if self.bench.hopeless:
                break
        self._note_state(sheet)

    def _note_state(self, sheet: Sheet) -> None:
        state = device_state(self.device)
        if state is not None:
            sheet.device_states.append(state)

    def _time_warm(self, child: Child, domain: Domain, sheet: Sheet) -> None:
        """The columns beside the cold one, which also show whether the candidate works in a CUDA graph.

        Raises:
            StageFailed: It does not.
        """
        for workload in self.scope.workloads:
            if not holds(domain, workload):
                continue
            calls = (self.bench.fresh(workload), self.bench.fresh(workload))
            with gpu.device_lock(self.device):
                own = replays.candidate_times(child, self.kernel_type, workload, calls)
                eager = replays.eager_times(self.kernel_type, calls[0])
            sheet.warm_times[key_of(workload)] = own
            sheet.eager_warm_times[key_of(workload)] = eager

    def _must_have_memory(self) -> None:
        """After a want of memory: is it the candidate's, or has another process taken the GPU's?

        Raises:
            DeviceError: Another has: no verdict on a candidate can be had from it.
        """
        if self.device.type != "cuda":
            return
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        needed = _MEMORY_FACTOR * max(tensor_bytes(w) for w in self.scope.workloads) + _CONTEXTS_BYTES
        if free < needed <= total / 2:
            raise DeviceError(
                f"Other processes hold the memory of this GPU: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free, where "
                f"judging needs {needed / 1e9:.1f} GB.",
                remedy="End them or wait for them, or name another GPU with --device cuda:N.",
            )

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
