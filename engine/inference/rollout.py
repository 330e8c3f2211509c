"""Where a Vision Transformer looks: the attention of all its blocks, multiplied up from the image to what the head reads.

Attention rollout (Abnar and Zuidema, https://arxiv.org/abs/2005.00928): half of each block's output is its input, because
of the residual connection, and the other half what its attention, the mean over the heads, took from each token.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """timm's attention layers that hand their weights to a dropout when they are not fused, from first to last."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "fused_attn") and isinstance(getattr(module, "attn_drop", None), nn.Module)
    ]


@contextlib.contextmanager
def watching_attention(model: nn.Module, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `see` with the attention weights [B, heads, N, N] of each layer, as it computes with them."""
    layers = attention_layers(model)
    fused = [layer.fused_attn for layer in layers]
    hooks = [layer.attn_drop.register_forward_pre_hook(lambda _, given: see(given[0])) for layer in layers]
    try:
        for layer in layers:
            layer.fused_attn = False  # the fused kernel computes no weights that could be seen
        yield
    finally:
        for layer, was in zip(layers, fused, strict=True):
            layer.fused_attn = was
        for hook in hooks:
            hook.remove()


class Rollout:
    """Maps of a model whose tokens stay the same from block to block."""

    title = "attention rollout"

    def __init__(self, model: nn.Module, grid: tuple[int, int]):
        self.model, self.grid = model, grid

    @classmethod
    def of(cls, model: nn.Module, image: Tensor) -> "Rollout | None":
        """None for models that are no plain row of blocks, such as Swin with its windows. `image`: any, of the right size."""
        shapes: list[torch.Size] = []
        with torch.no_grad(), watching_attention(model, lambda weights: shapes.append(weights.shape)):
            model(image)
        grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
        if not shapes or grid is None or len(shapes) != len(getattr(model, "blocks", ())):
            return None
        num_tokens = grid[0] * grid[1] + getattr(model, "num_prefix_tokens", 0)
        plain = all(len(each) == 4 and each[0] == 1 and each[2:] == (num_tokens, num_tokens) for each in shapes)
        return cls(model, tuple(grid)) if plain else None

    @torch.no_grad()
    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """[B, rows, columns]: how much the head reads of each patch. The classes make no difference."""
        mixed: Tensor | None = None

        def see(weights: Tensor) -> None:
            nonlocal mixed
            step = (weights.mean(1) + torch.eye(weights.shape[-1], device=weights.device)) / 2
            mixed = step if mixed is None else step @ mixed

        with watching_attention(self.model, see), watching_pool(self.model) as pooled:
            self.model(images)
        read = self._rows(mixed) if not pooled else (pooled[0] @ self._taken_by_pool(mixed)).mean(1)
        return read[:, -self.grid[0] * self.grid[1] :].unflatten(1, self.grid)

    def _rows(self, mixed: Tensor) -> Tensor:
        """[B, N]: the mean over the tokens that the head reads."""
        model, prefix = self.model, getattr(self.model, "num_prefix_tokens", 0)
        if getattr(model, "global_pool", "token") == "token" and prefix:
            return mixed[:, : 2 if hasattr(model, "head_dist") else 1].mean(1)
        return mixed[:, 0 if getattr(model, "pool_include_prefix", False) else prefix :].mean(1)

    def _taken_by_pool(self, mixed: Tensor) -> Tensor:
        return mixed if getattr(self.model, "pool_include_prefix", False) else mixed[:, self.model.num_prefix_tokens :]


@contextlib.contextmanager
def watching_pool(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the weights [B, queries, N], the mean over the heads, with which a pooling by attention reads the tokens."""
    pool, seen, weights = getattr(model, "attn_pool", None), {}, []
    if not all(hasattr(pool, name) for name in ("q_norm", "k_norm", "scale", "proj")):
        yield weights
        return

    def keep(name: str) -> Callable:
        return lambda module, given, output: seen.update({name: output})

    def compute(*_) -> None:
        weights.append((seen["q"] * pool.scale @ seen["k"].transpose(-2, -1)).softmax(-1).mean(1))

    hooks = [
        pool.q_norm.register_forward_hook(keep("q")),
        pool.k_norm.register_forward_hook(keep("k")),
        pool.proj.register_forward_pre_hook(compute),
    ]
    try:
        yield weights
    finally:
        for hook in hooks:
            hook.remove()
