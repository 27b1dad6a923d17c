"""The last hook before the first use of each parameter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.schedules.dear import FirstUses
from tests.schedules.loops import batch, make_model


class Borrower(nn.Module):
    """Uses its first child's weight before it calls it, and a list of parameters that no module owns directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(F.linear(inputs, self.first.weight)) + self.first(inputs)


def needs(model: nn.Module, *inputs: Tensor) -> list[list[set[str]]]:
    """Names that each hook requests, for each of two forward passes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    numbers = {parameter: number for number, parameter in enumerate(names)}
    asked: list[set[str]] = []
    uses = FirstUses(model, numbers, lambda layers: asked.append({list(names.values())[layer] for layer in layers}))
    passes = []
    for each in inputs:
        asked.clear()
        uses.begin()
        model(each)
        uses.end()
        passes.append([found for found in asked if found])
    uses.close()
    asked.clear()
    model(inputs[0])
    assert not asked
    return passes


def test_a_borrowed_weight() -> None:
    first, second = needs(Borrower(), torch.ones(1, 2), torch.ones(1, 2))
    assert first == []
    assert second == [{"first.weight"}, {"second.weight"}]


def test_attention_uses_weights_of_a_module_it_does_not_call() -> None:
    _, second = needs(make_model(), batch(0, 0, 0), batch(0, 0, 0))
    attention = next(found for found in second if "attention.in_proj_weight" in found)
    assert {"attention.out_proj.weight", "attention.out_proj.bias"} <= attention
    recurrent = next(found for found in second if "recurrent.weight_hh_l0" in found)
    # A use between two calls is assigned to the earlier call.
    assert "scale" in recurrent
    assert {"embedding.weight"} in second
    assert {"decoder.bias"} in second
    assert not any("unused.weight" in found for found in second)


def test_functions_without_modules() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ParameterList([nn.Parameter(torch.ones(2))])

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.inner[0]

    _, second = needs(Bare(), torch.ones(2), torch.ones(2))
    assert second == [{"inner.0"}]
