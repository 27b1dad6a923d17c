"""Where a forward pass uses which parameters for the first time.

Hooks run before a module's forward, not before the use of a parameter, and a module may use parameters of another:
attention uses the weights of its output projection without calling it, a tied decoder those of the embedding. So the
first forward pass is watched, and each first use is booked on the module whose hook ran last before it: from the
second step on, that hook is the last chance to wait for the parameter. What was not used then is waited for when a
module that has it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from spardl.basics.uncopied import Uncopied

__all__ = ["FirstUses"]


class FirstUses:
    """Tells, before each module's forward, which groups of parameters are about to be used.

    Args:
        model: whose forward passes are watched.
        layer_of: the number of each parameter's layer.
        need: called with the numbers of layers; more often than necessary.
    """

    def __init__(
        self, model: nn.Module, layer_of: Mapping[nn.Parameter, int], need: Callable[[set[int]], None]
    ) -> None:
        self._layer_of, self._need = layer_of, need
        self._seen: set[nn.Parameter] = set()
        self._at_begin: set[int] = set()
        self._of: dict[nn.Module, set[int]] = {module: set() for module in model.modules()}
        self._last: nn.Module | None = None
        self._watch: _Watch | None = _Watch(self._note)
        self._entered = False
        self._hooks = [module.register_forward_pre_hook(Uncopied(self._before)) for module in self._of]

    def begin(self) -> None:
        """A forward pass may begin."""
        self._last = None
        self._need(self._at_begin)
        if self._watch is not None and not self._entered:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
            self._entered = True

    def end(self) -> None:
        """The forward pass is over; from now on it is known what it needs."""
        if self._watch is not None and self._entered:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._watch = None
            for module, needed in self._of.items():
                unseen = set(module.parameters(recurse=False)) - self._seen
                needed |= {self._layer_of[parameter] for parameter in unseen if parameter in self._layer_of}

    def close(self) -> None:
        """Takes the hooks off."""
        self.end()
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, arguments: Any) -> None:
        self._last = module
        self._need(self._of[module])

    def _note(self, parameter: nn.Parameter) -> None:
        layer = self._layer_of.get(parameter)
        if layer is not None and parameter not in self._seen:
            self._seen.add(parameter)
            (self._at_begin if self._last is None else self._of[self._last]).add(layer)


class _Watch(TorchFunctionMode):
    """Sees the arguments of every function of torch."""

    def __init__(self, note: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter):
                self._note(leaf)
        return func(*args, **(kwargs or {}))
