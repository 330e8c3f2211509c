"""Models that take images at their own aspect ratio, timm's NaFlexVit, and the grids of patches of a batch."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from configs.schema import Config, Data, Model
from datasets.order import Piece
from models.kwargs import check_kwargs, refuse_unknown
from models.timm_models import build_timm
from models.vit import check_patches, sincos2d
from utils.errors import ConfigError
from utils.seed import keyed_rng
from utils.text import counted
from utils.torch_internals import import_timm

# The modules of timm whose models can be built as a NaFlexVit (`use_naflex`), and NaFlexVit's own module.
PLAIN, OWN = ("timm.models.vision_transformer", "timm.models.eva"), "timm.models.naflexvit"


def build_native(config: Config, num_classes: int) -> nn.Module:
    """Return timm's NaFlexVit with these settings and random weights."""
    from timm.models.naflexvit import NaFlexVit

    settings, (native, added) = config.MODEL, _of_vit(config) if config.MODEL.TYPE == "vit" else _of_timm(config)
    try:
        model = build_timm(dataclasses.replace(config, MODEL=native), num_classes, added)
    except (ConfigError, TypeError) as error:
        # A few models have parts that NaFlexVit lacks.
        if "NaFlexVit.__init__() got unexpected" in str(error):
            raise _refusal(config) from None
        raise
    if not isinstance(model, NaFlexVit):
        raise _refusal(config)
    embeds = model.embeds
    _check_patches(config, embeds)
    if settings.TYPE == "vit":
        # Draw as in a plain ViT. For small patches, timm's weights are several times smaller, which costs accuracy.
        embeds.proj.reset_parameters()
    if settings.TYPE == "vit" and settings.POS_EMBED == "sincos2d":
        rows = sincos2d(embeds.pos_embed_grid_size, settings.EMBED_DIM).to(embeds.pos_embed)
        embeds.pos_embed.data.copy_(rows.view(embeds.pos_embed.shape))
        embeds.pos_embed.requires_grad_(False)
    return model


def _check_patches(config: Config, embeds: nn.Module) -> None:
    """Raise ConfigError if patches do not have the form that the readers write."""
    height, width = embeds.patch_size
    if embeds.is_linear and embeds.channels_last and 1 < height == width:
        return
    settings = config.MODEL
    key = "MODEL.PATCH_SIZE" if settings.TYPE == "vit" else "MODEL.KWARGS" if settings.KWARGS else "MODEL.NAME"
    raise ConfigError(
        f"{key}: the patches of {settings.NAME} have {height} x {width} pixels and a "
        f"{'linear' if embeds.is_linear else 'convolutional'} embedding with channels "
        f"{'last' if embeds.channels_last else 'first'}; DATA.TOKENS needs square patches of at least 2 x 2 pixels, a "
        "linear embedding and channels last; change this setting, or set DATA.TOKENS=null"
    )


