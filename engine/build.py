"""Builds the parts of a run: the image sets and their cache, the model, and the trainer with its state."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from configs.checks import CUDA_GRAPH_MODES
from configs.schema import Config
from datasets import (
    CacheProgress,
    Normalize,
    OpenedData,
    TrainData,
    build_preparation,
    build_train_data,
    open_data,
)
from datasets.opening import PartsToRead
from engine.parallel import choose_parallel, is_sharded
from engine.plan import Inputs, Plan, StepPlan, TrainPlan
from engine.precision import Precision, set_matmul
from engine.session import Session
from engine.tasks import find_task
from engine.train.clipping import Clipping
from engine.train.clock import Clock
from engine.train.computing import ComputingModel
from engine.train.counters import Counters
from engine.train.loss import build_loss
from engine.train.optimizers import build_optimizer
from engine.train.schedule import Schedule
from engine.train.trainer import Trainer
from models import add_adapters, build_model
from models.transforms import choose_transforms
from utils.distributed import Process
from utils.errors import ConfigError
from utils.host import keep_freed_memory
from utils.log import Log
from utils.seed import make_deterministic
from utils.torch_internals import import_compiler

if TYPE_CHECKING:
    from engine.train.distillation import Distillation


def open_data_of_run(
    inputs: Inputs, parts: PartsToRead, session: Session, signal: Callable[[], int] = lambda: 0
) -> OpenedData:
    """Open the data, cached if DATA.CACHE is set. `signal`: the number of a pending stop signal, or 0. Collective."""
    config, process, log = inputs.config, session.process, session.log
    cache = CacheProgress(log.say, log.warn, signal, may_build=process.local_rank == 0)
    return open_data(config, parts, inputs.prior, process, say=log.say, output=config.SAVE, cache=cache)


def prepare_torch(config: Config, process: Process, log: Log) -> None:
    """Set up torch for DETERMINISTIC and COMPILE before it computes anything."""
    if config.DETERMINISTIC:
        make_deterministic()
    if config.COMPILE and not config.EVAL:
        from models.compilation import prepare_compiler

        log.say(*prepare_compiler(os.environ, process.num_cores))
        import_compiler()


def build(plan: TrainPlan, log: Log) -> Trainer:
    """Build the trainer of a run at step 0, including its model and data."""
    model = make_model(plan, log)
    data = build_train_data(plan.config, plan.train_set, plan.process, plan.order)
    trainer = build_trainer(plan.step_plan, model, data, log)
    trainer.before = {} if plan.scores_start else None
    return trainer


def make_model(plan: Plan, log: Log) -> nn.Module:
    """Build the model with random or pretrained weights, on the device, or on the host if FSDP will shard it."""
    process, config = plan.process, plan.config
    torch.manual_seed(config.SEED)
    model = build_model(config, plan.num_classes)
    log.say(*process.after_first(lambda: plan.load_weights(model)))
    add_adapters(model, config)  # MODEL.LORA; changes the model in place
    # In training, FSDP moves the model to the device block by block (Parallel.place).
    return model if is_sharded(config, process) and not config.EVAL else model.to(process.device)


def find_distillation(plan: StepPlan, log: Log) -> "Distillation | None":
    """Return the distillation that the settings ask for, or None. Collective."""
    if plan.config.TRAIN.DISTILLATION_TYPE == "none":
        return None
    from engine.train.distillation import make_distillation

    return make_distillation(plan.config, plan.process, log, plan.num_classes, plan.classes)


def build_trainer(plan: StepPlan, model: nn.Module, data: TrainData, log: Log) -> Trainer:
    """Build a trainer at step 0. The model is on its device, except with fsdp2, where Parallel.place moves it.

    The order matters. Transforms exchange modules, so the average is copied after them. FSDP shards model and average
    before the average chooses the tensors that it follows. DDP wraps the compiled model. The optimizer gets the weights
    that this process has in the end.
    """
    config, process, precision, task = plan.config, plan.process, plan.precision, find_task(plan.config)
    if distillation := find_distillation(plan, log):
        distillation.change_model(model)
    set_matmul(config.PRECISION.MATMUL)
    keep_freed_memory(process.device)
    parallel = choose_parallel(config, process, precision.half)
    transforms = choose_transforms(config, process.device, precision.half, training=True)
    log.say(*transforms.apply(model))
    ema = None
    if config.TRAIN.MODEL_EMA:
        from engine.train.ema import Ema

        ema = Ema(model, config.TRAIN, parallel)
    parallel.place(model, *([ema.model] if ema else []))
    if ema:
        ema.follow(model, parallel)
    computing = computing_model(model, precision)
    compute_model = computing.model.train()
    if config.COMPILE:
        from models.compilation import compile_model

        for compiled in [compute_model, ema.model] if ema else [compute_model]:  # the EMA shares the compiled graphs
            compile_model(compiled, config)
    accumulates = data.order.num_micro_batches(0) > 1
    if accumulates and config.COMPILE in CUDA_GRAPH_MODES:
        raise ConfigError(
            f"COMPILE is {config.COMPILE}, whose CUDA graphs cannot accumulate gradients, but an update is "
            f"{data.order.describe_split()}: use -compile true, or the same number of processes as before"
        )
    replica = parallel.wrap(compute_model, accumulates)
    local = parallel.parameters(model)
    parameters = [parameter for parameter in local.values() if parameter.requires_grad]
    schedule = Schedule(config.TRAIN, data.steps_per_epoch, data.global_batch)
    optimizer = build_optimizer(config.TRAIN, model, local, schedule.base)
    parallel.track_optimizer(optimizer)
    normalize = Normalize(config.DATA, parameters[0].dtype).to(process.device)
    prepare = build_preparation(config, normalize, is_compiled=config.COMPILE and process.device.type != "cpu")
    loss = build_loss(config, plan.class_weights, process.device)
    if distillation:
        prepare, loss = distillation.wrap(prepare, loss, precision)
    return Trainer(
        config=config,
        task=task,
        process=process,
        data=data,
        model=model,
        computing=computing,
        replica=replica,
        transforms=transforms,
        precision=precision,
        parallel=parallel,
        optimizer=optimizer,
        parameters=parameters,
        clipping=Clipping(config.TRAIN, local.values()),
        schedule=schedule,
        loss=loss,
        prepare=prepare,
        ema=ema,
        counters=Counters(process.device, has_classes=config.task.has_classes),
        clock=Clock.on(process.device, is_traced=process.is_first and config.PROFILE is not None),
    )


def computing_model(model: nn.Module, precision: Precision) -> ComputingModel:
    """Return the model that computes the updates of a trained model."""
    if not precision.is_naive:
        return ComputingModel(model)
    from engine.half_copy import HalfCopy

    return HalfCopy(model, precision.half)
