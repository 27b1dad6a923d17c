"""Exact bfloat16 weights for other processes, such as rollout workers: :class:`WeightSync`.

At the learning rates of fine-tuning, most steps change a weight by less than half a unit in the last place of its
bfloat16 value, so few bfloat16 values change between two calls. The source sends only the changed values, with their
indices encoded as in sparse gradients. They replace the old values and are never added, so rounding errors cannot
accumulate.

Source: PULSESync in Miahi and Belilovsky, Understanding and Exploiting Weight Update Sparsity for
Communication-Efficient Distributed RL, 2026 (arXiv 2602.03839). The index code, the checksum and the broadcast here
differ from theirs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spardl.basics.checks import check_integer
from spardl.basics.errors import ConfigError
from spardl.basics.version import __version__
from spardl.clusters.process_group import ProcessGroupCluster
from spardl.communicators.steps.transfer import all_gather
from spardl.method.provenance import compare
from spardl.protocol.programs import Exchange, Phase, Program, Receive, Send, Team, Worker, whole_team
from spardl.vector.flat import local_part
from spardl.vector.packing import Slot, message_bytes, message_words, pack, unpack
from spardl.vector.sparse import SparseVector

__all__ = ["Patch", "Receiver", "Synced", "Target", "WeightSync", "broadcast", "synchronize"]


class Synced(NamedTuple):
    """Result of :meth:`WeightSync.sync`.

    Attributes:
        changed: Number of weights sent: those whose bfloat16 value has changed, or all of them.
        patch_bytes: Size in bytes of the message with the values of these weights and, unless all are sent, their
            indices. Each receiver receives it once.
        dense_bytes: Size of all weights in bfloat16, in bytes.
        bytes_sent: Number of payload bytes that this rank sent, including copies for several receivers, headers and
            checks.
        bytes_received: Number of payload bytes that this rank received, including headers and checks.
        stale: Ranks that no longer held the weights of the last call; if there are any, all weights were sent again.
    """

    changed: int
    patch_bytes: int
    dense_bytes: int
    bytes_sent: int
    bytes_received: int
    stale: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """Ratio of ``patch_bytes`` to ``dense_bytes``; 0 if there are no bytes to send."""
        return self.patch_bytes / self.dense_bytes if self.dense_bytes else 0.0


class WeightSync:
    """Copies the weights of one rank to all ranks of a group in bfloat16, bit by bit, as small patches.

    Create one on every rank, and call :meth:`sync` on all of them whenever the receivers need new weights. The first
    call sends all weights. Later calls send the weights whose bfloat16 value has changed since the last call, or all
    weights if this takes fewer bytes. Each call compares a checksum of the weights of every receiver with that of the
    source. If they differ, for example because a receiver has loaded a checkpoint in between, all weights are sent
    again, with a warning.

    Args:
        parameters: ``model.named_parameters()`` or ``model.parameters()``, or other named tensors, in the same order
            and with the same names and shapes on all ranks. They must be float32 or bfloat16 on the source, and
            bfloat16 on the receivers, where they are overwritten. Tensors of other dtypes, such as counters, are
            refused.
        source: Rank in the group whose weights are sent.
        group: Process group of the source and the receivers; ``None`` for the default group. Its timeout limits every
            wait.

    Raises:
        ConfigError: If there are no weights, one of them has another dtype or is sharded, they are on several devices,
            the source is not a rank of the group, or there is no process group.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> weights = spardl.WeightSync(model.named_parameters(), source=0)
        >>> weights.sync().changed
        1010
        >>> with torch.no_grad():
        ...     model.bias[3] += 1
        ...     model.weight *= 1 + 1e-9  # changes no bfloat16 value
        >>> synced = weights.sync()
        >>> print(f"{synced.changed} weight in {synced.patch_bytes} of {synced.dense_bytes} bytes")
        1 weight in 4 of 2020 bytes
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        source: int = 0,
        *,
        group: Any = None,
    ) -> None:
        names, tensors = _named_tensors(parameters)
        self._cluster = ProcessGroupCluster(group, tensors[0].device)
        (self._worker,) = self._cluster.local_workers
        check_integer("source", source, least=0, most=self._worker.size - 1)
        sends = self._worker.rank == source
        _check_dtypes(names, tensors, sends=sends)
        self._source, self._names = source, names
        self._target: Target = Patch(tensors) if sends else Receiver(tensors)
        self._compared = False

    def sync(self) -> Synced:
        """Makes the weights of all receivers bit-identical to those of the source in bfloat16.

        All ranks must call this at the same time.

        Returns:
            The numbers of weights and bytes that were sent, as :class:`Synced`.

        Raises:
            ConfigError: On all ranks, if names or shapes differ in the first call, or a receiver does not hold the
                weights that it has just received.
            PeerError: If another rank is lost or does not answer in time.
        """
        self._cluster.check_alive()
        if not self._compared:
            shapes = [str(tuple(tensor.shape)) for tensor in self._target.tensors]
            facts = {"version": __version__, "handle": "WeightSync", "source": str(self._source)}
            facts |= {f"weight {number} ({name})": shapes[number] for number, name in enumerate(self._names)}
            self._cluster.run_uncounted([compare(self._worker, facts, self._cluster.device)])
            self._compared = True
        ledger = self._cluster.ledgers[0]
        sent, received = ledger.bytes_sent, ledger.bytes_received
        with torch.no_grad():
            (synced,) = self._cluster.run([synchronize(self._worker, self._source, self._target)])
        if synced.stale:
            warnings.warn(
                f"spardl: rank {', '.join(map(str, synced.stale))} did not hold the weights of the last sync(), so all "
                f"{synced.changed:,} weights were sent again; do not change the weights of receivers.",
                stacklevel=2,
            )
        return synced._replace(bytes_sent=ledger.bytes_sent - sent, bytes_received=ledger.bytes_received - received)


