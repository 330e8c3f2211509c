"""MODEL.KWARGS: checks of the arguments for timm's constructors, and error messages if timm refuses them."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from configs.schema import VIT_FIELDS, Model
from utils.errors import ConfigError, did_you_mean
from utils.host import free_host_memory
from utils.text import format_bytes

_WEIGHTS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path")
_OF_ALL = {
    "img_size": "DATA.IMAGE_SIZE",
    "in_chans": "DATA.IMAGE_CHANNELS",
    "num_classes": "MODEL.NUM_CLASSES",
    "attn_drop_rate": "MODEL.ATTENTION_DROPOUT",
    "drop_path_rate": "MODEL.DROPPATH",
}
SETTING_OF = _OF_ALL | {"device": "DEVICE", "dtype": "AMP"} | dict.fromkeys(_WEIGHTS, "MODEL.PRETRAINED")
SETTING_BY_TYPE = {
    "vit": {name.lower(): f"MODEL.{name}" for name in VIT_FIELDS}
    | dict.fromkeys(("pos_drop_rate", "proj_drop_rate"), "MODEL.DROPOUT"),
    "timm": {"drop_rate": "MODEL.DROPOUT"},
}
OF_A_MODEL = _OF_ALL | SETTING_BY_TYPE["timm"]  # arguments whose value comes from a setting
# Arguments that turn the model into something other than a classifier, or that control how timm finds or scripts it.
NOT_TAKEN = "features_only out_indices feature_cfg feature_cls scriptable exportable no_jit cache_dir".split()
MOST_TENSORS = 5_000  # the most tensors that a model may have; timm's models have far fewer
# Arguments for the number of layers of a model or a stage, and the most layers allowed, as for MODEL.DEPTH.
LAYERS, MOST_LAYERS = ("depth", "depths", "layers", "num_layers"), 1_000


def check_kwargs(model: Model) -> None:
    """Raise ConfigError for arguments that have their own setting, add too many layers, or do not suit a classifier."""
    settings = SETTING_OF | SETTING_BY_TYPE[model.TYPE]
    for name, value in model.KWARGS.items():
        if name in settings:
            raise ConfigError(f"MODEL.KWARGS.{name}: {value!r}; use the setting {settings[name]} instead")
        if name in LAYERS and any(int(each) > MOST_LAYERS for each in re.findall(r"\d+", repr(value)[:MOST_LAYERS])):
            raise ConfigError(
                f"MODEL.KWARGS.{name}: {value!r} is too large: at most {MOST_LAYERS:,} layers are allowed; lower it"
            )
        if name in NOT_TAKEN or (name, value) == ("global_pool", ""):
            raise ConfigError(f"MODEL.KWARGS.{name}: {value!r} cannot be used to train a classifier; remove it")


def refuse_unknown(model: Model, name: str, constructor: Callable) -> None:
    """Raise ConfigError for an argument that this constructor does not have."""
    taken = inspect.signature(constructor).parameters.keys() - {"self"}
    offered = sorted(taken - SETTING_OF.keys() - SETTING_BY_TYPE[model.TYPE].keys())
    near = did_you_mean(name, offered) or f"; it has {', '.join(offered)}"
    raise ConfigError(f"MODEL.KWARGS.{name}: timm's {constructor.__name__} has no such argument{near}")


@contextlib.contextmanager
def refusing_values(model: Model) -> Iterator[None]:
    """Turn errors of timm's constructor into ConfigError if MODEL.KWARGS has arguments.

    A weights file may contain MODEL.KWARGS too, so the constructor is stopped before huge weights fill the memory.
    """
    counts, most = [0, 0], free_host_memory() // 2  # [tensors, bytes] so far, and the most bytes allowed

    def count(module: nn.Module, name: str, weight: nn.Parameter) -> None:  # called before the weight is initialised
        counts[:] = counts[0] + 1, counts[1] + (0 if weight.is_meta else weight.nbytes)
        if counts[0] > MOST_TENSORS or counts[1] > most:
            allocated = f"{counts[0]:,} tensors and {format_bytes(counts[1])} of weights already"
            raise ValueError(f"{allocated}; at most {MOST_TENSORS:,} tensors and {format_bytes(most)} are allowed")

    hook = register_module_parameter_registration_hook(count) if model.KWARGS else contextlib.nullcontext()
    try:
        with hook:
            yield
    except ConfigError:
        raise
    except Exception as error:  # timm checks few arguments, so a wrong value may cause any error where it is used
        if not model.KWARGS:
            raise
        values = ", ".join(f"{name} {value!r}" for name, value in model.KWARGS.items())
        why = str(error).split("\n")[0]
        raise ConfigError(
            f"MODEL.KWARGS: timm cannot build this model with {values} ({type(error).__name__}{why and f': {why}'}); "
            "MODEL.KWARGS=null removes them all"
        ) from None
