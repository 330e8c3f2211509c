"""Contracts of the main interfaces, checked at every call in all tests and in the programs that they start.

CONTRACTS has a row for each interface: its dotted name, and a function of its arguments (by name, in `it`) and its result
that returns whether the contract holds. For a generator, the result is each of its items. `install` wraps the interfaces.
A broken contract raises an AssertionError with the name of the interface and its result, and fails the test even if the
program catches the error.
"""

import functools
import inspect
import json
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


def is_share(value: float) -> bool:
    return -1e-6 <= value <= 1 + 1e-6 or math.isnan(value)


# --- images, their order, and batches ---


def each_image_in_one_part(it, parts):
    whole = it.image_set
    rows = np.arange(len(whole)) if whole.rows is None else whole.rows
    targets = dict(zip(rows.tolist(), whole.targets.tolist(), strict=True))
    found = [dict(zip(part.rows.tolist(), part.targets.tolist(), strict=True)) for part in parts]
    return found[0] | found[1] == targets and len(found[0]) + len(found[1]) == len(targets)


def pieces_of_window(it, pieces):
    """Each piece is at its place in the window, and those of all processes are the whole window."""
    order, window = it.self, it.self.window(it.step)
    of_rank = inspect.unwrap(type(order).pieces)
    sizes = [piece.num_samples for rank in range(order.world_size) for piece in of_rank(order, it.step, rank)]
    return (
        all(
            np.array_equal(each.indices, window[each.first :][: each.num_samples])
            for each in pieces
            if each.num_samples
        )
        and (order.num_repeats > 1 or order.is_balanced or len(np.unique(window)) == len(window))
        and sum(sizes) == order.window_size(it.step) == len(window)
    )


def shares_of_ranks(it, data):
    shares = [type(data)(data.image_set, 1, rank, data.world_size, None).share for rank in range(data.world_size)]
    is_complete = sorted(np.concatenate(shares).tolist()) == [*range(len(it.image_set))]
    return is_complete and np.array_equal(shares[data.rank], data.share)


def batch_of_piece(it, batch):
    """Images have the size of the settings; targets are those of the piece, without images that an evaluation leaves out."""
    reader, images, targets = it.self, batch.images, batch.targets
    left_out = it.bad if len(targets) < len(it.piece.indices) else []
    expected = reader.image_set.targets[it.piece.indices[~np.isin(it.piece.indices, left_out)]]
    if targets.is_floating_point():  # several labels, or numbers, which are NaN where they are missing
        expected = [len(reader.image_set.meaning.classes_of(each)) for each in expected.tolist()]
        has_numbers = hasattr(reader.image_set.meaning, "values")
        targets = (targets.isfinite() if has_numbers else targets).sum(1)
    is_replaced = bool(it.bad) and not left_out
    shape = reader.data.IMAGE_CHANNELS, *[reader.side(it.piece)] * 2
    return (
        images.dtype == reader.image_set.pixels.dtype_in_batch
        and (images.ndim != 4 or images.shape[1:] == shape)
        and len(images) == len(targets)
        and batch.num_samples in (0, len(images))
        and (is_replaced or targets.ndim > 1 or np.array_equal(targets.numpy(), expected))
    )


# --- crops, erasing, mixing, normalisation ---


def is_inside(left: int, top: int, width: int, height: int, outer_width: int, outer_height: int) -> bool:
    return 0 <= left <= left + width <= outer_width and 0 <= top <= top + height <= outer_height


