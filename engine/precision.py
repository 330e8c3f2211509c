"""Mixed precision: the data type of computations. All precisions share one code path."""

import torch
from torch import Tensor, nn

from configs.schema import Config
from engine.train.loss_scale import LossScaler
from models.parts import starts_with_convolution
from utils.errors import ConfigError


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


def scaler_class(device: torch.device) -> type[LossScaler]:
    """Return the class of the loss scale. On CPUs, torch's functions unscale and clip, as in earlier runs."""
    if device.type == "cpu":
        return LossScaler
    from engine.train.fused_loss_scale import FusedLossScaler

    return FusedLossScaler


class Precision:
    """The autocast and the GradScaler of a run (PRECISION.MODE, PRECISION.DTYPE)."""

    def __init__(self, config: Config, device: torch.device):
        settings = config.PRECISION
        self.device, self._config = device, config
        self.is_naive = config.AMP and settings.MODE == "naive"
        self.is_float8 = config.AMP and settings.MODE == "float8"
        self.half, self.reason = choose_half(config.AMP, settings.DTYPE, device, has_bfloat16(device))
        if self.is_float8:
            from models.transforms.float8 import check_float8

            check_float8(device)
            self.half, self.reason = torch.bfloat16, "PRECISION.MODE is float8"
        self.scaler = scaler_class(device)(device.type, settings, needed=self.half is torch.float16)
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

    def describe(self, origin: str = "", trains: bool = False, is_fastest: bool = False) -> str:
        """Return a line with the precision, where it was set, why it was chosen, and advice on a better choice.

        `trains`: whether -amp auto could choose the precision. `is_fastest`: whether it has.
        """
        if self.half is None:
            advice = "; -amp auto uses half precision where it is faster" if trains and not is_fastest else ""
            reason = "the faster one" if is_fastest else f"as {self.reason}"
            return f"float32{origin}, {reason}{advice}"
        scale = " with GradScaler"
        if self.half is torch.float16:  # with other types the scale is 1 and gradients are only checked
            moves = "moving" if self.scaler.moves else "constant"
            scale += f" (loss scale {self.scaler.get_scale():g}, {moves})"
        if self.is_float8:
            advice = "" if self._config.COMPILE else "; float8 is faster only with -compile"
        elif self.device.type == "cpu":
            instead = "use -amp auto" if trains else "leave -amp out"
            advice = "" if is_fastest else slowness_on_cpu(self.half, instead)
        else:
            has_better = self.half is torch.float16 and self.device.type != "mps" and has_bfloat16(self.device)
            better = f"; this {self.device.type} device also supports bfloat16, which needs no loss scale: use "
            advice = f"{better}-amp_dtype bfloat16" if has_better else ""
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
        from engine.half_copy import half_copy

        copied = half_copy(model, self.half)
        if in_training and self._config.COMPILE and not self._config.EVAL:
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


def slowness_on_cpu(half: torch.dtype, remedy: str) -> str:
    """Return a warning with a remedy if this processor multiplies matrices slowly in the half type, or "" if not."""
    from utils.host import half_speedup

    speedup, name = half_speedup(torch.device("cpu"), half), str(half).removeprefix("torch.")
    slower = f", about {1 / speedup:.1f} times slower than float32 on this processor" if speedup < 0.9 else ""
    if half is torch.float16:  # attention is slow in float16 even if large layers are fast
        return f"; float16 is slow on CPUs{slower}: {remedy}, or use -amp_dtype bfloat16"
    if speedup >= 1:
        return ""
    slower = slower.removeprefix(", ") or "no faster than float32 on this processor"
    return f"; {name} is {slower}: {remedy}, unless you need to save memory"


def amp_hint(amp: bool, device: torch.device) -> str:
    """Return advice to use -amp, for messages about a lack of memory. On a CPU it saves little memory."""
    return "" if amp or device.type == "cpu" else ", or use -amp"


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
