"""Normalisers whose statistics are module buffers, so that checkpoints and exports carry them.

They move only when `update` is called: the caller freezes them through a rollout and its epochs. Statistics are
float64, counts int64, outputs float32. The count starts at 0, where SB3's `RunningMeanStd` has 1e-4 phantom samples.
"""

import torch as th
from torch import Tensor, nn

from grpo_rl.errors import ConfigError, NonFiniteError


class RunningNorm(nn.Module):
    """clip((x − mean)/sqrt(var + eps), ±clip) with the mean and population variance of all that `update` has seen.

    Args:
        shape: Shape of one sample.
        clip: Largest absolute output.
        eps: Added to the variance.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.clip = clip
        self.eps = eps
        self.register_buffer("mean", th.zeros(self.shape, dtype=th.float64))
        self.register_buffer("var", th.ones(self.shape, dtype=th.float64))
        self.register_buffer("count", th.zeros((), dtype=th.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised x, (*, *shape) float32; x itself as long as nothing was seen."""
        normed = ((x - self.mean) / (self.var + self.eps).sqrt()).clamp(-self.clip, self.clip)
        return th.where(self.count > 0, normed, x).float()

    @th.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take samples into the statistics, in any order and split (Chan et al. 1983).

        Args:
            x: (*, *shape) samples; any number of leading axes.
            mask: (*) bool over the leading axes; False rows are not read.

        Raises:
            ConfigError: x is not made of samples of this shape.
            NonFiniteError: NaN or infinity; the statistics are left as they were.
        """
        leading = x.dim() - len(self.shape)
        if leading < 1 or tuple(x.shape[leading:]) != self.shape:
            expected = ", ".join(map(str, ("*", *self.shape)))
            raise ConfigError(f"expected samples of shape ({expected}), got {tuple(x.shape)}.")
        x = x.reshape(-1, *self.shape) if mask is None else x[mask]
        if len(x) == 0:
            return
        x = x.double()
        batch_mean = x.mean(dim=0)
        batch_m2 = (x - batch_mean).square().sum(dim=0)
        if not bool(batch_m2.isfinite().all()):
            raise NonFiniteError(
                "NaN or infinity in what a normaliser was given: check the env's observations and rewards."
            )
        total = self.count + len(x)
        delta = batch_mean - self.mean
        m2 = self.var * self.count + batch_m2 + delta.square() * self.count * len(x) / total
        self.mean += delta * len(x) / total
        self.var.copy_(m2 / total)
        self.count.copy_(total)

    def extra_repr(self) -> str:
        return f"shape={self.shape}, clip={self.clip}, eps={self.eps}"


class ReturnScale(RunningNorm):
    """clip(r/sqrt(var + eps), ±clip): rewards scaled by the spread of discounted returns, never shifted (VecNormalize).

    `update` takes discounted returns, `forward` scales rewards; both of any shape.
    """

    def __init__(self, eps: float = 1e-8, clip: float = 10.0) -> None:
        super().__init__((), clip=clip, eps=eps)

    def unit(self) -> Tensor:
        """How much reward a scaled reward of 1 is, but for the clipping: scalar float64, 1 where nothing was seen."""
        return th.where(self.count > 0, (self.var + self.eps).sqrt(), 1.0)

    def forward(self, rewards: Tensor) -> Tensor:
        """Scaled rewards, float32; the rewards themselves as long as nothing was seen."""
        scaled = (rewards / (self.var + self.eps).sqrt()).clamp(-self.clip, self.clip)
        return th.where(self.count > 0, scaled, rewards).float()
