from __future__ import annotations

import json
from pathlib import Path

from tests.golden.test_golden import TINY
from tests.support.driver import composed, here, only_run
from trainer.targets import editions


def test_editions_of_changed_parts() -> None:
    assert editions(composed("schedule=wfbp")) == {}
    assert editions(composed("schedule=mg_wfbp")) == {"spardl.MgWfbp": 2}
    assert editions({"parts": [{"_target_": "spardl.schedules.layer_fusion.LayerFusion"}]}) == {"spardl.LayerFusion": 2}


def test_a_run_says_which_editions_it_had(tmp_path: Path) -> None:
    assert here(*TINY, "schedule=mg_wfbp", "compressor=none", "cluster.workers=2", f"output_dir={tmp_path}") == 0
    assert json.loads((only_run(tmp_path) / "summary.json").read_text())["editions"] == {"spardl.MgWfbp": 2}
