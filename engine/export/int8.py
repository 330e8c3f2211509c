"""Changes the graph of an exported model to 8 bits, and compares its accuracy with the accuracy in float32."""

import ast
import fnmatch
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from datasets.image_set import ImageSet
from engine.evaluation.image_test import ErrorTest, ImageTest
from engine.evaluation.scores import wilson_interval
from engine.export.files import WrongExport
from engine.export.formats import SCOPES, load_onnx
from engine.export.photo_subject import PhotoSubject, draw
from engine.tasks.classes import ClassTask
from utils.errors import ConfigError
from utils.text import counted, first_of, format_bytes

KINDS = ("MatMul", "Gemm", "Conv")  # 8 bits elsewhere save little time, and cost most of the accuracy
FOR_RANGES, FOR_ACCURACY, FOR_LAYERS = 256, 5000, 16  # numbers of images, drawn by a seed
MOST_LOST = 2.0  # percentage points of accuracy, at the end of a 95% interval
MOST_OTHER = 5.0  # percentage of answers that may differ, at the end of a 95% interval; above it, most_lost is ignored
DEVIATIONS = 1.96  # half the width of a 95% interval, in standard deviations
MODEL = "model.model."  # the place of the model in PhotoClassifier
NUM_NAMED = 3


class Inputs(CalibrationDataReader):
    """Photos for onnxruntime, which measures the range of each value on them."""

    def __init__(self, photos: Iterable[np.ndarray]):
        self._photos = iter(photos)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(({"photo": photo} for photo in self._photos), None)


class Agreement(NamedTuple):
    """Counts the answers of the 8-bit graph that differ from those of the float32 graph, and limits their cost."""

    num_answers: int
    num_other: int
    largest_cost: float  # the largest difference in float32 probability between both answers; 1 if all answers agree

    @property
    def most_other(self) -> float:
        """Return the upper end of the 95% interval of the percentage of answers that differ."""
        return wilson_interval(100 * self.num_other / self.num_answers, self.num_answers)[1]

    @property
    def most_lost(self) -> float:
        """Return an upper bound of the loss of accuracy in percentage points: the percentage times the largest cost.

        If the differing answers are near ties, this bound is narrower than the interval of the accuracies' difference.
        """
        return self.largest_cost * self.most_other

    @property
    def is_close(self) -> bool:
        return self.most_other <= MOST_OTHER and self.most_lost <= MOST_LOST

    def __str__(self) -> str:
        return (
            f"other answers: {self.num_other:,} of {self.num_answers:,}, which lose at most {self.most_lost:.2f} "
            "points (95% interval)"
        )


class Judgement(NamedTuple):
    """How much worse the answers of the 8-bit graph are."""

    accuracies: list[str]  # of both graphs
    lines: list[str]
    problem: str  # empty: the accuracy is kept
    more: str = ""  # a remedy


def judge_classes(task: ClassTask, truths: list, before: list, after: list) -> Judgement:
    """Compare the classes in the answers of both graphs, for each image, with the true ones."""
    first, second = (
        np.concatenate([task.answer(answer) == truth for answer, truth in zip(answers, truths, strict=True)])
        for answers in (before, after)
    )
    test = ImageTest(len(first), int((first & ~second).sum()), int((second & ~first).sum()))
    low, high = test.interval
    costs = np.concatenate([task.cost(*both) for both in zip(before, after, strict=True)])
    others = costs[costs > 0]
    agreement = Agreement(len(costs), len(others), float(others.max()) if len(others) else 1.0)
    is_kept = low >= -MOST_LOST or (high >= 0 and agreement.is_close)
    needed = images_needed(test)
    return Judgement(
        [f"{each.mean():.2%} of {len(each)} right" for each in (first, second)],
        [f"int8 - float32: {test.value:+.2f} points (95% interval {low:+.2f} to {high:+.2f})", str(agreement)],
        "" if is_kept else f"the accuracy may be lower by more than {MOST_LOST:g} points",
        f", give about {counted(needed, 'validation image')}" if needed else "",
    )


def judge_numbers(task: ClassTask, truths: list, before: list, after: list) -> Judgement:
    """Compare the errors of both graphs, for each image and number, in standard deviations."""
    truth, *answers = (np.stack(each) for each in (truths, before, after))
    first, second = (np.nanmean(task.cost(each, truth), 1) for each in answers)
    errors = [np.nanmean(np.abs(each - truth)) for each in answers]
    test = ErrorTest((second - first)[~np.isnan(first)])
    low, high = test.interval
    is_kept = high <= task.most_difference
    return Judgement(
        [f"MAE {each:.4g} on {len(truth)} images" for each in errors],
        [f"int8 - float32: {test.value:+.4f} standard deviations (95% interval {low:+.4f} to {high:+.4f})"],
        "" if is_kept else f"the MAE may be larger by more than {task.most_difference:g} standard deviations",
    )


def images_needed(test: ImageTest) -> int | None:
    """Return the number of images that would make the interval narrow enough, or None if the accuracy is too low.

    It assumes that the shares of differing answers stay the same.
    """
    change = test.value / 100
    room = MOST_LOST / 100 + change
    share = (test.only_first + test.only_second + 1) / test.num_images
    return math.ceil((DEVIATIONS / room) ** 2 * (share - change**2)) if room > 0 else None


