"""Weight files as other programs write them, harmless and malicious, for the tests to read."""

import builtins
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from configs.schema import Config, Data, Model
from configs.values import flatten
from models import build_model
from models.weights.record import preprocessing_of
from models.weights.torch_files import to_safetensors
from utils import VERSION

WIDTH, DEPTH, HEADS, CLASSES = 24, 2, 3, 10
FACTOR = 5  # of the weights that write_run_weights draws


def vit(num_classes=CLASSES, image_size=32, patch_size=8, channels=3, **model):
    fields = {"PATCH_SIZE": patch_size, "EMBED_DIM": WIDTH, "DEPTH": DEPTH, "NUM_HEADS": HEADS} | model
    return build_model(
        Config(DATA=Data(IMAGE_SIZE=image_size, IMAGE_CHANNELS=channels), MODEL=Model(**fields)), num_classes
    )


def timm_model(name, num_classes=CLASSES, image_size=32):
    return build_model(Config(DATA=Data(IMAGE_SIZE=image_size), MODEL=Model(TYPE="timm", NAME=name)), num_classes)


def write_run_weights(
    path: Path, dataset: str = "imagefolder", more: dict | None = None, split: dict | None = None
) -> Path:
    """Write random weights of a small ViT for images of 32 x 32 and 200 classes, as a run of halfstep exports them.

    `more`: settings that the file has besides those of today; `split`: which images the run held out.
    """
    config = Config(
        DATA=Data(DATASET=dataset, IMAGE_SIZE=32, CROP_PCT=1.0),
        MODEL=Model(PATCH_SIZE=4, EMBED_DIM=96, DEPTH=4, NUM_HEADS=3),
    )
    classes = [f"kind {number}" for number in range(200)]
    torch.manual_seed(0)
    state = build_model(config, len(classes)).state_dict()
    # Larger than usual at the start of a training, so that the features are far from linear, as trained ones are.
    state = {name: tensor * FACTOR if tensor.ndim > 1 else tensor for name, tensor in state.items()}
    settings = flatten(config) | (more or {})
    facts = {"arch": "vit", "class_names": classes, "config": settings, "data": preprocessing_of(config.DATA)}
    facts |= {"split": split} if split else {}
    path.write_bytes(to_safetensors(state, facts | {"weights": "state_dict", "halfstep_version": VERSION}))
    return path


