"""All exhibits of all papers."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.exhibits.base import Exhibit
from scripts.exhibits.papers import dear, frontier, oktopk, settings, sketch_fusion, spardl, study

__all__ = ["catalogue", "papers"]

PAPERS = (spardl, oktopk, study, dear, sketch_fusion, frontier, settings)


def catalogue() -> Mapping[str, Exhibit]:
    """All exhibits by name."""
    return {exhibit.name: exhibit for paper in PAPERS for exhibit in paper.EXHIBITS}


def papers() -> Mapping[str, str]:
    """The paper of each exhibit, by the exhibit's name."""
    return {exhibit.name: str(paper.__doc__).strip() for paper in PAPERS for exhibit in paper.EXHIBITS}
