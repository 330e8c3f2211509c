"""Messages of the engine in all cases: the rows of -check, how a run ends, and the suggested next steps."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from configs.schema import Train
from datasets import load_image_sets
from datasets.batch_order import Order
from datasets.types import ImageSet
from engine.check import images, quick_checks
from engine.check.images import ScanResult
from engine.evaluation.scores import Best, Scores, describe_scores
from engine.record.next_steps import after_evaluation, after_failure, after_training
from engine.train.forecast import Forecast, RunTimes
from engine.train.stop_conditions import why_finished
from tests.support.cases import assert_cases
from tests.support.configs import CPU, replaced, small_config
from utils.distributed import Process
from utils.text import counted


def told(findings: dict) -> dict[str, str]:
    """Return the text of each case's findings."""
    several = {name: found if isinstance(found, list) else [found] for name, found in findings.items()}
    return {name: "\n".join(line for each in found for line in each.lines()) for name, found in several.items()}


RATES = {
    "of AdamW, as it is customary": ("TRAIN.BASE_LR=3e-3", 4096),
    "of AdamW, far above": ("TRAIN.BASE_LR=3e-3", 32),
    "of AdamW, scaled": ("TRAIN.BASE_LR=3e-3 TRAIN.LINEAR_SCALED_LR=4096", 32),
    "of SGD, far below, one image an update": ("TRAIN.BASE_LR=1e-7 TRAIN.OPTIMIZER.NAME=SGD", 1),
    "of another": ("TRAIN.OPTIMIZER.NAME=lamb", 64),
}
WEIGHTS = {
    "none": "TRAIN.BASE_LR=3e-3",
    "none, with what keeps what they know": "MODEL.FREEZE=[*,!head] TRAIN.LAYER_DECAY=0.75",
    "with a rate from scratch": "MODEL.PRETRAINED=resnet50 TRAIN.BASE_LR=3e-3",
    "with a rate from scratch and decay": "MODEL.PRETRAINED=resnet50 TRAIN.BASE_LR=3e-3 TRAIN.LAYER_DECAY=0.75",
    "with a lower rate": "MODEL.PRETRAINED=resnet50 TRAIN.BASE_LR=1e-4",
    "frozen": "MODEL.PRETRAINED=resnet50 MODEL.FREEZE=[*,!head] TRAIN.BASE_LR=3e-3",
    "of a run that goes on": "MODEL.RESUME=last.pth TRAIN.BASE_LR=3e-3",
}


def test_quick_check_rows_have_their_settings_and_values(tmp_path, monkeypatch):
    config = small_config(tmp_path, "KEEP_CHECKPOINTS=3", "DATA.BATCH_SIZE_EVAL=8")
    sizes = {"free_bytes": lambda folder: free[-1], "shared_bytes": lambda config, workers: 3 * 2**19 * workers}
    for name, function in sizes.items():
        monkeypatch.setattr(quick_checks, name, function)
    free, rows = [10 * 2**30], {}
    for name, (options, batch) in RATES.items():
        rows[f"learning rate {name}"] = quick_checks.check_rate(small_config(tmp_path, *options.split()).TRAIN, batch)
    for name, options in WEIGHTS.items():
        rows[f"weights: {name}"] = quick_checks.check_fine_tuning(small_config(tmp_path, *options.split()), 256)
    usual = replace(config.TRAIN, NUM_EPOCHS=3, WARMUP_EPOCHS=2)
    for name, schedule in {
        "a cool-down": replaced(usual, LR_SCHEDULER={"COOLDOWN_EPOCHS": 1}),
        "steps and no cool-down": replaced(usual, LR_SCHEDULER={"COOLDOWN_EPOCHS": 1, "NAME": "step"}),
        "one epoch": replace(usual, NUM_EPOCHS=1),
    }.items():
        rows[f"warm-up with {name}"] = quick_checks.check_warm_up(schedule)
    for warm_up, decay, number in (
        (True, 0.99996, 18),
        (False, 0.5, 1),
        (False, 0.99996, 18),
        (False, 0.99996, 375300),
    ):
        settings = replace(config.TRAIN, MODEL_EMA_WARMUP=warm_up, MODEL_EMA_DECAY=decay)
        rows[f"EMA {warm_up} {decay} {number}"] = quick_checks.check_ema(settings, number)
    for number in (1000, 33, 20, 1):
        rows[f"updates of {number}"] = quick_checks.check_updates(Order(number, 16, 2, 1, number == 33, 0, None))
    for name, free_bytes in {"much": 2**32, "little": 7 * 2**20, "too little": 2**20}.items():
        free.append(free_bytes)
        rows[f"{name} room"] = [
            quick_checks.check_disk(config, tmp_path / "not/yet", 2**20),
            quick_checks.check_shared_memory(config, 1 if name == "too little" else 4),
        ]
    rows["no loader process"] = quick_checks.check_shared_memory(config, 0)
    assert_cases("quick_checks", told(rows))


def scan_of(sides: list, digests: list[int], total: int | None = None, name: str = "train") -> ScanResult:
    """Return a scan of images with these sizes. Images without a digest are unreadable."""
    images = ImageSet(np.zeros(total or len(sides), int), ["cat", "dog"])
    images.name = lambda index: f"{name}/{index}.png"
    scan = ScanResult(images, len(sides))
    scan.sides[:], scan.digests[:] = sides, digests
    scan.reasons = {number: "cut off" for number, digest in enumerate(digests) if not digest}
    return scan


