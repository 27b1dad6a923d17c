"""Fragments sent during local steps: bit-exact resumption, and equal weights at the end."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import spardl
from spardl.basics.errors import ConfigError, WorkerError
from spardl.clusters import ProcessGroupCluster
from tests.hooks.small import OPTIONS, backward, made, rule, weights
from tests.support.harness import run_workers, same_bits
from tests.support.quick import some_quick

STREAMING: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 2, "mixing": 0.5}


def streamed(method: str, rank: int, state: dict[str, Any] | None = None) -> tuple[nn.Module, Any, spardl.Outer]:
    model = made()
    own = rule(model)
    outer = spardl.Outer(model.named_parameters(), own, method, **STREAMING, **OPTIONS[method])
    if state is not None:
        own.load_state_dict(copy.deepcopy(state["optimizer"]))
        outer.load_state_dict(state["outer"])
    return model, own, outer


@pytest.mark.slow
@pytest.mark.parametrize("method", some_quick(["spardl", "none"], 2))
def test_fragments_resume_bit_exactly_from_any_step(method: str) -> None:
    """Also with a fragment in flight, and if workers call state_dict() at different steps or never."""
    steps = 13

    def work(cluster: ProcessGroupCluster) -> tuple[list[list[Tensor]], list[int]]:
        (rank,) = cluster.local_ranks

        def trained(outer: spardl.Outer, model: nn.Module, some: range) -> list[Tensor]:
            found = []
            for step in some:
                backward(model, rank, step)
                outer.step()
                found.append(weights(model))
            return found

        model, _, outer = streamed(method, rank)
        runs = [trained(outer, model, range(steps))]
        outer.close()
        aloft = []
        for stop in range(steps):
            model, own, outer = streamed(method, rank)
            before = trained(outer, model, range(stop))
            if rank == stop % 2 or stop % 3 == 0:
                outer.state_dict()
            before += trained(outer, model, range(stop, stop + 1))
            saved = {"optimizer": copy.deepcopy(own.state_dict()), "outer": outer.state_dict()}
            aloft.append(len(saved["outer"]["outer"]["aloft"]))
            runs.append(before + trained(outer, model, range(stop + 1, steps)))
            outer.close()
            # As in a new process.
            model, own, outer = streamed(method, rank, saved)
            runs.append(before + trained(outer, model, range(stop + 1, steps)))
            outer.close()
        return runs, aloft

    for runs, aloft in run_workers(2, work):
        assert {0, 1} <= set(aloft)
        for run in runs:
            assert all(same_bits(one, other) for one, other in zip(run, runs[0], strict=True))


def test_state_loaded_while_a_step_is_in_flight() -> None:
    def work(cluster: ProcessGroupCluster) -> bool:
        (rank,) = cluster.local_ranks
        model, own, outer = streamed("spardl", rank)
        saved = {"optimizer": copy.deepcopy(own.state_dict()), "outer": outer.state_dict()}

        def trained() -> Tensor:
            for step in range(3):  # the first fragment is sent after the second
                backward(model, rank, step)
                outer.step()
            return weights(model)

        first = trained()
        own.load_state_dict(saved["optimizer"])
        outer.load_state_dict(saved["outer"])
        again = trained()
        outer.close()
        return same_bits(first, again)

    assert run_workers(2, work) == [True, True]


def test_after_an_exchange_fragments_are_equal_on_all_workers() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[list[Tensor], int]:
        (rank,) = cluster.local_ranks
        model, _, outer = streamed("spardl", rank)
        found = []
        for count in (3, 2, 4, 1):
            for step in range(count):
                backward(model, rank, 10 * count + step)
                outer.step()
            outer.exchange()
            found.append(weights(model))
        exchanges = outer.stats().steps
        outer.close()
        return found, exchanges

    one, other = run_workers(2, work)
    assert all(same_bits(*pair) for pair in zip(one[0], other[0], strict=True))
    assert (
        one[1] == other[1] == 2 * 4 + 2
    )  # those of exchange(), and one each that was due after 2 steps and has been applied


def test_worker_lost_during_local_steps_raises_at_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fragment sent after 8 steps is applied after 10; until then, workers train without noticing the loss."""
    # Worker 0 exits as soon as it has noticed.
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 60.0)

    def work(cluster: ProcessGroupCluster) -> None:
        (rank,) = cluster.local_ranks
        model = made()
        outer = spardl.Outer(
            model.named_parameters(), rule(model), "none", timeout=30.0, every=4, delay=2, communicator="dense"
        )
        for step in range(14):
            if step == 7 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(model, rank, step)
            try:
                outer.step()
            except Exception as error:
                (tmp_path / "said").write_text(f"step {step + 1}: {type(error).__name__}: {error}")
                os._exit(0)
        raise AssertionError("no worker noticed")

    with pytest.raises(WorkerError, match="worker 1 was killed by SIGKILL"):
        run_workers(2, work)
    assert (tmp_path / "said").read_text().startswith("step 10: PeerError: rank 0 lost contact in an exchange")


