"""The choice among candidates: measures and scores each, and compares them on the same images."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.load import LoadedConfig
from configs.tables import METRICS
from datasets import BadImages
from engine.choice.candidates import Candidate, candidates_of, with_newest_run
from engine.choice.measure import file_of, measure, plan_candidate
from engine.choice.scoring import FOLDS, Scored, half_width, images_of
from engine.evaluation.scores import format_value, rank_of, wilson_interval
from engine.memory import release
from engine.plan import TrainPlan
from engine.record.saved_files import read_object
from engine.report.choice import lines_of
from engine.session import check_folder
from engine.settings import load_settings, words_in
from engine.short_trial import alone
from engine.weights_lines import warn_of_overlap
from utils.distributed import Process
from utils.errors import ConfigError, DataError, UserError, cause_of
from utils.files import write_text
from utils.program import when_started
from utils.text import counted, one_line, warning

FOLDER = "choice"  # in the folder of runs: the results of candidates
# Errors that rule out one candidate; the others are still measured.
FAILURES = (UserError, RuntimeError, MemoryError, OSError)
VERSION = 1  # version of the format of a record; it changes if a key changes its meaning or is removed


def choose(
    arguments: Sequence[str],
    words: Sequence[str],
    folder: Path,
    process: Process,
    say: Callable[[str], None],
    left: Callable[[], float | None] = lambda: None,
    keeps: bool = True,
) -> dict[str, Any]:
    """Return the record of a choice: plain values, as in a JSON file, the best candidate first.

    `arguments`: the command line of the fine-tuning; `words`: the candidates; `folder`: where results are kept;
    `left`: returns the longest time of a fine-tuning in seconds, if there is a limit; it is asked at the end. Raise ConfigError if
    no candidate can be used.
    """
    notes: list[str] = []
    candidates, startup = candidates_of(words, notes), time.monotonic() - when_started()
    rows, results, failed, first = [], {}, [], None
    for number, candidate in enumerate(candidates, start=1):
        place, began = f"{number} of {len(candidates)}, {candidate.word}", time.monotonic()
        try:
            plan = plan_candidate(arguments, candidate, process)
            if first is None:
                first = plan
                refuse_unreadable(plan)
            path = folder / file_of(plan, candidate)
            result = read_object(path)
            if not RESULT <= result.keys():
                scored, facts = measure(plan, candidate, began - startup)
                result = result_of(plan, candidate, scored, facts)
                if keeps:
                    keep(path, result, say)
            results[candidate.word] = result
            rows.append(result["row"])
            notes += warn_of_overlap(plan)
        except DataError:  # the data are at fault, not the candidate
            raise
        except FAILURES as error:
            failed.append({"name": candidate.word, "reason": one_line(str(error) or type(error).__name__)})
            say(f"{place}: cannot be used (see below)")
        else:
            value = format_value(plan.config.TRAIN.BEST_METRIC, rows[-1]["score"])
            say(f"{place}: {value}, {time.monotonic() - began:.0f} s")
        release(process.device)
    if not rows:
        raise ConfigError(why_none(failed, notes))
    metric, budget = first.config.TRAIN.BEST_METRIC, left()
    if budget is not None and budget <= 0:
        raise ConfigError("TRAIN.BUDGET: the choice has taken all of it; allow more, or name the weights")
    compare(rows, results, metric, budget)
    return {
        "version": VERSION,
        "metric": metric,
        "images": results[rows[0]["word"]]["images"],
        "notes": notes,
        "budget_seconds": budget,
        "best": best_of(rows)["word"],
        "candidates": rows,
        "failed": failed,
    }


def why_none(failed: list[dict[str, str]], notes: list[str]) -> str:
    if len(failed) > 1 and len({each["reason"] for each in failed}) == 1:  # a wrong setting
        return failed[0]["reason"]
    lines = [f"{each['name']}: {each['reason']}" for each in failed]
    return "\n  ".join(["no candidate can be used:", *lines, *notes])


def refuse_unreadable(plan: TrainPlan) -> None:
    """Raise DataError if a run would end at once because of unreadable images."""
    for images in (plan.train_set, plan.eval_set):
        BadImages(images, plan.config.DATA.MAX_BAD_FRACTION, lambda line: None).check_sample(alone(plan.inputs).process)


RESULT = {"row", "draws", "images"}  # keys of a result


def result_of(plan: TrainPlan, candidate: Candidate, scored: Scored, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a candidate before the comparison, the scores of drawn images, and which images they are."""
    draws = scored.draws()
    row = {"word": candidate.word, "name": candidate.source, "image_size": candidate.size, "score": scored.value}
    row |= {"interval": interval_of(plan.config.TRAIN.BEST_METRIC, scored, draws)} | facts
    return {"row": row, "draws": draws.tolist(), "images": describe_images(plan, scored)}


