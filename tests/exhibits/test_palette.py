"""Colours of figures: enough contrast, told apart by those who see few colours, and one for each method everywhere."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from scripts.exhibits.charts import palette
from scripts.exhibits.papers.catalogue import catalogue

# What those see who lack a kind of cones (Machado, Oliveira and Fernandes, 2009, severity 1), row by row.
SEEING = {
    "all": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours as WCAG 2 defines it, from 1 to 21."""
    darker, lighter = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear sRGB, for white of D65."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x, y, z = (
        np.cbrt(part) if part > 0.008856 else 7.787 * part + 16 / 116 for part in to_xyz @ rgb / [0.95047, 1, 1.08883]
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seeing", SEEING)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_series_are_told_apart(scheme: str, seeing: str) -> None:
    seen = [lab(np.clip(SEEING[seeing] @ linear(getattr(each, scheme)), 0, 1)) for each in palette.SERIES]
    assert min(float(np.linalg.norm(one - other)) for one, other in combinations(seen, 2)) > 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_in_any_colour_can_be_read(scheme: str) -> None:
    """Names stand beside lines in the lines' colours, so lines have the contrast of text."""
    own = {name: getattr(colour, scheme) for name, colour in palette.PAGE.items()}
    for paper in (own["paper"], own["panel"]):
        for front in (own["ink"], own["soft"], own["link"], *(getattr(each, scheme) for each in palette.SERIES)):
            assert contrast(front, paper) >= 4.5
    for verdict in ("good", "half", "open", "built", "bad"):
        assert contrast(own[verdict], own[f"{verdict}-paper"]) >= 4.5


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


def test_numbers_on_coloured_fields_can_be_read() -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    for name in ("viridis", "viridis_r"):
        for value in range(256):
            field = colormaps[name](value)
            assert contrast(palette.readable(field), to_hex(field)) >= 4.5


def test_a_method_has_one_colour_everywhere() -> None:
    names = {"dense": ["dense", "none", "torch dense all-reduce"], "SparDL": ["spardl", "SparDL, B-SAG, d = 7"]}
    for name, others in names.items():
        (color,) = {palette.looks([each])[each].color for each in (name, *others)}
        for exhibit in catalogue().values():
            methods = list(getattr(exhibit, "methods", ()))
            looks = palette.looks(methods)
            if name in methods:
                assert looks[name].color == color


def test_the_floor_and_the_ceiling_have_colours_of_their_own() -> None:
    looks = palette.looks(["SparDL", "dense", "alone", "bf16", "PowerSGD"])
    assert len({look.color for look in looks.values()}) == 5


def test_variants_differ_by_dash_and_colour() -> None:
    looks = palette.looks(["SparDL, P = 5", "Ok-Topk, P = 5", "SparDL, P = 8", "something", "anything"])
    one, _, other, *strangers = looks.values()
    assert one.color == other.color
    assert one.dash != other.dash
    assert len({look.color for look in (one, *strangers)}) == 3
    rare, often, other = palette.looks(["new, every 15", "new, every 5", "something"]).values()
    assert rare.color == often.color != other.color
    assert rare.dash != often.dash
    many = palette.looks([f"stranger {place}" for place in range(12)])
    assert len({(look.color, str(look.dash)) for look in many.values()}) == 12
