"""The names of the library's methods, for completion in editors. Written by scripts/docs.py."""

from typing import Literal, TypeAlias

__all__ = ["MethodName"]

MethodName: TypeAlias = Literal[
    "arc_topk",
    "arc_topk_ef21",
    "bf16",
    "cast",
    "compute_visible",
    "count_sketch",
    "dgc",
    "fp16",
    "fp8",
    "gaussiank",
    "gtopk",
    "int2",
    "int4",
    "int8",
    "none",
    "oktopk",
    "oktopk_bert",
    "oktopk_lstm",
    "oktopk_vgg",
    "onebit",
    "powersgd",
    "qsgd",
    "quantized",
    "random_block",
    "random_k",
    "reused_threshold",
    "signsgd",
    "sketch_fusion",
    "spardl",
    "terngrad",
    "threshold",
    "topk",
    "topka",
    "topkdsa",
]
"""A method of this library, by name. ``method_names()`` also lists the methods of other packages."""
