"""Contracts of the main interfaces, checked at every call in all tests and in the programs that they start.

CONTRACTS has a row for each interface: its dotted name, and a function of its arguments (by name, in `it`) and its
result that returns whether the contract holds. `install` wraps the interfaces. A broken contract raises an
AssertionError with the name of the interface and its result, and fails the test even if the program catches the error.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

CALLED: set[str] = set()  # the interfaces that this process has called
BROKEN: list[str] = []  # the contracts that did not hold, since the start of the test


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether reading values makes no device wait."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def close(one: float, other: float, tolerance: float = 1e-6) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(one) and math.isnan(other))


def rates_of_step(it, nothing):
    groups, rate = it.self.optimizer.param_groups, it.self.schedule(it.self.step - 1)
    return all(close(float(group["lr"]), rate * group.get("lr_scale", 1)) for group in groups)


def report_of_last_step(it, report):
    trainer, last = it.self, it.self.counters.last
    return (
        report.step == max(trainer.step - 1, 0)
        and report.lr == trainer.schedule(report.step)
        and (-1e-6 <= report.accuracy <= 1 + 1e-6 or math.isnan(report.accuracy))
        and 0 <= report.skipped <= trainer.step
        # The norm of all gradients is the same in every process.
        and (not is_readable(last) or close(report.grad_norm, last[2].item(), 1e-4))
    )


def scores_of_all_images(it, found):
    return len(found) == len(it.models) and all(
        (0 <= scores.top1 <= scores.top5 <= 100 or math.isnan(scores.top1))  # NaN: the model learns no classes
        and not scores.loss < 0
        and scores.num_images + scores.num_excluded == it.data.num_samples
        and np.isin(images.indices, it.data.share).all()
        for scores, images in found
    )


def raw_and_ema(it, found):
    return [*found] == ["", "_ema"][: 1 + (it.trainer.ema is not None and it.trainer.step > 0)]


def row_of_epoch(it, row):
    result = it.epoch.result
    scores = [
        (row.get(f"eval_{name}{suffix}"), getattr(scores, name))
        for suffix, scores in result.scores.items()
        for name in ("loss", "top1", "top5", *scores.more())
    ]
    figures = [(row[name], getattr(result.report, name)) for name in ("skipped", "lr", "loss_scale")]
    is_plain = all(value is None or isinstance(value, int | float) for value in row.values())
    return is_plain and all(value is None or close(value, expected, 1e-3) for value, expected in scores + figures)


def raw_and_ema_weights(it, state):
    trainer = it.self
    owners = {"state_dict": trainer.model} | ({"state_dict_ema": trainer.ema.model} if trainer.ema else {})
    last = {key: [*owner.named_parameters()][-1] for key, owner in owners.items() if not trainer.parallel.is_sharded}
    are_own = (not is_readable(weight) or weight.equal(state[key][name]) for key, (name, weight) in last.items())
    is_now = (state["epoch"], state["step"]) == (trainer.epoch - 1, trainer.step)
    return is_now and ("state_dict_ema" in state) == (trainer.ema is not None) and all(are_own)


def progress_of_best(it, facts):
    best, held = it.best, facts["best"] or {}
    value = best.value if math.isfinite(best.value) else None  # JSON has no NaN
    expected = (best.epoch, value) if best.exists else (None, None)
    totals = (facts["total_epochs"], facts["position"]["epoch"])
    is_best = (facts["best_epoch"], held.get(best.metric)) == expected
    return is_best and totals == (it.trainer.schedule.num_epochs, it.trainer.epoch)


CONTRACTS: dict[str, Callable[[SimpleNamespace, Any], bool]] = {
    "engine.train.trainer.Trainer.update": rates_of_step,
    "engine.train.trainer.Trainer.report": report_of_last_step,
    "engine.evaluation.evaluate.evaluate": scores_of_all_images,
    "engine.evaluate_weights.evaluate_both": raw_and_ema,
    "engine.record.columns.epoch_row": row_of_epoch,
    "engine.train.trainer.Trainer.state_dict": raw_and_ema_weights,
    "engine.saves.describe_progress": progress_of_best,
}
ROOMS = ("configs", "datasets", "engine", "models", "scripts", "tests", "utils")


def checked(name: str, function: FunctionType, holds: Callable[[SimpleNamespace, Any], bool]) -> Callable:
    """Return a function that calls this one and checks the contract."""
    signature = inspect.signature(function)

    def check(result: Any, *arguments, **options) -> None:
        CALLED.add(name)
        if not holds(SimpleNamespace(**signature.bind(*arguments, **options).arguments), result):
            BROKEN.append(f"{name}: its contract does not hold for {result!r}"[:1000])
            raise AssertionError(BROKEN[-1])

    @functools.wraps(function)
    def call(*arguments, **options):
        result = function(*arguments, **options)
        check(result, *arguments, **options)
        return result

    return call


def refuse_pickle(*arguments) -> None:
    BROKEN.append("torch read a pickle from another process")
    raise AssertionError(BROKEN[-1])


def install() -> None:
    """Wrap the interfaces, and replace the functions among them wherever a module has imported them."""
    torch.distributed.distributed_c10d._tensor_to_object = refuse_pickle
    functions = {}
    for name, contract in CONTRACTS.items():
        place, _, attribute = name.rpartition(".")
        owner = resolve_name(place)
        function = vars(owner)[attribute]
        wrapped = checked(name, function, contract)
        setattr(owner, attribute, wrapped)
        functions |= {} if inspect.isclass(owner) else {function: wrapped}
    for module in [each for name, each in sys.modules.items() if name.split(".")[0] in ROOMS]:
        for name, value in vars(module).copy().items():
            if isinstance(value, FunctionType) and value in functions:
                setattr(module, name, functions[value])