def _named_tensors(parameters: Iterable[Any]) -> tuple[list[str], list[Tensor]]:
    several = isinstance(parameters, Iterable) and not isinstance(parameters, nn.Module | Tensor)
    names, tensors = [], []
    for number, each in enumerate(parameters if several else [parameters]):
        named = each if isinstance(each, tuple) and len(each) == 2 else (str(number), each)
        if not several or not isinstance(named[1], Tensor):
            kind = type(each).__name__
            raise ConfigError(f"WeightSync copies tensors, got a {kind}; pass model.named_parameters()")
        names.append(str(named[0]))
        tensors.append(named[1])
    if not tensors:
        raise ConfigError("WeightSync was given no weights; pass model.named_parameters()")
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ConfigError(f"weights are on {' and '.join(devices)}; create one WeightSync per device")
    return names, tensors


def _check_dtypes(names: Sequence[str], tensors: Sequence[Tensor], *, sends: bool) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if local_part(tensor) is not tensor:
            raise ConfigError(f"{name} is sharded; pass a plain tensor and copy full_tensor() to it before each sync()")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ConfigError(f"{name} has no dense values in memory; pass dense tensors on cpu or cuda")
        if tensor.dtype != torch.bfloat16 and not (sends and tensor.dtype == torch.float32):
            holds = "float32 or bfloat16 weights of the source" if sends else "bfloat16 weights of receivers"
            remedy = "leave it out" if sends else "call model.to(torch.bfloat16) on receivers"
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(f"{name} has dtype {dtype}, but WeightSync copies {holds}; {remedy}")


# Source and receivers. Only the source has a state: a copy of the bits that the receivers hold. A receiver that has
# lost its weights recovers when all weights are sent again.


class Receiver:
    """Weights of a rank that receives them.

    Args:
        tensors: Tensors of any shapes, bfloat16.

    Attributes:
        tensors: Tensors passed to the constructor, of any shapes.
        count: Total number of entries of the tensors.
        device: Device of the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.count = sum(tensor.numel() for tensor in tensors)
        self.device = tensors[0].device

    def parts(self) -> Iterator[Tensor]:
        """Yields the bits of each tensor's weights that the receivers should hold, as int16, shape (m,)."""
        for tensor in self.tensors:
            yield _bits(tensor)

    def checksum(self) -> int:
        """Returns a checksum (64-bit integer) of all bits; a change of exactly one weight always changes it."""
        return _checksum(self.parts(), self.device)

    def write(self, number: int, bits: Tensor, places: Tensor | None = None) -> None:
        """Overwrites weights.

        Args:
            number: Number of the tensor.
            bits: New values as int16, shape (m,).
            places: Positions of the values in the flattened tensor, shape (m,); ``None`` for all.
        """
        tensor = self.tensors[number].detach()
        flat = tensor.reshape(-1)
        if places is None:
            flat.view(torch.int16).copy_(bits)
        else:
            flat.view(torch.int16)[places] = bits
        if not tensor.is_contiguous():  # flat is a copy
            tensor.copy_(flat.view(tensor.shape))

    def apply(self, vector: SparseVector) -> None:
        """Overwrites some weights: those at the indices of ``vector``, with its values, which are bits as int16."""
        starts = torch.tensor([0, *(tensor.numel() for tensor in self.tensors)], device=self.device).cumsum(0)
        cuts = torch.searchsorted(vector.indices, starts).tolist()
        for number, (begin, end) in enumerate(pairwise(cuts)):
            if begin < end:
                self.write(number, vector.values[begin:end], vector.indices[begin:end] - starts[number])


