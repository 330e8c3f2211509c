"""Builds what a plan says: the data with its cache, the model, and the trainer with its parts."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from configs.combinations import CUDA_GRAPH_MODES
from configs.schema import Config
from datasets import (
    CacheProgress,
    Normalize,
    SavedData,
    TrainData,
    build_preparation,
    cache_image_sets,
    load_image_sets,
)
from engine.parallel import choose_parallel, is_sharded
from engine.plan import ImageSets, Plan
from engine.precision.loss_scale import Clipping
from engine.precision.policy import set_matmul
from engine.session import Session
from engine.train.counters import Counters
from engine.train.ema import Ema
from engine.train.guards import choose_guard
from engine.train.loss import StepWrapper, build_loss
from engine.train.optimizers import build_optimizer
from engine.train.schedule import Schedule
from engine.train.trainer import Trainer
from models import adapt, build_model
from models.compilation import compile_model
from models.transforms import choose_transforms
from utils.distributed import Process
from utils.errors import ConfigError
from utils.host import keep_freed_memory
from utils.log import Log


def load_data_sets(
    config: Config, kept: SavedData | None, session: Session, signal: Callable[[], int] = lambda: 0
) -> ImageSets:
    """The image sets, cached if DATA.CACHE is set. `signal`: number of a pending stop signal, or 0."""
    process, log = session.process, session.log
    progress = CacheProgress(log.say, log.warn, signal, may_build=process.local_rank == 0)
    return process.after_first(
        lambda: cache_image_sets(config, load_image_sets(config, log.say, kept, config.SAVE), progress)
    )


def make_model(session: Session, plan: Plan) -> nn.Module:
    """The model on this process's device, with its initial weights unless the run resumes."""
    process, log, config = session.process, session.log, plan.config
    torch.manual_seed(config.SEED)
    model = build_model(config, plan.num_classes)
    log.say(*process.after_first(lambda: plan.load_weights(model)))
    adapt(model, config)
    # FSDP moves a model to the device block by block.
    return model if is_sharded(config, process) and not config.START.EVAL else model.to(process.device)


def make_wrappers(
    config: Config, process: Process, log: Log, num_classes: int, classes: Sequence[str] | None = None
) -> list[StepWrapper]:
    """Return what wraps the preparation and the loss of a step; each one wraps those before it. Collective.

    `classes`: names of the data's classes; None for trials, for which random weights will do.
    """
    wrappers: list[StepWrapper] = []
    if config.TRAIN.DISTILLATION_TYPE != "none":
        from extras.distillation.step import make_distillation  # extra: distillation

        wrappers.append(make_distillation(config, process, log, num_classes, classes))
    return wrappers


def build_trainer(
    plan: Plan, model: nn.Module, data: TrainData, log: Log, wrappers: Sequence[StepWrapper] = ()
) -> Trainer:
    """A trainer for this model at step 0. The model is on its device, unless fsdp2 moves it there block by block."""
    for wrapper in wrappers:
        wrapper.change_model(model)
    config, process, precision = plan.config, plan.process, plan.precision
    set_matmul(config.PRECISION.MATMUL)
    keep_freed_memory(process.device)
    parallel = choose_parallel(config, process, precision.half)
    transforms = choose_transforms(config, process.device, precision.half, training=True)
    log.say(*transforms.apply(model))
    ema = Ema(model, config.TRAIN, parallel) if config.TRAIN.MODEL_EMA else None
    parallel.place(model, *([ema.model] if ema else []))
    if ema:
        ema.follow(model, parallel)
    computing = precision.computing_model(model)
    compute_model = computing.model.train()
    if config.COMPILE:
        for each in [compute_model, ema.model] if ema else [compute_model]:  # which share their graphs
            compile_model(each, config)
    accumulates = data.order.num_micro_batches(0) > 1
    if accumulates and config.COMPILE in CUDA_GRAPH_MODES:
        raise ConfigError(
            f"COMPILE is {config.COMPILE}, whose CUDA graphs do not add gradients, and an update is "
            f"{data.order.describe_split()}: use -compile true, or as many processes as before"
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
    for wrapper in wrappers:
        prepare, loss = wrapper.wrap(prepare, loss, precision)
    trainer = Trainer(
        config=config,
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
        clipping=Clipping(config.TRAIN, model, local),
        schedule=schedule,
        loss=loss,
        prepare=prepare,
        ema=ema,
        counters=Counters(process.device),
    )
    trainer.guard = choose_guard(config, trainer, log)
    return trainer
