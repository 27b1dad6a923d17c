"""A training saved midway and resumed in new processes equals an uninterrupted one."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.hooks.loops import Ddp, Hooks, Path, batches, made, weights
from tests.support.harness import run_workers

PATHS: dict[str, type[Path]] = {"ddp": Ddp, "hooks": Hooks}
METHODS: dict[str, dict[str, Any]] = {
    "spardl": {"method": "spardl", "density": 0.1, "teams": 2},
    "oktopk": {"method": "oktopk", "density": 0.1, "period": 3},
    "powersgd": {"method": "powersgd", "rank": 1},
    "dgc": {"method": "dgc", "density": 0.1},
}
OTHER_HANDLE = "this is not the state of a handle of this kind; load the result of its state_dict()"


def run(path: Path, rule: torch.optim.Optimizer, model: Any, steps: range) -> None:
    for batch in batches(model, steps):
        rule.zero_grad()
        path.backward([batch])
        rule.step()


def begun(kind: type[Path], options: dict[str, Any]) -> tuple[Path, torch.optim.Optimizer, Any]:
    model = made("cnn")
    return kind(model, {**options, "bucket_mb": 0.001}), torch.optim.SGD(model.parameters(), lr=0.1), model


def saved(*states: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("ddp", "spardl"),
        *(
            pytest.param(kind, method, marks=pytest.mark.slow)
            for kind in PATHS
            for method in METHODS
            if (kind, method) != ("ddp", "spardl")
        ),
    ],
)
def test_the_state_round_trip(kind: str, method: str) -> None:
    """With torch.save on each rank, into processes whose DDP starts with other buckets."""

    def first(cluster: ProcessGroupCluster) -> tuple[bytes, torch.Tensor]:
        path, rule, model = begun(PATHS[kind], METHODS[method])
        run(path, rule, model, range(7))
        kept = saved(model.state_dict(), rule.state_dict(), path.handle.state_dict())
        run(path, rule, model, range(7, 14))
        return kept, weights(model)

    halfway = run_workers(2, first)

    def second(cluster: ProcessGroupCluster) -> bool:
        kept, expected = halfway[cluster.local_ranks[0]]
        path, rule, model = begun(PATHS[kind], METHODS[method])
        parts = torch.load(io.BytesIO(kept), weights_only=True)
        for part, whose in zip(parts, (model, rule, path.handle), strict=True):
            whose.load_state_dict(part)
        run(path, rule, model, range(7, 14))
        return torch.equal(weights(model), expected)

    assert all(run_workers(2, second))


@pytest.mark.slow
def test_saved_state_is_a_copy() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        path, rule, model = begun(Hooks, METHODS["spardl"])
        run(path, rule, model, range(3))
        state = path.handle.state_dict()
        before = [group["memory"].clone() for group in state["groups"]]
        run(path, rule, model, range(3, 6))
        path.handle.load_state_dict(state)
        run(path, rule, model, range(6, 8))
        return all(torch.equal(group["memory"], old) for group, old in zip(state["groups"], before, strict=True))

    assert all(run_workers(2, work))


def test_states_of_others_are_refused() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        one = spardl.Synchronizer(made("cnn").named_parameters(), "spardl")
        other = spardl.Synchronizer(made("transformer").named_parameters(), "spardl")
        cut = spardl.Synchronizer(made("cnn").named_parameters(), "spardl", bucket_mb=0.001)
        said = []
        for each in (other, cut):
            with pytest.raises(ConfigError) as error:
                each.load_state_dict(one.state_dict())
            said.append(str(error.value))
        return said

    (said,) = run_workers(1, work)
    line = "this state belongs to other parameters or another bucket_mb; load it into a handle of the same model and "
    assert said == [f"{line}bucket_mb"] * 2


def test_states_of_other_workers_and_methods_are_refused() -> None:
    """For example if only rank 0 saves and all load; nothing is changed."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        paths = [begun(Ddp, METHODS["spardl"])[0], begun(Hooks, METHODS["spardl"])[0]]
        (batch,) = batches(made("cnn"), [0])
        for path in paths:
            path.backward([batch])
        states = [path.handle.state_dict() for path in paths]
        said = []
        wrong = {
            "rank": {**states[0], "owner": {**states[0]["owner"], "rank": 1 - cluster.local_ranks[0]}},
            "workers": {**states[0], "owner": {**states[0]["owner"], "workers": 4}},
            "method": {**states[0], "owner": {**states[0]["owner"], "parts": ["A", "B", "C", "D"]}},
            "none": {"names": states[0]["names"]},
            "fsdp": {"owner": states[0]["owner"], "units": {}},
        }
        fresh = begun(Ddp, METHODS["spardl"])[0]
        for handle in (fresh.handle, paths[0].handle):
            for state in wrong.values():
                with pytest.raises(ConfigError) as error:
                    handle.load_state_dict(state)
                said.append(str(error.value))
        with pytest.raises(ConfigError, match="not the state of a Synchronizer"):
            paths[1].handle.load_state_dict({name: value for name, value in states[0].items() if name != "usage"})
        assert not any(group["memory"].any() for group in fresh.handle.state_dict()["groups"])
        assert all(
            torch.equal(group["memory"], before["memory"])
            for path, state in zip(paths, states, strict=True)
            for group, before in zip(path.handle.state_dict()["groups"], state["groups"], strict=True)
        )
        return said

    for rank, said in enumerate(run_workers(2, work)):
        assert said[:5] == said[5:]
        assert said[0].startswith(f"this state belongs to rank {1 - rank} of 2, but this is rank {rank} of 2; save and")
        assert said[1].startswith(f"this state belongs to rank {rank} of 4")
        assert said[2].startswith(
            "this state belongs to the method A + B + C + D, but this method is TopK + SparDL + GlobalResidual + "
        )
        assert said[3:5] == [OTHER_HANDLE] * 2


