"""The names of the library's methods, for editors to complete. Written by scripts/api_reference.py."""

from typing import Literal, TypeAlias

__all__ = ["MethodName"]

MethodName: TypeAlias = Literal[
    "bf16",
    "cast",
    "count_sketch",
    "dgc",
    "fp16",
    "gaussiank",
    "gtopk",
    "none",
    "oktopk",
    "oktopk_bert",
    "oktopk_lstm",
    "oktopk_vgg",
    "powersgd",
    "qsgd",
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
"""A method of this library, by name. Those of other packages are in ``method_names()``, but not here."""
