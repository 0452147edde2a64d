"""Losses of the update: pure functions on packed rows (M,), one row a step or a token.

Every loss is returned per row and summed once, by `aggregate`, with weights that already hold the denominator (1/M
over steps, or an aggregation's own): splitting a batch into micro-batches then never changes a gradient. ρ stands for
exp(logp − old_logp); log-probabilities and advantages are fp32.
"""

import torch as th
from torch import Tensor
from torch.nn import functional as F

from grpo_rl.advantages import masked_standardize as masked_standardize  # the minibatch form of "batch" scaling
from grpo_rl.errors import ConfigError


def clipped_surrogate(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, clip_range: float, clip_range_high: float | None = None
) -> Tensor:
    """−min(ρ·A, clip(ρ, 1 − clip_range, 1 + clip_range_high)·A): PPO's loss (arXiv 1707.06347), per row (M,).

    `clip_range_high` is `clip_range` when None; a higher one is DAPO's clip-higher (arXiv 2503.14476).
    """
    ratio = (logp - old_logp).exp()
    high = clip_range if clip_range_high is None else clip_range_high
    return -th.min(ratio * advantage, ratio.clamp(1 - clip_range, 1 + high) * advantage)


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip_range: float | None = None
) -> Tensor:
    """Squared error per row (M,); with `clip_range` the prediction may move from `old_values` by at most that.

    As SB3's PPO: the error of the clipped prediction alone, not the larger of the two errors (OpenAI baselines).

    Raises:
        ConfigError: `clip_range` without `old_values`.
    """
    if clip_range is not None:
        if old_values is None:
            raise ConfigError("value_loss with clip_range needs old_values, the predictions when sampled; got None.")
        values = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return F.mse_loss(values, returns, reduction="none")


def entropy_loss(entropy: Tensor | None, logp: Tensor) -> Tensor:
    """−entropy per row (M,); without a closed form (None), its one-sample estimate −(−logp), as SB3."""
    return logp if entropy is None else -entropy


def aggregate(loss: Tensor, weight: Tensor) -> Tensor:
    """Σ weight · loss over the rows: scalar. For a mean, the weights of the whole batch sum to 1."""
    return (weight * loss).sum()


# --- KL estimators, from samples of the policy behind logp (Schulman, http://joschu.net/blog/kl-approx.html) ----------
def kl_k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp − ref_logp per row: unbiased for KL(π‖ref), noisy, may be negative."""
    return logp - ref_logp


def kl_k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(logp − ref_logp)²/2 per row: biased, low variance; its gradient as a loss is that of KL(π‖ref)."""
    return 0.5 * (logp - ref_logp).square()


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """e^d − d − 1 with d = ref_logp − logp, per row: unbiased and never negative.

    Its value is unbiased for KL(π‖ref), its gradient as a loss is not (verl #2953): that is `kl_k2`'s.
    """
    d = ref_logp - logp
    return d.expm1() - d


# --- diagnostics ------------------------------------------------------------------------------------------------------
@th.no_grad()
def approx_kl(logp: Tensor, old_logp: Tensor) -> Tensor:
    """mean((ρ − 1) − log ρ) over the rows: SB3's estimate of KL(π_old‖π) from samples of π_old. Scalar, no gradient."""
    return kl_k3(old_logp, logp).mean()


@th.no_grad()
def clip_fraction(
    ratio: Tensor,
    clip_range: float,
    weight: Tensor | None = None,
    *,
    advantage: Tensor | None = None,
    clip_range_high: float | None = None,
) -> Tensor:
    """Share of rows whose ratio left the clip range, weighted by `weight` (equal when None). Scalar, no gradient.

    Without `advantage` this is SB3's number, |ρ − 1| > ε. With it, only active clips count, those that stop the
    gradient: ρ below the range with A < 0, or above it with A > 0.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    below, above = ratio < 1 - clip_range, ratio > 1 + high
    if advantage is not None:
        below, above = below & (advantage < 0), above & (advantage > 0)
    clipped = (below | above).float()
    return clipped.mean() if weight is None else (weight * clipped).sum() / weight.sum()
