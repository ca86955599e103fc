"""Rounds of turns on one workload: who is faster, by how much, and whether every timed output was right.

In each round every contender takes one turn (see `turn`), in random order, on the same fresh values: activations are a
secret rotation of a master copy, the other tensors come from one of two masters. The plain torch expression takes part
in every round; what it returns is what the others' outputs are held against, and where that quick look finds a
difference, the float64 oracle decides.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from autokernel_hf.judge import checks, statistics
from autokernel_hf.judge.arena import ALIGNMENT, POISON, Layout, Slot, outputs_of, same_bits
from autokernel_hf.judge.large import inputs_of
from autokernel_hf.judge.near import Near
from autokernel_hf.judge.quiet import wait_for_quiet
from autokernel_hf.judge.remote import Child, Failed
from autokernel_hf.judge.turn import DELAY_FACTOR, DELAY_US, Times, Turn, flush_for
from autokernel_hf.kernels.base import DTYPES, Args, KernelType, itemsize
from autokernel_hf.records import TensorSpec, Workload

EAGER = "eager"
MAX_CALLS = 6
# Of timed calls: enough that short ones are not lost in the noise of one, not more than a slow contender can bear.
_TURN_US = 4000.0
_LONGEST_TURN_US = 30_000.0
_SET_BYTES = {"cpu": 1 << 30, "cuda": 512 << 20}
_ROUND_S = 0.25
_FEWEST_ROUNDS = 5
_WEIGHINGS = 12
_PATIENCE = 2.5  # times the budget: then the least count no longer matters
_WARM_CALLS, _WARM_S = 24, 0.4
_SPIN_LIMIT_S = 0.06
# A synchronization that finds nothing to wait for takes less, and a kernel's own tail is a small part of it.
_LATE_US = 30.0
_LATE_SHARE = 0.25
# What a child's turn may cost beyond its calls: its request, views of the arena, a context switch of the GPU.
_TURN_SLACK_US = {"cpu": 1000.0, "cuda": 2000.0}
# Calls in a row, for clocks that are wrong by less than a turn's slack: how long a row should take, how many times longer
# than its calls are said to take it may, and how often that may be tried. Other programs only make a row longer, and a
# short row is likelier to be left alone by them: so after some tries rows are shorter.
_ROWS_US, _MOST_IN_A_ROW = (3000.0,) * 20 + (1000.0,) * 60, 2000
_ROW_FACTOR, _ROW_SLACK_US = 1.5, 150.0


@dataclass(slots=True)
class Column:
    """One contender's times, a value a round: a typical call of its turn, and sums over the turn.

    On a GPU that is the median. On a CPU it is the lower quartile: what other programs do to a call only makes it longer
    (a kernel of two threads waits 0.7 ms where another program holds one of two cores), and often does so to most calls.
    """

    launch_bound: bool = False  # whether a call takes the host's time where that is longer than the device's
    device_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    late_us: list[float] = field(default_factory=list)
    claimed_us: list[float] = field(
        default_factory=list
    )  # all timed calls together, by the contender's own clock
    wall_us: list[float] = field(default_factory=list)  # the whole turn, by the referee's clock
    blocks: list[int] = field(default_factory=list)  # which pair of processes the round was between
    cost_us: list[float] = field(default_factory=list)  # what the verdict is about

    def add(self, times: Times, wall_us: float, block: int) -> None:
        self.blocks.append(block)
        typical = median if any(times.late_us) else _lower_quartile  # late times are 0 on a CPU
        self.device_us.append(typical(times.device_us))
        self.host_us.append(typical(times.host_us))
        device_us, host_us = self.device_us[-1], self.host_us[-1]
        self.cost_us.append(max(device_us, host_us) if self.launch_bound else device_us)
        self.late_us.append(median(times.late_us))
        self.claimed_us.append(sum(times.device_us))
        self.wall_us.append(wall_us)


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long the rounds of one workload may go on. The least count is kept even where it takes longer."""

    seconds: float
    least: int
    most: int


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch's CPU code on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Values:
    """The arguments of a workload's timed calls, new in every round.

    `live` names the arguments that are written before each call: the first tensor, and those that are activations like
    it. `sources` holds their values, a list per call; `arguments` is what the referee's own contenders are called with.
    """

    def __init__(
        self, kernel_type: KernelType, workload: Workload, device: torch.device, seeds: Sequence[int]
    ) -> None:
        self.kernel_type = kernel_type
        self.workload = workload
        self.device = device
        self.masters = [inputs_of(kernel_type, workload, seed, device) for seed in seeds]
        args = self.masters[0]
        self.live = _activations(args)
        self.statics = tuple(n for n, v in args.items() if isinstance(v, Tensor) and n not in self.live)
        self.outputs = outputs_of(kernel_type, workload)
        self.most_calls = max_calls(workload, self.live, self.outputs, device)
        self.calls = self.most_calls
        self.delay_us = DELAY_US[0]
        self.threads = torch.get_num_threads()
        self.arguments: Args = dict(args)
        for name in self.live:
            self.arguments[name] = _same_layout(args[name])
        self.sources = [
            [torch.empty(args[n].shape, dtype=args[n].dtype, device=device) for n in self.live]
            for _ in range(self.most_calls)
        ]

    def refresh(self, dice: random.Random) -> None:
        """Fresh values for the next round."""
        chosen = dice.choice(self.masters)
        for name in self.statics:
            self.arguments[name] = chosen[name]
        for call in self.sources[: self.calls]:
            for name, target in zip(self.live, call, strict=True):
                self._rotate(target, name, dice)

    def sample(self, dice: random.Random) -> Args:
        """Fresh values for a call that is not timed, in the workload's own layout."""
        args = dict(dice.choice(self.masters))
        for name in self.live:
            dense = torch.empty(args[name].shape, dtype=args[name].dtype, device=self.device)
            self._rotate(dense, name, dice)
            args[name] = _same_layout(args[name])
            args[name].copy_(dense)
        return args

    def _rotate(self, target: Tensor, name: str, dice: random.Random) -> None:
        """Fill a contiguous tensor with the values of a master copy, from a secret place on."""
        master = dice.choice(self.masters)[name].reshape(-1)
        flat, count = target.view(-1), target.numel()
        if count:
            shift = dice.randrange(count)
            flat[: count - shift].copy_(master[shift:])
            flat[count - shift :].copy_(master[:shift])

    def args_of(self, call: int) -> Args:
        """The arguments of one call of this round."""
        return {**self.arguments, **dict(zip(self.live, self.sources[call], strict=True))}

    def new_sinks(self) -> list[list[Tensor]]:
        return [
            [torch.empty(o.shape, dtype=DTYPES[o.dtype], device=self.device) for o in self.outputs]
            for _ in range(self.most_calls)
        ]


