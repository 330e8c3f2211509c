"""Builds a trainer from settings only, for trials of a batch size and for benchmarks."""

from collections.abc import Sequence

from torch import nn

from configs.load import LoadedConfig
from configs.schema import Config
from datasets import TrainData, class_weights
from engine.build import build_trainer
from engine.plan import Inputs
from engine.precision.policy import Precision
from engine.train.loss import StepWrapper
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.log import Log


def build_trial(
    config: Config, process: Process, model: nn.Module, data: TrainData, log: Log, wrappers: Sequence[StepWrapper] = ()
) -> Trainer:
    """Build a trainer as in a run, but without a checkpoint and without evaluations."""
    inputs, loss_weights = inputs_of_trial(config, process), class_weights(config, data.image_set)
    return build_trainer(inputs, loss_weights, model, data, log, wrappers)


def inputs_of_trial(config: Config, process: Process) -> Inputs:
    """Return the inputs of a plan without a checkpoint."""
    return Inputs(LoadedConfig(config, {}, [], []), process, Precision(config, process.device))
