"""Probes of attention: every fused kernel against float32, and the last block for the class token alone."""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.benchmarks.session.plan import Context
from scripts.benchmarks.session.probes.checks import Probes, Unavailable, require
from scripts.benchmarks.session.probes.trainers import first_batches, small_trainer

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "plain": SDPBackend.MATH,
}
QUERIES, KEYS = (1, 197), (50, 128, 192, 197, 257, 577)
SHIFTS = (0, -128)  # of all logits, which changes nothing but what the kernel computes between
MAX_ERROR = 0.02  # of a tensor, relative to its norm: bfloat16 alone makes 0.002 to 0.008
MAX_DROPOUT_ERROR = 0.1  # of a mean over at least 48 queries of 50 keys, whose standard deviation is 0.012
HEADS, WIDTH = 6, 64


def run_probes(context: Context) -> None:
    probes = Probes(context)
    for name, queries, dropout in itertools.product(BACKENDS, QUERIES, (0.0, 0.1)):
        where = f"{name} attention, {'a single query' if queries == 1 else f'{queries} queries'}, dropout {dropout:g}"
        probes.check(where, lambda: attention_errors(context, name, queries, dropout))  # noqa: B023
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        probes.check(f"class-token block against the whole, {kind}", lambda: class_token(context, dtype))  # noqa: B023
    probes.end()


def attention_errors(context: Context, name: str, num_queries: int, dropout: float) -> str:
    """The worst of all numbers of keys and shifts, and where."""
    errors, refused = {}, []
    for num_keys, shift in itertools.product(context.pick(KEYS, KEYS[:1]), SHIFTS):
        q, k, v = make_inputs(context.device, num_queries, num_keys, shift)
        case = f"{num_keys} keys, logits shifted by {shift}"
        try:
            with sdpa_kernel(BACKENDS[name]):
                result = out_and_gradients(q, k, v, dropout)
        except RuntimeError as error:
            if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
                raise
            refused.append(case)
        else:
            is_finite = all(each.isfinite().all() for each in result)
            compare = dropout_error if dropout else worst_error
            errors[case] = compare(result, (q, k, v)) if is_finite else math.inf
    if not errors:
        raise Unavailable("torch refuses it")
    worst = max(errors, key=errors.get)
    figure = (
        f"worst relative error {errors[worst]:.2g} at {worst}{'; refused: ' if refused else ''}{'; '.join(refused)}"
    )
    return require(errors[worst] < (MAX_DROPOUT_ERROR if dropout else MAX_ERROR), figure)


def make_inputs(device: str, num_queries: int, num_keys: int, shift: float) -> tuple[Tensor, ...]:
    """[8, heads, tokens, width] in bfloat16. The first component of queries and keys shifts all logits alike; the first
    one of the values is 1, so that the first one of the output is the sum of the weights that dropout left.
    """
    torch.manual_seed(num_keys)
    q, k, v = (torch.randn(8, HEADS, tokens, WIDTH, device=device) for tokens in (num_queries, num_keys, num_keys))
    q[..., 0], k[..., 0], v[..., 0] = 32.0, shift * math.sqrt(WIDTH) / 32, 1.0
    return tuple(each.bfloat16() for each in (q, k, v))


def out_and_gradients(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in (q, k, v)]
    out = functional.scaled_dot_product_attention(*inputs, dropout_p=dropout)
    direction = torch.linspace(-1, 1, out.numel(), device=q.device).view(out.shape).cos().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


def worst_error(result: list[Tensor], inputs: tuple[Tensor, ...]) -> float:
    """Against plain attention in float32. The shifted component is left out: it multiplies rounding errors by 32."""
    with sdpa_kernel(SDPBackend.MATH):
        expected = out_and_gradients(*(each.float() for each in inputs), 0.0)
    pairs = [(got.float()[..., 1:], want[..., 1:]) for got, want in zip(result, expected, strict=True)]
    return max(((got - want).norm() / want.norm()).item() for got, want in pairs)


def dropout_error(result: list[Tensor], inputs: tuple[Tensor, ...]) -> float:
    """How far the mean of the sums of weights is from 1; each kernel draws its own random numbers."""
    return abs(result[0][..., 0].float().mean().item() - 1)


def class_token(context: Context, dtype: torch.dtype) -> str:
    """Logits and gradients of a model whose last block computes the class token alone, and of one that computes all."""
    from models.transforms.class_token_block import ClassTokenBlock, ClassTokenVisionTransformer

    trainer = small_trainer(context)
    model, (batch,) = trainer.model, first_batches(trainer)
    assert type(model) is ClassTokenVisionTransformer
    images, targets = trainer.to_device(batch)

    def compute() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(images)
        functional.cross_entropy(logits.float(), targets).backward()
        return [logits.detach().float(), *(each.grad for each in model.parameters())]

    short = compute()
    ClassTokenBlock().revert(model)
    pairs = list(zip(short, compute(), strict=True))
    total = math.sqrt(sum((got - want).square().sum().item() for got, want in pairs))
    error = total / math.sqrt(sum(want.square().sum().item() for _, want in pairs))
    return require(error < (1e-4 if dtype == torch.float32 else 0.03), f"relative error {error:.2g}")