def random_weights() -> dict[str, torch.Tensor]:
    """Return weights with no two equal numbers, so that a swap or a missing transpose is noticed."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in vit().state_dict().items()}


def assert_same(found: dict, expected: dict) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def saved(content, path: Path, **how) -> Path:
    torch.save(content, path, **how)
    return path


def google_arrays(weights: dict, prefix: str) -> dict[str, np.ndarray]:
    """Convert to the layout of Google's vision_transformer: kernels as [in, out], attention split into heads."""
    arrays = {
        "cls": weights["cls_token"],
        "embedding/kernel": weights["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": weights["patch_embed.proj.bias"],
        "Transformer/posembed_input/pos_embedding": weights["pos_embed"],
        "Transformer/encoder_norm/scale": weights["norm.weight"],
        "Transformer/encoder_norm/bias": weights["norm.bias"],
        "head/kernel": weights["head.weight"].T,
        "head/bias": weights["head.bias"],
    }
    width, depth = len(weights["norm.bias"]), sum(name.endswith("norm1.bias") for name in weights)
    for block in range(depth):
        ours, theirs = f"blocks.{block}.", f"Transformer/encoderblock_{block}/"
        attention = f"{theirs}MultiHeadDotProductAttention_1/"
        for number, part in enumerate(("query", "key", "value")):
            rows = slice(number * width, (number + 1) * width)
            kernel = weights[f"{ours}attn.qkv.weight"][rows].T
            arrays[f"{attention}{part}/kernel"] = kernel.reshape(width, HEADS, width // HEADS)
            arrays[f"{attention}{part}/bias"] = weights[f"{ours}attn.qkv.bias"][rows].reshape(HEADS, width // HEADS)
        arrays[f"{attention}out/kernel"] = weights[f"{ours}attn.proj.weight"].T.reshape(HEADS, width // HEADS, width)
        arrays[f"{attention}out/bias"] = weights[f"{ours}attn.proj.bias"]
        for norm, name in (("norm1", "LayerNorm_0"), ("norm2", "LayerNorm_2")):
            arrays[f"{theirs}{name}/scale"] = weights[f"{ours}{norm}.weight"]
            arrays[f"{theirs}{name}/bias"] = weights[f"{ours}{norm}.bias"]
        for layer, name in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
            arrays[f"{theirs}MlpBlock_3/{name}/kernel"] = weights[f"{ours}mlp.{layer}.weight"].T
            arrays[f"{theirs}MlpBlock_3/{name}/bias"] = weights[f"{ours}mlp.{layer}.bias"]
    return {prefix + name: tensor.numpy() for name, tensor in arrays.items()}


PADDLE_2022 = {
    "cls_token": "cls_token",
    "pos_embed": "position_embedding",
    "patch_embed.proj": "patch_embedding.patch_embedding",
    "blocks": "encoder.layers",
    "norm": "encoder.encoder_norm",
    "head": "classifier",
}
PADDLE_2021 = PADDLE_2022 | {
    "cls_token": "patch_embedding.cls_token",
    "pos_embed": "patch_embedding.position_embeddings",
}
PADDLE_OLDEST = {
    "cls_token": "transformer.embeddings.cls_token",
    "pos_embed": "transformer.embeddings.position_embeddings",
    "patch_embed.proj": "transformer.embeddings.patch_embeddings",
    "blocks": "transformer.encoder.layers",
    "norm": "transformer.encoder.encoder_norm",
    "head": "classifier",
}
DEIT_2021 = {
    "cls_token": "class_token",
    "pos_embed": "pos_embed",
    "patch_embed.proj": "patch_embed.proj",
    "blocks": "layers",
    "norm": "norm",
    "head": "head",
}
YEARS = {"2022": PADDLE_2022, "2021": PADDLE_2021, "oldest": PADDLE_OLDEST, "deit_2021": DEIT_2021}
IN_BLOCK = {"norm1": "attn_norm", "norm2": "mlp_norm", "attn.proj": "attn.out"}
IS_LINEAR = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight", "head.weight")


def paddle_arrays(weights: dict, names: dict) -> dict[str, np.ndarray]:
    arrays = {}
    for name, tensor in weights.items():
        whole = next(timm_name for timm_name in names if name == timm_name or name.startswith(f"{timm_name}."))
        rest = name.removeprefix(whole)
        if names is not DEIT_2021:
            for ours, theirs in IN_BLOCK.items():
                rest = rest.replace(f".{ours}.", f".{theirs}.")
        arrays[names[whole] + rest] = (tensor.T if name.endswith(IS_LINEAR) else tensor).contiguous().numpy()
    return arrays


class PaddleTensor:
    """A tensor pickled as paddle.save does: in most versions (name, array), in some eval('data', {'data': array})."""

    def __init__(self, array, by_eval=False):
        self.how = (eval, ("data", {"data": array})) if by_eval else (tuple, (("linear_0.w_0", array),))

    def __reduce__(self):
        return self.how


def training_file(arrays: dict, by_eval=False, key="model") -> dict:
    tensors = OrderedDict((name, PaddleTensor(array, by_eval)) for name, array in arrays.items())
    moments = {
        "linear_0.w_0_moment1_0": PaddleTensor(np.ones(3, np.float32)),
        "LR_Scheduler": {"last_lr": np.float64(0.1)},
    }
    return {key: tensors, "optimizer": moments, "epoch": 7, "lr_scheduler": {"last_epoch": 7}, "amp_grad_scaler": {}}


PADDLE_LAYOUTS = {
    "flat": lambda arrays: arrays | {"StructuredToParameterName@@": {name: "linear_0.w_0" for name in arrays}},
    "training": training_file,
    "training_by_eval": lambda arrays: training_file(arrays, by_eval=True),
    "training_with_mean": lambda arrays: {"model": {}} | training_file(arrays, key="model_ema"),
}


def pickled(content, path: Path, protocol=4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


class Payload:
    """An object that calls a function when it is unpickled, as a malicious file would."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def payloads(marker: Path) -> dict:
    touch = f"open({str(marker)!r}, 'w').close()"
    system = Payload(os.system, f"touch {marker}")
    objects = np.empty(1, dtype=object)
    objects[0] = system
    return {
        "system": system,
        "eval": Payload(eval, touch),
        "eval_like_paddle": Payload(eval, "data", {"data": system}),
        "eval_with_names": Payload(eval, touch, {"data": np.ones(1)}),
        "exec": Payload(builtins.exec, touch),
        "getattr": Payload(getattr, Payload(__import__, "os"), "system"),
        "object_array": objects,
    }


PAYLOADS = list(payloads(Path("marker")))


def transformers_weights(weights: dict) -> dict[str, torch.Tensor]:
    """Convert to the layout of ViTForImageClassification in transformers: separate queries, keys and values."""
    names = {
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
        "blocks.": "encoder.layer.",
        ".norm1.": ".layernorm_before.",
        ".norm2.": ".layernorm_after.",
        ".attn.proj.": ".attention.output.dense.",
        ".mlp.fc1.": ".intermediate.dense.",
        ".mlp.fc2.": ".output.dense.",
    }
    state = {}
    for name, tensor in weights.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        prefix = "" if name.startswith("head.") else "vit."
        name = prefix + name.replace("head.", "classifier.").replace("norm.", "layernorm.")
        if ".attn.qkv." in name:
            for part, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                state[name.replace(".attn.qkv.", f".attention.attention.{part}.")] = rows.clone()
        else:
            state[name] = tensor
    return state