def test_data_set_rows_of_the_check_have_their_settings_and_values(tmp_path):
    config, rows = small_config(tmp_path, "DATA.MAX_BAD_FRACTION=0.3"), {}
    for number in (1, 99, 100):
        rows[f"{number} images"] = images.check_counts(counted(number, "image"), ImageSet(np.zeros(number), ["a"]))
    names = ["cat", "dog", "owl"]
    for name, (train, val, options) in {
        "even": ([0, 0, 1, 1], [0, 1], []),
        "of an evaluation": (None, [0, 1], []),
        "uneven": ([0] * 1100 + [1], [0, 1], []),
        "uneven, in their order": ([0] * 11 + [1], [1], ["DATA.DATASET=shards"]),
        "missing": ([0] * 40 + [2], [0], ["MODEL.NUM_CLASSES=1000"]),
    }.items():
        kinds = names if name == "missing" else names[:2]
        sets = [each and ImageSet(np.array(each), kinds) for each in (train, val)]
        rows[f"classes, {name}"] = images.check_classes(small_config(tmp_path, *options), *sets)
    whole, part = scan_of([[8, 10], [4, 6], [30, 40]], [1, 2, 3]), scan_of([[8, 9], [8, 8]], [4, 7], 1006)
    bad, worse = scan_of([[8, 8]] * 3 + [[0, 0]], [7, 8, 9, 0]), scan_of([[0, 0]] * 12, [0] * 12, 1200)
    twins = scan_of([[8, 10]] * 2, [3, 3], name="val")
    for name, scan in {"whole": whole, "a part": part, "bad": bad, "worse": worse}.items():
        rows[f"read, {name}"] = [
            images.check_readable("training", scan, 0.3),
            images.check_sizes("training", scan, config),
        ]
    clash = scan_of([[8, 10]] * 3, [1, 1, 3], name="val")
    clash.image_set.targets[0] = 1
    in_classes = {"in two classes": (whole, clash), "in two classes of an evaluation": (None, clash)}
    pairs = in_classes | {
        "none": (whole, bad),
        "none of a part": (whole, part),
        "two": (whole, twins),
        "one of a part": (part, bad),
    }
    for name, (train, val) in pairs.items():
        rows[f"duplicates: {name}"] = images.check_duplicates(train, val)
    assert_cases("data_set", told(rows))


SCORES = Scores(0.51234, 87.5, 99.25, 400, 0)


def test_score_lines_have_their_settings_and_values():
    with_more = replace(SCORES, macro_recall=80.1239, macro_f1=70.0, metric="macro_f1", num_excluded=2)
    labels = Scores(0.5, 50.0, 90.0, 1, 1, micro_f1=60.0, map=61.5, metric="map")
    few, many = (replace(SCORES, num_images=number, macro_f1=9.0) for number in (99, 50_000))
    few = replace(few, metric="loss")
    lines = []
    for scores in (with_more, labels, few, many, replace(many, top5=100.0)):
        name = "EMA " * (scores is few)
        lines += [scores.describe_short(), scores.describe(f"{name}Validation")]
        lines.append(describe_scores(scores, name, "3 of 5 classes"))
    for best in (Best(), *(Best.of(each, 3, "_ema" if each is few else "") for each in (SCORES, with_more, few, many))):
        lines += [best.describe(has_ema=False), best.describe(has_ema=True)]
    assert_cases("scores", "\n".join(lines))


def test_next_steps_have_their_settings_and_values_for_every_run_ending(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.record.next_steps._python", lambda: "python")
    config, run = small_config(tmp_path, "TRAIN.NUM_EPOCHS=40"), tmp_path / "my run"
    run.mkdir()
    (photo := tmp_path / "a photo.png").touch()
    digits, one, many = load_image_sets(config)[1], Process(CPU), Process(CPU, world_size=4, local_size=4)
    photos = SimpleNamespace(root=tmp_path, name=lambda index: str(photo))
    lines = {"before the first save": after_training(config, one, run, digits, "done") + after_failure(one, run)}
    for name in ("last.pth", "best.pth", "report.html"):
        (run / name).touch()
    for state in ("done", "early stop", "stopped", "save_failed", "failed"):
        lines[state] = after_training(config, one, run, photos if state == "done" else digits, state)
    for state in ("done", "stopped"):
        lines[f"{state} with a budget"] = after_training(
            replaced(config, TRAIN={"BUDGET": "1h"}), many, run, digits, state
        )
    lines["an error on one of two nodes"] = after_failure(replace(many, world_size=8), run)
    lines["an evaluation of weights of others"] = after_evaluation(None, run, digits)
    for name in ("status.json", "mistakes.png"):
        (run / name).touch()
        lines[f"an evaluation with {name}"] = after_evaluation(run / "best.pth", run, photos)
    lines["of what was exported"] = after_evaluation(run / "best.safetensors", run, digits)
    assert_cases("next_steps", {name: "\n".join(each) for name, each in lines.items()})


def test_time_left_lines_have_their_settings_and_values(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.train.forecast.time_in", lambda seconds: f"<{seconds:g} s later>")
    lines = []
    for limit in ("", "RUN.MAX_TIME=1h"):
        config = small_config(tmp_path, "TRAIN.NUM_EPOCHS=1", *limit.split())
        times = RunTimes.of(config, Order(320, 32, 1, 1, False, 0, None), num_evaluated=10)
        forecast = Forecast(config, times, start=0.0, clock=lambda: 600.0)
        lines += [forecast.describe(5, left) for left in (7.2, 99.5, 100.0, 3540.0, 3 * 3600 + 59, 200_000.0)]
    lines += [why_finished(replace(Train(), EARLY_STOP=number), 9, 3, number) for number in (1, 2)]
    assert_cases("time_left", "\n".join(lines))
