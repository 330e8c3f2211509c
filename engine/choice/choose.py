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
from engine.choice.scoring import DRAWS, FOLDS, Scored, half_width, images_of, noise_of
from engine.evaluation.scores import format_value, rank_of, wilson_interval
from engine.memory import release
from engine.plan import TrainPlan
from engine.record.saved_files import read_object
from engine.report.choice import by_reason, lines_of
from engine.session import check_folder
from engine.settings import candidate_names_in, load_settings
from engine.short_trial import alone
from engine.train.budget import RESERVE
from engine.weights_lines import warn_of_overlap
from models.weights.files import find_file
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
    candidate_names: Sequence[str],
    folder: Path,
    process: Process,
    say: Callable[[str], None],
    left: Callable[[], float | None] = lambda: None,
    keeps: bool = True,
) -> dict[str, Any]:
    """Return the record of a choice: plain values, as in a JSON file, the best candidate first.

    `arguments`: the command line of the fine-tuning; `candidate_names`: [] for the usual ones; `folder`: where results
    are kept; `left`: returns the longest time of a fine-tuning in seconds, if there is a limit; it is asked at the end.
    Raise ConfigError if no candidate can be used.
    """
    notes: list[str] = []
    candidates, startup = candidates_of(candidate_names, notes), time.monotonic() - when_started()
    rows, results, failed, first = [], {}, [], None
    known: dict[tuple[Path, int], str] = {}  # {key of a candidate: the word of the first one with this key}
    for number, candidate in enumerate(candidates, start=1):
        place, began = f"{number} of {len(candidates)}, {candidate.word}", time.monotonic()
        try:
            plan = plan_candidate(arguments, candidate, process)
            if first is None:
                first = plan
                refuse_unreadable(plan)
            if (same := known.setdefault(key_of(plan, candidate), candidate.word)) != candidate.word:
                notes.append(f"{candidate.word}: the same as {same}")
                continue
            path = folder / file_of(plan, candidate)
            result = read_object(path)
            if not is_result(result):
                result = result_of(plan, candidate, *measure(plan, candidate, began - startup))
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


def key_of(plan: TrainPlan, candidate: Candidate) -> tuple[Path, int | str]:
    """Return the weights and the size of the images. Without a size, a candidate has that of its settings."""
    return (find_file(candidate.source) or Path(candidate.source)).resolve(), plan.config.DATA.IMAGE_SIZE


def why_none(failed: list[dict[str, str]], notes: list[str]) -> str:
    lines = [f"{names}: {reason}" for names, reason in by_reason(failed)]
    if len(failed) > 1 and len({each["reason"] for each in failed}) == 1:  # a wrong setting
        return failed[0]["reason"]
    return "\n  ".join(["no candidate can be used:", *lines, *notes])


def refuse_unreadable(plan: TrainPlan) -> None:
    """Raise DataError if a run would end at once because of unreadable images."""
    for images in (plan.train_set, plan.eval_set):
        BadImages(images, plan.config.DATA.MAX_BAD_FRACTION, lambda line: None).check_sample(alone(plan.inputs).process)


# The keys of a row that have numbers.
FIGURES = ("score", "seconds", "shortest_seconds", "parameters", "train_images_per_s", "predict_images_per_s")


