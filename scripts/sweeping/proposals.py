"""Points that optuna proposes. What it knows is rebuilt from the plan and the runs, so a kill loses none of it.

optuna's own journal was tried: killed inside a write it cannot be read again (JSONDecodeError).
"""

import importlib.util
import statistics
from collections.abc import Iterator
from dataclasses import replace

from configs.values import SETTINGS
from scripts.sweeping.plan import Plan, Range, Trial, range_or_choices
from scripts.sweeping.results import DONE, Result
from scripts.sweeping.runner import Runner
from utils.errors import ConfigError

ATTEMPTS = 100  # to find a point that was not tried yet


def check_installed() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "-optuna: the package optuna is not installed; pip install optuna, or list the values for a grid"
        )


def proposed_trials(runner: Runner) -> Iterator[Trial]:
    """The trials of the points that are in the plan, then of new ones, each proposed when there is room to run it."""
    number = 0
    while True:
        trials = runner.plan.trials
        while number < len(trials):
            yield trials[number]
            number += 1
        if len(runner.plan.points) >= runner.plan.optuna:
            return
        point = propose(runner.plan, runner.results)
        if point is None:
            print("optuna proposes only points that were tried already; the sweep ends")
            return
        runner.plan = replace(runner.plan, points=[*runner.plan.points, point])
        runner.plan.save(runner.folder)


def propose(plan: Plan, results: dict[int, Result]) -> dict[str, str] | None:
    """The settings of the next point; None if there seem to be no more. The same for the same plan and results."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(key, text) for key, text in plan.over.items()}
    # A text is a choice; a number stands for itself.
    kinds = {key: SETTINGS[key].kind if hasattr(each, "low") else str for key, each in distributions.items()}
    config = plan.load_point({}).config
    direction = "minimize" if config.TRAIN.BEST_METRIC == "loss" else "maximize"
    for attempt in range(ATTEMPTS):
        # Seeded anew for each point, so that a sweep that was started again proposes as one that was not.
        sampler = optuna.samplers.TPESampler(seed=config.SEED + len(plan.points) + 1_000_000 * attempt)
        study = optuna.create_study(direction=direction, sampler=sampler)
        for number, point in enumerate(plan.points):
            of_point = [results.get(trial.index) for trial in plan.trials if trial.point == number]
            if all(each and each.state == DONE and each.best is not None for each in of_point):
                params = {key: kinds[key](word) for key, word in point.items()}
                value = statistics.fmean(each.best for each in of_point)
                study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
        point = {key: str(value) for key, value in study.ask(distributions).params.items()}
        if point not in plan.points:
            return point
    return None


def _distribution(key: str, text: str):
    import optuna

    each = range_or_choices(key, text)
    if not isinstance(each, Range):
        return optuna.distributions.CategoricalDistribution(each)
    is_whole = SETTINGS[key].kind is int
    kind = optuna.distributions.IntDistribution if is_whole else optuna.distributions.FloatDistribution
    return kind(each.low, each.high, log=each.is_log)