@dataclass
class Quantizer:
    """Changes the file of a float32 graph to 8 bits if that keeps the accuracy."""

    subject: PhotoSubject
    train: ImageSet
    keep_float: Sequence[str]  # patterns of layers
    accepts_any: bool  # whether the accuracy may be lower

    def __call__(self, path: Path) -> str:
        """Replace the graph in the file. Return both accuracies. Raise WrongExport if too much accuracy is lost."""
        model = onnx.load(path)
        layers = layers_of(model)
        if unknown := [name for name in self.keep_float if not fnmatch.filter(layers, name)]:
            raise ConfigError(
                f"-keep_float: no layer is called {unknown[0]}; layers: {first_of(list(layers), limit=8)}"
            )
        layers = {
            name: nodes
            for name, nodes in layers.items()
            if not any(fnmatch.fnmatch(name, each) for each in self.keep_float)
        }
        if not layers:
            raise ConfigError("-keep_float: no layer is left for 8 bits; name fewer layers")
        photos = [self.subject.preparation.as_photo(pixels) for _, pixels in draw(self.train, FOR_RANGES)]
        changed = path.with_name(f"8-bits-{path.name}")
        quantize(path, changed, photos, [node for nodes in layers.values() for node in nodes])
        judgement = self.compare(path, changed)
        text = "\n".join(judgement.lines)
        if judgement.problem and not self.accepts_any:
            worst = self.worst_layers(path, changed, photos[:FOR_LAYERS], layers)[:NUM_NAMED]
            raise WrongExport(
                f"-int8: {judgement.problem}, so no file was written; these layers "
                f"change the answers most: {', '.join(worst)}; name them with -keep_float{judgement.more}, or add "
                f"-accept\n{text}"
            )
        result = onnx.load(changed)
        for node in result.graph.node:
            del node.metadata_props[:]
        del result.metadata_props[:]  # onnxruntime has added some of its own
        result.metadata_props.extend(model.metadata_props)
        result.producer_name = model.producer_name  # so that the file is recognized as ours
        onnx.save(result, path)
        changed.unlink()
        return text

    def compare(self, before: Path, after: Path) -> Judgement:
        """Return the judgement, whose lines begin with accuracy, size and speed of both files."""
        files = {"float32": before, "int8": after}
        runs, seconds = [load_onnx(self.subject, path) for path in files.values()], [0.0, 0.0]
        fits: tuple[list, list] = ([], [])  # whether each photo fits the validation images, if the graph tells
        answers, truths, task = ([], []), [], self.subject.task
        for index, pixels in draw(self.subject.photos, FOR_ACCURACY):
            photo = torch.from_numpy(self.subject.preparation.as_photo(pixels))
            truths.append(task.truth(self.subject.photos, index))
            for number, run in enumerate(runs):
                start = time.perf_counter()
                results = run(photo)
                seconds[number] += time.perf_counter() - start
                answers[number].append(self.probabilities(results))
                if self.subject.known:
                    fits[number].append(results[1] >= 0)
        judge = judge_classes if self.subject.config.task.has_classes else judge_numbers
        judgement = judge(task, truths, *answers)
        lines = [
            f"{name}: {accuracy}, {format_bytes(path.stat().st_size)}, {len(truths) / duration:.1f} images/s"
            + (f", {np.mean(fit):.1%} fit the validation images" if fit else "")
            for (name, path), accuracy, duration, fit in zip(
                files.items(), judgement.accuracies, seconds, fits, strict=True
            )
        ]
        return judgement._replace(lines=[*lines, *judgement.lines])

    def probabilities(self, results: Any) -> np.ndarray:
        """Return the probabilities in the results of a graph."""
        return (results[0] if self.subject.known else results).numpy()

    def worst_layers(
        self, source: Path, target: Path, photos: Sequence[np.ndarray], layers: dict[str, list[str]]
    ) -> list[str]:
        """Return the layers, first those that change the probabilities most when only they have 8 bits."""

        def answers(path: Path) -> np.ndarray:
            run = load_onnx(self.subject, path)
            return np.stack([self.probabilities(run(torch.from_numpy(photo))) for photo in photos])

        expected, changes = answers(source), {}
        for layer, nodes in layers.items():
            quantize(source, target, photos, nodes)
            changes[layer] = float(np.abs(answers(target) - expected).sum())
        return sorted(changes, key=changes.get, reverse=True)


def quantize(source: Path, target: Path, photos: Iterable[np.ndarray], nodes: list[str]) -> None:
    """Write the graph with these nodes in 8 bits: weights for each channel, and ranges of values as in these photos."""
    logging.getLogger().setLevel(logging.ERROR)  # onnxruntime recommends its own preprocessing at each call
    quantize_static(
        source,
        target,
        Inputs(photos),
        op_types_to_quantize=list(KINDS),
        nodes_to_quantize=nodes,
        per_channel=True,
        reduce_range=True,  # weights of 7 bits, because sums of 8-bit products saturate on processors without VNNI
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


def layers_of(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Return the nodes of each layer of the model that can have 8 bits, without the nodes that prepare the photo."""
    layers: dict[str, list[str]] = {}
    for node in model.graph.node:
        scopes = ast.literal_eval({each.key: each.value for each in node.metadata_props}.get(SCOPES, "[]"))
        if node.op_type in KINDS and len(scopes) > 1 and scopes[-2].startswith(MODEL):
            layers.setdefault(scopes[-2].removeprefix(MODEL), []).append(node.name)
    return layers