class Patch(Receiver):
    """Weights of the source, and a copy of the bits that the receivers hold, to find the weights that have changed.

    Args:
        tensors: Tensors of any shapes, float32 or bfloat16.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._held = torch.empty(self.count, dtype=torch.int16, device=self.device)
        # Whether the receivers hold these bits; false while they are being sent, so that a retry sends everything.
        self.confirmed = False

    def parts(self) -> Iterator[Tensor]:
        """Yields the bits that each tensor's weights had in the last ``take``, as int16, shape (m,)."""
        yield from self._held.split([tensor.numel() for tensor in self.tensors])

    def take(self) -> SparseVector | None:
        """Records the current weights, and returns those that have changed since the last call.

        Returns:
            The new bits of the changed weights as int16, indexed by position in all tensors together; ``None`` if it is
            cheaper, or necessary, to send all weights.
        """
        dense = (
            not self.confirmed or message_bytes(Slot(self._count_changed(), self.count), torch.int16) >= 2 * self.count
        )
        self.confirmed = False
        if dense:
            for tensor, held in zip(self.tensors, self.parts(), strict=True):
                held.copy_(_bits(tensor))
            return None
        start, indices, values = 0, [], []
        for tensor, held in zip(self.tensors, self.parts(), strict=True):
            bits = _bits(tensor)
            places = (bits != held).nonzero().squeeze(1)
            indices.append(places + start)
            values.append(bits[places])
            held[places] = values[-1]
            start += tensor.numel()
        return SparseVector(torch.cat(indices), torch.cat(values), self.count)

    def _count_changed(self) -> int:
        # Counted before the indices are listed, which take four times the memory of the weights if all have changed.
        pairs = zip(self.tensors, self.parts(), strict=True)
        return int(torch.stack([(_bits(tensor) != held).count_nonzero() for tensor, held in pairs]).sum())


Target = Receiver | Patch
"""Weights of one rank: a ``Patch`` on the source, a ``Receiver`` elsewhere."""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.bfloat16).reshape(-1).view(torch.int16)


# Number of 64-bit words that are summed at a time: 2 MiB, which stay in the cache.
_CHUNK = 1 << 18
# Odd numbers whose multiples look random: the golden ratio in 64 bits, and one from the finalizer of SplitMix64.
_MIXERS = -0x61C8864680B583EB, -0x40A7B892E31B1A47


