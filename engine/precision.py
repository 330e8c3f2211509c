"""Mixed precision: the data type of computations, the loss scale, skipped updates, and clipping of gradients.

All precisions share one code path. A GradScaler checks every gradient. In float16 it adapts its scale. In bfloat16 and
float32 the scale is 1, and the GradScaler only skips non-finite updates.
"""

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from configs.schema import Config, Train
from configs.schema import Precision as PrecisionSettings
from engine.parallel import Parallel
from models.parts import has_running_statistics, starts_with_convolution
from utils.errors import ConfigError
from utils.host import half_speedup
from utils.torch_internals import foreach_copy_, found_inf, scale_and_growth, set_found_inf


def choose_half(
    amp: bool, dtype: str | None, device: torch.device, gpu_has_bfloat16: bool
) -> tuple[torch.dtype | None, str]:
    """Return the half type (None without -amp) and the reason for it."""
    if not amp:
        return None, "-amp is off"
    if dtype == "auto":
        dtype = "float16" if device.type == "cuda" and not gpu_has_bfloat16 else "bfloat16"
        return getattr(torch, dtype), f"-amp_dtype auto: the best half type on this {device.type} device"
    if dtype:
        return getattr(torch, dtype), f"-amp_dtype {dtype}"
    dtype = "float16" if device.type == "cuda" else "bfloat16"
    return getattr(torch, dtype), f"the default on {device.type}"


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16 natively. CUDA devices since 2020 do."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


WORTHWHILE = 1.3  # the speedup over float32 from which -amp is recommended


class Precision:
    """The autocast and the GradScaler of a run."""

    def __init__(self, config: Config, device: torch.device):
        settings = config.PRECISION
        self.device, self._config = device, config
        self.is_naive, self.is_float8 = (config.AMP and settings.MODE == mode for mode in ("naive", "float8"))
        self.half, self.reason = choose_half(config.AMP, settings.DTYPE, device, has_bfloat16(device))
        if self.is_float8:
            from models.transforms.float8 import check_float8

            check_float8(device)
            self.half, self.reason = torch.bfloat16, "PRECISION.MODE is float8"
        # On CPUs, torch's own functions unscale and clip, so that results stay equal to earlier runs.
        scaler = LossScaler if device.type == "cpu" else FusedLossScaler
        self.scaler = scaler(device.type, settings, needed=self.half is torch.float16)
        check_matmul(settings.MATMUL, device)

    @property
    def name(self) -> str:
        """Return the mode and the half type, such as `autocast bfloat16`, or `float32` without -amp."""
        if self.half is None:
            return "float32"
        mode = "naive" if self.is_naive else "autocast"
        if self.is_float8:
            mode = "float8 in large Linear layers, else autocast"
        return f"{mode} {str(self.half).removeprefix('torch.')}"

    def describe(self, origin: str = "") -> str:
        """Return a line with the precision, where it was set, why it was chosen, and advice from the measured speed."""
        speedup = half_speedup(self.device, self.half or torch.bfloat16)
        advice = speed_advice(self.device, self.half, speedup)
        if self.half is None:
            return f"float32{origin}, as {self.reason}{advice}"
        scale = " with GradScaler"
        if self.half is torch.float16:  # with other types the scale is 1 and gradients are only checked
            moves = "moving" if self.scaler.moves else "constant"
            scale += f" (loss scale {self.scaler.get_scale():g}, {moves})"
        if self.is_float8:
            advice = "" if self._config.COMPILE else "; float8 is faster only with -compile"
        return f"{self.name}{scale}{origin}, {self.reason}{advice}"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None and not self.is_naive)

    def computing(self, model: nn.Module, in_training: bool = False) -> nn.Module:
        """Return the model to evaluate: the model itself under autocast, or a half-precision copy in naive mode.

        `in_training` is true between epochs. Then the copy of a compiled model is compiled too, and reuses the graphs
        of the previous copy.
        """
        if not self.is_naive:
            return model
        copied = half_copy(model, self.half)
        if in_training and self._config.COMPILE and not self._config.START.EVAL:
            from models.compilation import compile_model

            compile_model(copied, self._config)
        return copied

    def input_dtype(self, model: nn.Module) -> torch.dtype:
        """Return the data type of a model's input images: its weights' type, or half if autocast would cast the images.

        CPUs never use half here, so that their results stay equal to earlier runs. Half is not used with
        PRECISION.CUSTOM_BLACK_LIST either, because the list may name the first layer.
        """
        weights = next((each.dtype for each in model.parameters()), torch.float32)
        autocasts = self.half is not None and weights is torch.float32 and not self._config.PRECISION.CUSTOM_BLACK_LIST
        is_cast = autocasts and self.device.type != "cpu" and starts_with_convolution(model)
        return self.half if is_cast else weights

    def state_dict(self) -> dict:
        return {**self.scaler.state_dict(), "dtype": str(self.half)}

    def load_state_dict(self, state: dict) -> None:
        """Load the loss scale, unless the half type has changed. A new type starts with its own scale."""
        if state["dtype"] == str(self.half):
            self.scaler.load_state_dict({name: value for name, value in state.items() if name != "dtype"})


