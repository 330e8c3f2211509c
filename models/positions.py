"""Position embeddings of a ViT that are not learned: fixed sines and cosines, or none."""

import timm
import torch
from torch import Tensor, nn

from configs.schema import Model
from utils.errors import ConfigError


def fix_positions(model: Model, built: nn.Module) -> None:
    """Write the fixed positions into timm's model. Without positions, raise ConfigError if timm loses its tokens."""
    if model.POS_EMBED == "sincos2d":
        rows = sincos2d(built.patch_embed.grid_size, model.EMBED_DIM).to(built.pos_embed)
        with torch.no_grad():
            built.pos_embed.zero_()[:, -len(rows) :] = rows  # class token and registers come first and have no position
        built.pos_embed.requires_grad_(False)
    elif built.num_prefix_tokens and loses_tokens():
        raise ConfigError(
            f"MODEL.POS_EMBED: timm {timm.__version__} loses class token and registers of a model without position "
            "embedding; use timm 1.0.26 or later, or MODEL.POS_EMBED=learn"
        )


def loses_tokens() -> bool:
    """Return whether this version of timm leaves class token and registers out if there is no position embedding."""
    fields = {"img_size": 1, "patch_size": 1, "embed_dim": 1, "depth": 0, "num_heads": 1}
    probe = timm.models.VisionTransformer(**fields, pos_embed="none")
    return probe.forward_features(torch.zeros(1, 3, 1, 1)).shape[1] == 1


def sincos2d(grid: tuple[int, int], width: int) -> Tensor:
    """Return MoCo v3's position embedding [patches, width] in big_vision's order: sines and cosines of x, then of y."""
    if width % 4:
        raise ConfigError(f"MODEL.EMBED_DIM: {width} is not a multiple of 4, which MODEL.POS_EMBED sincos2d needs")
    frequencies = 10_000.0 ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    y, x = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    angles = [each.flatten()[:, None] * frequencies for each in (x, y)]
    return torch.cat([function(angle) for angle in angles for function in (torch.sin, torch.cos)], dim=1)
