"""The report that a run prints at its end, and the environment that its summary records."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from spardl.basics.version import __version__
from trainer.runs import Run

__all__ = ["environment", "print_report", "processor", "rows"]


def environment() -> dict[str, Any]:
    """Returns versions, Git commit and machine by name, for the summary of a run; contains no environment variables."""
    return {
        "spardl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} thread(s) per worker",
        # Results are bitwise reproducible for equal torch versions and equal instruction sets.
        "cpu": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
    }


@cache
def processor() -> str:
    """Returns the name of the processor, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _commit(folder: Path = Path(__file__).parent) -> str | None:
    """Returns the commit of the clone with this ``folder``; with ``-dirty`` if files other than records differ."""
    # Records of finished jobs change no result, and a plan of many jobs adds them while others run.
    changes = ("diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)docs/results")
    try:
        found = _git(folder, "rev-parse", "--short=12", "HEAD")
        if found.returncode:
            return None
        return found.stdout.strip() + ("-dirty" if _git(folder, *changes).returncode else "")
    except (OSError, subprocess.TimeoutExpired):
        return None


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=False)


def rows(summary: Mapping[str, Any], simulated: bool) -> list[tuple[str, str]]:
    """Formats a summary as rows of a table, each a pair of a name and a text.

    Args:
        summary: Summary that the trainer returns.
        simulated: Whether the cluster is simulated, so that its times are virtual.
    """
    best, metric = summary["best"], summary["metric"]
    final = ", ".join(f"{name} {value:.4g}" for name, value in summary["final"].items())
    clock = f", {_seconds(summary['cluster_seconds'])} on the virtual clock" if simulated else ""
    beside = summary["step_seconds_beside"]
    sent, dense = summary["step_bytes"], summary["step_bytes_dense"]
    # A single worker sends nothing, with or without compression.
    share = f" ({sent / dense:.2%} of dense)" if dense else ""
    return [
        (metric, f"{summary['final'][metric]:.4g} (best {best:.4g})"),
        ("final figures", final),
        *([("early stopping", _early(summary))] if "early_stopping" in summary else []),
        (
            "wall time",
            f"{_seconds(summary['wall_seconds'])}, evaluation {_seconds(summary['evaluation_seconds'])}{clock}",
        ),
        ("samples per second", _pace(summary["samples_per_second"], simulated)),
        ("step time", _split(summary["step_seconds"])),
        *([("overlapped time", _split(beside))] if any(beside.values()) else []),
        (
            "sent per worker and step",
            f"{_bytes(sent)} in {summary['step_rounds']:.3g} rounds; dense {_bytes(dense)}{share}",
        ),
        ("entries of the average", f"{summary['density']:.3%} of {summary['parameters']:,}"),
        *([("residual", _residual(summary))] if summary.get("residual_ratio") else []),
        ("replicas", f"bitwise identical in {summary['replica_checks']} checks"),
        ("break-even bandwidth", _break_even(summary["break_even_gbit"])),
        ("peak memory", f"{_bytes(summary['peak_memory_bytes'])} in the largest process"),
    ]


def print_report(summary: Mapping[str, Any], run: Run, simulated: bool, caveats: Sequence[str] = ()) -> None:
    """Prints the report of a finished run, with warnings about its results."""
    table = Table(title=f"run {run.id}", show_header=False, title_justify="left")
    for name, text in rows(summary, simulated):
        table.add_row(name, text)
    # A pipe has no width, and wrapped lines are hard to search.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table)
    for caveat in caveats:
        print(f"beware: {caveat}")
    print(f"results: {run.folder}", flush=True)


def _early(summary: Mapping[str, Any]) -> str:
    found = summary["early_stopping"]
    best = "" if found["best"] is None else f" of {found['best']:.4g}"
    return (
        f"after step {summary['steps']} of {summary['planned_steps']}: {found['metric']} has not improved in "
        f"{found['patience']} evaluations since its best{best} at step {found['best_step']}"
    )


def _residual(summary: Mapping[str, Any]) -> str:
    ratio, age = summary["residual_ratio"], summary["residual_age"]
    return f"{ratio:.3g} x the update of a step, about {age:.3g} steps old"


def _pace(samples: float | None, simulated: bool) -> str:
    if samples is None:
        return "too few steps to measure (training.untimed_steps are excluded)"
    return f"{samples:.4g} of all workers{', on the virtual clock' if simulated else ''}"


def _split(seconds: Mapping[str, float]) -> str:
    parts = [f"{name} {_seconds(value)}" for name, value in seconds.items() if value]
    return f"{_seconds(sum(seconds.values()))}: {', '.join(parts)}"


def _break_even(gbit: float | None) -> str:
    if gbit is None:
        return "none: no bytes are saved"
    return f"saves time on networks slower than {gbit:.3g} Gbit/s per worker"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
