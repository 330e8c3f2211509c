"""The choice among candidates: measures and scores each, and compares them on the same images."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.load import LoadedConfig
from configs.schema import to_seconds
from engine.choice.candidates import Candidate, candidates_of, words_in
from engine.choice.measure import images_of, measure, plan_candidate
from engine.choice.scoring import FOLDS, Scored, half_width
from engine.evaluation.scores import format_value, rank_of, wilson_interval
from engine.memory import release
from engine.plan import TrainPlan
from engine.report.choice import lines_of
from engine.settings import load_settings
from utils.distributed import Process
from utils.errors import ConfigError, DataError, UserError
from utils.program import when_started
from utils.text import counted, one_line

FOLDER = "choice"  # in the folder of runs: what was measured
FAILURES = (UserError, RuntimeError, MemoryError, OSError)  # of a candidate, which do not end the others
VERSION = 1  # of the record; it changes only if a key changes its meaning or is removed


def choose(
    arguments: Sequence[str],
    words: Sequence[str],
    folder: Path,
    process: Process,
    say: Callable[[str], None],
    budget: float | None = None,
    keeps: bool = True,
) -> dict[str, Any]:
    """Return the record of a choice: plain values, as in a JSON file, the best candidate first.

    `arguments`: the command line of the fine-tuning; `words`: the candidates; `folder`: where features are kept;
    `budget`: the longest time of a fine-tuning in seconds. Raise ConfigError if no candidate can be used.
    """
    notes: list[str] = []
    candidates, startup = candidates_of(words, notes), time.monotonic() - when_started()
    rows, draws, failed, plan, about = [], {}, [], None, ""
    for number, candidate in enumerate(candidates, start=1):
        place, began = f"{number} of {len(candidates)}, {candidate.word}", time.monotonic()
        try:
            plan = plan_candidate(arguments, candidate, process)
            found = measure(plan, candidate, folder, began - startup, keeps)
            scored = Scored(plan, found)
            rows.append(row_of(plan, candidate, scored, found.facts, budget))
            draws[candidate.word] = scored.draws()
            about = about or describe_images(plan, scored)
        except DataError:  # no other candidate would help
            raise
        except FAILURES as error:
            failed.append({"name": candidate.word, "reason": one_line(str(error) or type(error).__name__)})
            say(f"{place}: cannot be used (see below)")
        else:
            value = format_value(plan.config.TRAIN.BEST_METRIC, rows[-1]["score"])
            say(f"{place}: {value}, {time.monotonic() - began:.0f} s")
        release(process.device)
    if not rows:
        reasons = {each["reason"]: each["name"] for each in failed}
        lines = [f"  {name}: {reason}" for reason, name in reasons.items()]  # wrong settings have the same for all
        raise ConfigError("\n".join(["no candidate can be used:", *lines]) if len(lines) > 1 else failed[0]["reason"])
    metric = plan.config.TRAIN.BEST_METRIC
    compare(rows, draws, metric)
    return {
        "version": VERSION,
        "metric": metric,
        "images": about,
        "notes": notes,
        "budget_seconds": budget,
        "best": best_of(rows)["word"],
        "candidates": rows,
        "failed": failed,
    }


def row_of(
    plan: TrainPlan, candidate: Candidate, scored: Scored, facts: dict[str, Any], budget: float | None
) -> dict[str, Any]:
    """Return the row of a candidate that can be used, before it is compared with the others."""
    metric, value = plan.config.TRAIN.BEST_METRIC, scored.value
    interval = [*wilson_interval(value, len(scored.targets))] if metric == "top1" else None
    row = {"word": candidate.word, "name": candidate.source, "image_size": candidate.size, "score": value}
    row |= {"interval": interval, "is_worse": False, "exceeds_budget": bool(budget and facts["seconds"] > budget)}
    return row | facts


def compare(rows: list[dict[str, Any]], draws: dict[str, Any], metric: str) -> None:
    """Sort the rows, the best first, and mark those that are worse than the first beyond the noise of the images."""
    rows.sort(key=lambda row: rank_of(metric, row["score"], row["seconds"]), reverse=True)
    best = rows[0]
    for row in rows:
        half = half_width(draws[row["word"]])
        row["interval"] = row["interval"] or [row["score"] - half, row["score"] + half]
        gap = half_width(draws[best["word"]] - draws[row["word"]])
        row["is_worse"] = abs(best["score"] - row["score"]) > gap


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first row within the budget, or the fastest if there is none."""
    within = [row for row in rows if not row["exceeds_budget"]]
    return within[0] if within else min(rows, key=lambda row: row["seconds"])


def describe_images(plan: TrainPlan, scored: Scored) -> str:
    train, val = images_of(plan)
    fitted = f"{scored.num_fitted:,} of {counted(len(plan.train_set), 'training image')}"
    if val is None:
        return (
            f"linear models of the features of {fitted}, each fitted to four of {FOLDS} parts and scored on the fifth"
        )
    scored_on = f"{len(scored.targets):,} of {counted(len(plan.eval_set), 'validation image')}"
    return f"linear models of the features of {fitted}, scored on {scored_on}"


# --- the choice of a run ---


def settings_of_choice(loaded: LoadedConfig, process: Process) -> LoadedConfig:
    """Return the settings with the best candidate in place of MODEL.PRETRAINED choose. Collective."""
    config, sizes = loaded.config, {"world_size": process.world_size, "local_size": process.local_size}
    # The first process plans a run of all processes, but computes alone.
    simulated = Process(process.device, **sizes, num_cores=process.num_cores)
    given = words_in(config.MODEL.PRETRAINED), Path(config.SAVE, FOLDER), simulated, print
    more = {"budget": to_seconds(config.TRAIN.BUDGET or ""), "keeps": not config.START.CHECK}
    record = process.first(lambda: choose(loaded.arguments, *given, **more))
    best = best_of(record["candidates"])
    found = load_settings(loaded.arguments, Candidate(best["name"], best["image_size"]).settings)
    return replace(found, started=loaded.started, notes=[*lines_of(record), *found.notes], choice=record)
