from __future__ import annotations

import torch
from torch import nn

from spardl.protocol.programs import Worker
from tests.trainer.toy import simulated
from trainer.sampler import ShuffledSampler, TrainingWorker, average_buffers


def workers(count: int, model: nn.Module) -> list[TrainingWorker]:
    return [
        TrainingWorker(worker, model, ShuffledSampler(100, worker, 2, 1), seed=1)
        for worker in (Worker(rank, count) for rank in range(count))
    ]


def draw(worker: TrainingWorker) -> float:
    with worker.active():
        return torch.rand(1).item()


def test_random_numbers_are_each_workers_own() -> None:
    model = nn.Linear(2, 2)
    one, other = workers(2, model)
    torch.manual_seed(9)
    outside = torch.rand(1).item()
    torch.manual_seed(9)
    alternating = [draw(worker) for _ in range(3) for worker in (one, other)]
    assert torch.rand(1).item() == outside
    again_one, again_other = workers(2, model)
    assert [draw(again_one) for _ in range(3)] == alternating[::2]
    assert [draw(again_other) for _ in range(3)] == alternating[1::2]
    assert len(set(alternating)) == 6


def test_running_statistics_are_each_workers_own() -> None:
    model = nn.BatchNorm1d(1, momentum=1.0)
    everyone = workers(3, model)
    for rank, worker in enumerate(everyone):
        with worker.active():
            model(torch.full((4, 1), float(rank)))
    assert [worker.floating_buffers()[0].item() for worker in everyone] == [0.0, 1.0, 2.0]
    average_buffers(simulated(3), everyone, model)
    assert model.running_mean is not None
    assert model.running_mean.item() == 1.0
    assert everyone[0].floating_buffers()[0].item() == 0.0


def test_a_model_without_buffers() -> None:
    model = nn.Linear(2, 2)
    everyone = workers(2, model)
    assert everyone[0].floating_buffers().numel() == 0
    average_buffers(simulated(2), everyone, model)


def test_the_state_round_trips() -> None:
    model = nn.BatchNorm1d(1)
    worker = workers(1, model)[0]
    with worker.active():
        model(torch.randn(4, 1))
    state = {
        name: [part.clone() for part in parts] if isinstance(parts, list) else {k: v.clone() for k, v in parts.items()}
        for name, parts in worker.state_dict().items()
    }
    expected = draw(worker), worker.floating_buffers()
    fresh = workers(1, nn.BatchNorm1d(1))[0]
    fresh.load_state_dict(state)
    assert draw(fresh) == expected[0]
    assert torch.equal(fresh.floating_buffers(), expected[1])