class ComputingModel:
    """The trained model itself, or in naive mode a half-precision copy, which computes the forward and backward passes.

    The optimizer updates the trained model's float32 weights with the gradients of the copy.
    """

    def __init__(self, model: nn.Module, half: torch.dtype | None = None):
        """Copy the model in the type `half`. None: `model` itself computes, so there is nothing to copy."""
        self.model = model if half is None else half_copy(model, half)
        pairs = [] if half is None else zip(model.parameters(), self.model.parameters(), strict=True)
        self._pairs = [(master, copied) for master, copied in pairs if master.requires_grad]

    def gradients_to_master(self) -> None:
        """Move the gradients, still scaled, from the copy to the trained model."""
        used = [(master, copied) for master, copied in self._pairs if copied.grad is not None]
        for master, _ in used:
            master.grad = torch.empty_like(master)
        if used:
            foreach_copy_([master.grad for master, _ in used], [copied.grad for _, copied in used])
        for _, copied in used:
            copied.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights from the trained model to the copy."""
        if self._pairs:
            foreach_copy_([copied for _, copied in self._pairs], [master for master, _ in self._pairs])


def half_copy(model: nn.Module, half: torch.dtype) -> nn.Module:
    if any(has_running_statistics(module) for module in model.modules()):
        raise ConfigError(
            "PRECISION.MODE is naive, but the model has BatchNorm, whose running statistics would be inaccurate in "
            "half precision; use PRECISION.MODE autocast"
        )
    return copy.deepcopy(model).to(half)


def speed_advice(device: torch.device, half: torch.dtype | None, speedup: float) -> str:
    """Return advice on a faster precision. `speedup` compares the half type (bfloat16 without -amp) with float32."""
    what = "processor" if device.type == "cpu" else f"{device.type} device"
    if half is None:
        advice = f"; this {what} multiplies matrices about {speedup:.1f} times as fast in bfloat16: use -amp"
        return advice if speedup > WORTHWHILE else ""
    name = str(half).removeprefix("torch.")
    if device.type == "cpu" and half is torch.float16:  # attention is slow in float16 even if large layers are fast
        slower = f", about {1 / speedup:.1f} times slower than float32 on this CPU" if speedup < 0.9 else ""
        return f"; float16 is slow on CPUs{slower}: use -amp_dtype bfloat16, or leave -amp out"
    if speedup < 1:
        slower = f"about {1 / speedup:.1f} times slower than float32" if speedup < 0.9 else "no faster than float32"
        return f"; {name} is {slower} on this {what}: leave -amp out, unless you need to save memory"
    if half is torch.float16 and device.type != "mps" and has_bfloat16(device):
        return f"; this {what} also supports bfloat16, which needs no loss scale: use -amp_dtype bfloat16"
    return ""


def amp_hint(amp: bool, device: torch.device) -> str:
    """Return advice to use -amp, for messages about a lack of memory, or "" if half precision would be slower."""
    return "" if amp or half_speedup(device, torch.bfloat16) < 1 else ", or use -amp"


def check_matmul(mode: str, device: torch.device) -> None:
    """Raise ConfigError for tf32 on a device that does not support it."""
    if mode == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise ConfigError(f"PRECISION.MATMUL is tf32, which this {device.type} device does not support; use ieee")


def widen(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor as float32, and any other tensor unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def are_finite(logits: Tensor) -> Tensor:
    """Return whether the largest logit of each image is finite. NaN and infinity would predict an arbitrary class.

    Single logits of -inf are allowed; they exclude a class.
    """
    return logits.amax(1).isfinite()


def set_matmul(mode: str) -> None:
    """Multiply float32 matrices in ieee precision or in tf32, in the whole process."""
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = mode == "tf32"


# --- the loss scale and clipping: torch's GradScaler with Paddle's rule ---


SMALLEST_UNIT = 1e-3  # AGC's lower limit for the norm of a unit's weights, so that a unit can learn even if all are 0


class Clipping:
    """Gradient clipping by TRAIN.CLIP_MODE and TRAIN.GRAD_CLIP. It does nothing if GRAD_CLIP is not set."""

    def __init__(self, settings: Train, parameters: Iterable[nn.Parameter]):
        """Set the limit, and the parameters that AGC clips. `parameters`: all, or this process's shards of all."""
        limit = settings.GRAD_CLIP
        self.max_norm = limit if settings.CLIP_MODE == "norm" else None
        self.max_value = limit if settings.CLIP_MODE == "value" else None
        self._factor = limit if settings.CLIP_MODE == "agc" else None
        # As in timm's --clip-mode agc, the last two parameters are left out: weight and bias of the classifier.
        self._units = list(parameters)[:-2] if self._factor else []

    @property
    def is_by_norm(self) -> bool:
        """Return whether clipping needs only the norm of all gradients, so that a fused optimizer can clip."""
        return not (self.max_value or self._factor)

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Clip the gradients of `parameters`. `norm` is the norm of all gradients together."""
        if self.max_norm:
            clip_grads_with_norm_(parameters, self.max_norm, norm)
        if self.max_value:
            clip_grad_value_(parameters, self.max_value)
        for parameter in self._units:
            if parameter.grad is not None:
                _clip_units(parameter, self._factor)


def _clip_units(parameter: Tensor, factor: float) -> None:
    """Clip a gradient adaptively (AGC, Brock et al., 2021).

    AGC limits the norm of each unit's gradient to `factor` times the norm of the unit's weights. A unit is a row of a
    matrix, a filter, or a whole vector.
    """
    dims = tuple(range(1, parameter.ndim)) or None
    both = parameter.detach(), parameter.grad
    largest, norm = (torch.linalg.vector_norm(each, dim=dims, keepdim=True) for each in both)
    largest = largest.clamp(min=SMALLEST_UNIT) * factor
    scale = largest / norm.clamp(min=1e-6)
    parameter.grad.copy_(torch.where(norm < largest, parameter.grad, parameter.grad * scale))


class LossScaler(GradScaler):
    """A loss scale that is constant, or shrinks after several overflows and grows after several good updates.

    torch's own rule neither counts overflows nor has a minimum: after 166 consecutive overflows its scale is exactly 0
    and every gradient is NaN. Everything is computed on the device, without synchronisation.
    """

    def __init__(self, device_type: str, settings: PrecisionSettings, needed: bool):
        """Start with the initial scale. `needed` is true for float16. For other types the scale stays 1, and the scaler
        only skips non-finite updates.
        """
        self._settings = settings
        self.moves = needed and settings.USE_DYNAMIC_LOSS_SCALING
        super().__init__(device_type, init_scale=settings.INIT_LOSS_SCALING if needed else 1.0)
        # Overflows since the last good update or decrease of the scale.
        self._bad = torch.zeros((), dtype=torch.int32, device=device_type)

    def update(self) -> None:
        """Adjust the scale after an update was done or skipped, without synchronisation."""
        scale, good = scale_and_growth(self)
        super().update(self._next(scale, good, self.found_inf()) if self.moves else scale.clone())

    @torch.no_grad()
    def _next(self, scale: Tensor, good: Tensor, found_inf: Tensor) -> Tensor:
        """Update the counters and return the new scale."""
        settings = self._settings
        is_bad = found_inf.reshape(()) > 0
        bad_so_far = self._bad + 1
        good_so_far = good + 1
        shrinks = is_bad & (bad_so_far >= settings.DECR_EVERY_N_NAN_OR_INF)
        grows = ~is_bad & (good_so_far >= settings.INCR_EVERY_N_STEPS)
        good.copy_(torch.where(is_bad | grows, 0, good_so_far))
        self._bad = torch.where(is_bad & ~shrinks, bad_so_far, 0)  # a good update resets the count, as in Paddle
        shrunk = (scale * settings.DECR_RATIO).clamp(min=settings.MIN_LOSS_SCALING)
        grown = scale * settings.INCR_RATIO
        if settings.MAX_LOSS_SCALING is not None:
            grown = grown.clamp(max=settings.MAX_LOSS_SCALING)
        grown = torch.where(torch.isfinite(grown), grown, scale)
        return torch.where(shrinks, shrunk, torch.where(grows, grown, scale))

    def unscale_and_clip(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], parallel: Parallel, clipping: Clipping
    ) -> Tensor:
        """Unscale, check and clip the gradients before step(). Return their norm before clipping, on the device."""
        self.unscale_(optimizer)
        parallel.sync_found_inf(self.found_inf())
        norm = parallel.norm(_local_norm(parameters))
        clipping(parameters, norm)
        return norm

    def found_inf(self) -> Tensor:
        """Return 1.0 if a gradient is not finite, else 0.0, on the device. The value is valid until update()."""
        return found_inf(self)

    def state_dict(self) -> dict:
        return super().state_dict() | {"_bad_tracker": int(self._bad)}

    def load_state_dict(self, state: dict) -> None:
        """Load scale and counters."""
        super().load_state_dict({name: value for name, value in state.items() if name != "_bad_tracker"})
        self._bad.fill_(state["_bad_tracker"])


class FusedLossScaler(LossScaler):
    """A loss scaler that leaves unscaling and clipping to the fused optimizer, which reads all gradients anyway.

    On GPUs an update spends its time on memory traffic, and unscaling, checking and clipping each read all gradients.
    Here only their norm is computed before the optimizer runs. The norm also shows whether all gradients are finite. So
    an update is also skipped if the squares of finite scaled gradients overflow float32 (a norm above 1.8e19).
    """

    def unscale_and_clip(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], parallel: Parallel, clipping: Clipping
    ) -> Tensor:
        if not (optimizer.defaults.get("fused") and clipping.is_by_norm):
            return super().unscale_and_clip(optimizer, parameters, parallel, clipping)
        scale, _ = scale_and_growth(self)
        norm = parallel.norm(_local_norm(parameters)) / scale  # over all processes, so that all of them skip together
        limit = clipping.max_norm
        kept = (limit / (norm + 1e-6)).clamp(max=1) if limit else torch.ones_like(norm)
        set_found_inf(self, optimizer, (~norm.isfinite()).to(scale))
        optimizer.grad_scale = (scale / kept).to(scale)  # the kernel divides by grad_scale; step() deletes it
        return norm


def _local_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norm of this process's part of the gradient."""
    return get_total_norm([each.grad for each in parameters if each.grad is not None])
