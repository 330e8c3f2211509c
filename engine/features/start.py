"""The start of a new classifier: a linear classifier of the pretrained model's features is fitted, scored and saved."""

import time

import torch
from torch import nn

from datasets import BadImages, EvalData
from engine.evaluate_weights import evaluate_both, note_start
from engine.evaluation.scores import Scores
from engine.evaluation.tally import MakeTally
from engine.features.compute import (
    MOST_IMAGES,
    Gathered,
    ImageFeatures,
    TwoTallies,
    features_of_images,
    has_zero_classifier,
    tapped,
    why_not_fitted,
)
from engine.features.doubts import describe_doubts
from engine.features.linear import LinearClassifier, set_classifier
from engine.features.saved import save_features
from engine.saves import Saves
from engine.train.stop_conditions import Stopped
from models.heads import output_layers, set_to_zero
from models.weights.record import CALIBRATION
from utils.commands import command
from utils.errors import DataError
from utils.program import StopSignal
from utils.runs import BEST


def start_classifier(saves: Saves, eval_data: EvalData, bad_images: BadImages, stop: StopSignal) -> None:
    """Fit a linear classifier for a new classifier, evaluate the model with it, and save it as best.pth. Collective.

    With MODEL.NEW_CLASSIFIER zeros, the model then starts from zeros again. Nothing happens if the classifier is not
    new; any other reason against it is logged.
    """
    plan, trainer = saves.plan, saves.trainer
    layers = list(output_layers(trainer.model).values())
    if trainer.step:
        return
    if not trainer.best.exists:  # else the run was stopped after it saved this start
        if not trainer.process.all_true(has_zero_classifier(trainer)):
            return
        train = fit_classifier(saves, layers, stop)
        if not train:
            return
        keep_start(saves, train, eval_data, bad_images)
    if plan.config.MODEL.NEW_CLASSIFIER == "zeros":
        for layer in layers:
            set_to_zero(layer)
        trainer.computing.refresh()


def keep_start(saves: Saves, train: ImageFeatures, eval_data: EvalData, bad_images: BadImages) -> None:
    """Save the weights before the first update as the best so far, and write features.npz. Collective.

    `train`: the features of the training images. Without validation images, there are no scores.
    """
    plan, trainer, start, scores = saves.plan, saves.trainer, time.perf_counter(), None
    if plan.holds_out:
        scores, val = score_start(saves, eval_data, bad_images)
    else:
        saves.take_as_best(epoch=0)
        val = ImageFeatures(train.indices[:0], [features[:0] for features in train.features], train.targets[:0])
    seconds, judged = time.perf_counter() - start, [train]
    if val:
        trainer.process.first(lambda: save_features(saves.session, (plan.train_set, plan.eval_set), (train, val)))
        judged.append(val)
    if text := trainer.process.first(lambda: describe_doubts(judged, plan.num_classes)):
        saves.log.say(f"labels: {text}; after the run: {command('labels', saves.folder)}")
    if scores:
        by_model = ", by a linear model of the pretrained features"
        if plan.config.task.has_classes:
            by_model = ", by a linear classifier of the pretrained features"
        note_start(saves, scores, seconds, by_model)
    saves.save(metric=scores and scores.value, extra_names=[BEST])


def score_start(saves: Saves, eval_data: EvalData, bad_images: BadImages) -> tuple[Scores, ImageFeatures | None]:
    """Evaluate the weights before the first update. Return the scores, and the features unless there are many images.

    Collective.
    """
    plan, trainer = saves.plan, saves.trainer

    def also_gathering(make_tally: MakeTally) -> MakeTally:
        def make_both(*sizes) -> TwoTallies:
            return TwoTallies(make_tally(*sizes), gathered)

        return make_both

    with tapped(trainer) as tap:
        gathered = Gathered(tap) if len(plan.eval_set) <= MOST_IMAGES else None
        evaluation = evaluate_both(trainer, eval_data, bad_images, also_gathering if gathered else None)[""]
    comparison = saves.compare_with_best({"": evaluation}, epoch=0)
    if calibration := trainer.parts.get(CALIBRATION):
        calibration.fit(trainer, comparison.images)
    return evaluation.scores, gathered.of_all(evaluation.images.indices, trainer.process) if gathered else None


def fit_classifier(saves: Saves, layers: list[nn.Module], stop: StopSignal) -> ImageFeatures | None:
    """Put a linear classifier of the training images' features into the model. Return the features if there is one."""
    plan, trainer, log = saves.plan, saves.trainer, saves.log
    if reason := why_not_fitted(plan, trainer, layers):
        log.say(f"no linear classifier before training: {reason}")
        return None

    def stop_if_requested() -> None:
        signal, _ = trainer.process.delayed_max([stop.number, 0])  # two numbers, as in the votes of the training
        if signal:
            raise Stopped(signal)

    if plan.config.DATA.IMAGE_CHANNELS not in (1, 3) or plan.config.DATA.RGB:
        from engine.features.channels import resume_channels, start_channels

        resume_channels(trainer, plan.inputs.saved)
        if line := start_channels(trainer, plan.train_set, log.note, stop_if_requested):
            log.say(line)
    train = features_of_images(plan.train_set, trainer, log.note, stop_if_requested)
    features, targets = torch.from_numpy(train.joined), torch.from_numpy(train.targets)
    if not len(targets) or not features.isfinite().all():
        log.say("no linear classifier before training: some features are not finite")
        return None
    if text := trainer.task.why_no_fit(targets, plan.classes):
        if len(plan.train_set) <= MOST_IMAGES:  # else other images may have one
            raise DataError(f"DATA.COLUMNS: {text}; repair the images, or leave this column out")
        log.say(f"no linear classifier before training: among {MOST_IMAGES:,} images, {text}")
        return None
    arguments = (features, targets, layers[0].weight.shape[0])
    classifier = trainer.process.first(lambda: trainer.task.fit_head(*arguments), LinearClassifier)
    stop_if_requested()  # a resumed run then repeats the pass
    set_classifier(layers, classifier)
    trainer.computing.refresh()
    return train
