"""P workers in one process, on a virtual network with a virtual clock.

The programs are the ones that run on a real cluster, line for line; here they take turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from spardl.basics.checks import check_flag, check_kind, check_whole
from spardl.basics.errors import ConfigError, ProgramError
from spardl.clusters.base import Cluster, Flight
from spardl.clusters.following import follower
from spardl.clusters.ledger import Ledger, PhaseStack
from spardl.clusters.network import Network
from spardl.clusters.virtual import VirtualRun
from spardl.protocol.programs import Boundary, Phase, Program

if TYPE_CHECKING:
    from spardl.clusters.profile import Profile

__all__ = ["SimulatedCluster"]

T = TypeVar("T")


class SimulatedCluster(Cluster):
    """All workers in this process.

    Every worker has two virtual clocks: of its computation, and of the communication beside it.

    Args:
        workers: P.
        network: what the virtual seconds of messages are reckoned with.
        device: where the model and all messages live.
        count_local: whether the measured seconds of local work (forward and backward pass, selection, ...) pass on the
            virtual clocks too; without, they show the network alone.
        profile: seconds of the forward and backward pass to use instead of measured ones.
        timer: what local work is measured with, in seconds. ``time.thread_time`` leaves out what other programs take of
            a busy machine; it is wrong where several threads work, or a GPU.

    Raises:
        ConfigError: if there is not at least one worker, or an argument is of a wrong type.

    Example:
        >>> from spardl.vector.layout import Layout
        >>> method = spardl.make_method("spardl", density=0.01)
        >>> cluster = spardl.SimulatedCluster(8, spardl.Network(alpha=50e-6, gbit=1), count_local=False)
        >>> states = [method.init_state(Layout.flat(100_000), torch.float32) for _ in cluster.local_ranks]
        >>> for state in states:
        ...     method.accumulate(torch.randn(100_000), state)
        >>> averages = cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states)])
        >>> ledger = cluster.ledgers[0]
        >>> print(f"{ledger.rounds} rounds, {ledger.bytes_sent} bytes, {1e3 * cluster.seconds():.2f} ms")
        6 rounds, 9068 bytes, 0.37 ms
    """

    def __init__(
        self,
        workers: int,
        network: Network,
        *,
        device: torch.device | str = "cpu",
        count_local: bool = True,
        profile: Profile | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_whole("cluster.workers", workers, least=1)
        check_kind("network", network, Network)
        check_flag("count_local", count_local)
        self.size = workers
        self.device = torch.device(device)
        self.local_ranks = range(workers)
        self.ledgers = [Ledger() for _ in range(workers)]
        self._clocks = [0.0] * workers
        self._streams = [0.0] * workers
        self._jobs: deque[_Job] = deque()
        self._network = network
        self._count_local = count_local
        self._profile = profile
        # Seconds of the profile that have passed in the pass which each worker is in.
        self._passed = [0.0] * workers
        self._follow = follower()
        self._stack = PhaseStack(self._charge, timer)
        self._run = partial(VirtualRun, timer=timer)

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs all workers' programs."""
        followed = self._follow(programs, self.local_workers)
        return self._run(followed, self._network, self.ledgers, self._clocks, self._count_local).to_the_end()

    def run_aside(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs all workers' programs while the clocks stand still."""
        return self._run(programs, self._network, self._spare_ledgers(), [0.0] * self.size, False).to_the_end()

    def time_aside(self, programs: Sequence[Program[Any]]) -> list[float]:
        """Virtual seconds, on clocks that are thrown away."""
        clocks = [0.0] * self.size
        self._run(programs, self._network, self._spare_ledgers(), clocks, self._count_local).to_the_end()
        return clocks

    def _spare_ledgers(self) -> list[Ledger]:
        return [Ledger() for _ in self.local_ranks]

    def flight(self, programs: Sequence[Program[T]], *, pauses: bool = False) -> Flight[T]:
        """Prepares all workers' programs; they run when the first result is asked for."""
        return _SimulatedFlight(self, self._follow(programs, self.local_workers), pauses)

    def timed(self, phase: Phase, local: Sequence[int]) -> AbstractContextManager[None]:
        """Enters measured seconds for each, and lets them pass on their virtual clocks."""
        return self._stack.timed(phase, local)

    def expect(self, layers: Sequence[int]) -> None:
        """Checks that the profile, if there is one, is of this model."""
        if self._profile is not None and tuple(layers) != self._profile.entries:
            raise ConfigError(
                f"cluster.profile is of a model with {len(self._profile.entries)} layers and "
                f"{sum(self._profile.entries)} parameters, this one has {len(layers)} and {sum(layers)}; make one of "
                "this model with spardl profile"
            )

    @contextmanager
    def computing(self, local: int) -> Iterator[None]:
        """Measured seconds, or those of the profile."""
        with self.timed(Phase.COMPUTE, [local]):
            yield
        if self._profile is not None:
            self._proceed(local, self._profile.forward + self._profile.backward)
            self._passed[local] = 0.0

    def reach(self, local: int, layers: Collection[int], *, backward: bool) -> None:
        """Moves the clock on to where the profile has these layers."""
        if self._profile is None:
            return
        times = [self._profile.layers[layer] for layer in layers]
        if backward:
            self._proceed(local, self._profile.forward + max((each.ready for each in times), default=0.0))
        else:
            self._proceed(local, min((each.needed for each in times), default=0.0))

    def _proceed(self, local: int, seconds: float) -> None:
        ahead = max(0.0, seconds - self._passed[local])
        self._passed[local] += ahead
        self._clocks[local] += ahead
        self.ledgers[local].spend(Phase.COMPUTE, ahead)

    def _charge(self, phase: Phase, local: Sequence[int], seconds: float) -> None:
        if phase is Phase.COMPUTE and self._profile is not None:
            return
        for rank in local:
            self.ledgers[rank].spend(phase, seconds)
            self._clocks[rank] += seconds if self._count_local else 0.0

    def seconds(self) -> float:
        """Virtual seconds of the slowest worker."""
        return max(self._clocks)

    def close(self) -> None:
        """Nothing to leave."""

    def now(self, local: int) -> float:
        """Virtual seconds."""
        self._stack.settle()
        return self._clocks[local]

    def enqueue(self, job: _Job) -> None:
        """Puts ``job``, communication, into the streams of all workers."""
        self._jobs.append(job)

    def arrive(self, local: int, job: _Job) -> Any:
        """Lets a worker's computation wait until its part of a job is done.

        Args:
            local: which local rank.
            job: as enqueued.

        Returns:
            The result of its program.
        """
        while job.results is None:
            self._work_off(self._jobs.popleft())
        waited = max(0.0, job.ends[local] - self.now(local))
        self._clocks[local] += waited
        self.ledgers[local].spend(Phase.WAIT, waited)
        return job.results[local]

    def _work_off(self, job: _Job) -> None:
        job.ends = [max(pair) for pair in zip(self._streams, job.starts(), strict=True)]
        job.results = self._run(
            job.programs,
            self._network,
            self.ledgers,
            job.ends,
            self._count_local,
            begun=job.begun,
            pauses=job.pauses,
            beside=True,
        ).to_the_end()
        self._streams = list(job.ends)


class _Job:
    """All workers' programs up to a boundary, from one, or whole.

    Attributes:
        ends: when each worker is through, on the clocks of communication.
        results: of each worker; ``None`` before it ran.
    """

    def __init__(self, programs: Sequence[Program[Any]], *, begun: bool = False, pauses: bool = False) -> None:
        self.programs, self.begun, self.pauses = programs, begun, pauses
        self.released: dict[int, float] = {}
        self.ends: list[float] = []
        self.results: list[Any] | None = None

    def starts(self) -> list[float]:
        """When each worker released it."""
        missing = set(range(len(self.programs))) - set(self.released)
        if missing:
            raise ProgramError(f"a result is asked for that rank {min(missing)} has not begun to send")
        return [self.released[rank] for rank in range(len(self.programs))]


class _SimulatedFlight(Flight[T]):
    """Programs that wait for all workers to release them."""

    def __init__(self, cluster: SimulatedCluster, programs: Sequence[Program[T]], pauses: bool) -> None:
        self._cluster = cluster
        self._first = _Job(programs, pauses=pauses)
        self._last = _Job(programs, begun=True) if pauses else self._first

    def release(self, local: int) -> None:
        if not self._first.released:
            self._cluster.enqueue(self._first)
        self._first.released[local] = self._cluster.now(local)

    def boundary(self, local: int) -> Boundary:
        reached = self._cluster.arrive(local, self._first)
        assert isinstance(reached, Boundary)
        return reached

    def resume(self) -> None:
        self._last.released = {local: self._cluster.now(local) for local in range(self._cluster.size)}
        self._cluster.enqueue(self._last)

    def wait(self, local: int) -> T:
        result: T = self._cluster.arrive(local, self._last)
        return result