def arguments_of(config: Config) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments with which timm builds this model."""
    native, added = _of_vit(config) if config.MODEL.TYPE == "vit" else _of_timm(config)
    size = {"img_size": config.DATA.IMAGE_SIZE} if "use_naflex" in added else {}
    return native.NAME, {**native.KWARGS, **added, **size}


def _of_timm(config: Config) -> tuple[Model, dict[str, Any]]:
    """Return the settings and further arguments for building this timm model as a NaFlexVit."""
    from timm.models.naflexvit import NaFlexVitCfg

    timm, settings = import_timm(), config.MODEL
    where = timm.models.model_entrypoint(settings.NAME).__module__ if timm.is_model(settings.NAME) else OWN
    if where not in (*PLAIN, OWN):
        raise _refusal(config)
    check_kwargs(settings)
    if where in PLAIN:
        return settings, {"use_naflex": True}
    fields = {each.name for each in dataclasses.fields(NaFlexVitCfg)}
    for name in settings.KWARGS:
        if name not in fields:
            refuse_unknown(settings, name, NaFlexVitCfg)
    # build_timm tests the model with a square of DATA.IMAGE_SIZE. Padding lets this test pass for any patch size.
    return settings, {"dynamic_img_pad": True}


def _of_vit(config: Config) -> tuple[Model, dict[str, Any]]:
    """Return the settings and further arguments for building a NaFlexVit with the architecture of this plain ViT."""
    settings = config.MODEL
    check_patches(config, settings.PATCH_SIZE)
    check_kwargs(settings)
    arguments = {
        "use_naflex": True,
        "patch_size": settings.PATCH_SIZE,
        "embed_dim": settings.EMBED_DIM,
        "depth": settings.DEPTH,
        "num_heads": settings.NUM_HEADS,
        "mlp_ratio": settings.MLP_RATIO,
        "qkv_bias": settings.QKV_BIAS,
        "pos_embed": "none" if settings.POS_EMBED == "none" else "learned",
        "pos_drop_rate": settings.DROPOUT or 0.0,
        "proj_drop_rate": settings.DROPOUT or 0.0,
        "fix_init": False,  # as in a plain ViT: no smaller weights in later blocks
    }
    model = Model(
        TYPE="timm",
        NAME="vit_base_patch16_224",  # `arguments` override its sizes
        ATTENTION_DROPOUT=settings.ATTENTION_DROPOUT or 0.0,
        DROPPATH=settings.DROPPATH or 0.0,
        KWARGS=settings.KWARGS,
    )
    return model, {name: value for name, value in arguments.items() if name not in settings.KWARGS}


def _refusal(config: Config) -> ConfigError:
    return ConfigError(
        f"MODEL.NAME: {config.MODEL.NAME} cannot take images at their own aspect ratio (DATA.TOKENS is "
        f"{config.DATA.TOKENS}); choose another model, for example naflexvit_base_patch16_gap or vit_small_patch16_224 "
        "(docs/native-aspect.md lists the models), or set DATA.TOKENS=null"
    )


@functools.lru_cache(8)
def _patch_size(model: Model, data: Data) -> int:
    with torch.device("meta"):
        return build_native(Config(DATA=data, MODEL=model), 1).get_patch_size()[0]


def patch_size_of(config: Config) -> int:
    """Return the side of the model's patches in pixels."""
    data = Data(IMAGE_SIZE=config.DATA.IMAGE_SIZE, IMAGE_CHANNELS=config.DATA.IMAGE_CHANNELS, TOKENS=config.DATA.TOKENS)
    return _patch_size(config.MODEL, data)


def image_bytes(config: Config) -> int:
    """Return the bytes per image in the batches with the most patches, including the row with the grid."""
    data = config.DATA
    return (max((data.TOKENS, *data.TRAIN_TOKENS)) + 1) * patch_size_of(config) ** 2 * data.IMAGE_CHANNELS


# --- grids of patches ---


GRID_BYTES = 4  # the last row starts with height and width of the grid, 2 bytes each, little endian


def lengths_of(data: Data) -> Sequence[int]:
    """Return the numbers of patches from which an update draws one."""
    return data.TRAIN_TOKENS or (data.TOKENS,)


def length_of(config: Config, step: int) -> int:
    """Return the number of patches per image in an update. It is the same in every process and micro-batch."""
    lengths = lengths_of(config.DATA)
    return lengths[int(keyed_rng("tokens", config.SEED, step).random() * len(lengths))]


def length_of_piece(config: Config, piece: Piece) -> int:
    """Return the number of patches per image in a piece of training or evaluation."""
    return config.DATA.TOKENS if piece.repeats is None else length_of(config, piece.step)


@functools.lru_cache(1 << 16)
def size_of(height: int, width: int, patch: int, length: int) -> tuple[int, int]:
    """Return the height and width to which timm resizes an image so that it has at most `length` patches."""
    from timm.data.naflex_transforms import get_image_size_for_seq

    try:
        return get_image_size_for_seq((height, width), patch, length)[1]
    except ValueError:  # timm does not shrink an image to less than 1/100,000 of its side
        side = patch * length
        return (side, patch) if height > width else (patch, side)


def new_batch(count: int, length: int, patch: int, channels: int, pinned: bool = False) -> Tensor:
    """Return uninitialized memory for a batch of images with `length` patches."""
    return torch.empty((count, length + 1, patch * patch * channels), dtype=torch.uint8, pin_memory=pinned)


def pack(pixels: Tensor, patch: int, out: Tensor) -> None:
    """Write an image, uint8 [C, H, W] with channels last in memory, to `out`, uint8 [N + 1, P * P * C], in timm's order."""
    channels, rows, columns = pixels.shape[0], pixels.shape[1] // patch, pixels.shape[2] // patch
    count = rows * columns
    patches = pixels.permute(1, 2, 0).view(rows, patch, columns, patch, channels).transpose(1, 2)
    out[:count].view(rows, columns, patch, patch, channels).copy_(patches)
    out[count:].zero_()
    set_grid(out, rows, columns)


