"""All that mixed precision is: in which type a device computes, the loss scale, and which updates are skipped.

There is one path for every precision. A GradScaler looks at every gradient: in float16 its scale moves, in bfloat16
and float32 it stays 1 and only keeps a non-finite update from reaching the weights.
"""

import torch
from torch.amp import GradScaler

from configs.schema import Config


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return True


class Precision:
    """Autocast and GradScaler of one run."""

    def __init__(self, config: Config, device: torch.device):
        settings = config.PRECISION
        self.device = device
        self.half, self.reason = self._choose(config.AMP, settings.DTYPE, device)
        self.scale_moves = self.half is torch.float16
        self.scaler = GradScaler(
            device.type,
            init_scale=settings.INIT_LOSS_SCALING if self.scale_moves else 1.0,
            growth_factor=settings.INCR_RATIO,
            backoff_factor=settings.DECR_RATIO,
            growth_interval=settings.INCR_EVERY_N_STEPS,
        )

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

    def describe(self) -> str:
        """One line: what was chosen, why, and what this device could do better."""
        fast = has_fast_bfloat16(self.device)
        if self.half is None:
            advice = (
                "; this device computes faster in half precision: -amp" if fast or self.device.type == "cuda" else ""
            )
            return f"precision: float32, as {self.reason}{advice}"
        name = str(self.half).removeprefix("torch.")
        scale = f"loss scale {self.scaler.get_scale():g}, moving" if self.scale_moves else "loss scale 1, as a guard"
        advice = ""
        if self.half is torch.float16 and self.device.type == "cpu":
            advice = "; float16 is very slow on a CPU, -amp_dtype bfloat16 is the one to use"
        elif self.half is torch.float16 and fast:
            advice = "; this device also has bfloat16, which needs no loss scale: -amp_dtype bfloat16"
        elif self.half is torch.bfloat16 and not fast:
            advice = "; this device has no bfloat16 arithmetic, so this saves memory but not time"
        return f"precision: autocast {name} with GradScaler ({scale}), {self.reason}{advice}"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], grad_clip: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unscale, clip, step, or skip where a gradient is not finite.

        Returns the gradient norm before clipping and 1.0 or 0.0 for skipped or not, both on the device.
        """
        self.scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if grad_clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, grad_norm)
        (skipped,) = self.scaler._found_inf_per_device(optimizer).values()  # gone after scaler.update
        self.scaler.step(optimizer)
        self.scaler.update(None if self.scale_moves else 1.0)
        optimizer.zero_grad(set_to_none=True)
        return grad_norm, skipped

    def state_dict(self) -> dict:
        return {**self.scaler.state_dict(), "dtype": str(self.half)}

    def load_state_dict(self, state: dict) -> None:
        """A scale means something only to the type it was found for; another type starts from its own."""
        if state.get("dtype", str(self.half)) == str(self.half):
            self.scaler.load_state_dict({name: value for name, value in state.items() if name != "dtype"})
