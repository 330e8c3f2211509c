"""Resizes weights that depend on the grid of patches, if they belong to images that are not square."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from configs.schema import Shape
from utils.errors import ConfigError
from utils.without_values import build_without_values

POSITIONS, BIASES = "pos_embed", "relative_position_bias_table"  # the last part of the names of such weights


class Sized(NamedTuple):
    """The shape of a model's images, and a function that builds the same model for images of another shape."""

    shape: Shape
    build: Callable[[Shape], nn.Module]


def resize_from(old: Shape, state: dict[str, Tensor], model: nn.Module, sized: Sized) -> dict[str, Tensor]:
    """Return weights for images of shape `old` as weights of the model, which takes images of shape `sized.shape`.

    timm's functions for files take every grid in a file for a square. The same model, built for the old shape, has the
    size of each grid.
    """
    source = build_without_values(lambda: sized.build(old))
    before, after, resized = source.state_dict(), model.state_dict(), dict(state)
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        if name not in before or before[name].shape != tensor.shape or name not in after:
            continue  # weights of another architecture, or with other channels
        if name == POSITIONS and tensor.ndim == 3:
            resized[name] = _resize_positions(tensor, source.patch_embed.grid_size, model.patch_embed.grid_size)
        elif last == BIASES:
            windows = (each.get_submodule(path).window_size for each in (source, model))
            resized[name] = _resize_biases(tensor, *windows)
        if resized[name].shape != after[name].shape:
            raise ConfigError(
                f"{name} is for images of {old} and cannot be resized for {sized.shape}; add -image_size {old.size}"
            )
    return resized


def _resize_positions(tensor: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resize position embeddings [1, tokens, D]. Tokens that belong to no patch come first."""
    from timm.layers import resample_abs_pos_embed

    count = tensor.shape[1] - old[0] * old[1]
    return resample_abs_pos_embed(tensor, new_size=[*new], old_size=[*old], num_prefix_tokens=count)


def _resize_biases(tensor: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resize biases for each distance of two places: [distances, heads] with others at the end, or [heads, H, W]."""
    from timm.layers import resize_rel_pos_bias_table

    (old_rows, old_columns), (rows, columns) = ([2 * side - 1 for side in window] for window in (old, new))

    def resize(grid: Tensor) -> Tensor:
        shape = (len(grid), rows, columns)
        return resize_rel_pos_bias_table(grid, new, shape).reshape(shape)  # timm 1.0.20 returns [heads * H, W]

    if tensor.ndim == 3:
        return resize(tensor)
    grid, others = tensor[: old_rows * old_columns], tensor[old_rows * old_columns :]
    grid = grid.T.reshape(-1, old_rows, old_columns)
    return torch.cat([resize(grid).flatten(1).T, others])
