"""Mixed precision: networks in 16 bits where `torch.autocast` allows it, all that is learnt from them in 32.

Names are Lightning Fabric's. On a CPU "16-mixed" is carried out as "bf16-mixed", as Fabric does it, but not in silence:
`Precision.effective` says so, and the log has it.
"""

import contextlib
from typing import Any

import torch as th
from torch import nn

from grpo_rl.errors import ConfigError, warn

PRECISIONS: dict[str, th.dtype | None] = {"32-true": None, "bf16-mixed": th.bfloat16, "16-mixed": th.float16}

_STATE = ("scale", "_growth_tracker")


def autocast(device: th.device, dtype: th.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which a network computes in `dtype`; None: as it is."""
    return contextlib.nullcontext() if dtype is None else th.autocast(device.type, dtype=dtype)


class Precision:
    """How a policy's gradient is made: scaled up before the backward pass in fp16, where small ones would be lost.

    Args:
        requested: "32-true", "bf16-mixed" or "16-mixed".
        device: of the policy.

    Attributes:
        effective: what is done on that device.
        dtype: of the networks' forward pass; None: float32.

    Raises:
        ConfigError: An unknown name.
    """

    def __init__(self, requested: str, device: th.device) -> None:
        if requested not in PRECISIONS:
            raise ConfigError(f"precision={requested!r}: expected one of {', '.join(map(repr, PRECISIONS))}")
        self.effective = "bf16-mixed" if requested == "16-mixed" and device.type == "cpu" else requested
        self.dtype = PRECISIONS[self.effective]
        if self.effective != requested:
            warn(f'precision="{requested}" on {device} is carried out as "{self.effective}"')
        self.scale_for(self.dtype, device)

    def scale_for(self, dtype: th.dtype | None, device: th.device) -> None:
        """Gradients of networks that compute in `dtype` are scaled from now on; of fp16 only that changes anything."""
        self.scaler = th.amp.GradScaler(device.type, enabled=dtype is th.float16)

    def backward(self, loss: th.Tensor) -> None:
        """Adds the gradient of a loss, a scalar, to the parameters'; in fp16 times the scale."""
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: th.optim.Optimizer) -> None:
        """Gradients as they are, for clipping; some are infinite or NaN where the scale was too large."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: th.optim.Optimizer) -> None:
        """A step of the optimizer; in fp16 none, and half the scale, where a gradient is not finite."""
        self.scaler.step(optimizer)
        self.scaler.update()

    @property
    def skips(self) -> bool:
        """Whether a gradient that is not finite is a scale that was too large, which needs no other cure."""
        return self.scaler.is_enabled()

    def verdict(self, norm: th.Tensor) -> dict[str, th.Tensor]:
        """For the log: the norm of a gradient before it was clipped, and in fp16 whether its step is left out."""
        if not self.skips:
            return {"grad_norm": norm}
        finite = norm.isfinite()
        return {"grad_norm": norm.where(finite, th.zeros_like(norm)), "skipped_steps": (~finite).float()}

    def state(self) -> dict[str, float]:
        """The scale, and how many good steps it has seen, for a checkpoint; empty where nothing is scaled."""
        return {name: self.scaler.state_dict()[name] for name in _STATE} if self.skips else {}

    def set_state(self, state: dict[str, float]) -> None:
        """Goes on from `state`; an empty one changes nothing."""
        if state and self.skips:
            self.scaler.load_state_dict(self.scaler.state_dict() | state)


def check_underflow(policy: nn.Module, dtype: th.dtype | None) -> None:
    """Warns of fp16 in a network with convolutions."""
    if dtype is th.float16 and any(isinstance(module, nn.modules.conv._ConvNd) for module in policy.modules()):
        warn(
            'precision="16-mixed" with convolutions: their small activations and gradients can underflow to 0 in fp16,'
            ' which no loss scale brings back. precision="bf16-mixed" has the range of float32; or watch'
            " train/skipped_steps and train/loss_scale"
        )
