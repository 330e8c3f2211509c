"""Lets the device decide whether an optimizer's update is applied or skipped, so that the host need not wait."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from utils.host import LateValue
from utils.torch_internals import foreach_copy_, foreach_put_back_, tree_map

ON_DEVICE = object()  # placeholder for device tensors in a copy of the host values
SET_ELSEWHERE = ("params", "lr")  # keys of a parameter group that `step` never changes


class SkippingOptimizer:
    """A wrapper for any optimizer (torch's, timm's or another) whose `step` cannot be skipped on the device.

    It copies weights and state, runs every update, and restores them on the device if a gradient was not finite.
    Counters that the optimizer keeps on the host, and state that it created in this step, are restored by the host
    before the next update. Only then does the host read whether the last update was skipped. The device has finished
    that update by then and is still busy with the next forward and backward, so it never waits for the host.
    """

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner = inner
        self._former: tuple[LateValue, dict] | None = None  # whether the last update was skipped; the state before it

    @property
    def param_groups(self) -> list[dict]:
        return self.inner.param_groups

    @property
    def state(self) -> dict:
        self._restore_host_state()
        return self.inner.state

    @property
    def defaults(self) -> dict:
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, skipped: Tensor) -> None:
        """Update the weights, unless `skipped` is 1.0."""
        if skipped.device.type == "cpu":  # on a CPU, reading the value costs nothing
            if not skipped:
                self.inner.step()
            return
        self._restore_host_state()
        weights = [each.detach() for each in self._all_parameters() if each.grad is not None]
        former = _copied([weights, self._contents()])
        self.inner.step()
        _put_back([weights, self._contents()], former, skipped.reshape(()))
        self._former = LateValue(skipped), _on_host(former[1])

    def state_dict(self) -> dict:
        self._restore_host_state()
        return self.inner.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._former = None
        self.inner.load_state_dict(state)

    def _all_parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _contents(self) -> dict[str, Any]:
        """Return everything that a step changes, except the weights. The tensors are the optimizer's, not copies."""
        states = (self.inner.state.get(each) for each in self._all_parameters())
        groups = [{key: group[key] for key in group if key not in SET_ELSEWHERE} for group in self.param_groups]
        return {"state": {number: state for number, state in enumerate(states) if state}, "groups": groups}

    def _restore_host_state(self) -> None:
        """If the last update was skipped, restore the part of the state that is on the host."""
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


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _copied(value: Any) -> Any:
    """Return a deep copy. One kernel copies all device tensors of the same type."""
    kinds = {False: torch.clone, True: torch.empty_like}
    copies = tree_map(lambda each: kinds[_is_on_device(each)](each) if isinstance(each, Tensor) else each, value)
    for pairs in _by_type(_pairs(copies, value)):
        foreach_copy_(*map(list, zip(*pairs, strict=True)))
    return copies


def _on_host(value: Any) -> Any:
    return tree_map(lambda each: ON_DEVICE if isinstance(each, Tensor) and each.device.type != "cpu" else each, value)


def _pairs(now: Any, former: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (current tensor, former tensor) for each device tensor in `former`."""
    if isinstance(now, dict | list | tuple):
        for key in former if isinstance(former, dict) else range(len(former)):
            yield from _pairs(now[key], former[key])
    elif _is_on_device(now):
        yield now, former


def _by_type(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[list[tuple[Tensor, Tensor]]]:
    """Return the pairs grouped by type, because a kernel takes only one type."""
    groups: dict[torch.dtype, list] = {}
    for pair in pairs:
        groups.setdefault(pair[0].dtype, []).append(pair)
    return groups.values()


def _put_back(now: Any, former: Any, skipped: Tensor) -> None:
    """Restore the former values of device tensors if the update was skipped. Tensors that are new stay unchanged."""
    for pairs in _by_type(_pairs(now, former)):
        tensors, copies = map(list, zip(*pairs, strict=True))
        is_dense = all(each.stride() == copy.stride() for each, copy in pairs)  # the kernel ignores strides
        # On MPS, fused kernels of older versions of torch ignore found_inf, which says whether to skip.
        if is_dense and tensors[0].is_floating_point() and skipped.device.type != "mps":
            foreach_put_back_(tensors, copies, skipped)
        else:
            for each, copy in pairs:
                torch.where(skipped > 0, copy, each, out=each)


def _merged(now: Any, former: Any) -> Any:
    """Return the former values where they are host values, and otherwise the current ones."""
    if former is ON_DEVICE:
        return now
    if isinstance(former, dict):
        return {key: _merged(now.get(key), each) for key, each in former.items()}
    if isinstance(former, list | tuple):
        return type(former)(map(_merged, now, former))
    return former
