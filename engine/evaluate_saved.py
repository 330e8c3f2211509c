"""Evaluates best.pth again, at the end of a run whose earlier start was killed before it wrote the results."""

from pathlib import Path

from datasets import BadImages, EvalData
from engine.checkpoint.find import read_checkpoint
from engine.evaluation.evaluate import evaluate
from engine.tasks.class_tables import ClassResults
from engine.train.trainer import Trainer


def evaluate_saved(path: Path, trainer: Trainer, data: EvalData, bad_images: BadImages) -> ClassResults:
    """Evaluate best.pth again.

    Its better weights replace those of the trainer's model, so the training must be over.
    """
    suffix = trainer.best.suffix
    key, model = f"state_dict{suffix}", trainer.ema.model if suffix and trainer.ema else trainer.model
    state = trainer.parallel.local_part({key: read_checkpoint(path, lazily=True)[key]})
    trainer.parallel.load(model, state[key])
    (evaluation,) = evaluate([model], data, trainer.inference, bad_images, trainer.task.tally)
    return evaluation.images.gather(trainer.process)