def set_grid(images: Tensor, rows: int, columns: int) -> None:
    """Write this grid to an image, uint8 [N + 1, P * P * C], or to all images of a batch."""
    head = [rows % 256, rows // 256, columns % 256, columns // 256]
    images[..., -1, :GRID_BYTES] = torch.tensor(head, dtype=torch.uint8)


def grids_of(batch: Tensor) -> np.ndarray:
    """Return the height and width of each image's grid, int64 [B, 2]. The batch must be on the host."""
    head = batch[:, -1, :GRID_BYTES].numpy().astype(np.int64)
    return head[:, 0::2] + 256 * head[:, 1::2]


def unpack(image: Tensor, grid: Sequence[int], patch: int) -> Tensor:
    """Return an image of a batch, [N, P * P * C] or with more rows, as a view [rows, P, columns, P, C]."""
    rows, columns = grid
    return image[: rows * columns].view(rows, columns, patch, patch, -1).transpose(1, 2)


def patch_of(size: int) -> tuple[int, int]:
    """Return the side and the number of channels, 1 or 3, of a patch with this many values."""
    channels = 1 if math.isqrt(size) ** 2 == size else 3
    return math.isqrt(size // channels), channels


def pictures_of(patches: Tensor, grids: Sequence[Sequence[int]] | None = None) -> list[np.ndarray]:
    """Return the images of a batch as uint8 [H, W, C]. Without `grids`, each image must have its row with the grid."""
    patch, channels = patch_of(patches.shape[2])
    grids = grids_of(patches).tolist() if grids is None else grids
    return [
        unpack(image, grid, patch).reshape(grid[0] * patch, grid[1] * patch, channels).numpy()
        for image, grid in zip(patches, grids, strict=True)
    ]


# --- descriptions ---


WIDE = 2  # an image is wide or tall if its longer side is more than this many times its shorter side
MOST = 2_000  # maximum number of sizes that -check computes; it samples larger data sets


def describe_sequences(config: Config) -> str:
    """Return the log line about the number of patches."""
    patch, data = patch_size_of(config), config.DATA
    text = f"images: own aspect ratio, at most {data.TOKENS:,} patches of {patch} x {patch}"
    if data.TRAIN_TOKENS:
        lengths = ", ".join(f"{each:,}" for each in data.TRAIN_TOKENS)
        text += f" in evaluation; in training, the maximum is drawn for each update from {lengths}"
    return text


CODE_FOR_TIMM = """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or hf-hub:OWNER/NAME
data = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(
    **data, is_training=False, naflex=True, patch_size={patch}, max_seq_len={tokens}, patchify=True
)
logits = model({{name: each[None] for name, each in transform(prepare(image)).items()}})
"""


def code_for_timm(config: Config) -> str:
    """Return Python code that classifies an image with timm, for the model card of an export."""
    return CODE_FOR_TIMM.format(patch=patch_size_of(config), tokens=config.DATA.TOKENS)


def describe_shapes(config: Config, sides: np.ndarray, is_training: bool) -> str:
    """Return the text of -check's row about shapes. `sides`: height and width of each image, int [N, 2]."""
    if not len(sides):
        return "no image could be read"
    patch, length = patch_size_of(config), max(lengths_of(config.DATA)) if is_training else config.DATA.TOKENS
    chosen = sides[np.linspace(0, len(sides) - 1, min(MOST, len(sides))).astype(int)]
    sizes = np.array([size_of(height, width, patch, length) for height, width in chosen.tolist()])
    padding = 1 - (sizes.prod(axis=1) / (patch * patch * length)).mean()
    ratios = sides.max(axis=1) / sides.min(axis=1)
    # A square crop keeps the shorter side.
    lost = 1 - (1 / ratios).mean()
    height, width = sizes[np.argsort(chosen.prod(axis=1, dtype=np.int64), kind="stable")[len(chosen) // 2]].tolist()
    return (
        f"{(ratios > WIDE).mean():.1%} of the images are wider or taller than {WIDE}:1 (the most extreme is "
        f"{ratios.max():.3g}:1); a square crop would cut off {lost:.1%} of the average image; with at most "
        f"{counted(length, 'patch')} of {patch} x {patch}, the median image becomes {width} x {height}, and {padding:.1%} "
        "of the patches are padding"
    )
