"""Heat maps of the regions that a model looks at: attention rollout for plain Vision Transformers, else Grad-CAM."""

import contextlib
import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.utils import AttentionExtract
from torch import Tensor, nn

from engine.predict.classifier import Classifier
from engine.predict.output import describe, write_picture
from engine.predict.output_paths import numbered
from engine.predict.pictures import Tile, contact_sheet, fitted
from engine.predict.predictor import PredictedBatch
from utils.errors import ConfigError

MAP_SIDE = 320  # pixels per side of each photo and map
MAP_SHARE = 0.5  # opacity of the map over the photo


class Maps(NamedTuple):
    """The source of a model's heat maps, the folder to write them to, and a file name for each image."""

    source: "Rollout | GradientMaps"
    folder: Path
    names: list[str]

    @classmethod
    def of(cls, classifier: Classifier, device: torch.device, folder: Path, paths: Sequence[str]) -> "Maps":
        """Choose attention rollout for plain Vision Transformers, otherwise Grad-CAM.

        Call this before any transform changes the model.
        """
        data = classifier.config.DATA
        if classifier.runtime:
            raise ConfigError(f"-attention: {classifier.source} is an exported graph; name the run that it came from")
        model = copy.deepcopy(classifier.model).float().to(device)
        blank = torch.zeros(1, data.IMAGE_CHANNELS, *data.shape, device=device)
        source = Rollout.of(model, blank) or GradientMaps.of(model, blank)
        if source is None:
            raise ConfigError(
                f"-attention: {classifier.config.MODEL.NAME} has neither attention between all tokens nor a feature "
                f"map larger than 1 x 1 for images of {data.shape}; leave -attention out"
            )
        return cls(source, folder, map_names(paths))

    def write(self, batch: PredictedBatch) -> None:
        """Write a picture for each image of a batch: the model's input, the map over it, and the predicted classes."""
        maps = self.source(batch.inputs, batch.best).cpu().numpy()
        for number, pixels in enumerate(batch.pictures):
            photo = fitted(pixels, MAP_SIDE)
            tiles = [
                Tile(np.asarray(photo), describe(batch.guesses[number])),
                Tile(np.asarray(overlaid(photo, maps[number])), [self.source.title]),
            ]
            path = self.folder / self.names[batch.indices[number]]
            write_picture(contact_sheet(tiles, num_columns=2, side=MAP_SIDE), path)


def map_names(paths: Sequence[str]) -> list[str]:
    """Return a unique file name for each path: photo.png for the first photo.*, photo-2.png for the second."""
    names: dict[str, None] = {}
    for path in paths:
        names[next(name for name in numbered(Path(path).stem, ".png") if name not in names)] = None
    return list(names)


def overlaid(photo: Image.Image, values: np.ndarray) -> Image.Image:
    """Return the photo with a map of any size drawn over it: blue at the lowest value, red at the highest."""
    import matplotlib

    span = float(values.max() - values.min())
    heat = Image.fromarray(((values - values.min()) / (span or 1.0)).astype(np.float32))
    heat = heat.resize(photo.size, Image.Resampling.BILINEAR)
    colours = matplotlib.colormaps["turbo"](np.asarray(heat), bytes=True)[..., :3]
    return Image.blend(photo, Image.fromarray(np.ascontiguousarray(colours)), MAP_SHARE)


