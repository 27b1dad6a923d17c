"""Where the time of an update goes: counts, assumptions and tables, checked by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet50

from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.kinds import counts, gpu
from spardl.clusters import Network
from tasks.models.vgg_cifar import CifarVgg
from tests.support import shown


def count(name: str, workers: int, *overrides: str, settle: int = 0, kept: int = 512) -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = counts.count_cycle(name, overrides, workers, 0.01, kept, settle)["kinds"]
    assert json.loads(json.dumps(kinds)) == kinds
    return kinds


def test_dense_sends_every_entry_twice_around_the_ring() -> None:
    (kind,) = count("none", 4)
    assert (kind["share"], kind["rounds"]) == (1, 6)
    assert kind["words"] == {"fixed": pytest.approx(0, abs=1), "per_entry": pytest.approx(1.5, rel=1e-3)}
    assert kind["bytes"]["per_entry"] == pytest.approx(6, rel=1e-3)


def test_topka_sends_its_pairs_to_all_others() -> None:
    (kind,) = count("topka", 8)
    assert kind["rounds"] == 3
    assert kind["words"]["per_entry"] == pytest.approx(2 * 7 * 0.01, rel=1e-3)


def test_the_steps_of_oktopk_have_their_shares() -> None:
    kinds = count("oktopk", 4, kept=128)
    # Of 128 steps two evaluate thresholds and choose regions, two evaluate only.
    assert [kind["share"] for kind in kinds] == [2 / 128, 124 / 128, 2 / 128]
    assert kinds[0]["rounds"] == kinds[2]["rounds"] + 4
    assert kinds[1]["words"]["per_entry"] < kinds[2]["words"]["per_entry"]


def test_messages_of_one_round_do_not_queue() -> None:
    ordinary = count("oktopk", 8)[1]
    busiest = 4 * 7 / 8 * 0.01 * 4  # about 4k(P-1)/P words where loads are equal, of 4 bytes at most
    assert 0 < ordinary["bytes"]["per_entry"] < busiest
    assert ordinary["rounds"] == 3 + 2 + 3 + 3  # numbers, 7 messages by four, numbers, blocks


@pytest.mark.slow
def test_teams_are_counted_after_they_have_adapted() -> None:
    words = ("communicator.teams=2", "communicator.gather=bruck")
    early, late = (count("spardl", 4, *words, settle=settle, kept=256)[0] for settle in (0, 6))
    assert early["rounds"] == late["rounds"] == 3
    assert early["words"]["per_entry"] != late["words"]["per_entry"]


def kind(rounds: int, per_entry: float, share: float = 1.0, sent: float | None = None, fixed: float = 0.0) -> Any:
    words, nbytes = ({"fixed": at, "per_entry": each} for at, each in ((0.0, per_entry), (fixed, sent or per_entry)))
    return {"share": share, "rounds": rounds, "words": words, "bytes": nbytes}


def test_the_parts_by_hand() -> None:
    # 6 x 1e6 x 10 operations at 6e9 a second, and an update of 1000 entries; a byte takes a millisecond.
    model, network = gpu.Model("Small", 1000, 10, 1e6, 6e9, "by hand"), Network(alpha=1e-3, gbit=8e-6)
    kinds = [kind(4, 0.1, 0.75, 0.2, 100.0), kind(8, 0.5, 0.25, 1.0, 100.0)]
    found = counts.predict(model, "topka", kinds, 4, network)
    assert found.computation == pytest.approx(0.01 + 1000 * 5e-11)
    assert found.latency == pytest.approx(5e-3)  # 3/4 x 4 + 1/4 x 8 rounds
    assert found.bandwidth == pytest.approx(0.5)  # 100 bytes, and 3/4 x 200 + 1/4 x 1000
    assert found.communication == pytest.approx(0.505)
    line = gpu.COMPRESSING["topka"]
    merged = 200 / 2 * gpu.MERGING  # 3/4 x 100 + 1/4 x 500 words, two a pair
    assert found.compression == pytest.approx(line.start + 4 * line.worker + 1000 * line.entry + merged)
    assert found.total == pytest.approx(found.computation + found.compression + 0.505)
    assert gpu.seconds_to_compress("none", 1000, 4, 1e9) == 0  # dense gradients are not compressed


def exhibit(workers: tuple[int, ...] = (2, 4)) -> Any:
    return counts.UpdateBreakdown(
        name="x.y",
        title="T",
        source="",
        shows="",
        methods={"one": counts.Counted("topka"), "all": counts.Counted("none")},
        plans={"smoke": counts.UpdatePlan({"vgg16": workers}, 64, "")},
        network="ethernet_1g",
        density={"vgg16": 0.01},
        baseline="all",
    )


def counted(rounds: int, per_entry: float) -> Any:
    return {"kinds": [kind(rounds, per_entry)]}


def test_a_table_by_hand() -> None:
    made = exhibit()
    jobs = made.jobs("smoke")
    assert [dict(job.arguments)["workers"] for job in jobs] == [2, 4, 2, 4]
    figures = [counted(1, 0.1), counted(2, 0.2), counted(2, 1.0), counted(6, 1.5)]
    (table,) = made.tables("smoke", shown.results(dict(zip(jobs, figures, strict=True))))
    assert [row.name for row in table.rows] == ["one, P = 2", "one, P = 4", "all, P = 2", "all, P = 4"]
    length, alpha, beta = gpu.MODELS["vgg16"].entries, 50e-6, 8e-9
    four, dense = (shown.cells(table, name) for name in ("one, P = 4", "all, P = 4"))
    assert four["communication"].value == pytest.approx(2 * alpha + 0.2 * length * beta)
    assert dense["of it latency"].value == pytest.approx(6 * alpha)
    assert four["speed-up over all"].value == pytest.approx(dense["update"].value / four["update"].value)
    assert dense["speed-up over all"].value == 1
    ratio = (6 * alpha + 1.5 * length * beta) / (2 * alpha + 0.2 * length * beta)
    assert four["of the communication, over all"].value == pytest.approx(ratio)
    efficiency = shown.cells(table, "one, P = 2")["update"].value / four["update"].value
    assert four["weak scaling efficiency"].value == pytest.approx(efficiency)
    assert set(table.rows[1].jobs) == {jobs[1], jobs[3]}


def test_what_failed_or_was_not_sent_is_said() -> None:
    made = exhibit((2,))
    one, every = made.jobs("smoke")
    (table,) = made.tables("smoke", shown.results({one: counted(1, 0.1)}))
    assert [cell.text for cell in table.rows[0].cells[-2:]] == ["baseline failed"] * 2
    assert table.rows[1].cells[0].text == "not run yet"
    assert not any(cell.bad for cell in table.rows[1].cells)  # nothing failed there
    (table,) = made.tables("smoke", shown.results({every: counted(1, 1.0)}))
    assert table.rows[0].cells[0].text == "not run yet"
    made = exhibit((1,))
    (table,) = made.tables("smoke", shown.results(dict.fromkeys(made.jobs("smoke"), counted(0, 0.0))))
    assert table.rows[0].cells[-1].text == "no messages"  # one worker


def test_the_picture_stacks_all_parts() -> None:
    made = exhibit((2,))
    found = shown.results(dict.fromkeys(made.jobs("smoke"), counted(2, 0.5)))
    (picture,) = made.pictures("smoke", found)
    tops = [bar.get_x() + bar.get_width() for bar in shown.axes(picture).patches]
    (table,) = made.tables("smoke", found)
    assert tops[-2:] == pytest.approx([shown.cells(table, row.name)["update"].value for row in table.rows])


def test_a_bar_that_would_dwarf_the_others_is_cut_off() -> None:
    figure, bars = Figure(), {"a": (1, 0, 0, 0), "b": (1, 1, 0, 0), "c": (0, 0, 0, 50)}
    counts.draw_parts({name: counts.Parts(*parts) for name, parts in bars.items()}, figure)
    (axes,) = figure.axes
    assert axes.get_xlim() == (0, pytest.approx(1.05 * 6))
    assert [text.get_text() for text in axes.texts] == [" 1", " 2", " \u219250"]


def products(model: nn.Module, pictures: Tensor) -> tuple[float, int]:
    with FlopCounterMode(display=False) as counter:
        model(pictures)
    return counter.get_total_flops() / 2 / len(pictures), sum(weight.numel() for weight in model.parameters())


def test_assumptions_are_those_of_our_networks_and_benchmarks() -> None:
    with torch.device("meta"):
        found = {
            "vgg16": products(CifarVgg(16, num_classes=10), torch.zeros(2, 3, 32, 32)),
            "vgg19": products(CifarVgg(19, num_classes=100), torch.zeros(2, 3, 32, 32)),
            "vgg11": products(CifarVgg(11, num_classes=1), torch.zeros(2, 3, 64, 64)),
            "resnet50": products(resnet50(), torch.zeros(2, 3, 224, 224)),
        }
    for name, (counted_products, entries) in found.items():
        assert gpu.MODELS[name].products == pytest.approx(counted_products, rel=0.01)
        assert gpu.MODELS[name].entries == entries
    bench, model = gpu.ASSUMED["resnet50"], gpu.MODELS["resnet50"]
    assert model.seconds / model.batch == pytest.approx(bench.seconds / bench.batch, rel=0.05)


def test_every_exhibit_finds_its_assumptions() -> None:
    found = [made for made in catalogue().values() if isinstance(made, counts.UpdateBreakdown)]
    assert {made.name.partition(".")[0] for made in found} == {"spardl", "oktopk"}
    for made in found:
        assert made.baseline in made.methods
        assert {contender.choice for contender in made.methods.values()} <= set(gpu.COMPRESSING)
        for scale, plan in made.plans.items():
            assert {dict(job.arguments)["density"] for job in made.jobs(scale)} <= set(made.density.values())
            assert set(plan.workers) <= set(gpu.MODELS)
