"""Checks the settings of a run that starts from trained weights: learning rate, and file for its kind of model."""

import math

from torch import nn

from configs.schema import Config
from configs.tables import TORCH_OPTIMIZERS
from engine.settings_of_weights import fine_tuning_file
from engine.train.schedule import batch_factor
from models.parts import statistics_of
from utils.text import counted

# The highest learning rates for fine-tuning, relative to the highest usual rate from scratch. With layer decay the
# limit is higher, because layers near the input get only a small part of the rate. Models with BatchNorm tolerate more
# if its statistics are frozen.
OF_TRAINED, WITH_LAYER_DECAY, AND_FROZEN_STATISTICS = 0.5, 2.5, 5.0
USUAL_LAYER_DECAY = 0.75


def judge_rate(config: Config, global_batch: int, network: nn.Module | None) -> list[tuple[str, str]]:
    """Compare the highest learning rate with the limit that keeps trained weights useful. Return a text and a remedy.

    The remedy is "" if the rate is within the limit. Return [] if the limit is unknown or does not apply, as in a
    resumed run, or if only a few weights are trained. If the network has BatchNorm, but the layer decay is that of the
    file for models without it, the text says this instead. The limit grows with the square root of the batch size, as
    is usual for Adam and similar optimizers.
    """
    settings, model = config.TRAIN, config.MODEL
    has_decay = settings.LAYER_DECAY is not None and settings.LAYER_DECAY < 1
    if not (model.PRETRAINED or config.MODEL.RESUME):
        methods = {"MODEL.FREEZE": model.FREEZE, "MODEL.LORA": model.LORA.RANK, "TRAIN.LAYER_DECAY": has_decay}
        meant = [name for name, is_set in methods.items() if is_set]
        text = f"the run starts from random weights, but only trained weights benefit from {', '.join(meant)}"
        return [(text, "name trained weights with -pretrained")] if meant else []
    if config.MODEL.RESUME or model.FREEZE or model.LORA.RANK:
        return []
    has_batchnorm = network is not None and bool(statistics_of(network))
    file = f"configs/{fine_tuning_file(config, has_batchnorm)}.yaml"
    if has_batchnorm and settings.LAYER_DECAY == USUAL_LAYER_DECAY and not model.FROZEN_STATISTICS:
        text = f"TRAIN.LAYER_DECAY {USUAL_LAYER_DECAY} without MODEL.FROZEN_STATISTICS suits models without BatchNorm"
        return [(f"{text}, but this model has it", f"use -cfg {file}")]
    if settings.OPTIMIZER.NAME not in TORCH_OPTIMIZERS:
        return []
    _, from_scratch = TORCH_OPTIMIZERS[settings.OPTIMIZER.NAME].usual_rates
    rate = settings.BASE_LR * batch_factor(settings, global_batch)
    scale = math.sqrt(global_batch / 256) * from_scratch
    factor = AND_FROZEN_STATISTICS if model.FROZEN_STATISTICS else WITH_LAYER_DECAY
    limit = scale * (factor if has_decay else OF_TRAINED)
    how = f"with TRAIN.LAYER_DECAY {settings.LAYER_DECAY:g}" if has_decay else "without TRAIN.LAYER_DECAY"
    text = (
        f"the learning rate is {rate:.3g} for {counted(global_batch, 'image')} per update; "
        f"trained weights tolerate up to {limit:.2g} {how}"
    )
    if rate <= limit:
        return [(text, "")]
    remedy = f"a rate for training from scratch destroys trained weights: use -cfg {file}"
    if not has_batchnorm:
        base = settings.BASE_LR / rate * scale * OF_TRAINED
        remedy += f", or -opts TRAIN.BASE_LR={base:.1g} TRAIN.LAYER_DECAY={USUAL_LAYER_DECAY}"
    return [(text, remedy)]
