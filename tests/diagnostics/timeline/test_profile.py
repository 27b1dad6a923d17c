"""Profiles survive a file, stretch evenly, and refuse what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import LayerTimes, Profile
from spardl.vector.layout import Layout
from tests.diagnostics.timeline.profiles import profile_of, profiles

TOY = profile_of([10, 0, 5], [0.0, 0.25, 0.5], [1.5, 1.0, 0.5], update=1e-9, tail=0.125)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    TOY.write(tmp_path / "toy.json")
    assert Profile.read(tmp_path / "toy.json") == TOY
    assert len((tmp_path / "toy.json").read_text().splitlines()) == 8 + 3 + 2


@given(profile=profiles())
def test_six_digits_are_kept(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.getbasetemp() / "profile.json"
    profile.write(path)
    found = Profile.read(path)
    assert found.entries == profile.entries
    assert found.ready == pytest.approx(profile.ready, rel=1e-5)
    assert [layer.needed for layer in found.layers] == pytest.approx([x.needed for x in profile.layers], rel=1e-5)
    assert found.compute == pytest.approx(profile.compute, rel=1e-5)


def test_scaling_keeps_the_shape() -> None:
    found = TOY.scaled(4.5)
    assert found.compute == pytest.approx(4.5)
    factor = 4.5 / TOY.compute
    for name in ("forward", "backward", "update"):
        assert getattr(found, name) == pytest.approx(factor * getattr(TOY, name))
    assert found.ready == pytest.approx([factor * ready for ready in TOY.ready])
    assert found.layers[2].needed == pytest.approx(factor * 0.5)
    assert found.entries == TOY.entries == (10, 0, 5)


def test_what_cannot_be_scaled() -> None:
    still = Profile("toy", "none", 1, (LayerTimes("a", 1, 0.0, 0.0),), 0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="take 0 seconds"):
        still.scaled(1.0)
    with pytest.raises(ConfigError, match="seconds must be a number of seconds, at least 0, got -1"):
        TOY.scaled(-1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch", 0),
        ("batch", True),
        ("forward", -1.0),
        ("backward", float("nan")),
        ("update", "fast"),
        ("update", float("inf")),
        ("model", 7),
        ("device", None),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be "):
        replace(TOY, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("entries", -1), ("entries", 1.5), ("needed", 0.7), ("ready", 1.7), ("name", 1)]
)
def test_a_layer_out_of_range_is_named(tmp_path: Path, field: str, value: Any) -> None:
    """Nothing is needed after the forward pass, or ready after the backward pass."""
    TOY.write(tmp_path / "toy.json")
    plain = json.loads((tmp_path / "toy.json").read_text())
    plain["layers"][1][field] = value
    (tmp_path / "toy.json").write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=rf"toy\.json: layers\[1\]\.{field} must be .*, got {value!r}$"):
        Profile.read(tmp_path / "toy.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda plain: plain.pop("forward"), "forward is missing"),
        (lambda plain: plain.update(speed=1), "speed is unknown"),
        (lambda plain: plain["layers"][0].pop("ready"), r"layers\[0\]\.ready is missing"),
        (lambda plain: plain["layers"].append(3), r"layers\[3\] must be a mapping, got 'int'"),
        (lambda plain: plain.update(layers={}), "layers must be a list, got 'dict'"),
        (lambda plain: plain["layers"].clear(), "layers is empty"),
    ],
)
def test_a_file_of_another_shape(tmp_path: Path, change: Any, complaint: str) -> None:
    TOY.write(tmp_path / "toy.json")
    plain = json.loads((tmp_path / "toy.json").read_text())
    change(plain)
    (tmp_path / "toy.json").write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=complaint) as found:
        Profile.read(tmp_path / "toy.json")
    assert "toy.json" in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("text", [None, "{", "[1, 2]", "\x00"])
def test_no_profile_at_all(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "toy.json").write_text(text)
    with pytest.raises(ConfigError, match=r"toy\.json") as found:
        Profile.read(tmp_path / "toy.json")
    assert "\n" not in str(found.value)


def test_shapes_survive_a_file_and_stretching(tmp_path: Path) -> None:
    shaped = replace(TOY, layers=(replace(TOY.layers[0], shapes=((2, 4), (2,))), *TOY.layers[1:]))
    shaped.write(tmp_path / "toy.json")
    assert Profile.read(tmp_path / "toy.json") == shaped
    assert shaped.scaled(1.0).layers[0].shapes == ((2, 4), (2,))
    assert shaped.layout is None
    assert replace(shaped, layers=shaped.layers[:2]).layout == Layout.of([(2, 4), (2,)])


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([[3, 3]], r"layers\[0\].shapes must be shapes with 10 entries in total"),
        ([10], r"layers\[0\].shapes must be a list that contains the shape"),
        ([[-1, -10]], r"layers\[0\].shapes must be a list that contains the shape"),
        ("10", r"layers\[0\].shapes must be a list that contains the shape"),
    ],
)
def test_bad_shapes(shapes: object, said: str, tmp_path: Path) -> None:
    TOY.write(tmp_path / "toy.json")
    plain = json.loads((tmp_path / "toy.json").read_text())
    plain["layers"][0]["shapes"] = shapes
    (tmp_path / "toy.json").write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=said):
        Profile.read(tmp_path / "toy.json")
