"""Measured passes in place of assumed ones: where they count, what says so, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import reproduce
from scripts.benchmarks import schedules as bench_schedules
from scripts.exhibits import base, jobs
from scripts.exhibits.claims import judging
from scripts.exhibits.claims.catalogue import load_all
from scripts.exhibits.kinds import gpu, lab
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.passes import MeasuredPasses, read_passes
from spardl.basics.errors import ConfigError
from spardl.clusters.profile import LayerTimes, Profile

Given = Callable[..., dict[str, MeasuredPasses]]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """Reads a profile with one layer of a model, by default of 9 seconds."""

    def made(model: str, entries: int, seconds: float = 9.0) -> dict[str, MeasuredPasses]:
        layers = (LayerTimes("all", entries, 0.0, seconds * 2 / 3),)
        path = tmp_path / f"{model}-{seconds}.json"
        Profile(model, "a clock", 3, layers, seconds / 3, seconds * 2 / 3, 0.0).write(path)
        return read_passes([f"{model}={path}"])

    return made


def vgg16(given: Given, seconds: float = 9.0) -> dict[str, MeasuredPasses]:
    return given("vgg16", gpu.MODELS["vgg16"].entries, seconds)


def counted(exhibit: Any, scale: str) -> base.Results:
    line = {"fixed": 0.0, "per_entry": 0.1}
    kinds = {"kinds": [{"share": 1.0, "rounds": 4, "words": line, "bytes": line}]}
    return base.Results(Path("x"), {job: jobs.Outcome(Path("x"), kinds) for job in exhibit.jobs(scale)})


def test_updates_have_the_seconds_of_the_profile(given: Given) -> None:
    exhibit = catalogue()["spardl.breakdown"]
    measured = exhibit.with_passes(vgg16(given))
    assert measured.jobs("laptop") == exhibit.jobs("laptop")  # counts do not depend on them
    (before, *rest), (after, *same) = (each.tables("laptop", counted(each, "laptop")) for each in (exhibit, measured))
    assert {row.cells[0].value for row in after.rows} == {9.0}
    assert before.rows[0].cells[0].value == pytest.approx(gpu.MODELS["vgg16"].seconds)
    assert [row.cells for table in same for row in table.rows] == [row.cells for table in rest for row in table.rows]
    assert "vgg16" not in measured.assumes("laptop")
    assert "vgg16" in exhibit.assumes("laptop")
    caption = measured.caption("laptop")
    assert "Measured: VGG-16 on CIFAR-10: 9 s for 3 examples on a clock" in caption
    assert "VGG-19 on CIFAR-100: " in caption.partition("Measured")[0]
    assert "vgg16: 9 s" in measured.basis.measured
    assert "vgg16" not in exhibit.basis.measured


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dear.speed", "dear.breakdown", "dear.tuning", "sketch_fusion.fusion", "sketch_fusion.scaling"]
)
def test_iterations_are_predicted_from_the_profile(name: str, given: Given) -> None:
    exhibit: Any = catalogue()[name]
    size = bench_schedules.sizes()["resnet50"]
    slow, slower = (exhibit.with_passes(given("resnet50", size, seconds)) for seconds in (9.0, 90.0))
    ids = {each.job("smoke").id for each in (exhibit, slow, slower)}
    assert len(ids) == 3
    assert slow.assumes("smoke") == []
    assert "resnet50" not in slow.assumes("laptop")
    assert "a clock" in slow.caption("smoke")
    assert "--profile resnet50=" in slow.job("smoke").command
    found = [each.function(**dict(each.job("smoke").arguments)) for each in (exhibit, slow)]
    assert found[0] != found[1]
    if name == "dear.speed":
        assert min(found[1]["sheets"][0]["rows"][0][1:7]) > 9


def test_a_job_without_its_models_is_as_before(given: Given) -> None:
    size = bench_schedules.sizes()["bert_base"]
    measured = catalogue()["dear.speed"].with_passes(given("bert_base", size))
    assert measured.job("smoke").id == catalogue()["dear.speed"].job("smoke").id
    assert measured.job("laptop").id != catalogue()["dear.speed"].job("laptop").id


def test_benches_in_the_lab_sleep_as_long(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = given("resnet50", bench_schedules.sizes()["resnet50"])
    measured = catalogue()["dear.lab"].with_passes(taken)
    job = measured.job("laptop")
    assert job.id != catalogue()["dear.lab"].job("laptop").id
    assert measured.job("smoke").id == catalogue()["dear.lab"].job("smoke").id  # of another model
    words = dict(job.arguments)["words"]
    assert f"profile:{taken['resnet50'].path}" in words
    assert "--compute" not in words
    assert words[-6:] == catalogue()["dear.lab"].job("laptop").arguments[-1][1][-6:]
    asked: list[Any] = []
    monkeypatch.setattr(lab.netlab, "run", lambda arguments: asked.append(arguments) or 3)
    with pytest.raises(Exception, match="exit code 3"):
        lab.schedules(**dict(job.arguments))
    assert f"profile:{taken['resnet50'].path}" in asked[0].command
    updates = catalogue()["spardl.lab_updates"]
    slept = updates.with_passes(given("lstm_imdb", gpu.MODELS["lstm_imdb"].entries))
    assert not {job.id for job in slept.jobs("laptop")} & {job.id for job in updates.jobs("laptop")}
    assert (updates.assumes("laptop"), slept.assumes("laptop")) == (["lstm_imdb"], [])


@pytest.mark.parametrize("name", catalogue())
def test_every_exhibit_takes_them_or_assumes_none(name: str, given: Given) -> None:
    exhibit = catalogue()[name]
    sizes = {**{model: each.entries for model, each in gpu.MODELS.items()}, **bench_schedules.sizes()}
    sizes["resnet20"] = sum(Profile.read(lab.PROFILES / "resnet20.json").entries)
    assumed = "RTX 2080 Ti" in exhibit.basis.assumed or "sleep for the" in exhibit.basis.assumed
    assert bool(exhibit.assumes("laptop")) == assumed
    taken = {model: given(model, sizes[model])[model] for model in exhibit.assumes("laptop")}
    assert not exhibit.with_passes(taken).assumes("laptop")


def test_a_profile_of_another_size_is_refused(given: Given) -> None:
    wrong = given("vgg16", 12), given("resnet50", 12), given("lstm_imdb", 12)
    for exhibit, taken in (
        (catalogue()["spardl.breakdown"], wrong[0]),
        (catalogue()["dear.speed"], wrong[1]),
        (catalogue()["dear.lab"], wrong[1]),
        (catalogue()["spardl.lab_updates"], wrong[2]),
    ):
        with pytest.raises(ConfigError, match=r"has 12 parameters, but \w+ has [\d,]+; measure \w+"):
            exhibit.with_passes(taken)


def test_what_is_no_profile_of_one_model_is_refused(given: Given) -> None:
    file = vgg16(given)["vgg16"].path
    for words, reason in (
        (["vgg16"], "must be MODEL=FILE"),
        (["=x.json"], "must be MODEL=FILE"),
        (["vgg16=nowhere.json"], "is not a profile"),
        ([f"vgg16={file}", f"vgg16={file}"], "names vgg16 twice"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_passes(words)


def test_every_exhibit_says_what_changes(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    exhibits = reproduce.chosen(["spardl.breakdown", "spardl.density"])
    found = reproduce.measured(exhibits, "smoke", vgg16(given))
    assert found[0].assumes("smoke") == []
    assert capsys.readouterr().out.splitlines() == [
        "spardl.breakdown: passes measured: vgg16",
        "spardl.density: assumes no passes, so --profile changes nothing",
    ]
    with pytest.raises(ConfigError, match="has no effect on the chosen exhibits at smoke; remove it"):
        reproduce.measured(exhibits[1:], "smoke", vgg16(given))


def claim_at(name: str, exhibit: Any, scale: str = "smoke") -> Any:
    (claim,) = (each for each in load_all() if each.name == name)
    return claim.where(exhibit, scale)


def test_verdicts_rest_on_no_guess_where_passes_were_measured(given: Given) -> None:
    guess, name = judging.Limit.ASSUMED_GPU, "DeAR: speed on 10 GbE"
    measured = catalogue()["dear.speed"].with_passes(given("resnet50", bench_schedules.sizes()["resnet50"]))
    assert guess in claim_at(name, catalogue()["dear.speed"]).limits
    assert guess not in claim_at(name, measured).limits
    assert guess in claim_at(name, measured, "laptop").limits  # other models are assumed there
    # What compressors take is assumed in any case.
    whole = catalogue()["spardl.breakdown"].with_passes(vgg16(given))
    assert whole.assumes("smoke") == []
    assert guess in claim_at("SparDL: speed of an update", whole).limits
