"""Contracts of the main interfaces, checked at every call in all tests and in the programs that they start.

CONTRACTS has a row for each interface: its dotted name, and a function of its arguments (by name) and of its result, or
of each item if it is a generator. `install` wraps the interfaces. A contract that does not hold raises an AssertionError
with the name of the interface and the values, and fails the test even if the program catches the error.
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


# --- images and their order ---


def image_sets(given, sets):
    train, val = sets
    for each in filter(None, sets):
        names = each.target_names()
        assert not names or 0 <= each.targets.min() <= each.targets.max() < len(names), (each.targets, names)
    assert train is None or train.classes == val.classes, (train.classes, val.classes)


def taken(given, part):
    assert len(part) == len(given.indices), (len(part), len(given.indices))
    for place in {0, len(part) - 1} if len(part) else ():
        expected = given.self.row(int(given.indices[place]))
        assert part.row(place) == expected, (part.row(place), expected)


def divided(given, parts):
    whole = given.image_set
    rows = np.arange(len(whole)) if whole.rows is None else np.sort(whole.rows)
    targets = {whole.row(number): target for number, target in enumerate(whole.targets.tolist())}
    assert np.array_equal(np.sort(np.concatenate([part.rows for part in parts])), rows), [part.rows for part in parts]
    for part in parts:
        assert part.targets.tolist() == [targets[row] for row in part.rows.tolist()], part.targets


def pieces(given, found):
    order, images = given.self, given.self.window(given.step)
    is_drawn_once = order.num_repeats == 1 and not order.is_balanced
    assert not is_drawn_once or len(np.unique(images)) == len(images), images
    for each in found:
        expected = images[each.first : each.first + each.num_samples]
        assert not each.num_samples or np.array_equal(each.indices, expected), (each.indices, expected)
    of_rank = inspect.unwrap(type(order).pieces)
    total = sum(each.num_samples for rank in range(order.world_size) for each in of_rank(order, given.step, rank))
    assert total == order.window_size(given.step), total


def batch_parts(given, parts):
    batch = given.self
    assert sum(len(part.targets) for part in parts) == len(batch.targets), parts
    for before, after in zip(parts, parts[1:], strict=False):
        assert after.piece.first == before.piece.first + len(before.targets), (before.piece, after.piece)


def shares_of_ranks(given, data):
    shares = [type(data)(data.image_set, 1, rank, data.world_size, None).share for rank in range(data.world_size)]
    assert sorted(np.concatenate(shares).tolist()) == [*range(len(given.image_set))], shares
    assert np.array_equal(shares[data.rank], data.share), data.share


def batch(given, result):
    reader, images, targets = given.self, result.images, result.targets
    assert images.dtype == torch.uint8 and result.num_samples in (0, len(images)), (images.dtype, result.num_samples)
    assert len(images) == len(targets), (len(images), len(targets))
    if images.ndim == 4:
        shape = reader.data.IMAGE_CHANNELS, reader.side(given.piece), reader.side(given.piece)
        assert images.shape[1:] == shape, images.shape
    left_out = given.bad if len(targets) < len(given.piece.indices) else []
    indices = given.piece.indices[~np.isin(given.piece.indices, left_out)]
    expected = reader.image_set.targets[indices]
    if targets.ndim == 1 and (left_out or not given.bad):
        assert np.array_equal(targets.numpy(), expected), (targets, expected)
    if targets.ndim == 2 and targets.is_floating_point() and (left_out or not given.bad):
        expected = [len(reader.image_set.label_sets[number]) for number in expected.tolist()]
        assert targets.sum(1).tolist() == expected, (targets, expected)


# --- crops, erasing, mixing, normalisation ---


def crop(given, box):
    left, top, width, height = box
    assert 0 <= left < left + width <= given.width and 0 <= top < top + height <= given.height, box


def erased(given, row):
    for left, top, width, height, *noise in row:
        assert min(left, top, *noise) >= 0 and max(left + width, top + height, *noise) <= given.self.side, row


def erased_patches(given, boxes):
    for (rows, columns), of_image in zip(given.grids.tolist(), boxes.tolist(), strict=True):
        for first, height, width, stride, _ in of_image:
            is_inside = first // columns + height <= rows and first % columns + width <= columns
            assert not width or (is_inside and stride == columns), (of_image, rows, columns)


def prepared(given, result):
    (images, targets), labels = result, given.batch.targets
    assert images.shape == given.batch.images.shape and images.is_floating_point(), (images.shape, images.dtype)
    if not is_readable(images):
        return
    assert images.isfinite().all(), images
    assert torch.equal(targets if isinstance(targets, torch.Tensor) else targets.first, labels), (targets, labels)
    low, high = given.self.normalize.shift, given.self.normalize.shift + 255 * given.self.normalize.scale
    if given.self.erase is None:
        assert ((low - 0.1 <= images) & (images <= high + 0.1)).all(), (images.min(), images.max())


def mixed_targets(given, mixed):
    from datasets.transforms.erase_and_mix import inside_box

    if is_readable(mixed.share):
        _, own, *box = given.table.unbind(1)
        expected = own * (1 - inside_box(*box, given.self.side).float().mean((1, 2, 3)))
        assert torch.allclose(mixed.share.float(), expected.float(), atol=1e-5), (mixed.share, expected)


def larger_share(given, classes):
    mixed = given.targets
    if not isinstance(mixed, torch.Tensor) and mixed.first.ndim == 1 and is_readable(classes):
        own, other = mixed.share * (classes == mixed.first), (1 - mixed.share) * (classes == mixed.second)
        assert (own + other >= 0.5 - 1e-6).all(), (mixed, classes)


# --- a step ---


def sums(given, found):
    if is_readable(found):
        _, right, images = found.tolist()
        assert images == given.batch.num_samples and 0 <= right <= images + 1e-6, found


def update(given, nothing):
    trainer = given.self
    for group in trainer.optimizer.param_groups:
        expected = trainer.schedule(trainer.step - 1) * group.get("lr_scale", 1)
        assert close(float(group["lr"]), expected), (group["lr"], expected)


def report(given, found):
    trainer, last = given.self, max(given.self.step - 1, 0)
    assert found.step == last and found.lr == trainer.schedule(last), (found, last)
    assert is_share(found.accuracy) and 0 <= found.skipped <= trainer.step, found
    if is_readable(trainer.counters.last):  # the norm of all gradients is the same in every process
        assert close(found.grad_norm, trainer.counters.last[2].item(), 1e-4), (found.grad_norm, trainer.counters.last)


def rate(given, value):
    schedule = given.self
    assert 0 <= value <= max(schedule.start, schedule.base, schedule.end) * (1 + 1e-9), (value, schedule.base)


# --- evaluation, metrics and checkpoints ---


def evaluations(given, found):
    assert len(found) == len(given.models), found
    for scores, images in found:
        assert 0 <= scores.top1 <= scores.top5 <= 100 and not scores.loss < 0, scores
        assert scores.num_images + scores.num_excluded == given.data.num_samples, scores
        assert np.isin(images.indices, given.data.share).all(), images.indices


def weights_scored(given, found):
    has_ema = given.trainer.ema is not None and given.trainer.step > 0
    assert [*found] == ["", "_ema"][: 1 + has_ema], found


def per_image(given, found):
    assert (np.diff(found.indices) > 0).all(), found.indices
    for each in (found.probabilities, getattr(found, "label_probabilities", found.probabilities)):
        assert ((each >= 0) & (each <= 1)).all() or np.isnan(each).any(), each
    if hasattr(found, "labels") and np.isfinite(found.probabilities).all():
        assert (found.label_probabilities <= found.probabilities + 1e-6).all(), found
        numbers = [np.bincount(each, minlength=found.counts.shape[1]) for each in (found.labels, found.predictions)]
        assert np.array_equal(numbers, found.counts[:2]), (numbers, found.counts)


def metrics_row(given, row):
    result = given.epoch.result
    assert all(value is None or isinstance(value, int | float) for value in row.values()), row
    for suffix, scores in result.scores.items():
        for name in ("loss", "top1", "top5", *scores.more()):
            value, expected = row.get(f"eval_{name}{suffix}"), getattr(scores, name)
            assert value is None or close(value, expected, 1e-3), (name, suffix, value, expected)
    for name in ("skipped", "lr", "loss_scale"):
        assert close(row[name], getattr(result.report, name)), (name, row)


def checkpoint(given, state):
    trainer = given.self
    assert (state["epoch"], state["step"]) == (trainer.epoch - 1, trainer.step), (state["epoch"], state["step"])
    for key, owner in (("state_dict", trainer.model), ("state_dict_ema", trainer.ema and trainer.ema.model)):
        assert (key in state) == (owner is not None), [*state]
        for name, weight in [*owner.named_parameters()][-1:] if owner and not trainer.parallel.is_sharded else ():
            assert not is_readable(weight) or weight.equal(state[key][name]), (key, name)


def progress(given, facts):
    best, epoch, schedule = given.best, given.trainer.epoch, given.trainer.schedule
    expected = (best.epoch, best.value) if best.exists else (None, None)
    held = facts["best"] or {}
    assert (facts["best_epoch"], held.get(best.metric)) == expected, (facts, best)
    assert facts["total_steps"] >= schedule.num_epochs and facts["total_epochs"] == schedule.num_epochs, facts
    assert facts["position"]["epoch"] == epoch, facts


# --- predictions, features and pictures ---


def prediction(given, found):
    values = [guess.probability for guess in found.guesses]
    classes = given.self.classifier.classes
    assert values == sorted(values, reverse=True) and all(map(is_share, values)), values
    assert given.self.several or sum(values) <= 1 + 1e-4, values
    assert all(guess.name == classes[guess.number] for guess in found.guesses), found.guesses
    assert found.path == given.paths[found.index], found


def features(given, found):
    expected = given.images.targets[found.indices]
    assert all(len(each) == len(found.indices) for each in (found.targets, *found.features)), found
    assert found.targets.ndim > 1 or np.array_equal(found.targets, expected), (found.targets, expected)


def embedded(given, table):
    assert len({*map(len, table)}) == 1 and (np.diff(table.indices) > 0).all(), table
    for index, size in [*zip(table.indices.tolist(), table.sizes.tolist(), strict=True)][:1]:
        assert size == [*given.images.read(index).shape[1::-1]], size


def fits(width: int, height: int, pixels: np.ndarray, side: int) -> bool:
    """Return whether width x height is the size of this image enlarged or reduced to the square."""
    rows, columns = pixels.shape[:2]
    return max(width, height) == side and abs(width * rows - height * columns) <= max(rows, columns, side)


def fitted(given, picture):
    assert fits(*picture.size, given.pixels, given.side), (picture.size, given.pixels.shape)


def sheet(given, picture):
    number, side = getattr(given, "num_columns", 6), getattr(given, "side", 150)
    places = [place[:4] for place in json.loads(picture.info["halfstep tiles"])]
    centres = [((left + right) // 2, (top + bottom) // 2) for left, top, right, bottom in places]
    assert len(places) == len(given.tiles), places
    for index, (tile, (left, top, right, bottom)) in enumerate(zip(given.tiles, places, strict=True)):
        assert 0 <= left < right <= picture.width and 0 <= top < bottom <= picture.height, places
        assert tile.pixels is None or fits(right - left, bottom - top, tile.pixels, side), (places, tile.pixels.shape)
        row, column = centres[index // number * number][1], centres[index % number][0]
        assert abs(centres[index][0] - column) <= 1 and abs(centres[index][1] - row) <= 1, places


# --- tables of a run ---


def class_rates(given, rates):
    assert all(map(is_share, rates.ravel().tolist())), rates
    errors = given.results.counts[1] - given.results.counts[2]
    others = len(given.results.indices) - given.results.counts[0]
    has_others = others > 0
    assert np.allclose((1 - rates[:, 1])[has_others] * others[has_others], errors[has_others]), rates


def calibrated(given, found):
    if "figures" in found:
        figures, changes = found["figures"], np.any(np.abs(np.log(found["temperature"])) > 1e-3)
        assert is_share(figures["ece_before"]) and is_share(figures["ece_after"]), figures
        assert figures["nll_after"] < figures["nll_before"] or not changes, figures


CONTRACTS: dict[str, Callable[[SimpleNamespace, Any], None]] = {
    "datasets.build.load_image_sets": image_sets,
    "datasets.types.ImageSet.take": taken,
    "datasets.split.divide": divided,
    "datasets.order.Order.pieces": pieces,
    "datasets.types.Batch.parts": batch_parts,
    "datasets.build.build_eval_data": shares_of_ranks,
    "datasets.loading.readers.TrainReader.batch": batch,
    "datasets.loading.readers.EvalReader.batch": batch,
    "datasets.transforms.crop.crop_box": crop,
    "datasets.transforms.erase_and_mix.Boxes.row": erased,
    "extras.native_aspect.batches.PatchBoxes.draw": erased_patches,
    "datasets.transforms.preparation.Preparation.__call__": prepared,
    "datasets.transforms.erase_and_mix.Mixing.targets": mixed_targets,
    "datasets.transforms.preparation.dominant_class": larger_share,
    "engine.train.trainer.Trainer.forward_and_backward": sums,
    "engine.train.trainer.Trainer.update": update,
    "engine.train.trainer.Trainer.report": report,
    "engine.train.schedule.Schedule.__call__": rate,
    "engine.evaluation.evaluate.evaluate": evaluations,
    "engine.evaluate_weights.evaluate_both": weights_scored,
    "engine.evaluation.tally.PerImage.gather": per_image,
    "engine.record.columns.epoch_row": metrics_row,
    "engine.train.trainer.Trainer.state_dict": checkpoint,
    "engine.saves.describe_progress": progress,
    "engine.predict.predictor.Predictor.__call__": prediction,
    "engine.features.compute.features_of_images": features,
    "engine.features.embedder.Embedder.__call__": embedded,
    "engine.predict.pictures.fitted": fitted,
    "engine.predict.pictures.contact_sheet": sheet,
    "extras.report.image_results.class_rates": class_rates,
    "extras.calibration.calibrate": calibrated,
}
ROOMS = ("configs", "datasets", "engine", "extras", "models", "scripts", "tests", "utils")


def checked(name: str, function: FunctionType, contract: Callable[[SimpleNamespace, Any], None]) -> Callable:
    """Return a function that calls this one and checks the contract."""
    signature = inspect.signature(function)

    def check(result: Any, *arguments, **options) -> None:
        CALLED.add(name)
        try:
            contract(SimpleNamespace(**signature.bind(*arguments, **options).arguments), result)
        except AssertionError as error:
            BROKEN.append(f"{name}: {contract.__name__} does not hold for {error}")
            raise AssertionError(BROKEN[-1]) from None

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
