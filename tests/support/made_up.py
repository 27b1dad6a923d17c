"""Results of all exhibits at any scale without their work: of the right shape, with figures by formula.

What figures and tables look like depends on how many rows there are, how long their names are and where lines end, so
pages are tried with as much as a whole scale has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

from scripts.exhibits.base import Exhibit, Results
from scripts.exhibits.jobs import Computation, Job, Outcome, Training
from scripts.exhibits.kinds import lab, predictions, schedules
from scripts.exhibits.kinds.traces import BINS, THRESHOLDS

STEPS = ("none, after_backward", "none, wfbp", "none, dear")
METHODS = ("torch dense all-reduce", "torch PowerSGD hook, rank 4", "spardl", "oktopk", "topka", "none")


def results(exhibit: Exhibit, scale: str, folder: Path) -> Results:
    """A result for every job of an exhibit; of trainings the folder holds the metrics."""
    return Results(folder, {job: _outcome(job, folder) for job in exhibit.jobs(scale)})


def _outcome(job: Job, folder: Path) -> Outcome:
    if isinstance(job, Training):
        return _training(job, folder)
    assert isinstance(job, Computation)
    found = job.recalled({"result": _computed(job), "environment": {}}, folder / job.name)
    assert found
    return found


def _share(*words: object) -> float:
    """From 0 to 1, always the same for the same words."""
    return crc32(repr(words).encode()) / 2**32


def _training(job: Training, folder: Path) -> Outcome:
    """Twelve evaluations; dense training is slow and good."""
    method = str(job.labels and job.labels.job_type)
    seed, case = job.words[-1], str(job.labels and job.labels.tags)
    metric = next((name for part, name in METRICS.items() if part in case), "accuracy")
    dense = method.partition(",")[0] == "dense"
    reach = 0.97 - 0.2 * _share(method, case) * (not dense) - 0.07 * _share(seed, method)
    seconds = 4.5 if dense else 1.2 + 0.8 * _share("pace", method) + 0.1 * _share(seed)
    values = [_at(metric, reach * (1 - math.exp(-place / 3))) for place in range(1, 13)]
    where = folder / f"{crc32(job.command.encode()):08x}"
    where.mkdir(parents=True, exist_ok=True)
    events = [{"kind": "eval", "step": 10 * place, metric: value} for place, value in enumerate(values, 1)]
    (where / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    summary = {
        "metric": metric,
        "final": {metric: values[-1]},
        "best": values[-1],
        "steps": 120,
        "cluster_seconds": seconds,
        "step_bytes": 100.0 if dense else 1.3 + 6 * _share(method),
        "step_bytes_dense": 100.0,
    }
    return Outcome(where, summary)


METRICS = {
    "House": "mae",
    "PTB": "perplexity",
    "Penn Treebank": "perplexity",
    "Wikipedia": "mlm_loss",
    "WikiText": "mlm_loss",
    "AN4": "wer",
}


def _at(metric: str, share: float) -> float:
    """The metric of a model that has learned this share of all."""
    ends = {"accuracy": (0.1, 1.0), "mae": (32.0, 5.0), "perplexity": (6000.0, 90.0), "mlm_loss": (8.2, 5.6)}
    bad, good = ends.get(metric, (1.0, 0.05))
    return bad * (good / bad) ** share if metric == "perplexity" else bad + (good - bad) * share


def _computed(job: Computation) -> Mapping[str, Any]:
    if job.name in MADE:
        return MADE[job.name](job)
    if isinstance(job, lab.Measurement):
        return {"sheets": [_measured(METHODS if job.name == "spardl.lab" else STEPS)]}
    return {"sheets": SHEETS[job.name](dict(job.arguments))}


def _costs(job: Computation) -> Mapping[str, Any]:
    del job
    words = {"words": [150.0, 612.0], "bounds": [150.0, 650.0], "path": [150.0, 812.0]}
    return {"kinds": [{"share": 1.0, "k": 100.0, "rounds": [4, 8], "within": True, **words}]}


def _cycle(job: Computation) -> Mapping[str, Any]:
    settings = dict(job.arguments)
    weight = 1.0 if settings["name"] == "none" else 0.01 * (1 + 9 * _share(settings["name"]))
    line = {"fixed": 0.0, "per_entry": 4 * weight * math.log2(settings["workers"])}
    return {"kinds": [{"share": 1.0, "rounds": settings["workers"], "words": line, "bytes": line}]}


def _steps(job: Computation) -> int:
    return int(dict(job.arguments)["steps"])


def _selected(job: Computation) -> Mapping[str, Any]:
    steps = _steps(job)
    middle = [100 * (1 + 2 * math.exp(-step / 9) * _share(job.command) - 0.2 * _share(job.id)) for step in range(steps)]
    local = [[round(value * (0.8 + 0.05 * worker)) for worker in range(8)] for value in middle]
    return {"k": 100, "local": local, "sums": [round(value) for value in middle]}


def _selections(job: Computation) -> Mapping[str, Any]:
    xi = [2.5 + 4 * _share(job.command) - 2 * math.exp(-step / 9) for step in range(_steps(job))]
    cuts = dict(zip(THRESHOLDS, (3e-4, 2.7e-4, 5e-4), strict=True))
    counts = [1e5 * math.exp(-(((place - BINS / 2) / 6) ** 2)) for place in range(BINS)]
    last = {"scale": 1e-4, "counts": counts, "cuts": cuts, "selected": dict.fromkeys(cuts, 90)}
    return {"k": 100, "xi": xi, "sent": [0.8 * value for value in xi], "last": last}


def _loads(job: Computation) -> Mapping[str, Any]:
    del job
    steep = [max(0, 400 - 60 * worker) + 5 for worker in range(16)]
    even = [90 + 5 * (worker % 4) for worker in range(16)]
    ways = {"equal": steep, "plain": steep, "balanced": even, "fresh": even, "levelled": [100] * 16}
    sent = {name: {"loads": loads, "rounds": 4, "busiest": 10 * max(loads)} for name, loads in ways.items()}
    return {"length": 1000, "k": 100, "ways": sent}


def _raced(job: Computation) -> Mapping[str, Any]:
    """Dense training is slow and good; of the others some never get there."""
    given = dict(job.arguments)
    words = dict(zip(given["words"][1::2], given["words"][2::2], strict=True))
    case, steps, every = words["--case"], int(words["--steps"]), int(words["--every"])
    reach = 0.93 - 0.1 * _share(case) * (case != "ddp") - 0.01 * _share(job.id)
    pace = (0.6 if case == "ddp" else 0.05 + 0.05 * _share(case)) / given["gbit"] ** 0.5
    places = range(every, steps + 1, every)
    tests = [
        {
            "step": step,
            "seconds": step * pace,
            "sent": 1000 * step,
            "accuracy": reach * (1 - 0.5 * math.exp(-step / 40)),
            "loss": 1.0,
        }
        for step in places
    ]
    sizes = {"steps": steps, "cluster_seconds": steps * pace, "step_bytes": 1000.0, "step_bytes_dense": 4e6}
    final = {"accuracy": tests[-1]["accuracy"]}
    return {"metric": "accuracy", "final": final, "cores": 2, "caveats": [], "evaluations": tests, **sizes}


def _learned(job: Computation) -> Mapping[str, Any]:
    """Dense training is the best; of the others some never get there."""
    given = dict(job.arguments)
    low = 1.6 + 0.5 * _share(given["case"]) * (given["case"] != "ddp") + 0.02 * _share(job.id)
    tests = [
        {"step": step, "loss": low + 2.5 * math.exp(-4 * step / given["steps"])}
        for step in range(given["every"], given["steps"] + 1, given["every"])
    ]
    return {"metric": "loss", "steps": given["steps"], "parameters": 1000, "evaluations": tests}


def _paced(job: Computation) -> Mapping[str, Any]:
    given = dict(job.arguments)
    cases = given["words"][given["words"].index("--cases") + 1 :]
    sent = {case: {"alone": 0.0, "ddp": 1.2e6}.get(case, 4e5 * _share(case)) for case in cases}
    seconds = {case: 0.06 + 8e-9 * nbytes / given["gbit"] for case, nbytes in sent.items()}
    turns = {case: [factor * seconds[case] for factor in (0.9, 1.0, 1.3)] for case in cases}
    return {"cases": {case: {"seconds": turns[case], "sent": [sent[case]] * 3} for case in cases}}


def _steps_in_the_lab(job: Computation) -> Mapping[str, Any]:
    """The more workers there are, the less those gain that send to all."""
    given = dict(job.arguments)
    methods = given["words"][given["words"].index("--methods") + 1].split(",")
    rows = []
    for place, method in enumerate(methods):
        middle = (0.02 + 0.01 * place**2 * given["workers"]) / given["gbit"] ** 0.5
        turns = [middle * factor for factor in (0.9, 1, 1.3)]
        rows.append({"method": method, "seconds": turns, "predicted": 0.8 * middle})
    return {"rows": rows, "cores": 2}


MADE: Mapping[str, Callable[[Computation], Mapping[str, Any]]] = {
    "costs": _costs,
    "cycle": _cycle,
    "selected": _selected,
    "selections": _selections,
    "loads": _loads,
    "spardl.time_to_accuracy": _raced,
    "frontier.learned": _learned,
    "frontier.paced": _paced,
    "frontier.whole": _raced,
    "spardl.lab_updates": _steps_in_the_lab,
}


def _sheets(title: str, rows: Sequence[str], columns: Sequence[str]) -> list[Mapping[str, Any]]:
    """One for each network."""
    return [
        predictions.sheet(
            f"{title}, {network}",
            ("row", *columns),
            {row: [0.3 + 3 * _share(row, column, network) ** 2 for column in columns] for row in rows},
        )
        for network in ("ethernet_10g", "infiniband_100g")
    ]


def _each(*parts: Sequence[str]) -> list[str]:
    return [", ".join(words) for words in product(*parts)]


# As many rows as at scale laptop, with their names; the real figures take minutes to compute.
SHEETS: Mapping[str, Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]] = {
    "dear.speed": lambda given: _sheets(
        "Seconds of an iteration", given["models"], (*schedules.DENSE, schedules.OVER_BEST, schedules.OVER_LAYERS)
    ),
    "dear.no_fusion": lambda given: _sheets(
        "Seconds of an iteration without fusion", given["models"], (*schedules.ALONE, schedules.HALVES, schedules.FUSED)
    ),
    "dear.breakdown": lambda given: _sheets(
        "Where the seconds go", _each(given["models"], schedules.DENSE), ("computation", "communication", "not hidden")
    ),
    "dear.scaling": lambda given: _sheets(
        "Scaling efficiency", _each(given["models"], schedules.DENSE[1:]), [f"P = {size}" for size in given["workers"]]
    ),
    "dear.tuning": lambda given: _sheets(
        "Speed of the size found over that of the best size",
        _each(given["models"], ("ethernet_10g", "infiniband_100g"), tuple(schedules.SEARCHES)),
        [f"{trials} trials" for trials in schedules.TRIALS],
    )[:1],
    "sketch_fusion.fusion": lambda given: _sheets(
        "Seconds of an iteration",
        _each(given["models"], schedules.METHODS),
        (*schedules.PARTITIONS, schedules.APART, schedules.BETTER),
    ),
    "sketch_fusion.scaling": lambda given: _sheets(
        "Scaling efficiency", _each(given["models"], schedules.METHODS), schedules.PARTITIONS
    ),
}


def _measured(names: Sequence[str]) -> Mapping[str, Any]:
    columns = ("method", *lab.SECONDS, lab.TURNS)
    rows: list[Sequence[Any]] = []
    for place, name in enumerate(names):
        middle = 0.9 / (1 + place)
        known = (0.9 * middle, 0.9) if place > 1 else (lab.NOT_COUNTED, lab.NOT_COUNTED)
        turns = ", ".join(f"{middle * factor:.3g}" for factor in (0.9, 1, 1.3))
        rows.append([name, middle, 0.9 * middle, 1.3 * middle, *known, turns])
    return {"title": "Seconds of a synchronization, P = 4, 1 Gbit/s", "columns": list(columns), "rows": rows}
