"""Compressors: what one worker sends of a gradient. One published operator is one file."""

from spardl.compressors.base import CodeCompressor, Compressor, DenseCompressor, Mass, Output, SparseCompressor
from spardl.compressors.budget import Budget, BudgetedCompressor
from spardl.compressors.none import NoCompression
from spardl.compressors.topk import TopK

__all__ = [
    "Budget",
    "BudgetedCompressor",
    "CodeCompressor",
    "Compressor",
    "DenseCompressor",
    "Mass",
    "NoCompression",
    "Output",
    "SparseCompressor",
    "TopK",
]