@pytest.mark.parametrize("method", ["none", "spardl"])
def test_workers_that_made_fewer_steps_send_no_other_fragment(method: str) -> None:
    """At the end, one worker would send the first fragment, and the others the second."""

    def work(cluster: ProcessGroupCluster) -> str:
        (rank,) = cluster.local_ranks
        model = made()
        outer = spardl.Outer(model.named_parameters(), rule(model), method, every=4, fragments=2, timeout=60)
        with pytest.raises(ConfigError) as error:
            for step in range(11 if rank == 1 else 12):
                backward(model, rank, step)
                outer.step()
            outer.exchange()
        return str(error.value)

    said = "rank 1 sends fragment 1 of 2, but rank 0 sends fragment 2, so they have made different numbers of steps; "
    assert all(found.startswith(said) for found in run_workers(3, work))


def test_fragments_that_do_not_fit() -> None:
    model = made()
    with pytest.raises(ConfigError, match="fragments=3 exceeds the 2 layers of the model; use fewer"):
        spardl.Outer(model.named_parameters(), rule(model), "none", fragments=3)
    with pytest.raises(ConfigError, match="at most every=4 and delay below it, got fragments=2 and delay=4"):
        spardl.Outer(model.named_parameters(), rule(model), "none", every=4, fragments=2, delay=4)


def test_state_of_other_fragments_is_refused_without_changes() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[str, bool]:
        (rank,) = cluster.local_ranks
        model, _, outer = streamed("spardl", rank)
        whole = spardl.Outer(model.named_parameters(), rule(model), "spardl", every=4, density=0.2)
        before = weights(model)
        reported = []
        for into, saved in ((whole, outer), (outer, whole)):
            state = saved.state_dict()
            state["outer"]["weights"] = [weight + 1 for weight in state["outer"]["weights"]]
            with pytest.raises(ConfigError) as error:
                into.load_state_dict(state)
            reported.append(str(error.value))
        outer.close()
        whole.close()
        return "; ".join(reported), same_bits(before, weights(model))

    reported = (
        "this state was saved with fragments=2, but this Outer has fragments=1; use the same number; "
        "this state was saved with fragments=1, but this Outer has fragments=2; use"
    )
    for found, same in run_workers(2, work):
        assert found.startswith(reported)
        assert same


def test_a_state_that_was_saved_before_there_were_fragments() -> None:
    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        (rank,) = cluster.local_ranks
        model = made()
        own = rule(model)
        outer = spardl.Outer(model.named_parameters(), own, "spardl", every=3, density=0.2)

        def trained(some: range) -> Tensor:
            for step in some:
                backward(model, rank, step)
                outer.step()
            return weights(model)

        trained(range(5))
        optimizer, saved = copy.deepcopy(own.state_dict()), outer.state_dict()
        straight = trained(range(5, 9))
        for name in ("left", "aloft", "fragments"):
            del saved["outer"][name]
        own.load_state_dict(optimizer)
        outer.load_state_dict(saved)
        again = trained(range(5, 9))
        outer.close()
        return [straight, again]

    for straight, again in run_workers(2, work):
        assert same_bits(straight, again)