def test_all_handles_have_one_kind_of_state() -> None:
    """A Synchronizer of the same parameters loads a state of attach, and vice versa."""

    def work(cluster: ProcessGroupCluster) -> list[bool]:
        (batch,) = batches(made("cnn"), [0])
        found = []
        for kind, other in ((Ddp, Hooks), (Hooks, Ddp)):
            path, follower = begun(kind, METHODS["spardl"])[0], begun(other, METHODS["spardl"])[0]
            path.backward([batch])
            follower.backward([batch])
            for each in (path, path):
                each.backward([batch])
            follower.handle.load_state_dict(path.handle.state_dict())
            mine, theirs = (each.handle.state_dict()["groups"] for each in (follower, path))
            found.append(all(torch.equal(a["memory"], b["memory"]) for a, b in zip(mine, theirs, strict=True)))
        return found

    assert run_workers(2, work) == [[True, True]] * 2


def test_invalid_states_change_nothing() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        paths = [begun(kind, METHODS["oktopk"])[0] for kind in (Ddp, Hooks)]
        (batch,) = batches(made("cnn"), [0])
        said = []
        for path in paths:
            path.backward([batch])
            state = path.handle.state_dict()
            group = state["groups"][0]
            wrong: list[Any] = [
                3,
                None,
                [state],
                without(state, "factor"),
                {**state, "groups": 3},
                {**state, "groups": [*state["groups"][:-1], without(state["groups"][-1], "memory")]},
                {**state, "groups": [3, *state["groups"][1:]]},
                {**state, "groups": [{**group, "communication": {}}, *state["groups"][1:]]},
                {**state, "groups": [{**group, "velocity": torch.ones(7)}, *state["groups"][1:]]},
            ]
            for values in wrong:
                with pytest.raises(ConfigError) as error:
                    path.handle.load_state_dict(values)
                said.append(str(error.value))
            for mine, before in zip(path.handle.state_dict()["groups"], state["groups"], strict=True):
                assert torch.equal(mine["memory"], before["memory"])
                assert mine["step"] == before["step"]
        return said

    for said in run_workers(2, work):
        assert not any("\n" in each for each in said)
        assert set(said[:3] + said[9:12]) == {OTHER_HANDLE}
        invalid, rest = "this state is invalid: ", "; load the complete result of state_dict()"
        assert said[3] == said[12] == f"{invalid}factor is missing{rest}"
        assert said[4] == f"{invalid}groups must be a list, got int{rest}"
        assert said[5].startswith(f"{invalid}groups[")
        assert said[5].endswith(f".memory is missing{rest}")
        assert said[6] == f"{invalid}groups[0] must be a dict, got int{rest}"
        assert said[7].startswith(f"{invalid}groups[0].communication.")
        assert said[8].startswith("this state belongs to other parameters or another bucket_mb")


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def test_state_is_complete_before_the_first_step() -> None:
    """An empty mapping resets the handle completely."""

    def work(cluster: ProcessGroupCluster) -> bool:
        path, rule, model = begun(Ddp, METHODS["dgc"])
        fresh = path.handle.state_dict()
        path.handle.load_state_dict(fresh)
        run(path, rule, model, range(2))
        state = path.handle.state_dict()
        assert fresh.keys() == state.keys()
        assert [group.keys() for group in fresh["groups"]] == [group.keys() for group in state["groups"]]
        again, _, _ = begun(Ddp, METHODS["dgc"])
        again.handle.load_state_dict(state)
        assert again.handle.state_dict()["names"] == state["names"]
        path.handle.load_state_dict({})
        return all(not group["memory"].any() and group["step"] == 0 for group in path.handle.state_dict()["groups"])

    assert all(run_workers(1, work))
