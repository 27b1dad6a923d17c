"""Deterministic WordPiece tokenizers: every process builds the same tokenizer from the same text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tasks.datasets.text import SpecialTokens

__all__ = ["encode", "tokenizer_of", "train_wordpiece"]

PREFIX = "##"


def train_wordpiece(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Learns a lower-case WordPiece vocabulary from texts, which are split as in BERT.

    All workers must learn the same vocabulary. The trainer of the library ``tokenizers`` numbers single letters in an
    order that differs between processes, and these numbers decide between equally frequent merges. The letters are
    therefore passed as special tokens, in sorted order, which fixes their numbers.

    Args:
        texts: Texts to learn from, at least a few sentences.
        vocab_size: Maximum number of token ids. The result may have fewer if the text is small. It has more if there
            are more single letters and special tokens than ``vocab_size``.

    Returns:
        A tokenizer whose first ids are those of :class:`SpecialTokens`.
    """
    letters = _alphabet(texts)
    fixed = [*SpecialTokens.NAMES, *letters, *(PREFIX + letter for letter in letters)]
    learner = _tokenizer({})
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=fixed,
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    # A fresh tokenizer, because in the learner the letters would be split off as special tokens.
    return _tokenizer(learner.get_vocab())


def encode(tokenizer: Tokenizer, documents: Iterable[Sequence[str]]) -> Iterator[list[list[int]]]:
    """Yields, for each document, a list with the token ids of each sentence, without special tokens."""
    for document in documents:
        yield [encoding.ids for encoding in tokenizer.encode_batch(list(document), add_special_tokens=False)]


def tokenizer_of(vocabulary: dict[str, int]) -> Tokenizer:
    """Makes a lower-case WordPiece tokenizer from a vocabulary.

    Args:
        vocabulary: Id of each word piece; contains at least ``[UNK]``. Pieces that continue a word begin with ``##``.

    Returns:
        A tokenizer that splits text as BERT does, and treats ``[UNK]`` in a text as one token.
    """
    unknown = SpecialTokens.NAMES[SpecialTokens.unk]
    tokenizer = _tokenizer(vocabulary)
    tokenizer.add_special_tokens([unknown])
    return tokenizer


def _tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    unknown = SpecialTokens.NAMES[SpecialTokens.unk]
    model = models.WordPiece(vocab=vocabulary, unk_token=unknown, continuing_subword_prefix=PREFIX)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _alphabet(texts: Iterable[str]) -> list[str]:
    normalizer = normalizers.BertNormalizer(lowercase=True)
    letters = {letter for text in texts for letter in normalizer.normalize_str(text)}
    return sorted(letter for letter in letters if not letter.isspace())
