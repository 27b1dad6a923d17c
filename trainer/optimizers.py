"""Optimizers of the trainer that torch lacks: Muon for matrices with AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from spardl.basics.checks import check_integer
from spardl.basics.errors import ConfigError

__all__ = ["MuonAdamW", "OptimizerFactory", "make_optimizer", "optimizer_parts", "takes_model"]

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of hidden layers, AdamW for all other parameters, as one optimizer.

    Matrices are parameters of shape (a, b), except those of embeddings and of the last layer, as in Jordan et al.,
    Muon: An optimizer for hidden layers in neural networks, 2024.

    Args:
        model: Model to train, or its parameters: every parameter of shape (a, b) is then a matrix.
        lr: Learning rate of matrices.
        adamw_lr: Learning rate of the other parameters; ``None`` for ``lr``.
        weight_decay: Weight decay of all parameters.
        momentum: Momentum factor of Muon, a share.
        nesterov: Whether Muon uses Nesterov momentum.
        ns_steps: Number of Newton-Schulz iterations.
        adjust_lr_fn: Dependence of Muon's learning rate on the shape; ``match_rms_adamw`` suits rates of AdamW.
        betas: Decay rates of AdamW's moments, shares.
        eps: Constant added to the root of AdamW's second moment.

    Attributes:
        parts: The optimizers of torch that make the steps.

    Raises:
        ConfigError: If this version of torch has no Muon, the model has no such matrices, or ``ns_steps`` is out of
            range.
    """

    takes_model: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Parameter],
        lr: float = 0.01,
        adamw_lr: float | None = None,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        kind: Any = getattr(torch.optim, "Muon", None)
        if kind is None:
            raise ConfigError(
                f"optimizer=muon needs torch 2.9 or newer, found {torch.__version__}; use optimizer=adamw"
            )
        check_integer("optimizer.ns_steps", ns_steps, least=0, most=99)
        parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
        others = _outside(model) if isinstance(model, nn.Module) else set()
        matrices = [each for each in parameters if each.ndim == 2 and each not in others]
        rest = [each for each in parameters if each.ndim != 2 or each in others]
        if isinstance(model, nn.Module) and not matrices:
            raise ConfigError(f"optimizer=muon finds no matrices in {type(model).__name__}; use optimizer=adamw or sgd")
        rate = lr if adamw_lr is None else adamw_lr
        made: list[torch.optim.Optimizer] = []
        if matrices:
            muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
            made.append(kind(matrices, lr=lr, weight_decay=weight_decay, **muon))
        if rest:
            first, second = betas
            made.append(torch.optim.AdamW(rest, rate, (first, second), eps, weight_decay))
        self.parts = tuple(made)
        # load_state_dict() replaces the groups, so each one says whose it is.
        groups = [{**group, "part": number} for number, part in enumerate(made) for group in part.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes a step of both optimizers, with the current groups and state of this one.

        Args:
            closure: Computes the loss and all gradients; ``None`` if they exist.

        Returns:
            The loss of ``closure``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, part in enumerate(self.parts):
            # The engine restricts groups to some parameters, and outer steps swap the state of simulated workers.
            part.param_groups = [group for group in self.param_groups if group["part"] == number]
            part.state = self.state
            if part.param_groups:
                part.step()
        return loss


def _outside(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of embeddings and of the last layer."""
    owners = [module for module in model.modules() if [*module.parameters(recurse=False)]]
    chosen = [module for module in owners if isinstance(module, nn.Embedding) or module is owners[-1]]
    return {each for module in chosen for each in module.parameters(recurse=False)}


def make_optimizer(make: OptimizerFactory, model: nn.Module) -> torch.optim.Optimizer:
    """Creates the optimizer of a model.

    Args:
        make: Creates the optimizer from parameters, or from the model if its class has ``takes_model``.
        model: Model to train.
    """
    return make(model if takes_model(make) else model.parameters())


def takes_model(make: OptimizerFactory) -> bool:
    """Whether an optimizer chooses parameters by their place in the model, so that it is created from the model."""
    return bool(getattr(getattr(make, "func", make), "takes_model", False))


def optimizer_parts(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Optimizers of torch that make the steps of an optimizer: those of :class:`MuonAdamW`, or the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, MuonAdamW) else (optimizer,)
