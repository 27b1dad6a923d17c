"""Compressors determine which part of its gradient each worker sends; each published compressor has its own module."""

from spardl.compressors.arc_topk import ARCTopK
from spardl.compressors.arc_topk_ef21 import ARCTopKEF21
from spardl.compressors.base import CodeCompressor, Compressor, DenseCompressor, Mass, Output, SparseCompressor
from spardl.compressors.budget import Budget, BudgetedCompressor, PiecewiseCompressor
from spardl.compressors.cast import Cast
from spardl.compressors.count_sketch import CountSketch
from spardl.compressors.dgc import SampledTopK
from spardl.compressors.gaussiank import GaussianK
from spardl.compressors.none import NoCompression
from spardl.compressors.powersgd import PowerSGD
from spardl.compressors.qsgd import QSGD
from spardl.compressors.quantized import Quantized
from spardl.compressors.random_block import RandomBlock
from spardl.compressors.random_k import RandomK
from spardl.compressors.reused_threshold import ReusedThreshold
from spardl.compressors.shared_random import SharedChoice
from spardl.compressors.signsgd import SignSGD
from spardl.compressors.terngrad import TernGrad
from spardl.compressors.threshold import Threshold
from spardl.compressors.topk import TopK

__all__ = [
    "QSGD",
    "ARCTopK",
    "ARCTopKEF21",
    "Budget",
    "BudgetedCompressor",
    "Cast",
    "CodeCompressor",
    "Compressor",
    "CountSketch",
    "DenseCompressor",
    "GaussianK",
    "Mass",
    "NoCompression",
    "Output",
    "PiecewiseCompressor",
    "PowerSGD",
    "Quantized",
    "RandomBlock",
    "RandomK",
    "ReusedThreshold",
    "SampledTopK",
    "SharedChoice",
    "SignSGD",
    "SparseCompressor",
    "TernGrad",
    "Threshold",
    "TopK",
]
