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
        model: Model to train; or only its parameters, of which all with shape (a, b) then count as matrices.
        lr: Learning rate of matrices.
        adamw_lr: Learning rate of the other parameters; ``None`` for ``lr``.
        weight_decay: Weight decay of all parameters.
        momentum: Momentum factor of Muon, in [0, 1).
        nesterov: Whether Muon uses Nesterov momentum.
        ns_steps: Number of Newton-Schulz iterations.
        adjust_lr_fn: How Muon scales its learning rate by the shape of a matrix, as in ``torch.optim.Muon``;
            ``match_rms_adamw`` suits learning rates that were chosen for AdamW.
        betas: Decay rates of AdamW's first and second moment, each in [0, 1).
        eps: Constant added to the square root of AdamW's second moment.

    Attributes:
        parts: Torch optimizers that make the steps: Muon and AdamW, or one of them if the other has no parameters.

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
            raise ConfigError(
                f"optimizer=muon finds no matrices in {type(model).__name__}, other than embeddings and the last "
                "layer; use optimizer=adamw or sgd"
            )
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
        """Makes a step with both optimizers, which use the current parameter groups and state of this object.

        Args:
            closure: Function that computes all gradients and returns the loss; ``None`` if gradients exist already.

        Returns:
            The loss that ``closure`` returned; ``None`` without a closure.
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
        make: Function that creates the optimizer, from the model if ``takes_model(make)``, otherwise from parameters.
        model: Model to train.
    """
    return make(model if takes_model(make) else model.parameters())


def takes_model(make: OptimizerFactory) -> bool:
    """Returns whether ``make`` creates an optimizer, such as MuonAdamW, from the model instead of its parameters."""
    return bool(getattr(getattr(make, "func", make), "takes_model", False))


def optimizer_parts(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the torch optimizers that make the steps: those of a :class:`MuonAdamW`, or the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, MuonAdamW) else (optimizer,)