def result_of(plan: TrainPlan, candidate: Candidate, scored: Scored, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a candidate before the comparison, the scores of drawn images, and which images they are."""
    draws = scored.draws()
    row = {"word": candidate.word, "name": candidate.source, "image_size": candidate.size, "score": scored.value}
    row |= {"interval": interval_of(plan.config.TRAIN.BEST_METRIC, scored, draws)} | facts
    return {"row": row, "draws": draws.tolist(), "images": describe_images(plan, scored)}


def is_result(kept: dict[str, Any]) -> bool:
    """Return whether the content of a file is a result. Anything else is measured again."""
    row, draws, images = (kept.get(key) for key in ("row", "draws", "images"))
    if not (isinstance(row, dict) and isinstance(draws, list) and isinstance(images, str)):
        return False
    interval, texts = row.get("interval"), [row.get(key) for key in ("word", "name", "licence")]
    if not (isinstance(interval, list) and len(interval) == 2 and len(draws) == DRAWS):
        return False
    numbers = [*(row.get(key) for key in FIGURES), *interval, *draws]
    return all(isinstance(text, str) for text in texts) and all(isinstance(each, int | float) for each in numbers)


def interval_of(metric: str, scored: Scored, draws: np.ndarray) -> list[float]:
    """Return the 95% interval of the score, within its possible values."""
    value, half, row = scored.value, half_width(draws), METRICS[metric]
    is_percent = row.unit == "%"
    counts_images = metric in ("top1", "top5") and scored.num_groups == len(scored.targets)
    # If all images are right, so are those of each draw.
    if counts_images or (is_percent and draws.min() == draws.max()):
        return [*wilson_interval(value, scored.num_groups)]
    if is_percent:
        low, high = 0.0, 100.0
    else:
        low, high = (0.0, math.inf) if row.smaller_is_better else (-math.inf, 1.0)
    return [max(value - half, low), min(value + half, high)]


def keep(path: Path, result: dict[str, Any], say: Callable[[str], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result), shared=True)
    except OSError as error:
        say(warning(f"cannot write {path} ({cause_of(error)}), so another call measures this candidate again"))


def compare(rows: list[dict[str, Any]], results: dict[str, dict[str, Any]], metric: str, budget: float | None) -> None:
    """Sort the rows, the best first.

    Mark those that are worse than the first beyond the noise of the images, or too slow.
    """
    if budget is not None and budget <= 0:
        raise ConfigError("TRAIN.BUDGET: the choice has taken all of it; allow more, or name the weights")
    rows.sort(key=lambda row: rank_of(metric, row["score"], row["seconds"]), reverse=True)
    best, scored = rows[0], [row for row in rows if math.isfinite(row["score"])]
    gaps = dict.fromkeys((row["word"] for row in rows), 0.0)
    if len(scored) > 1:
        draws = np.array([results[row["word"]]["draws"] for row in scored], np.float64)
        for place, row in enumerate(scored):
            if results[row["word"]]["images"] != results[best["word"]]["images"]:
                # Some images could be read for only one of the two, so its draws are no pairs with the others.
                draws[place] = np.random.default_rng(place).permutation(draws[place])
        gaps |= zip((row["word"] for row in scored), noise_of(draws).tolist(), strict=True)
    for row in rows:
        row["is_worse"] = not math.isfinite(row["score"]) or abs(best["score"] - row["score"]) > gaps[row["word"]]
        row["is_shortened"] = budget is not None and row["seconds"] > budget
        row["exceeds_budget"] = budget is not None and row["shortest_seconds"] > budget * (1 - RESERVE)


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first row whose shortest run fits the budget, or the fastest if there is none."""
    within = [row for row in rows if not row["exceeds_budget"]]
    return within[0] if within else min(rows, key=lambda row: row["shortest_seconds"])


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
    candidate_names = with_newest_run(candidate_names_in(config.MODEL.PRETRAINED) or [], config.SAVE)
    how = candidate_names, Path(config.SAVE, FOLDER), simulated, print
    more: dict[str, Any] = {"keeps": not config.CHECK}
    if config.TRAIN.BUDGET:
        from engine.train.budget import Allowance

        more["left"] = Allowance(config.TRAIN.BUDGET, loaded.started, {}).left
    process.first(lambda: check_folder(config, None))  # before minutes of computing
    record = process.first(lambda: choose(loaded.arguments, *how, **more))
    best = best_of(record["candidates"])
    chosen = load_settings(loaded.arguments, Candidate(best["name"], best["image_size"]).settings)
    return replace(chosen, started=loaded.started, notes=[*lines_of(record), *chosen.notes], choice=record)
