"""Weights that are copied to other processes: the same bits, few bytes, clear errors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import spardl
from spardl.basics.errors import ConfigError, PeerError, WorkerError
from spardl.clusters import ProcessGroupCluster, SimulatedCluster
from spardl.hooks.weights import Patch, Receiver, Synced, Target, synchronize
from spardl.vector.packing import Slot, message_bytes
from tests.support.driver import wait_until
from tests.support.harness import NETWORK, run_workers
from tests.support.measuring import undisturbed

SHAPES = [(30, 7), (13,), (0, 4), (), (2, 3, 4, 5)]
ENTRIES = sum(torch.Size(shape).numel() for shape in SHAPES)
# Values that a cast could change: NaNs with a payload, infinities, negative zero, subnormal numbers.
ODD_BITS = torch.tensor([0x7FC0, 0x7F81, -0x7F, -0x3F, 0x7F80, -0x80, -0x8000, 0x0001], dtype=torch.int16)


def bits(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().to(torch.bfloat16).reshape(-1).view(torch.int16) for tensor in tensors])


class Group:
    """A source and its receivers in one process."""

    def __init__(self, tensors: Sequence[Tensor], workers: int = 3, source: int = 0) -> None:
        self.source, self.cluster = source, SimulatedCluster(workers, NETWORK, count_local=False)
        self.tensors = tensors
        self.received = [[torch.zeros_like(each, dtype=torch.bfloat16) for each in tensors] for _ in range(workers)]
        self.targets: list[Target] = [Receiver(each) for each in self.received]
        self.targets[source] = Patch(tensors)

    def sync(self) -> Synced:
        with torch.no_grad():
            pairs = zip(self.cluster.local_workers, self.targets, strict=True)
            found = self.cluster.run([synchronize(worker, self.source, target) for worker, target in pairs])
        assert all(each == found[0] for each in found)
        return found[0]

    def agrees(self) -> bool:
        """Whether the bits of all receivers are those of the source."""
        others = [each for rank, each in enumerate(self.received) if rank != self.source]
        return all(torch.equal(bits(each), bits(self.tensors)) for each in others)

    def sent(self) -> int:
        return sum(ledger.bytes_sent for ledger in self.cluster.ledgers)


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def overhead(workers: int) -> int:
    """Bytes of headers and checks of one call, sent by all ranks."""
    return 24 * (workers - 1) + workers * (workers - 1)


@settings(max_examples=25)
@given(
    workers=st.integers(1, 6),
    source=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shares=st.lists(st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_receivers_hold_the_bits_of_the_source(
    workers: int, source: int, dtype: torch.dtype, shares: list[float], seed: int
) -> None:
    group = Group(weights(dtype, seed), workers, source % workers)
    first = group.sync()
    assert group.agrees()
    assert (first.changed, first.patch_bytes, first.dense_bytes) == (ENTRIES, 2 * ENTRIES, 2 * ENTRIES)
    draws = torch.Generator().manual_seed(seed)
    for share in shares:
        before, sent = bits(group.tensors), group.sent()
        for tensor in group.tensors:
            odd = ODD_BITS[torch.randint(len(ODD_BITS), tensor.shape, generator=draws)].view(torch.bfloat16)
            drawn = torch.where(torch.rand(tensor.shape, generator=draws) < 0.5, odd, tensor + 1).to(dtype)
            tensor.copy_(torch.where(torch.rand(tensor.shape, generator=draws) < share, drawn, tensor))
        changed = int((bits(group.tensors) != before).sum())
        small = message_bytes(Slot(changed, ENTRIES), torch.int16)
        synced = group.sync()
        assert group.agrees()
        dense = small >= 2 * ENTRIES
        assert synced.changed == (ENTRIES if dense else changed)
        assert synced.patch_bytes == (2 * ENTRIES if dense else small)
        assert not synced.stale
        # Each receiver receives the patch once; no other message is sent.
        assert group.sent() - sent == synced.patch_bytes * (workers - 1) + overhead(workers)


def test_a_change_below_half_a_bfloat16_step_is_not_sent() -> None:
    group = Group([torch.ones(1000)])
    group.sync()
    group.tensors[0][7] += 2**-8  # a tie, which is rounded to 1, whose last bit is even
    assert group.sync()[:2] == (0, 0)
    group.tensors[0][7] += 2**-15
    assert group.sync().changed == 1
    assert group.received[1][0][7] == 1 + 2**-7


def test_non_contiguous_weights_arrive() -> None:
    tensor = torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last)
    group = Group([tensor, torch.randn(9, 8).T, torch.randn(8, 30)[:, 3:8]])
    for received in group.received:
        received[:] = [torch.empty_like(tensor, dtype=torch.bfloat16), torch.empty(9, 8).bfloat16().T, received[2]]
        assert not received[0].is_contiguous()
    for _ in range(2):
        group.sync()
        assert group.agrees()
        for each in group.tensors:
            each.view(torch.int32)[0] = 0x7F81_0000


@pytest.mark.parametrize("entry", [0, 3, 208, 222, 343])
@pytest.mark.parametrize("flip", [1, -0x8000])
def test_a_changed_receiver_is_sent_everything(entry: int, flip: int) -> None:
    group = Group(weights())
    group.sync()
    group.tensors[0][2] += 1
    damaged = group.received[2]
    whole = bits(damaged)
    whole[entry] ^= flip
    for tensor, part in zip(damaged, whole.split([each.numel() for each in damaged]), strict=True):
        tensor.copy_(part.view(torch.bfloat16).view(tensor.shape))
    synced = group.sync()
    assert synced.stale == (2,)
    assert synced.changed == ENTRIES
    assert synced.patch_bytes == 2 * ENTRIES + message_bytes(Slot(7, ENTRIES), torch.int16)
    assert group.agrees()
    assert not group.sync().stale


def test_swapped_weights_have_another_checksum() -> None:
    values = torch.arange(40.0).bfloat16()
    checksums = {Receiver([values]).checksum()}
    for other in (values.roll(4), values.flip(0), torch.cat((values[4:8], values[:4], values[8:]))):
        checksums.add(Receiver([other]).checksum())
    assert len(checksums) == 4
    halves = values[:20], values[20:]
    assert Receiver(halves).checksum() != Receiver(halves[::-1]).checksum()


def test_after_an_interrupted_call_everything_is_sent() -> None:
    group = Group(weights())
    group.sync()
    group.tensors[0][0] += 1
    program = synchronize(group.cluster.local_workers[0], 0, group.targets[0])
    for _ in range(2):
        next(program)  # until the header is to be sent
    program.close()
    assert group.sync().changed == ENTRIES
    assert group.agrees()


def test_receivers_whose_weights_share_memory_are_refused() -> None:
    group = Group([torch.zeros(8), torch.ones(8)])
    group.received[1][1] = group.received[1][0]
    with pytest.raises(ConfigError, match=r"^rank 1 does not hold the weights .* share no memory"):
        group.sync()


# --- real processes


def _model(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))
    return model if rank == 1 else model.to(torch.bfloat16)


def _trains(cluster: ProcessGroupCluster) -> list[Any]:
    rank = cluster.local_ranks[0]
    model = _model(rank)
    synchronizer = spardl.WeightSync(model.named_parameters(), source=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            if rank == 1 and step:
                optimizer.zero_grad()
                model(torch.randn(5, 20)).square().mean().backward()
                optimizer.step()
            if rank == 2 and step == 3:
                with torch.no_grad():
                    model[0].weight[2] = 0
            found.append((synchronizer.sync(), bits(model.parameters())))
    return [found, [str(each.message) for each in caught]]


def test_receivers_follow_a_training() -> None:
    results = run_workers(3, _trains)
    total = 2 * (20 * 30 + 30 + 30 * 10 + 10)
    for step in range(4):
        synced, held = zip(*(found[step] for found, _ in results), strict=True)
        assert torch.equal(held[0], held[1])
        assert torch.equal(held[2], held[1])
        assert len({each[:3] for each in synced}) == 1
        assert synced[0].dense_bytes == total
        resent = step == 3
        assert all(each.stale == (2,) * resent for each in synced)
        if 0 < step < 3:
            assert 0 < synced[0].share < 0.5
        # The order of the tree is 1, 2, 0; checks take one byte per other rank and call.
        checks = 2 * (1 + resent)
        assert synced[1].bytes_sent == 2 * (synced[0].patch_bytes + 24) + checks
        assert [synced[rank].bytes_sent for rank in (0, 2)] == [checks] * 2
        received = synced[0].patch_bytes + 24
        assert [each.bytes_received - checks for each in synced] == [received, 0, received]
    line = "spardl: rank 2 did not hold the weights of the last sync(), so all 940 weights were sent again; "
    assert [[each[: len(line)] for each in said] for _, said in results] == [[line]] * 3


def _complaint(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    return str(error.value)


def _disagrees(cluster: ProcessGroupCluster) -> list[str]:
    rank = cluster.local_ranks[0]

    def said(*shapes: tuple[int, ...], source: int = 0, name: str = "w") -> str:
        named = [(f"{name}{number}", torch.ones(shape).bfloat16()) for number, shape in enumerate(shapes)]
        return _complaint(lambda: spardl.WeightSync(named, source).sync())

    return [
        said((3, 4 + rank)),
        said(*[(3,)] * (rank + 1)),
        said((3,), name="wv"[rank]),
        said((3,), source=rank),
    ]


def test_different_models_are_refused_in_one_line() -> None:
    for said in run_workers(2, _disagrees):
        assert said == [
            "rank 1 has weight 0 (w0)=(3, 5), rank 0 has weight 0 (w0)=(3, 4); all workers need the same value",
            "rank 1 has weight 1 (w1)=(3,), rank 0 has no weight 1 (w1); all workers need the same value",
            "rank 1 has no weight 0 (w0), rank 0 has weight 0 (w0)=(3,); all workers need the same value",
            "rank 1 has source=1, rank 0 has source=0; all workers need the same value",
        ]


def _refused(cluster: ProcessGroupCluster) -> list[str]:
    model = nn.BatchNorm1d(3)
    shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
    given: list[tuple[Any, int]] = [
        (model, 0),
        (torch.ones(3), 0),
        (model.state_dict(), 0),
        ([], 0),
        (model.state_dict().items(), 0),
        ([torch.ones(3).half()], 0),
        ([torch.ones(3, device="meta")], 0),
        ([torch.ones(3), torch.ones(3, device="meta")], 0),
        ([("w", shard)], 0),
        ([torch.ones(3)], 1),
    ]
    return [_complaint(lambda pair=pair: spardl.WeightSync(*pair)) for pair in given]


def test_what_cannot_be_copied_is_refused_in_one_line() -> None:
    (said,) = run_workers(1, _refused)
    named = "; pass model.named_parameters()"
    assert said == [
        f"WeightSync copies tensors, got a BatchNorm1d{named}",
        f"WeightSync copies tensors, got a Tensor{named}",
        f"WeightSync copies tensors, got a str{named}",
        f"WeightSync was given no weights{named}",
        "num_batches_tracked has dtype int64, but WeightSync copies float32 or bfloat16 weights of the source; "
        "leave it out",
        "0 has dtype float16, but WeightSync copies float32 or bfloat16 weights of the source; leave it out",
        "0 has no dense values in memory; pass dense tensors on cpu or cuda",
        "weights are on cpu and meta; create one WeightSync per device",
        "w is sharded; pass a plain tensor and copy full_tensor() to it before each sync()",
        "source must be an integer, at least 0 and at most 0, got 1",
    ]


def test_float32_receivers_are_refused() -> None:
    def alone(cluster: ProcessGroupCluster) -> str:
        if cluster.local_ranks[0]:
            return ""
        return _complaint(lambda: spardl.WeightSync([torch.ones(3)], source=1))

    assert run_workers(2, alone)[0] == (
        "0 has dtype float32, but WeightSync copies bfloat16 weights of receivers; call model.to(torch.bfloat16) on "
        "receivers"
    )


@pytest.mark.slow
def test_a_lost_rank_raises_a_peer_error(tmp_path: Path) -> None:
    def loses(cluster: ProcessGroupCluster) -> None:
        rank = cluster.local_ranks[0]
        synchronizer = spardl.WeightSync([torch.ones(3).bfloat16()])
        synchronizer.sync()
        if rank == 2:
            wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
            return
        began = time.monotonic()
        with pytest.raises(PeerError) as error:
            synchronizer.sync()
        (tmp_path / f"{rank}").write_text(f"{time.monotonic() - began} {error.value}")

    def noticed() -> float:
        for file in tmp_path.iterdir():
            file.unlink()
        with pytest.raises(WorkerError):
            run_workers(3, loses, timeout=3)
        seconds, _, said = (tmp_path / "0").read_text().partition(" ")
        assert said.startswith("rank 0 lost contact in an exchange")
        return float(seconds)

    undisturbed(noticed, lambda seconds: seconds < 4)
