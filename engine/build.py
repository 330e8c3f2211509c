"""Builds a trainer from its parts, in the order of their dependencies."""

from torch import nn

from configs.schema import Config
from datasets import Normalize, TrainData, build_preparation, class_weights
from engine.parallel.strategy import choose_parallel
from engine.precision.policy import Precision, set_matmul
from engine.train.counters import Counters
from engine.train.ema import Ema
from engine.train.loss import DistillationLoss, build_loss
from engine.train.optim.clipping import Clipping
from engine.train.optim.factory import build_optimizer
from engine.train.schedule import Schedule
from engine.train.teacher import TaughtPreparation
from engine.train.trainer import Trainer
from models.compilation import compile_model
from models.teacher import Teacher, use_both_heads
from models.transforms import choose_transforms
from utils.distributed import Process
from utils.host import keep_freed_memory
from utils.log import Log


def build_trainer(
    config: Config, model: nn.Module, data: TrainData, process: Process, log: Log, teacher: Teacher | None = None
) -> Trainer:
    """A trainer for this model at step 0. The model is on its device, unless fsdp2 moves it there block by block."""
    use_both_heads(model, teacher is not None)  # before it is copied
    precision = Precision(config, process.device)
    set_matmul(config.PRECISION.MATMUL)
    keep_freed_memory(process.device)
    parallel = choose_parallel(config, process, precision.half)
    transforms = choose_transforms(config, process.device, precision.half, training=True)
    for line in transforms.apply(model):
        log.say(line)
    ema = Ema(model, config.TRAIN) if config.TRAIN.MODEL_EMA else None
    parallel.place(model, *([ema.model] if ema else []))
    if ema:
        ema.follow(model, parallel)
    computing = precision.computing_model(model)
    compute_model = computing.model.train()
    if config.COMPILE:
        for each in [compute_model, ema.model] if ema else [compute_model]:  # which share their graphs
            compile_model(each, config)
    replica = parallel.wrap(compute_model, accumulates=data.order.num_micro_batches(0) > 1)
    local = parallel.parameters(model)
    parameters = [parameter for parameter in local.values() if parameter.requires_grad]
    schedule = Schedule(config.TRAIN, data.steps_per_epoch, data.global_batch)
    optimizer = build_optimizer(config.TRAIN, model, local, schedule.base)
    parallel.track_optimizer(optimizer)
    normalize = Normalize(config.DATA, parameters[0].dtype).to(process.device)
    prepare = build_preparation(config, normalize, is_compiled=config.COMPILE and process.device.type != "cpu")
    loss = build_loss(config, class_weights(config, data.image_set), process.device)
    if teacher:
        prepare, loss = TaughtPreparation(prepare, teacher, precision), DistillationLoss(loss, config.TRAIN)
    return Trainer(
        config,
        process,
        data,
        model,
        computing,
        replica,
        transforms,
        precision,
        parallel,
        optimizer,
        parameters,
        Clipping(config.TRAIN, model, local),
        schedule,
        loss,
        prepare,
        ema,
        Counters(process.device),
    )
