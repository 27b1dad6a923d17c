"""The simulated cluster: its clock, and its answers to programs that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from spardl.basics.errors import ConfigError, ProgramError
from spardl.clusters import Network, SimulatedCluster, gather_rows
from spardl.protocol.programs import AllReduce, Exchange, Phase, Program, Receive, Send
from tests.support.harness import Bench, dense, spardl

ALPHA, BETA = 1e-3, 8e-9 / 2


def cluster(workers: int) -> SimulatedCluster:
    return SimulatedCluster(workers, Network(alpha=ALPHA, gbit=2), count_local=False)


def swap(sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]) -> Program[list[torch.Tensor]]:
    """Sends (to, bytes) and receives (source, bytes) in one exchange."""
    return (
        yield Exchange(
            [Send(to, torch.zeros(size, dtype=torch.uint8), size) for to, size in sends],
            [Receive(source, size, torch.uint8) for source, size in receives],
        )
    )


def test_a_message_takes_alpha_plus_beta_times_its_bytes() -> None:
    two = cluster(2)
    two.run([swap([(1, 1000)], []), swap([], [(0, 1000)])])
    assert two.seconds() == pytest.approx(ALPHA + BETA * 1000)
    # The sender is free as soon as its last byte has left.
    assert two.ledgers[0].seconds[Phase.COMMUNICATE] == pytest.approx(BETA * 1000)


def test_links_are_full_duplex() -> None:
    two = cluster(2)
    two.run([swap([(1, 1000)], [(1, 1000)]), swap([(0, 1000)], [(0, 1000)])])
    assert two.seconds() == pytest.approx(ALPHA + BETA * 1000)


def test_a_link_carries_one_message_at_a_time() -> None:
    three = cluster(3)
    three.run([swap([], [(1, 1000), (2, 1000)]), swap([(0, 1000)], []), swap([(0, 1000)], [])])
    assert three.seconds() == pytest.approx(ALPHA + 2 * BETA * 1000)
    three = cluster(3)
    three.run([swap([(1, 1000), (2, 1000)], []), swap([], [(0, 1000)]), swap([], [(0, 1000)])])
    assert three.seconds() == pytest.approx(ALPHA + 2 * BETA * 1000)


@pytest.mark.parametrize("bucket", [1, 2, 4])
def test_no_link_idles_while_all_send_to_several(bucket: int) -> None:
    five = cluster(5)
    offsets = range(1, 1 + bucket)
    five.run(
        [
            swap([((rank + ahead) % 5, 1000) for ahead in offsets], [((rank - ahead) % 5, 1000) for ahead in offsets])
            for rank in range(5)
        ]
    )
    assert five.seconds() == pytest.approx(ALPHA + bucket * BETA * 1000)


def test_messages_travel_in_the_order_of_time() -> None:
    three = cluster(3)

    # The second message of rank 0 must wait for its first one; that of rank 1 need not wait for either.
    three.run([swap([(1, 3000), (2, 1000)], []), swap([(2, 1000)], [(0, 3000)]), swap([], [(0, 1000), (1, 1000)])])
    assert three.ledgers[1].seconds[Phase.COMMUNICATE] == pytest.approx(ALPHA + 3 * BETA * 1000)
    assert three.seconds() == pytest.approx(ALPHA + 4 * BETA * 1000)


def test_rounds_follow_one_another() -> None:
    eight = Bench.build(dense(), 8, 800, torch.float32)
    eight.step([torch.ones(800)] * 8)
    assert eight.cluster.seconds() == pytest.approx(14 * (1e-4 + 8e-9 * 400))


@pytest.mark.slow
def test_sparse_beats_dense_on_the_virtual_clock() -> None:
    gradients = [torch.randn(50_000) for _ in range(14)]
    seconds = []
    for method in (dense(), spardl(0.01)):
        bench = Bench.build(method, 14, 50_000, torch.float32)
        bench.step(gradients)
        seconds.append(bench.cluster.seconds())
    assert seconds[1] < seconds[0] / 2


def test_local_work_passes_on_the_clock() -> None:
    one = SimulatedCluster(1, Network(alpha=0, gbit=1))
    with one.timed(Phase.COMPUTE, [0]):
        torch.randn(1000)
    assert one.seconds() == one.ledgers[0].seconds[Phase.COMPUTE] > 0
    still = cluster(1)
    with still.timed(Phase.COMPUTE, [0]):
        torch.randn(1000)
    assert still.seconds() == 0
    assert still.ledgers[0].seconds[Phase.COMPUTE] > 0


@pytest.mark.parametrize(("seconds", "lasts"), [(1, 4), (7, 7)])
def test_work_overlaps_messages_in_flight(seconds: int, lasts: int) -> None:
    """A message that takes 4 s, and work meanwhile: the longer one counts, and work is entered as what it is."""
    now, order = [0.0], list[str]()

    def work() -> None:
        now[0] += seconds
        order.append("work")

    def program(other: int) -> Program[None]:
        yield Phase.PACK
        message = torch.zeros(4, dtype=torch.uint8)
        yield Exchange([Send(other, message, 1)], [Receive(other, 4, torch.uint8)], work if other else None)
        order.append("arrived")

    two = SimulatedCluster(2, Network(alpha=4, gbit=1e9), timer=lambda: now[0])
    two.run([program(1), program(0)])
    assert order[0] == "work"
    assert two.seconds() == pytest.approx(lasts)
    assert two.ledgers[0].seconds[Phase.PACK] == seconds
    assert two.ledgers[0].seconds[Phase.COMMUNICATE] == pytest.approx(lasts - seconds)
    assert two.ledgers[1].seconds[Phase.COMMUNICATE] == pytest.approx(4)


def test_local_work_is_measured_with_the_given_timer() -> None:
    ticks = iter(range(100))
    one = SimulatedCluster(1, Network(alpha=0, gbit=1), timer=lambda: float(next(ticks)))

    def work() -> Program[None]:
        yield Phase.SELECT
        yield Phase.PACK

    with one.timed(Phase.COMPUTE, [0]):
        pass
    assert one.seconds() == 1
    one.run([work()])
    assert one.seconds() == 4
    assert [one.ledgers[0].seconds[phase] for phase in (Phase.MERGE, Phase.SELECT, Phase.PACK)] == [1, 1, 1]


def test_sender_may_reuse_its_payload_after_the_exchange() -> None:
    payload = torch.tensor([1.0])

    def sender() -> Program[None]:
        yield Exchange([Send(1, payload, 1)], [])
        payload.zero_()

    def receiver() -> Program[float]:
        arrived = yield Exchange([], [Receive(0, 1, torch.float32)])
        return arrived[0].item()

    assert cluster(2).run([sender(), receiver()])[1] == 1.0


def test_worker_without_messages() -> None:
    with pytest.raises(ProgramError, match="rank 1 waits for a message from rank 0, which has ended"):
        cluster(2).run([swap([], []), swap([], [(0, 8)])])


def test_two_workers_that_wait_for_each_other() -> None:
    with pytest.raises(ProgramError, match="rank 0 waits for a message from rank 1, which waits for rank 0"):
        cluster(2).run([swap([], [(1, 8)]), swap([], [(0, 8)])])


def test_a_message_of_another_size() -> None:
    with pytest.raises(ProgramError, match=r"rank 0 sends 8 x torch.uint8 to rank 1, which expects 9"):
        cluster(2).run([swap([(1, 8)], []), swap([], [(0, 9)])])


def test_unexpected_message() -> None:
    with pytest.raises(ProgramError, match="rank 0 sent a message that rank 1 never received"):
        cluster(2).run([swap([(1, 8)], []), swap([], [])])


def test_message_to_an_unknown_rank() -> None:
    with pytest.raises(ProgramError, match="rank 0 sends to rank 7, but there are 2 workers"):
        cluster(2).run([swap([(7, 8)], []), swap([], [])])


def test_a_collective_that_not_all_join() -> None:
    def join() -> Program[None]:
        yield AllReduce(torch.ones(2))

    with pytest.raises(ProgramError, match="rank 0 waits in a collective for rank 1, which has ended"):
        cluster(2).run([join(), swap([], [])])


def test_housekeeping_is_not_counted() -> None:
    three = cluster(3)
    rows = gather_rows(three, [torch.tensor([float(rank), 1.0]) for rank in range(3)])
    assert [row.tolist() for row in rows] == [[0, 1], [1, 1], [2, 1]]
    assert three.seconds() == 0
    assert three.ledgers[0].rounds == 0


def test_no_workers() -> None:
    with pytest.raises(ConfigError, match=r"cluster.workers must be an integer, at least 1, got 0"):
        cluster(0)
