"""All that mixed precision is: in which type a device computes, the loss scale, and which updates are skipped.

There is one path for every precision. A GradScaler looks at every gradient: in float16 its scale moves, in bfloat16
and float32 it stays 1 and only keeps a non-finite update from reaching the weights.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator

import torch

from configs.schema import Config
from engine.parallel.sharding import Whole
from engine.precision.loss_scale import LossScaler
from models.transforms.cpu_kernels import blocks_of, choose_kernels
from models.transforms.float8 import check_float8, from_float8, to_float8
from models.transforms.op_overrides import apply_lists
from utils.errors import ConfigError


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return True


class Precision:
    """Autocast and GradScaler of one run."""

    def __init__(self, config: Config, device: torch.device, emulate: bool = False):
        """`emulate`: the numbers of float8 on a device without, slowly."""
        settings = config.PRECISION
        self.device, self._settings, self._emulate = device, settings, emulate
        self.is_naive, self.is_float8 = (config.AMP and settings.MODE == mode for mode in ("naive", "float8"))
        self.half, self.reason = self._choose(config.AMP, settings.DTYPE, device)
        if self.is_float8:
            check_float8(device, emulate)
            self.half, self.reason = torch.bfloat16, "PRECISION.MODE is float8"
        self._check_device()
        self._compiles = config.COMPILE
        self.scaler = LossScaler(device.type, settings, needed=self.half is torch.float16)
        self._masters: list[torch.nn.Parameter] = []
        self._halves: list[torch.nn.Parameter] = []
        self._sharding = Whole()
        set_matmul(settings.MATMUL, device)

    @staticmethod
    def _choose(amp: bool, wanted: str | None, device: torch.device) -> tuple[torch.dtype | None, str]:
        if not amp:
            return None, "-amp was not given"
        if wanted == "auto":
            wanted = "float16" if device.type == "cuda" and not has_fast_bfloat16(device) else "bfloat16"
            return getattr(torch, wanted), f"-amp_dtype auto: the half type that this {device.type} device does best"
        if wanted:
            return getattr(torch, wanted), f"-amp_dtype {wanted}"
        wanted = "float16" if device.type == "cuda" else "bfloat16"
        return getattr(torch, wanted), f"the default on {device.type}"

    def _check_device(self) -> None:
        """One small product in the chosen type: what a device can do is best asked of it."""
        if self.half is not None:
            try:
                with torch.autocast(self.device.type, dtype=self.half):
                    tensor = torch.ones(8, 8, device=self.device)
                    torch.nn.functional.linear(tensor, tensor)
            except RuntimeError as error:
                name = str(self.half).removeprefix("torch.")
                other = "bfloat16" if name == "float16" else "float16"
                raise ConfigError(
                    f"PRECISION.DTYPE: {name} cannot be computed in on this {self.device.type} device ({error}); use "
                    f"-amp_dtype {other}, or leave -amp out"
                ) from error

    def describe(self) -> str:
        """One line: what was chosen, why, and what this device could do better."""
        fast = has_fast_bfloat16(self.device)
        if self.half is None:
            advice = (
                "; this device computes faster in half precision: -amp" if fast or self.device.type == "cuda" else ""
            )
            return f"precision: float32, as {self.reason}{advice}"
        name = str(self.half).removeprefix("torch.")
        scale = f"loss scale {self.scaler.get_scale():g}, {'moving' if self.scaler.moves else 'constant'}"
        if self.half is not torch.float16:
            scale = "loss scale 1, as a guard"
        advice = ""
        if self.half is torch.float16 and self.device.type == "cpu":
            advice = "; float16 is very slow on a CPU, -amp_dtype bfloat16 is the one to use"
        elif self.half is torch.float16 and fast:
            advice = "; this device also has bfloat16, which needs no loss scale: -amp_dtype bfloat16"
        elif self.half is torch.bfloat16 and not fast:
            advice = "; this device has no bfloat16 arithmetic, so this saves memory but not time"
        mode = "naive" if self.is_naive else "autocast"
        if self.is_float8:
            mode = "float8 in large Linear layers, else autocast"
            advice = "" if self._compiles else "; float8 gains time only with -compile"
        return f"precision: {mode} {name} with GradScaler ({scale}), {self.reason}{advice}"

    def advise_on_sizes(self, config: Config, num_classes: int) -> str | None:
        """Tensor Cores take matrices in steps of 8; other sizes are padded or computed without them."""
        sizes = {"DATA.BATCH_SIZE": config.DATA.BATCH_SIZE, "the number of classes": num_classes}
        if config.MODEL.TYPE == "vit":
            sizes["MODEL.EMBED_DIM"] = config.MODEL.EMBED_DIM
        odd = [f"{name} ({size})" for name, size in sizes.items() if size % 8]
        if self.half is None or self.device.type != "cuda" or not odd:
            return None
        return f"-amp is fastest when sizes are multiples of 8: {', '.join(odd)}; -num_classes may exceed the data's"

    def prepare(self, model: torch.nn.Module) -> list[str]:
        """Make the model compute as the settings say, by the fastest kernels there are. Returns lines for the log."""
        settings = self._settings
        if self.is_naive and (settings.CUSTOM_BLACK_LIST or settings.CUSTOM_WHITE_LIST):
            raise ConfigError(
                "PRECISION.CUSTOM_BLACK_LIST and CUSTOM_WHITE_LIST are about what autocast does, but PRECISION.MODE is "
                "naive, where everything is in half; use PRECISION.MODE autocast or remove the lists"
            )
        lines = apply_lists(model, settings, self.device.type, self.half)
        if settings.RESIDUAL == "half" and self.half is not None and not self.is_naive:
            self._narrow_residual(model)
        choose_kernels(model, self.device, self.half)  # after what replaces modules
        if self.is_float8:  # later still: a last block with other layers than torch's would not be shortened
            lines = [*lines, to_float8(model, self._emulate)]
        return lines

    def _narrow_residual(self, model: torch.nn.Module) -> None:
        """Cast what each block gets, which autocast's sums of float32 and half leave in float32."""
        blocks = blocks_of(model, "PRECISION.RESIDUAL is half", "PRECISION.RESIDUAL float32")
        half = self.half

        def cast(block: torch.nn.Module, inputs: tuple) -> tuple:
            # Not where autocast is off: a copy of the model may be run in float32.
            narrows = torch.is_autocast_enabled(self.device.type)
            return (inputs[0].to(half), *inputs[1:]) if narrows else inputs

        # The last block gets what the others made; a hook on it would keep it from being computed for one token.
        for block in blocks[:-1]:
            block.register_forward_pre_hook(cast)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None and not self.is_naive)

    def computing(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as it computes: itself under autocast; in naive mode a copy of it in half."""
        if not self.is_naive:
            return model
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            raise ConfigError(
                "PRECISION.MODE is naive, but the model has BatchNorm, whose running statistics half precision would "
                "spoil; use PRECISION.MODE autocast"
            )
        return copy.deepcopy(model).to(self.half)

    @contextlib.contextmanager
    def in_float32(self, model: torch.nn.Module) -> Iterator[None]:
        """This very code path without half precision: autocast off, and the model's lists with it."""
        half, naive = self.half, self.is_naive
        if self.is_float8:
            from_float8(model)
        apply_lists(model, dataclasses.replace(self._settings, CUSTOM_BLACK_LIST=(), CUSTOM_WHITE_LIST=()), "cpu", None)
        self.half, self.is_naive = None, False
        try:
            yield
        finally:
            self.half, self.is_naive = half, naive

    @contextlib.contextmanager
    def black_listed(self, model: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
        """Modules of these paths are on PRECISION.CUSTOM_BLACK_LIST too, for as long as this lasts."""
        listed = (*self._settings.CUSTOM_BLACK_LIST, *names)
        longer = dataclasses.replace(self._settings, CUSTOM_BLACK_LIST=listed)
        apply_lists(model, longer, self.device.type, self.half)
        try:
            yield
        finally:
            apply_lists(model, self._settings, self.device.type, self.half)

    def cast(self, images: torch.Tensor) -> torch.Tensor:
        """Images in the type that the model takes."""
        return images.to(self.half) if self.is_naive else images

    def link(self, model: torch.nn.Module, copy: torch.nn.Module, sharding: Whole) -> None:
        """From here on `update` moves the model by the gradients of its copy, and the copy after it."""
        self._sharding = sharding
        if copy is not model:
            pairs = zip(model.parameters(), copy.parameters(), strict=True)
            self._masters, self._halves = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], grad_clip: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unscale, clip, step, or skip where a gradient is not finite.

        Returns the gradient norm before clipping and 1.0 or 0.0 for skipped or not, both on the device.
        """
        self._move_gradients()
        self._sharding.collect_gradients()
        self.scaler.unscale_(optimizer)
        self._sharding.agree(self.scaler.found_inf(optimizer))
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = self._sharding.norm(norm)
        if grad_clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, grad_norm)
        skipped = self.scaler.found_inf(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        self.refresh()
        return grad_norm, skipped

    def _move_gradients(self) -> None:
        """Half gradients of the copy become float32 ones of the model, still scaled."""
        used = [
            (master, half) for master, half in zip(self._masters, self._halves, strict=True) if half.grad is not None
        ]
        if used:
            for master, _ in used:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([master.grad for master, _ in used], [half.grad for _, half in used])
            for _, half in used:
                half.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the copy the model's weights."""
        if self._halves:
            torch._foreach_copy_(self._halves, self._masters)

    def state_dict(self) -> dict:
        return {**self.scaler.state_dict(), "dtype": str(self.half)}

    def load_state_dict(self, state: dict) -> None:
        """A scale means something only to the type it was found for; another type starts from its own."""
        if state.get("dtype", str(self.half)) == str(self.half):
            self.scaler.load_state_dict({name: value for name, value in state.items() if name != "dtype"})


def set_matmul(mode: str, device: torch.device) -> None:
    """How float32 matrices are multiplied: exactly, or in tf32 on GPUs that have it."""
    if mode == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise ConfigError(f"PRECISION.MATMUL is tf32, which this {device.type} device does not have; use ieee")
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = mode == "tf32"