def _activations(args: Args) -> tuple[str, ...]:
    """The first tensor and those like it: same dtype, and same shape or (queries and keys) the same rank from 3 on.

    An expanded tensor is none: it holds one value many times, which no op before would write. A mask that is full of
    infinities is none either: rotated, it would mean something else.
    """
    tensors = [(n, v) for n, v in args.items() if isinstance(v, Tensor)]
    first = tensors[0][1]
    return tuple(
        name
        for name, tensor in tensors
        if 0 not in tensor.stride()
        and tensor.dtype == first.dtype
        and (tensor.shape == first.shape or tensor.dim() == first.dim() >= 3)
        and (tensor is first or bool(torch.isfinite(tensor.float()).all()))
    )


def max_calls(
    workload: Workload, live: Sequence[str], outputs: Sequence[TensorSpec], device: torch.device
) -> int:
    """How many calls a turn may have at most, as far as memory goes."""
    specs = [*(workload.tensor(n) for n in live), *outputs]
    a_set = sum(math.prod(s.shape) * itemsize(s.dtype) for s in specs)
    return max(1, min(MAX_CALLS, _SET_BYTES[device.type] // max(a_set, 1)))


def _same_layout(tensor: Tensor) -> Tensor:
    """New memory with the same strides and misalignment."""
    offset = 0 if tensor.data_ptr() % 16 == 0 else 1
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(offset + max(reach, 0), dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, tensor.stride(), offset)


class Local:
    """A contender in the referee itself: a trusted peer."""

    pid: int | None = None

    def __init__(self, name: str, function: Callable[..., object], values: Values) -> None:
        self.name = name
        self.function = function
        self.values = values
        self.sinks = values.new_sinks()
        self.overhead_us = 0.0
        self._flush = flush_for(values.device)

    def load(self) -> None:
        """Nothing to do: the referee's contenders read its own tensors."""

    def turn(self) -> tuple[Times, float]:
        values = self.values
        turn = Turn(
            self.function,
            values.arguments,
            [values.arguments[n] for n in values.live],
            values.sources[: values.calls],
            self.sinks[: values.calls],
            getattr(self.function, "prepare", None),
        )
        with threads(values.threads):
            began = time.perf_counter_ns()
            times = turn.take(self._flush, values.delay_us)
            wall_us = (time.perf_counter_ns() - began) / 1e3
        return times, wall_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the tensors of a workload's timed calls lie in a child's arena; `end` is how much of it they take."""

    arguments: tuple[tuple[str, object], ...]  # slots for tensors, values for the rest
    sources: tuple[tuple[Slot, ...], ...]
    sinks: tuple[tuple[Slot, ...], ...]
    end: int


def places_for(workload: Workload, live: Sequence[str], outputs: Sequence[TensorSpec], calls: int) -> Places:
    layout = Layout()
    arguments = tuple(
        (name, layout.place(value) if isinstance(value, TensorSpec) else value)
        for name, value in workload.args
    )
    sources = tuple(tuple(layout.place(_dense(workload.tensor(n))) for n in live) for _ in range(calls))
    sinks = tuple(tuple(layout.place(o) for o in outputs) for _ in range(calls))
    return Places(arguments=arguments, sources=sources, sinks=sinks, end=layout.end)


def _dense(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(shape=spec.shape, dtype=spec.dtype)


def room_for(kernel_type: KernelType, workload: Workload, device: torch.device) -> int:
    """The most bytes of arena that the timed calls of a workload take, whichever tensors turn out to be activations."""
    arguments = Layout()
    for _, spec in workload.tensors:
        arguments.place(spec)
    outputs = outputs_of(kernel_type, workload)
    specs = [*(spec for _, spec in workload.tensors), *outputs]
    a_set = sum(math.prod(s.shape) * itemsize(s.dtype) for s in specs)
    gaps = MAX_CALLS * len(specs) * 4 * ALIGNMENT
    return arguments.end + min(MAX_CALLS * a_set, max(_SET_BYTES[device.type], a_set)) + gaps


class Remote:
    """A contender in a child."""

    def __init__(self, name: str, child: Child, values: Values) -> None:
        self.name = name
        self.child = child
        self.values = values
        self.pid: int | None = child.pid
        self.places = places_for(values.workload, values.live, values.outputs, values.most_calls)
        self._statics: dict[str, Tensor] = {}

    def load(self) -> None:
        """Write this round's values into the arena, and poison the places of the outputs."""
        values, arena = self.values, self.child.arena
        for name, slot in self.places.arguments:
            tensor = values.arguments[name]
            if name in values.statics and self._statics.get(name) is not tensor:
                assert isinstance(slot, Slot)
                arena.write(slot, tensor)
                self._statics[name] = tensor
        for slots, tensors in zip(self.places.sources, values.sources[: values.calls], strict=False):
            for slot, tensor in zip(slots, tensors, strict=True):
                arena.write(slot, tensor)
        for slots in self.places.sinks[: values.calls]:
            for slot in slots:
                arena.fill(slot, POISON)
        if values.device.type == "cuda":
            torch.cuda.synchronize(values.device)

    def turn(self, *, blank: bool = False) -> tuple[Times, float]:
        calls = self.values.calls
        # How long a busy machine takes to wake a process is not the candidate's doing.
        overhead_us = self.child.noop()
        report = self.child.turn(
            self.places.arguments,
            self.values.live,
            self.places.sources[:calls],
            self.places.sinks[:calls],
            self.values.delay_us,
            blank=blank,
        )
        return report.times, max(report.wall_us - overhead_us, 0.0)

    def outputs(self, call: int) -> list[Tensor]:
        return [self.child.arena.view(slot) for slot in self.places.sinks[call]]

    def check_statics(self) -> None:
        """The tensors that were not rewritten must still be what they were.

        Raises:
            Failed: The candidate wrote to an input.
        """
        slots = dict(self.places.arguments)
        for name, tensor in self._statics.items():
            slot = slots[name]
            assert isinstance(slot, Slot)
            if not same_bits(self.child.arena.view(slot), tensor):
                raise Failed("incorrect", f"changed its input {name} during a timed call")


Contender = Local | Remote


class Rounds:
    """A block of rounds on one workload, between the same processes.

    Args:
        contenders: The first must be the plain torch expression, in the referee.
        columns: Where the times go; one that has times already is warm.
        torch_error: Per output, torch's own error on this workload, as the smoke stage saw it.
    """

    def __init__(
        self,
        values: Values,
        contenders: Sequence[Contender],
        columns: dict[str, Column],
        *,
        torch_error: Sequence[float],
        seed: int,
        block: int = 0,
    ) -> None:
        assert contenders[0].name == EAGER and isinstance(contenders[0], Local)
        self.values = values
        self.contenders = contenders
        self.columns = columns
        self.eager = contenders[0]
        self.torch_error = torch_error
        self.block = block
        self.dice = random.Random(seed)
        self.failed_contender: str | None = None

    def run(self, budget: Budget, decided: Callable[[], bool]) -> None:
        """Take rounds until `decided`, or the budget is spent.

        Raises:
            Failed: A contender in a child failed; `failed_contender` says which.
        """
        # What the referee does between turns it does on one thread: a pool that has worked spins on, and takes a core
        # from the next.
        with threads(1):
            self._take_rounds(budget, decided)

    def _take_rounds(self, budget: Budget, decided: Callable[[], bool]) -> None:
        self._warm_up()
        began = time.monotonic()
        for count in range(1, budget.most + 1):
            started = time.monotonic()
            self._round()
            now = time.monotonic()
            if now - started > _ROUND_S:
                # A busy machine makes calls wait for a core: more rounds tell more than more calls in each.
                self.values.calls = max(self._fewest_calls, self.values.calls // 2)
            if count >= budget.least and (now - began > budget.seconds or decided()):
                break
            if count >= _FEWEST_ROUNDS and now - began > _PATIENCE * budget.seconds:
                break
        _busy_until[self.values.device] = time.monotonic()

    def check_clocks(self) -> None:
        """Hold the clocks of contenders in children against the referee's, over all blocks so far.

        Raises:
            Failed: They contradict each other; `failed_contender` says whose.
        """
        for contender in self.contenders:
            if isinstance(contender, Remote):
                self._guarded(contender, partial(self._check_clocks, contender))
                self._guarded(contender, partial(self._check_row, contender))

    def _guarded(self, contender: Contender, action: Callable[[], object]) -> object:
        try:
            return action()
        except Failed:
            self.failed_contender = contender.name
            raise

    @property
    def _fewest_calls(self) -> int:
        return min(2, self.values.most_calls)

    def _warm_up(self) -> None:
        """Turns that do not count: they compile, fill caches, and tell how many calls a turn needs.

        They also let the allocator of each process settle: one that has just started walks through fresh memory for
        about ten calls before it uses the same again, and page faults made a 0.1 ms kernel take 0.8 ms.
        """
        self.values.calls = self._fewest_calls
        self.values.refresh(self.dice)
        times = {}
        for contender in self.contenders:
            contender.load()
            times[contender.name], _ = self._take(contender)
        # The first calls of a process load what they launch: the least of its turns tells what its host takes.
        hosts = {name: median(t.host_us) for name, t in times.items()}
        shortest = {name: min(t.device_us) for name, t in times.items()}
        self.values.calls = self.values.most_calls
        self.values.refresh(self.dice)
        for contender in self.contenders:
            if isinstance(contender, Local) and self.columns[contender.name].device_us:
                continue
            contender.load()
            until, calls = time.monotonic() + _WARM_S, 0
            while calls < _WARM_CALLS and time.monotonic() < until:
                taken, _ = self._take(contender)
                calls += len(taken.device_us)
                hosts[contender.name] = min(hosts[contender.name], median(taken.host_us))
                shortest[contender.name] = min(shortest[contender.name], *taken.device_us)
        wanted = min(_TURN_US / min(shortest.values()), _LONGEST_TURN_US / max(shortest.values()))
        self.values.calls = max(self._fewest_calls, min(self.values.most_calls, round(wanted)))
        if self.values.device.type == "cuda":
            self.values.delay_us = min(max(DELAY_US[0], DELAY_FACTOR * max(hosts.values())), DELAY_US[1])
            _preheat(self.values.device)

    def _take(self, contender: Contender) -> tuple[Times, float]:
        result = self._guarded(contender, contender.turn)
        assert isinstance(result, tuple)
        return result

    def _round(self) -> None:
        self.values.refresh(self.dice)
        order = list(self.contenders)
        self.dice.shuffle(order)
        for contender in order:
            contender.load()
        pids = [c.pid for c in order if c.pid is not None]
        for contender in order:
            if self.values.device.type == "cpu":
                wait_for_quiet(pids, limit_s=_SPIN_LIMIT_S)
            times, wall_us = self._take(contender)
            self.columns[contender.name].add(times, wall_us, self.block)
        wanted = [
            [
                Near(w, self.values.kernel_type, self.values.workload, e)
                for w, e in zip(call, self.torch_error, strict=True)
            ]
            for call in self.eager.sinks[: self.values.calls]
        ]
        for contender in order:
            if isinstance(contender, Remote):
                self._guarded(contender, partial(self._check, contender, wanted))

    def _check(self, contender: Remote, wanted: Sequence[Sequence[Near]]) -> None:
        """Every timed output: a quick look against torch's, and the oracle where that finds a difference."""
        kernel_type, workload = self.values.kernel_type, self.values.workload
        contender.check_statics()
        for call, nears in enumerate(wanted):
            outputs = contender.outputs(call)
            if all(near.holds(output) for near, output in zip(nears, outputs, strict=True)):
                continue
            args = self.values.args_of(call)
            outcome = checks.Oracle(kernel_type, workload, args).check(outputs)
            if outcome.problem:
                raise Failed("incorrect", f"was wrong in a timed call on fresh values: {outcome.problem}")

    def _check_clocks(self, contender: Remote) -> None:
        """The contender's own clock against the referee's, and its stream against the device."""
        column, base = self.columns[contender.name], self.columns[EAGER]
        late = median(column.late_us)
        if late > _LATE_US + _LATE_SHARE * median(column.device_us) + 2 * median(base.late_us):
            raise Failed(
                "rejected",
                f"leaves work behind outside of the current stream: the device went on for {late:.0f} us after it",
            )
        # What it claims to save over torch must be missing from the referee's own clock too, at least by half, beyond
        # what it takes to send a turn's request and to read it.
        claimed = median(b - c for b, c in zip(base.claimed_us, column.claimed_us, strict=True))
        saved = [b - c for b, c in zip(base.wall_us, column.wall_us, strict=True)]
        slack = _TURN_SLACK_US[self.values.device.type]
        if len(saved) < statistics.EARLY_ROUNDS:
            return
        _, most = statistics.bootstrap_median(saved, level=0.9999)
        if claimed < max(0.2 * median(base.claimed_us), 4 * slack):
            # So small a saving cannot be told from what a turn costs beside its calls: only from far more than that.
            if most + 4 * slack >= claimed:
                return
        elif most + slack >= claimed / 2:
            return
        # On a busy machine what a turn does beside its calls may take longer in one process than in the other for as long
        # as the rounds last. So it is weighed itself: turns with and without the timed calls, from the same process.
        hidden = [self._hidden_us(contender) for _ in range(_WEIGHINGS)]
        least, _ = statistics.bootstrap_median(hidden, level=0.9999)
        if least > slack + claimed / 4:
            raise Failed(
                "rejected",
                f"reported times that save {claimed:.0f} us a turn over torch, of which the referee's clock sees "
                f"{median(saved):.0f} us: its calls take {median(hidden):.0f} us more than it says",
            )

    def _check_row(self, contender: Remote) -> None:
        """Calls in a row, untimed and unchecked, by the referee's clock: about as long as the contender said of as many.

        What it said is what its verdict is about. Load makes that longer, never shorter; and of the rows, which load makes
        longer as well, the shortest counts.

        Raises:
            Failed: No row fits.
        """
        column = self.columns[contender.name]
        said_us = median(column.device_us)
        if self.values.device.type == "cuda":
            # The host queues a call while the device is at the one before.
            said_us = max(said_us, median(column.host_us))
        least_us = overhead_us = math.inf
        for wanted_us in _ROWS_US:
            calls = max(1, min(_MOST_IN_A_ROW, round(wanted_us / said_us)))
            if self.values.device.type == "cpu":
                wait_for_quiet([contender.child.pid], limit_s=_SPIN_LIMIT_S)
            # The least of these too: what load adds to one of them is not the row's.
            overhead_us = min(overhead_us, contender.child.noop())
            row_us = contender.child.loop(contender.places.arguments, calls) - overhead_us
            if row_us <= _ROW_FACTOR * calls * said_us + _ROW_SLACK_US:
                return
            least_us = min(least_us, row_us / calls)
        raise Failed(
            "rejected",
            f"says that a call takes {said_us:.3g} us, but of {len(_ROWS_US)} rows of calls the shortest takes "
            f"{least_us:.3g} us a call by the referee's clock",
        )

    def _hidden_us(self, contender: Remote) -> float:
        """How much longer the timed calls of a turn take by the referee's clock than by the contender's own.

        With values that are new to it: one that has read those of all calls in the untimed call, and worked out the answers
        there, does so anew.
        """
        walls = {}
        times = Times(device_us=(), host_us=(), late_us=())
        # The blank turn after the other, so that what it calls once was called before.
        for blank in (False, True):
            self.values.refresh(self.dice)
            contender.load()
            if self.values.device.type == "cpu":
                wait_for_quiet([contender.child.pid], limit_s=_SPIN_LIMIT_S)
            taken, walls[blank] = contender.turn(blank=blank)
            times = times if blank else taken
        return walls[False] - walls[True] - sum(times.device_us)


_PREHEAT_S, _STAYS_WARM_S = 0.1, 0.5
_busy_until: dict[torch.device, float] = {}  # when rounds on a device ended, by the monotonic clock


def _preheat(device: torch.device) -> None:
    """Bring the clocks up: a processor that idled runs slower at first."""
    if time.monotonic() - _busy_until.get(device, -math.inf) < _STAYS_WARM_S:
        return
    a = torch.randn(2048, 2048, device=device, dtype=torch.float16)
    until = time.monotonic() + _PREHEAT_S
    while time.monotonic() < until:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize(device)