def interval_of(metric: str, scored: Scored, draws: np.ndarray) -> list[float]:
    """Return the 95% interval of the score, within its possible values."""
    value, half, row = scored.value, half_width(draws), METRICS[metric]
    is_percent = row.unit == "%"
    counts_images = metric in ("top1", "top5") and scored.num_groups == len(scored.targets)
    # If all images are right, so are those of each draw.
    if counts_images or (is_percent and draws.min() == draws.max()):
        return [*wilson_interval(value, scored.num_groups)]
    low, high = (0.0, 100.0) if is_percent else (0.0, math.inf) if row.smaller_is_better else (-math.inf, 1.0)
    return [max(value - half, low), min(value + half, high)]


def keep(path: Path, result: dict[str, Any], say: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result), shared=True)
    except OSError as error:
        say(warning(f"cannot write {path} ({cause_of(error)}), so another call measures this candidate again"))


def compare(rows: list[dict[str, Any]], results: dict[str, dict[str, Any]], metric: str, budget: float | None) -> None:
    """Sort the rows, the best first. Mark those that are worse than the first beyond the noise of the images, or too slow."""
    rows.sort(key=lambda row: rank_of(metric, row["score"], row["seconds"]), reverse=True)
    best = rows[0]
    draws = {word: np.array(result["draws"]) for word, result in results.items()}
    for row in rows:
        mine, of_best = draws[row["word"]], draws[best["word"]]
        gap = half_width(of_best - mine)
        if results[row["word"]]["images"] != results[best["word"]]["images"]:
            gap = math.hypot(half_width(mine), half_width(of_best))  # some images could be read for only one of the two
        row["is_worse"] = not math.isfinite(row["score"]) or abs(best["score"] - row["score"]) > gap
        row["exceeds_budget"] = budget is not None and row["seconds"] > budget


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first row within the budget, or the fastest if there is none."""
    within = [row for row in rows if not row["exceeds_budget"]]
    return within[0] if within else min(rows, key=lambda row: row["seconds"])


def describe_images(plan: TrainPlan, scored: Scored) -> str:
    fitted = f"{scored.num_fitted:,} of {counted(len(plan.train_set), 'training image')}"
    how = f"each fitted to four of {FOLDS} parts and scored on the fifth"
    if len(images_of(plan)) > 1:
        how = f"scored on {len(scored.targets):,} of {counted(len(plan.eval_set), 'validation image')}"
    unseen = (
        f"; images of a class that their model was not fitted to: {scored.num_unseen:,}" if scored.num_unseen else ""
    )
    return f"linear models of the features of {fitted}, {how}{unseen}"


# --- the choice of a run ---


def settings_of_choice(loaded: LoadedConfig, process: Process) -> LoadedConfig:
    """Return the settings with the best candidate in place of MODEL.PRETRAINED choose. Collective."""
    config, sizes = loaded.config, {"world_size": process.world_size, "local_size": process.local_size}
    # The first process plans a run of all processes, but computes alone.
    simulated = Process(process.device, **sizes, num_cores=process.num_cores)
    words = with_newest_run(words_in(config.MODEL.PRETRAINED) or [], config.SAVE)
    given = words, Path(config.SAVE, FOLDER), simulated, print
    more: dict[str, Any] = {"keeps": not config.START.CHECK}
    if config.TRAIN.BUDGET:
        from engine.train.budget import Allowance

        more["left"] = Allowance(config.TRAIN.BUDGET, loaded.started, {}).left
    process.first(lambda: check_folder(config, None))  # before minutes of computing
    record = process.first(lambda: choose(loaded.arguments, *given, **more))
    best = best_of(record["candidates"])
    found = load_settings(loaded.arguments, Candidate(best["name"], best["image_size"]).settings)
    return replace(found, started=loaded.started, notes=[*lines_of(record), *found.notes], choice=record)
