"""torchvision's names of the weights of its ViT, Swin Transformer and ConvNeXt, as timm's."""

from collections.abc import Iterable

from torch import Tensor

from models.formats.common import rename

VIT = {
    r"^class_token$": "cls_token",
    r"^conv_proj\.": "patch_embed.proj.",
    r"^encoder\.pos_embedding$": "pos_embed",
    r"^encoder\.layers\.encoder_layer_(\d+)\.": r"blocks.\1.",
    r"^encoder\.ln\.": "norm.",
    r"^heads\.head\.": "head.",
    r"^heads\.pre_logits\.": "pre_logits.fc.",
    r"\.ln_([12])\.": r".norm\1.",
    r"\.self_attention\.in_proj_(weight|bias)$": r".attn.qkv.\1",
    r"\.self_attention\.out_proj\.": ".attn.proj.",
    r"\.mlp\.(0|linear_1)\.": ".mlp.fc1.",
    r"\.mlp\.(3|linear_2)\.": ".mlp.fc2.",
}


def _stages(blocks: str, downsample: str) -> dict[str, str]:
    """In `features`, the stages of blocks have odd numbers and what lies between them even ones."""
    odd = {rf"^features\.{2 * stage + 1}\.(\d+)\.": blocks.format(stage=stage) for stage in range(4)}
    return odd | {rf"^features\.{2 * stage}\.": downsample.format(stage=stage) for stage in range(1, 4)}


SWIN = {
    r"^features\.0\.0\.": "patch_embed.proj.",
    r"^features\.0\.2\.": "patch_embed.norm.",
    **_stages(r"layers.{stage}.blocks.\1.", "layers.{stage}.downsample."),
    r"\.mlp\.0\.": ".mlp.fc1.",
    r"\.mlp\.3\.": ".mlp.fc2.",
    r"^head\.": "head.fc.",
}
CONVNEXT = {
    r"^features\.0\.": "stem.",
    **_stages(r"stages.{stage}.blocks.\1.", "stages.{stage}.downsample."),
    r"\.block\.0\.": ".conv_dw.",
    r"\.block\.2\.": ".norm.",
    r"\.block\.3\.": ".mlp.fc1.",
    r"\.block\.5\.": ".mlp.fc2.",
    r"\.layer_scale$": ".gamma",
    r"^classifier\.0\.": "head.norm.",
    r"^classifier\.2\.": "head.fc.",
}
TABLES = {
    "conv_proj.weight": VIT,
    "features.1.0.attn.qkv.weight": SWIN,
    "features.1.0.block.0.weight": CONVNEXT,
}  # by a name that only such a model has


def is_of_torchvision(state: Iterable[str]) -> bool:
    return not TABLES.keys().isdisjoint(state)


def timm_names(names: Iterable[str]) -> dict[str, str]:
    """{torchvision's name: timm's}; without the buffers that timm computes anew. Other models have timm's names."""
    table = next((TABLES[known] for known in TABLES if known in names), {})
    return {name: rename(name, table) for name in names if not name.endswith(".relative_position_index")}


def to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = timm_names(state)
    # ConvNeXt's layer_scale is [C, 1, 1] in torchvision.
    return {new: state[old].flatten() if old.endswith(".layer_scale") else state[old] for old, new in names.items()}
