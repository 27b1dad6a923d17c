"""Training examples for BERT (pairs of segments with masked words), built batch by batch from a corpus."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from spardl.basics.errors import DataError
from tasks.datasets.text import Corpus, SpecialTokens

__all__ = ["IGNORED", "SentencePairs"]

IGNORED = -100  # label of a place that is not to be guessed: transformers' and torch's default
SPECIALS_PER_PAIR = 3
RANDOM_NEXT = 0.5
REPLACED_BY_MASK = 0.8
REPLACED_BY_RANDOM = 0.1


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Runs of consecutive sentences of one document that fit into a sequence: shape (chunks,) each.

    Attributes:
        first: Index of a chunk's first sentence.
        count: Number of sentences of a chunk, at least 2.
        document: Index of the document of a chunk.
    """

    first: Tensor
    count: Tensor
    document: Tensor


def _cut_long_sentences(sentences: list[int], longest: int) -> list[int]:
    """Adds sentence starts so that no sentence is longer than ``longest``; any two then fit into a sequence."""
    pieces = itertools.pairwise(sentences)
    return [start for begin, end in pieces for start in range(begin, end, longest)] + sentences[-1:]


def _pack(starts: list[int], first: int, last: int, capacity: int) -> list[tuple[int, int]]:
    """Packs sentences ``first`` to ``last`` (exclusive) into chunks (first, count) of up to ``capacity`` tokens.

    The last chunk starts earlier, inside the one before, as far as it fits, so that a document's last example is not
    shorter than others.
    """
    chunks = []
    begin = first
    while begin < last:
        end = begin + 1
        while end < last and starts[end + 1] - starts[begin] <= capacity:
            end += 1
        if end == last:
            while begin > first and starts[end] - starts[begin - 1] <= capacity:
                begin -= 1
        chunks.append((begin, end - begin))
        begin = end
    return [(begin, count) for begin, count in chunks if count > 1]


