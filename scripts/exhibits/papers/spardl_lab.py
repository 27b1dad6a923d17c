"""Measured steps of SparDL, compared with the modelled speedups."""

from __future__ import annotations

from itertools import product
from types import MappingProxyType

from scripts.exhibits.kinds.gpu import MODELS
from scripts.exhibits.kinds.lab_updates import Course, LabUpdates, Place
from scripts.exhibits.notes import OKTOPK

__all__ = ["LAB_UPDATES"]

MODEL = "lstm_imdb"


def _words(model: str, seconds: float, rounds: int, settle: int) -> tuple[str, ...]:
    given = {"--compute": f"{seconds:.3g}", "--rounds": str(rounds), "--steps": "1", "--settle": str(settle)}
    profile = ("--model", f"profile:scripts/profiles/{model}.json")
    return (*profile, *(word for pair in given.items() for word in pair))


WHOLE = Course(
    tuple(Place(*each) for each in product((4, 8, 14), (1.0, 0.1))),
    _words(MODEL, MODELS[MODEL].seconds, 7, 20),
    380.0,
    "about 15 minutes, alone on the machine",
)
LAB_UPDATES = LabUpdates(
    name="spardl.lab_updates",
    title="Updates on a real network",
    source="per-update time of every method on 14 workers, up to 4.9x faster, read in a summary; on processes of one "
    "machine instead",
    shows="measured speedups with real local work and latencies, compared with the modelled ones",
    methods=MappingProxyType({"SparDL": "spardl", "Ok-Topk": "oktopk", "TopkA": "topka", "dense": "none"}),
    courses=MappingProxyType(
        {
            "smoke": Course((Place(2, 1.0),), _words("resnet20", 0.02, 2, 2), 200.0, "20 s, alone on the machine"),
            "laptop": WHOLE,
            "paper": WHOLE,
        }
    ),
    model=f"A gradient of {MODELS[MODEL].entries:,} entries, that of {MODELS[MODEL].title}, density 0.01 (smoke: of "
    "ResNet-20)",
    note=OKTOPK,
)
