"""Compressors: what one worker keeps of a gradient. One published operator is one file."""

from spardl.compressors.base import Compressor, DenseCompressor, Output, SparseCompressor
from spardl.compressors.none import NoCompression
from spardl.compressors.topk import TopK

__all__ = ["Compressor", "DenseCompressor", "NoCompression", "Output", "SparseCompressor", "TopK"]
