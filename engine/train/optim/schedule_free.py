"""Optimizers of the package schedulefree: they train with other weights than those that are evaluated and saved."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from engine.train.optim.skipping import SkippingOptimizer

TRAINED = "trained_weights"  # in the saved state of a parameter


def averaged(optimizer: torch.optim.Optimizer | SkippingOptimizer) -> AbstractContextManager[None]:
    """Inside, the parameters are those to evaluate and to save."""
    return optimizer.averaged() if isinstance(optimizer, ScheduleFreeOptimizer) else nullcontext()


class ScheduleFreeOptimizer(SkippingOptimizer):
    """Trains with weights y; `averaged` puts the average x of past ones in their place for as long as it is entered."""

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner)
        inner.train()
        self._trained: dict[Tensor, Tensor] | None = None  # y, while the parameters hold x

    @contextmanager
    def averaged(self) -> Iterator[None]:
        # eval() and train() round, so y is kept and not computed anew.
        self._settle()
        self._trained = {each: each.detach().clone() for each in self._all_parameters()}
        self.inner.eval()
        try:
            yield
        finally:
            self.inner.train()
            self._put(self._trained)
            self._trained = None

    @torch.no_grad()
    def _put(self, weights: dict[Tensor, Tensor]) -> None:
        for parameter, values in weights.items():
            parameter.copy_(values)

    def state_dict(self) -> dict:
        """With y, if the parameters hold x now, as they do in a checkpoint."""
        state = super().state_dict()
        if self._trained is None:
            return state
        groups = [group | {"train_mode": True} for group in state["param_groups"]]
        kept = {
            number: state["state"].get(number, {}) | {TRAINED: values}
            for number, values in enumerate(self._trained.values())
        }
        return state | {"state": kept, "param_groups": groups}

    def load_state_dict(self, state: dict) -> None:
        kept = {number: dict(each) for number, each in state["state"].items()}
        trained = {number: each.pop(TRAINED) for number, each in kept.items() if TRAINED in each}
        super().load_state_dict(state | {"state": {number: each for number, each in kept.items() if each}})
        parameters = self._all_parameters()
        self._put({parameters[number]: values for number, values in trained.items()})