def _checksum(parts: Iterable[Tensor], device: torch.device) -> int:
    """Sum of all words modulo 2^64, each multiplied by an odd number that depends on its position."""
    total, first = torch.zeros((), dtype=torch.int64, device=device), 0
    for part in parts:
        for chunk in part.split(4 * _CHUNK):
            # A copy, because a view of 64 bits needs an aligned start and whole words.
            padded = chunk.new_zeros(-(-chunk.numel() // 4) * 4)
            padded[: chunk.numel()] = chunk
            words = padded.view(torch.int64)
            factors = torch.arange(first, first + words.numel(), device=device) * _MIXERS[0]
            factors = (factors ^ (factors >> 32)) * _MIXERS[1] | 1
            total += (words * factors).sum()
            first += words.numel()
    return int(total)


# The program of one rank.


def synchronize(worker: Worker, source: int, target: Target) -> Program[Synced]:
    """Program of one worker (its sequence of messages) that copies the weights of the source to all workers.

    Args:
        worker: Worker that runs the program.
        source: Rank of the source.
        target: Weights of this worker: a ``Patch`` on the source, a ``Receiver`` elsewhere.

    Returns:
        The numbers of weights and bytes sent. ``bytes_sent`` and ``bytes_received`` are 0, because the worker's ledger
        counts them.

    Raises:
        ConfigError: On all workers, if one of them does not hold the weights that it has just received.
    """
    yield Phase.SELECT
    changed, header = None, None
    if isinstance(target, Patch):
        changed = target.take()
        count = target.count if changed is None else len(changed)
        header = torch.tensor([changed is None, count, target.checksum()], device=target.device)
    received = yield from broadcast(worker, source, header, Receive(source, 3, torch.int64), 3)
    dense, count, checksum = received.tolist()
    nbytes = 2 * target.count
    if dense:
        yield from _send_all(worker, source, target)
    else:
        nbytes = yield from _send_changed(worker, source, target, changed, count)
    stale = yield from _find_stale(worker, target, checksum)
    if stale and not dense:
        yield from _send_all(worker, source, target)
        nbytes, count = nbytes + 2 * target.count, target.count
    if stale and (dense or (yield from _find_stale(worker, target, checksum))):
        raise ConfigError(
            f"rank {stale[0]} does not hold the weights that it has just received; pass weights that share no memory, "
            "and do not change them during sync()"
        )
    if isinstance(target, Patch):
        target.confirmed = True
    return Synced(count, nbytes, 2 * target.count, 0, 0, tuple(stale))


def _send_changed(
    worker: Worker, source: int, target: Target, changed: SparseVector | None, count: int
) -> Program[int]:
    """Sends the weights that have changed; returns the size of their message in bytes."""
    if not count:
        return 0
    yield Phase.PACK
    slot = Slot(count, target.count)
    message = None if changed is None else pack(changed, slot, torch.int16)
    incoming = Receive(source, message_bytes(slot, torch.int16), torch.uint8)
    message = yield from broadcast(worker, source, message, incoming, message_words(slot))
    yield Phase.MERGE
    if not isinstance(target, Patch):
        target.apply(unpack(message, slot, torch.int16, torch.int16))
    return message.numel()


def _send_all(worker: Worker, source: int, target: Target) -> Program[None]:
    """Sends all weights, one tensor at a time so that receivers need little memory."""
    yield Phase.PACK
    parts = list(target.parts()) if isinstance(target, Patch) else []
    for number, tensor in enumerate(target.tensors):
        item = parts[number].view(torch.uint8) if parts else None
        incoming = Receive(source, 2 * tensor.numel(), torch.uint8)
        message = yield from broadcast(worker, source, item, incoming, tensor.numel())
        if not parts:
            target.write(number, message.view(torch.int16))
    yield Phase.MERGE


def _find_stale(worker: Worker, target: Target, checksum: int) -> Program[list[int]]:
    """Returns the ranks whose weights have another checksum, on all ranks."""
    differs = not isinstance(target, Patch) and target.checksum() != checksum
    item = torch.tensor([differs], dtype=torch.uint8, device=target.device)
    ones = [1] * worker.size
    flags: list[Tensor] = yield from all_gather(whole_team(worker), item, ones, ones)
    return torch.cat(flags).nonzero().squeeze(1).tolist()


def broadcast(worker: Worker, source: int, item: Tensor | None, incoming: Receive, words: int) -> Program[Tensor]:
    """Program of one worker that sends a tensor from the source to all workers in ceil(log2 P) rounds (binomial tree).

    Args:
        worker: Worker that runs the program.
        source: Rank whose tensor is sent.
        item: Tensor to send, shape (m,), on the source; ``None`` elsewhere.
        incoming: Size and dtype of the tensor.
        words: Size of the tensor in the statistics, in words.

    Returns:
        The tensor, shape (m,).
    """
    ranks = [(source + number) % worker.size for number in range(worker.size)]
    team = Team(ranks, ranks.index(worker.rank))
    gap = 1
    while gap < team.size:
        # The first ``gap`` members hold the tensor; each sends it to the member ``gap`` places after it.
        if item is not None and team.position + gap < team.size:
            yield Exchange([Send(team.rank(gap), item, words)], [])
        elif item is None and team.position < 2 * gap:
            (item,) = yield Exchange([], [incoming._replace(source=team.rank(-gap))])
        gap *= 2
    assert item is not None
    return item
