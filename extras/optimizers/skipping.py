"""Lets the device decide whether an update of any optimizer is done or skipped, without making the host wait."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from utils.host import LateValue
from utils.torch_internals import foreach_copy_, foreach_put_back_, tree_map

ON_DEVICE = object()  # in place of a tensor of the device, where only the host's values matter
SET_ELSEWHERE = ("params", "lr")  # of a parameter group: what no step changes


class SkippingOptimizer:
    """An optimizer of torch, timm or others whose `step` has no way to be skipped on the device.

    Every update is done, on copies: where a gradient was not finite, weights and state are then put back, on the
    device. Counters that the optimizer keeps on the host, and state that it made in this step, are put back by the
    host before the next update: it reads then whether the one before was skipped, which the device knows by that time,
    as it has all work of the next one still to do.
    """

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner = inner
        self._former: tuple[LateValue, dict] | None = None  # whether the last update was skipped, and what was before

    @property
    def param_groups(self) -> list[dict]:
        return self.inner.param_groups

    @property
    def state(self) -> dict:
        self._settle()
        return self.inner.state

    @property
    def defaults(self) -> dict:
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, skipped: Tensor) -> None:
        """Update the weights, unless `skipped` is 1.0."""
        if skipped.device.type == "cpu":  # where reading it costs nothing
            if not skipped:
                self.inner.step()
            return
        self._settle()
        weights = [each.detach() for each in self._all_parameters() if each.grad is not None]
        former = _copied([weights, self._contents()])
        self.inner.step()
        _put_back([weights, self._contents()], former, skipped.reshape(()))
        self._former = LateValue(skipped), _on_host(former[1])

    def state_dict(self) -> dict:
        self._settle()
        return self.inner.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._former = None
        self.inner.load_state_dict(state)

    def _all_parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _contents(self) -> dict[str, Any]:
        """All that a step changes besides the weights: the optimizer's own tensors, not copies."""
        states = (self.inner.state.get(each) for each in self._all_parameters())
        groups = [{key: group[key] for key in group if key not in SET_ELSEWHERE} for group in self.param_groups]
        return {"state": {number: state for number, state in enumerate(states) if state}, "groups": groups}

    def _settle(self) -> None:
        """Put back what the host keeps of the state, if the last update was skipped."""
        late, self._former = self._former, None
        if late is None or not late[0].read():
            return
        former, state = late[1], self.inner.state
        for number, parameter in enumerate(self._all_parameters()):
            if number in former["state"]:
                state[parameter] = _merged(state[parameter], former["state"][number])
            else:
                state.pop(parameter, None)
        for group, before in zip(self.param_groups, former["groups"], strict=True):
            for key in group.keys() - before.keys() - set(SET_ELSEWHERE):
                del group[key]
            group.update(_merged(group, before))


def _is_there(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _copied(value: Any) -> Any:
    """A copy with all tensors; those of the device in one kernel for each type."""
    kinds = {False: torch.clone, True: torch.empty_like}
    copies = tree_map(lambda each: kinds[_is_there(each)](each) if isinstance(each, Tensor) else each, value)
    for pairs in _by_type(_pairs(copies, value)):
        foreach_copy_(*map(list, zip(*pairs, strict=True)))
    return copies


def _on_host(value: Any) -> Any:
    return tree_map(lambda each: ON_DEVICE if isinstance(each, Tensor) and each.device.type != "cpu" else each, value)


def _pairs(now: Any, former: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of the device in `former`, each behind what it is now."""
    if isinstance(now, dict | list | tuple):
        for key in former if isinstance(former, dict) else range(len(former)):
            yield from _pairs(now[key], former[key])
    elif _is_there(now):
        yield now, former


def _by_type(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[list[tuple[Tensor, Tensor]]]:
    """The pairs by type, as one kernel takes them."""
    groups: dict[torch.dtype, list] = {}
    for pair in pairs:
        groups.setdefault(pair[0].dtype, []).append(pair)
    return groups.values()


def _put_back(now: Any, former: Any, skipped: Tensor) -> None:
    """Give tensors of the device their former values where the update was skipped; those that are new stay."""
    for pairs in _by_type(_pairs(now, former)):
        tensors, copies = map(list, zip(*pairs, strict=True))
        is_dense = all(each.stride() == copy.stride() for each, copy in pairs)  # the kernel sees memory, not indices
        # On MPS fused kernels of older versions of torch ignore found_inf.
        if is_dense and tensors[0].is_floating_point() and skipped.device.type != "mps":
            foreach_put_back_(tensors, copies, skipped)
        else:
            for each, copy in pairs:
                torch.where(skipped > 0, copy, each, out=each)


def _merged(now: Any, former: Any) -> Any:
    """The former values, where they are the host's."""
    if former is ON_DEVICE:
        return now
    if isinstance(former, dict):
        return {key: _merged(now.get(key), each) for key, each in former.items()}
    if isinstance(former, list | tuple):
        return type(former)(map(_merged, now, former))
    return former