class Rollout:
    """Attention rollout, for a model whose blocks all work on the same tokens."""

    title = "attention rollout"

    def __init__(self, model: nn.Module, attention: AttentionExtract, grid: tuple[int, int]):
        """`attention` returns {layer: attention weights [B, heads, N, N]}, in the order of the blocks."""
        self.model, self.attention, self.grid = model, attention, grid

    @classmethod
    def of(cls, model: nn.Module, image: Tensor) -> "Rollout | None":
        """Return a Rollout of a copy if the model is a plain sequence of blocks that ends in a class token or a mean.

        Return None for other models, such as Swin. `image`: any image of the right size.
        """
        grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
        pools_by_attention = getattr(model, "attn_pool", None) is not None
        layers = [
            name
            for name, module in model.named_modules()
            if hasattr(module, "fused_attn") and isinstance(getattr(module, "attn_drop", None), nn.Module)
        ]
        if grid is None or pools_by_attention or not layers or len(layers) != len(getattr(model, "blocks", ())):
            return None
        model = copy.deepcopy(model)  # timm does not remove its hooks
        for name in layers:
            model.get_submodule(name).fused_attn = False  # the fused kernel does not return attention weights
        names = [f"{name}.attn_drop" for name in layers]
        attention = AttentionExtract(model, names, method="hook", hook_type="forward_pre")
        with torch.no_grad():
            weights = attention(image).values()
        num_tokens = grid[0] * grid[1] + getattr(model, "num_prefix_tokens", 0)
        is_plain = all(each.ndim == 4 and each.shape[2:] == (num_tokens, num_tokens) for each in weights)
        return cls(model, attention, tuple(grid)) if is_plain and len(weights) == len(layers) else None

    @torch.no_grad()
    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return [B, rows, columns]: the share of each patch in the head's input. `classes` has no effect."""
        # The weights of all blocks are in memory at once, so a batch could need many GB.
        return torch.cat([self._map(image) for image in images.split(1)])

    def _map(self, image: Tensor) -> Tensor:
        mixed: Tensor | None = None
        for weights in self.attention(image).values():
            step = (weights.mean(1) + torch.eye(weights.shape[-1], device=weights.device)) / 2
            mixed = step if mixed is None else step @ mixed
        prefix = getattr(self.model, "num_prefix_tokens", 0)
        if getattr(self.model, "global_pool", "token") == "token" and prefix:
            read = mixed[:, : 2 if hasattr(self.model, "head_dist") else 1].mean(1)
        else:
            read = mixed[:, 0 if getattr(self.model, "pool_include_prefix", False) else prefix :].mean(1)
        return read[:, -self.grid[0] * self.grid[1] :].unflatten(1, self.grid)


FINE_ENOUGH = 7  # positions per side; the last stage of most models has 7 for images of 224 x 224


class GradientMaps:
    """Grad-CAM from the output of one module of the model."""

    title = "Grad-CAM"

    def __init__(self, model: nn.Module, module: nn.Module, channels: int, shape: Sequence[int]):
        """`shape`: height and width of an image."""
        self.model, self.module, self.channels, self.shape = model, module, channels, shape

    @classmethod
    def of(cls, model: nn.Module, image: Tensor) -> "GradientMaps | None":
        """Return a GradientMaps of the last stage with at least FINE_ENOUGH positions per side.

        If no stage has so many, use the finest stage. Return None if all stages are 1 x 1. For images of 32 x 32
        pixels, the last stage of most models is 1 x 1.
        """
        known = getattr(model, "feature_info", ())
        stages = {stage["module"]: stage["num_chs"] for stage in known if "module" in stage}
        modules = dict(model.named_modules())
        maps_of_stages: list[tuple[int, GradientMaps]] = []
        for name, channels in stages.items():
            if name not in modules:
                continue
            maps = cls(model, modules[name], channels, image.shape[2:])
            with torch.no_grad(), maps._watching(outputs := []):
                model(image)
            grid = maps._as_grid(outputs[0]) if outputs else None
            if grid is not None and (side := min(grid.shape[1:3])) > 1:
                maps_of_stages.append((side, maps))
        return max(reversed(maps_of_stages), key=lambda stage: min(stage[0], FINE_ENOUGH), default=(0, None))[1]

    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return [B, rows, columns]: the evidence (at least 0) at each position for the class of the image."""
        with torch.enable_grad(), self._watching(outputs := []):
            logits = self.model(images.detach().clone().requires_grad_())
            (features,) = outputs
            (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), features)
        weights = self._as_grid(gradient).mean((1, 2), keepdim=True)
        return (self._as_grid(features) * weights).sum(-1).relu().detach()

    def _watching(self, outputs: list[Tensor]) -> contextlib.AbstractContextManager:
        """Append the outputs of the module to `outputs` inside the `with` block."""
        return self.module.register_forward_hook(lambda module, inputs, output: outputs.append(output))

    def _as_grid(self, features: Tensor) -> Tensor | None:
        """Return [B, rows, columns, channels] from [B, channels, rows, columns] or the tokens of a grid, else None."""
        if not isinstance(features, Tensor) or self.channels not in (shape := features.shape):
            return None
        if features.ndim == 4:
            is_last = shape[-1] == self.channels and shape[1] != self.channels
            is_last |= shape[1] == shape[-1] and getattr(self.model, "output_fmt", "NCHW") == "NHWC"
            return features if is_last else features.permute(0, 2, 3, 1)
        if features.ndim != 3:
            return None
        # The largest grid with the aspect ratio of the image: the first tokens may belong to no place.
        ratio = [side // math.gcd(*self.shape) for side in self.shape]
        rows, columns = (math.isqrt(shape[1] // math.prod(ratio)) * side for side in ratio)
        return features[:, -rows * columns :].unflatten(1, (rows, columns)) if rows else None
