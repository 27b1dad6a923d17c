"""``train.py --help`` and ``--list``: every group and choice, read from the configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest

from spardl.basics.errors import ConfigError
from tests.support.driver import here
from trainer.build import CONFIGURATIONS
from trainer.listing import groups, help_text, print_list


def test_the_help_fits_on_one_screen_and_has_a_line_per_group() -> None:
    lines = help_text().splitlines()
    assert len(lines) <= 45
    folders = {path.name for path in CONFIGURATIONS.iterdir() if path.is_dir()}
    assert set(groups()) == folders
    for name, (default, description) in groups().items():
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert description in line
        assert default in line or "; set by " in description
    for name in ("seed", "output_dir", "resume", "force", "plugins"):
        assert [line for line in lines if line.startswith(f"  {name} ")]


def test_help_and_lists_need_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here("--help") == 0
    assert capfd.readouterr().out == help_text()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wanted", "header", "rows"),
    [
        ("methods", "name paper when to use", ["oktopk Li and Hoefler, PPoPP 2022 "]),
        (
            "datasets",
            "name description",
            ["digits Loads the 1,797 scans ", "synthetic_an4 Placeholder for an4: tones instead "],
        ),
        (
            "experiments",
            "name model data set method workers minutes* paper",
            ["spardl/vgg16_cifar10 vgg16 cifar10 spardl 14", "oktopk/bert bert wikipedia oktopk_bert 32"],
        ),
        ("wire", "name description", ["int8 "]),
        pytest.param(
            "models",
            "name parameters data set minutes* paper description",
            ["vgg16 14,728,266 cifar10 - Simonyan et al., ICLR 2015 "],
            marks=[pytest.mark.slow, pytest.mark.timeout(300)],
        ),
    ],
)
def test_choices_are_listed(wanted: str, header: str, rows: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    print_list(wanted)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert header in lines
    for row in rows:
        assert [line for line in lines if line.startswith(row)], lines


def test_own_choices_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "mine.yaml").write_text("# My own pictures.\n_target_: mine.Pictures\n")
    print_list("datasets", str(tmp_path))
    assert "My own pictures." in capsys.readouterr().out


def test_a_list_imports_no_code_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "theirs.yaml").write_text("_target_: theircode.Pictures\n")
    (tmp_path / "theircode.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    print_list("datasets", str(tmp_path))
    assert "theirs" in capsys.readouterr().out
    assert not (tmp_path / "imported").exists()


def test_a_misspelt_group_is_suggested() -> None:
    with pytest.raises(ConfigError, match="--list modles is not a group; did you mean models"):
        print_list("modles")