def patches_inside(it, boxes):
    return all(
        not width or (stride == columns and is_inside(first % columns, first // columns, width, height, columns, rows))
        for (rows, columns), of_image in zip(it.grids.tolist(), boxes.tolist(), strict=True)
        for first, height, width, stride, _ in of_image
    )


def prepared(it, result):
    images, targets = result
    if not is_readable(images):
        return images.shape == it.batch.images.shape
    low, scale = it.self.normalize.shift, it.self.normalize.scale
    if it.batch.images.dtype == torch.float32:  # from 0 to 1, which bicubic resizing exceeds
        is_in_range = (low - 0.5 * scale <= images) & (images <= low + 1.5 * scale)
    else:
        is_in_range = (low - 0.1 <= images) & (images <= low + 255 * scale + 0.1)
    own = targets if isinstance(targets, torch.Tensor) else targets.first
    return (
        images.shape == it.batch.images.shape
        and bool(images.isfinite().all() if it.self.erase else is_in_range.all())
        and torch.equal(own.nan_to_num(), it.batch.targets.nan_to_num())  # NaN: a missing number
    )


def shares_of_pixels(it, mixed):
    from datasets.transforms.erase_and_mix import inside_box

    _, own, *box = it.table.unbind(1)
    expected = own * (1 - inside_box(*box, it.self.side).float().mean((1, 2, 3)))
    return not is_readable(own) or torch.allclose(mixed.share.float(), expected.float(), atol=1e-5)


def larger_share(it, classes):
    mixed = it.targets
    if isinstance(mixed, torch.Tensor) or mixed.first.ndim > 1 or not is_readable(classes):
        return True
    shares = mixed.share * (classes == mixed.first) + (1 - mixed.share) * (classes == mixed.second)
    return bool((shares >= 0.5 - 1e-6).all())


# --- a step, an evaluation, and what is written of them ---


def rates_of_step(it, nothing):
    groups, rate = it.self.optimizer.param_groups, it.self.schedule(it.self.step - 1)
    return all(close(float(group["lr"]), rate * group.get("lr_scale", 1)) for group in groups)


def report_of_last_step(it, report):
    trainer, last = it.self, it.self.counters.last
    return (
        report.step == max(trainer.step - 1, 0)
        and report.lr == trainer.schedule(report.step)
        and is_share(report.accuracy)
        and 0 <= report.skipped <= trainer.step
        # The norm of all gradients is the same in every process.
        and (not is_readable(last) or close(report.grad_norm, last[2].item(), 1e-4))
    )


def rate_in_range(it, rate):
    return 0 <= rate <= max(it.self.start, it.self.base, it.self.end) * (1 + 1e-9)


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


def results_of_images(it, found):
    shares, is_sorted = found.probabilities, (np.diff(found.indices) > 0).all()
    if not hasattr(found, "labels") or not np.isfinite(shares).all():
        return is_sorted
    numbers = [np.bincount(each, minlength=found.counts.shape[1]) for each in (found.labels, found.predictions)]
    are_shares = (found.label_probabilities >= 0) & (found.label_probabilities <= shares + 1e-6) & (shares <= 1 + 1e-6)
    return is_sorted and are_shares.all() and np.array_equal(numbers, found.counts[:2])


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
    expected = (best.epoch, best.value) if best.exists else (None, None)
    totals = (facts["total_epochs"], facts["position"]["epoch"])
    is_best = (facts["best_epoch"], held.get(best.metric)) == expected
    return is_best and totals == (it.trainer.schedule.num_epochs, it.trainer.epoch)


# --- predictions, features and pictures ---


def most_probable_first(it, found):
    values, classes = [guess[2] for guess in found.guesses], it.self.classifier.classes
    if not it.self.classifier.config.task.has_classes:  # numbers
        return [guess.name for guess in found.guesses] == classes and found.path == it.paths[found.index]
    return (
        values == sorted(values, reverse=True)
        and all(map(is_share, values))
        and (it.self.classifier.config.task.has_several_classes or sum(values) <= 1 + 1e-4)
        and all(guess.name == classes[guess.number] for guess in found.guesses)
        and found.path == it.paths[found.index]
    )


def features_of_targets(it, found):
    is_complete = all(len(each) == len(found.indices) for each in (found.targets, *found.features))
    return is_complete and (found.targets.ndim > 1 or np.array_equal(found.targets, it.images.targets[found.indices]))


def fits(width: int, height: int, pixels: np.ndarray | None, side: int) -> bool:
    """Return whether width x height is the size of this image after it was enlarged or reduced to the square."""
    rows, columns = (1, 1) if pixels is None else pixels.shape[:2]
    return max(width, height) == side and abs(width * rows - height * columns) <= max(rows, columns, side)


def tiles_in_rows(it, picture):
    num_columns, side = getattr(it, "num_columns", 6), getattr(it, "side", 150)
    places = [place[:4] for place in json.loads(picture.info["halfstep tiles"])]
    middles = [((left + right) // 2, (top + bottom) // 2) for left, top, right, bottom in places]
    firsts = [(middles[n % num_columns][0], middles[n // num_columns * num_columns][1]) for n in range(len(places))]
    return (
        len(places) == len(it.tiles)
        and all(is_inside(x, y, right - x, bottom - y, *picture.size) for x, y, right, bottom in places)
        and all(
            fits(right - left, bottom - top, tile.pixels, side)
            for tile, (left, top, right, bottom) in zip(it.tiles, places, strict=True)
        )
        and (not places or np.abs(np.subtract(middles, firsts)).max() <= 1)
    )


CONTRACTS: dict[str, Callable[[SimpleNamespace, Any], bool]] = {
    "datasets.split.divide": each_image_in_one_part,
    "datasets.order.Order.pieces": pieces_of_window,
    "datasets.build.build_eval_data": shares_of_ranks,
    "datasets.loading.readers.TrainReader.batch": batch_of_piece,
    "datasets.loading.readers.EvalReader.batch": batch_of_piece,
    "datasets.transforms.crop.crop_box": lambda it, box: is_inside(*box, it.width, it.height),
    "datasets.transforms.erase_and_mix.Boxes.row": lambda it, row: all(
        is_inside(*box[:4], it.self.side, it.self.side) and 0 <= max(box[4:]) <= it.self.side for box in row
    ),
    "datasets.native_aspect.batches.PatchBoxes.draw": patches_inside,
    "datasets.transforms.preparation.Preparation.__call__": prepared,
    "datasets.transforms.erase_and_mix.Mixing.targets": shares_of_pixels,
    "datasets.transforms.preparation.dominant_class": larger_share,
    "engine.train.trainer.Trainer.update": rates_of_step,
    "engine.train.trainer.Trainer.report": report_of_last_step,
    "engine.train.schedule.Schedule.__call__": rate_in_range,
    "engine.evaluation.evaluate.evaluate": scores_of_all_images,
    "engine.evaluate_weights.evaluate_both": raw_and_ema,
    "engine.tasks.classes.PerImage.gather": results_of_images,
    "engine.record.columns.epoch_row": row_of_epoch,
    "engine.train.trainer.Trainer.state_dict": raw_and_ema_weights,
    "engine.saves.describe_progress": progress_of_best,
    "engine.predict.predictor.Predictor.__call__": most_probable_first,
    "engine.features.compute.features_of_images": features_of_targets,
    "engine.predict.pictures.fitted": lambda it, picture: fits(*picture.size, it.pixels, it.side),
    "engine.predict.pictures.contact_sheet": tiles_in_rows,
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

    @functools.wraps(function)
    def call_generator(*arguments, **options):
        for item in function(*arguments, **options):
            check(item, *arguments, **options)
            yield item

    return call_generator if inspect.isgeneratorfunction(function) else call


def install() -> None:
    """Wrap the interfaces, and replace the functions among them wherever a module has imported them."""
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