class SentencePairs:
    """Pairs of segments with masked words, for the pre-training of BERT.

    An example consists of consecutive whole sentences of a document. Segment A ends at a random boundary between them.
    Segment B continues there or, with probability 1/2, begins at a random sentence of another document; it ends when
    the sequence is full or the document ends. Of the word pieces, 15% must be predicted: 80% of these become
    ``[MASK]``, 10% a random word piece, and 10% are not changed. All random choices are drawn again each time an
    example is used.

    Two details differ from the published program. A sentence longer than half a sequence is cut. Sentences that a
    random segment B replaces are not moved to the next example, so that an epoch always has the same length.

    Args:
        corpus: Corpus of at least two documents, one of which has at least two sentences.
        vocab_size: Number of token ids, which are in ``[0, vocab_size)``.
        special: Ids of the special tokens, which must differ.
        seq_len: Number of tokens in a sequence.
        mask_fraction: Share of the word pieces to predict; each example has at least one.

    Raises:
        DataError: If there are too few documents or sentences for pairs.
    """

    def __init__(
        self,
        corpus: Corpus,
        vocab_size: int,
        special: SpecialTokens,
        seq_len: int,
        mask_fraction: float = 0.15,
    ) -> None:
        self.tokens = corpus.tokens
        self.vocab_size, self.special = vocab_size, special
        self.seq_len, self.mask_fraction = seq_len, mask_fraction
        self.capacity = seq_len - SPECIALS_PER_PAIR
        starts = _cut_long_sentences(corpus.sentences.tolist(), self.capacity // 2)
        self.starts = torch.tensor(starts)
        # Where a document begins among the sentences, now that some are cut in pieces.
        self.documents = torch.searchsorted(self.starts, corpus.sentences[corpus.documents])
        self.chunks = self._make_chunks(starts)

    def _make_chunks(self, starts: list[int]) -> _Chunks:
        edges = self.documents.tolist()
        found = [
            (first, count, document)
            for document, (begin, end) in enumerate(itertools.pairwise(edges))
            for first, count in _pack(starts, begin, end, self.capacity)
        ]
        if len(edges) <= 2 or not found:
            raise DataError(
                "bert pre-training needs at least two documents of several sentences in each split; use another dataset"
            )
        first, count, document = torch.tensor(found).unbind(dim=1)
        return _Chunks(first, count, document)

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.chunks.first)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Builds a batch of examples.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Source of random numbers for segment ends, random segments and masks. ``None`` derives them from
                the position of each example, so that an example is always the same.

        Returns:
            int64 tensors: ``input_ids``, ``token_type_ids`` (1 in segment B), ``attention_mask`` (0 in the padding) and
            ``labels`` (-100 where nothing is predicted), each of shape (batch, seq_len); ``next_sentence_label``, shape
            (batch,), 1 if segment B is random.
        """
        chances = self._chances(indices, generator)
        choices, places = chances[:, :3], chances[:, 3:].view(len(indices), 3, self.seq_len)
        segments, random_next = self._choose_segments(indices, choices)
        ids, types, words = self._lay_out(*segments)
        inputs, labels = self._mask(ids, words, places)
        return {
            "input_ids": inputs,
            "token_type_ids": types,
            "attention_mask": (ids != self.special.pad).long(),
            "labels": labels,
            "next_sentence_label": random_next.long(),
        }

    def _chances(self, indices: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns the uniform random numbers for all choices: three per example, and three per position."""
        width = 3 + 3 * self.seq_len
        if generator is not None:
            return torch.rand(len(indices), width, dtype=torch.float64, generator=generator)
        own = torch.Generator()
        rows = [torch.rand(width, dtype=torch.float64, generator=own.manual_seed(index)) for index in indices.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.float64)

    def _choose_segments(
        self, indices: Tensor, chances: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Chooses segments: returns start and length of A and of B in the text, and whether B is random."""
        first, count = self.chunks.first[indices], self.chunks.count[indices]
        document = self.chunks.document[indices]
        boundary = first + 1 + (chances[:, 0] * (count - 1)).long()
        random_next = chances[:, 1] < RANDOM_NEXT
        follower = torch.where(random_next, self._elsewhere(document, chances[:, 2]), boundary)
        a_begin, b_begin = self.starts[first], self.starts[follower]
        a_length = self.starts[boundary] - a_begin
        home = torch.searchsorted(self.documents, follower, right=True)
        b_length = torch.minimum(self.capacity - a_length, self.starts[self.documents[home]] - b_begin)
        return (a_begin, a_length, b_begin, b_length), random_next

    def _elsewhere(self, document: Tensor, chance: Tensor) -> Tensor:
        """Returns a random sentence of any document except the given one."""
        begin, end = self.documents[document], self.documents[document + 1]
        others = len(self.starts) - 1 - (end - begin)
        drawn = (chance * others).long()
        return torch.where(drawn < begin, drawn, drawn + (end - begin))

    def _lay_out(
        self, a_begin: Tensor, a_length: Tensor, b_begin: Tensor, b_length: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ``[CLS] A [SEP] B [SEP]`` with padding: ids, segment numbers, and where word pieces are."""
        place = torch.arange(self.seq_len)
        middle = (a_length + 1).unsqueeze(1)
        end = middle + 1 + b_length.unsqueeze(1)
        in_a = (place > 0) & (place < middle)
        in_b = (place > middle) & (place < end)
        source = torch.where(in_a, a_begin.unsqueeze(1) + place - 1, b_begin.unsqueeze(1) + place - middle - 1)
        ids = self.tokens[source.clamp(0, len(self.tokens) - 1)]
        ids = torch.where(in_a | in_b, ids, self.special.pad)
        ids[:, 0] = self.special.cls
        ids = torch.where((place == middle) | (place == end), self.special.sep, ids)
        return ids, ((place > middle) & (place <= end)).long(), in_a | in_b

    def _mask(self, ids: Tensor, words: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
        """Masks the word pieces with the lowest random numbers; returns the input of the model and the labels."""
        rank = torch.where(words, chances[:, 0], 2.0).argsort(dim=1).argsort(dim=1)
        wanted = (self.mask_fraction * words.sum(dim=1, keepdim=True)).round().clamp(min=1)
        chosen = rank < wanted
        anything = self._ordinary(chances[:, 2])
        by_mask = chosen & (chances[:, 1] < REPLACED_BY_MASK)
        by_random = chosen & ~by_mask & (chances[:, 1] < REPLACED_BY_MASK + REPLACED_BY_RANDOM)
        inputs = torch.where(by_mask, self.special.mask, torch.where(by_random, anything, ids))
        return inputs, torch.where(chosen, ids, IGNORED)

    def _ordinary(self, chance: Tensor) -> Tensor:
        """Returns random token ids, none of which is special."""
        ids = (chance * (self.vocab_size - len(self.special.ids))).long()
        for special in self.special.ids:
            ids = ids + (ids >= special)
        return ids
