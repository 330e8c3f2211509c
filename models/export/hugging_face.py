"""Writes a folder in Hugging Face's format for timm, and for transformers if the model is a plain ViT or DeiT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.export.model_card import model_card
from models.export.plain_vit import is_distilled, is_plain
from models.export.subject import Subject, check_weights
from models.weights.files import read_weights
from models.weights.metadata import RESAMPLE, USUAL
from models.weights.names import TRANSFORMERS_KINDS, to_transformers
from models.weights.torch_files import to_safetensors
from utils.errors import ConfigError

FOR_TRANSFORMERS = "transformers.safetensors"  # config.json names this file; timm reads model.safetensors


def refuse_old_timm(subject: Subject) -> None:
    """Raise ConfigError if timm is too old to read a .safetensors file from `local-dir:`."""
    import timm

    if tuple(map(int, timm.__version__.split(".")[:3])) < (1, 0, 26):
        raise ConfigError(
            f"-to hf needs timm 1.0.26 or newer, but {timm.__version__} is installed; pip install -U timm"
        )


def write(subject: Subject, path: Path) -> None:
    path.mkdir()
    metadata = {"format": "pt"} | {name: json.dumps(fact) for name, fact in subject.record.items()}
    (path / "model.safetensors").write_bytes(to_safetensors(subject.state, metadata))
    contents = {"config.json": timm_config(subject)}
    if is_plain(subject):  # only timm can read other models
        contents["config.json"] |= transformers_config(subject)
        contents["preprocessor_config.json"] = image_processor(subject)
        (path / FOR_TRANSFORMERS).write_bytes(to_safetensors(to_transformers(subject.state), {"format": "pt"}))
    for name, content in contents.items():
        if content:
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (path / name).write_text(text + "\n", encoding="utf-8")
    (path / "README.md").write_text(model_card(subject), encoding="utf-8")


def load(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    """Load the folder with timm, and check transformers.safetensors, if it exists, with halfstep's own reader.

    The transformers library cannot be imported here, because it needs another package called `datasets`.
    """
    import timm

    if (path / FOR_TRANSFORMERS).exists():
        check_weights(read_weights(path / FOR_TRANSFORMERS).state, subject.state)
    with torch.random.fork_rng(devices=[]):
        return timm.create_model(f"local-dir:{path}", pretrained=True).eval()


def timm_config(subject: Subject) -> dict[str, Any]:
    """Return config.json as timm reads it."""
    settings, model = subject.config.MODEL, subject.model
    known = getattr(model, "pretrained_cfg", None) or {"first_conv": "patch_embed.proj", "classifier": "head"}
    layers = {name: known[name] for name in ("first_conv", "classifier", "pool_size") if known.get(name)}
    _, side, _ = subject.data["input_size"]
    has_fixed_size = settings.TYPE == "vit" or bool(known.get("fixed_input_size"))
    arguments = dict(settings.KWARGS)
    if has_fixed_size:
        arguments["img_size"] = side
    architecture = settings.NAME
    if settings.TYPE == "vit":
        architecture = f"vit_{USUAL.get(settings.EMBED_DIM, ['base'])[0]}_patch16_224"
        arguments |= {
            "patch_size": settings.PATCH_SIZE,
            "embed_dim": settings.EMBED_DIM,
            "depth": settings.DEPTH,
            "num_heads": settings.NUM_HEADS,
            "mlp_ratio": settings.MLP_RATIO,
            "qkv_bias": settings.QKV_BIAS,
            "pos_embed": "learn" if settings.POS_EMBED == "sincos2d" else settings.POS_EMBED,
        }
    if subject.config.DATA.TOKENS:
        from extras.native_aspect.models import arguments_of

        architecture, arguments = arguments_of(subject.config)
        has_fixed_size = False
    facts = layers | subject.data | {"num_classes": model.num_classes, "fixed_input_size": has_fixed_size}
    return {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "label_names": subject.labels,
        "model_args": arguments,
        "pretrained_cfg": facts | {"custom_load": False},
    }


def transformers_config(subject: Subject) -> dict[str, Any]:
    """Return the entries of config.json that transformers reads. Versions before 4.53 ignore `transformers_weights`."""
    model, distilled = subject.model, is_distilled(subject)
    channels, side, _ = subject.data["input_size"]
    has_several_labels = subject.config.DATA.has_several_labels
    return {
        "model_type": TRANSFORMERS_KINDS[distilled],
        "architectures": [("ViTForImageClassification", "DeiTForImageClassificationWithTeacher")[distilled]],
        "transformers_weights": FOR_TRANSFORMERS,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": model.blocks[0].attn.num_heads,
        "intermediate_size": model.blocks[0].mlp.fc1.out_features,
        "hidden_act": "gelu",
        "layer_norm_eps": model.norm.eps,
        "image_size": side,
        "patch_size": model.patch_embed.patch_size[0],
        "num_channels": channels,
        "qkv_bias": "blocks.0.attn.qkv.bias" in subject.state,
        "id2label": {str(number): name for number, name in enumerate(subject.labels)},
        "label2id": {name: number for number, name in enumerate(subject.labels)},
        "problem_type": f"{'multi' if has_several_labels else 'single'}_label_classification",
    }


def image_processor(subject: Subject) -> dict[str, Any] | None:
    """Return preprocessor_config.json, or None if no image processor of transformers supports this preprocessing."""
    data, (channels, side, _) = subject.data, subject.data["input_size"]
    resized = int(side / data["crop_pct"])
    kinds = {"center": ("BitImageProcessor", {"shortest_edge": resized})}
    kinds["squash"] = ("DeiTImageProcessor", {"height": resized, "width": resized})
    if data["crop_mode"] not in kinds or resized < side:
        return None
    kind, size = kinds[data["crop_mode"]]
    return {
        "image_processor_type": kind,
        "do_resize": True,
        "size": size,
        "resample": {name: number for number, name in RESAMPLE.items()}[data["interpolation"]],
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": data["mean"],
        "image_std": data["std"],
        "do_convert_rgb": channels == 3,
    }
