"""The notebook in examples/: its code cells run in order, and draw the figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.driver import ROOT

NOTEBOOK = ROOT / "examples" / "compare_methods.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_draws_its_figure(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=NOTEBOOK.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=890,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *table, figure = done.stdout.splitlines()
    for method, row in zip(("none", "topka", "spardl"), table[-3:], strict=True):
        assert f"compressor={method}" in row
        assert "finished" in row
    assert Path(figure).stat().st_size > 10_000
    assert Path(figure).is_relative_to(tmp_path)


def test_the_notebook_holds_no_outputs() -> None:
    assert not any(cell.get("outputs") for cell in json.loads(NOTEBOOK.read_text())["cells"])
