"""The children of a session: started from the fork server, kept while they may be needed, ended whole."""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeVar

from autokernel_hf.errors import JudgeError
from autokernel_hf.judge.arena import Pool
from autokernel_hf.judge.remote import Builder, Child, Failed, Process
from autokernel_hf.judge.server import NamespacesFirst, Server, Spawned
from autokernel_hf.judge.watchdog import Watchdog
from autokernel_hf.records import Built, Candidate

log = logging.getLogger(__name__)

_KEPT_CHILDREN = 2

P = TypeVar("P", bound=Process)


class Crew:
    """Starts and ends children.

    Args:
        device: As torch names it: cpu, cuda:0.
        server: One that was started already, or None.
        pool: Arenas large enough for whatever a child will be asked.
    """

    def __init__(
        self, *, device: str, interpret: bool, timeout_s: float, server: Server | None, pool: Pool
    ) -> None:
        self._device = device
        self._interpret = interpret
        self._timeout_s = timeout_s
        self._server = server
        self._pool = pool
        self._walls = NamespacesFirst()
        self._told = False
        self._watchdog = Watchdog()
        self._builder: Builder | None = None
        self._spare: Child | None = None
        self._kept: dict[str, Child] = {}
        self._built: dict[str, Built] = {}

    def take(self) -> Child:
        """A child that holds nothing yet."""
        child, self._spare = self._spare, None
        return child if child is not None and not child.ended else self._start()

    def put_back(self, child: Child) -> None:
        """Return a child that has loaded nothing: it is as good as new."""
        if self._spare is None or self._spare.ended:
            self._spare = child
        else:
            child.end()

    def prepare(self) -> None:
        """Have a child ready for the next `take`: on a GPU its context takes a while."""
        if self._spare is None or self._spare.ended:
            try:
                self._spare = self._start()
            except JudgeError as error:
                log.info("no child could be started ahead: %s", error)  # `take` will try again, and tell

    def start_build(self, candidate: Candidate) -> None:
        """Have a candidate built; what comes of it is for `finish_build`."""
        if self._builder is not None and self._builder.busy:
            self._builder.end()  # nobody waited for what it built last
        if self._builder is None or self._builder.ended:
            spawned = self._walls.start(partial(self._spawned, builder=True))
            assert spawned is not None
            self._builder = self._watched(Builder(spawned, timeout_s=self._timeout_s))
        self._builder.start(candidate, self._device)

    def finish_build(self, candidate: Candidate) -> Built:
        """What was built.

        Raises:
            Failed: The candidate does not build.
            ToolMissingError: This machine has no compiler for it.
        """
        assert self._builder is not None
        built = self._built[candidate.digest] = self._builder.finish()
        return built

    def fresh(self, candidate: Candidate) -> Child:
        """A new child that holds a candidate.

        Raises:
            Failed: The candidate does not build or import any more.
        """
        child = self.take()
        try:
            if candidate.digest not in self._built:
                self.start_build(candidate)
                self.finish_build(candidate)
            child.load(self._built[candidate.digest])
        except Failed:
            child.end()
            raise
        return child

    def holder(self, candidate: Candidate) -> Child:
        """The child that was kept for a candidate, or a new one, which is kept then.

        Raises:
            Failed: The candidate does not build or import any more.
        """
        child = self._kept.pop(candidate.digest, None)
        if child is None or child.ended:
            child = self.fresh(candidate)
        self.keep(candidate, child)
        return child

    def keep(self, candidate: Candidate, child: Child) -> None:
        """Keep a child alive, instead of the one that was used longest ago: it may be the next candidate's opponent."""
        old = self._kept.pop(candidate.digest, None)
        if old is not None and old is not child:
            old.end()
        self._kept[candidate.digest] = child
        while len(self._kept) > _KEPT_CHILDREN:
            self._kept.pop(next(iter(self._kept))).end()

    def close(self) -> None:
        processes = [self._spare, self._builder, *self._kept.values()]
        for process in processes:
            if process is not None:
                process.end()
        self._watchdog.close()
        self._pool.close()
        if self._server is not None:
            self._server.close()

    def _start(self) -> Child:
        child = self._walls.start(self._opened)
        assert child is not None  # without namespaces it starts, or raises
        return self._watched(child)

    def _opened(self, isolate: bool) -> Child | None:
        spawned = self._spawned(isolate, builder=False)
        if spawned is None:
            return None
        child = Child(spawned, self._pool, device=self._device, timeout_s=self._timeout_s)
        try:
            child.open()
        except JudgeError as error:
            if not isolate:
                raise
            # What a GPU's driver needs may be out of reach in namespaces; it is tried once without them.
            log.warning("children run without namespaces of their own: %s", error)
            return None
        return child

    def _spawned(self, isolate: bool, *, builder: bool) -> Spawned | None:
        if self._server is None:
            self._server = Server(interpret=self._interpret, device=self._device.partition(":")[0])
        spawned = self._server.spawn(isolate=isolate, builder=builder)
        if spawned is None:
            log.warning("the system refuses namespaces: candidates run under Landlock and a filter alone")
            return None
        if spawned.not_enforced and not self._told:
            self._told = True
            log.warning(
                "of the walls around a candidate this system lacks: %s", "; ".join(spawned.not_enforced)
            )
        return spawned

    def _watched(self, process: P) -> P:
        self._watchdog.watch(process)
        return process
