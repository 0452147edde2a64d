"""Losses of the update: pure functions on packed rows (M,), one row a step or a token.

Every loss is returned per row and summed once, by `aggregate`, with weights that already hold the denominator (1/M
over steps, or an aggregation's own): splitting a batch into micro-batches then never changes a gradient. ρ stands for
exp(logp − old_logp); log-probabilities and advantages are fp32.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch as th
from torch import Tensor
from torch.nn import functional as F

from grpo_rl.advantages import masked_standardize as masked_standardize  # the minibatch form of "batch" scaling
from grpo_rl.errors import ConfigError


def clipped_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
    delta: float | None = None,
    centre: Tensor | None = None,
) -> Tensor:
    """−min(ρ·A, clip(ρ, 1 − clip_range, 1 + clip_range_high)·A): PPO's loss (arXiv 1707.06347), per row (M,).

    `clip_range_high` is `clip_range` when None; a higher one is DAPO's clip-higher (arXiv 2503.14476). `delta` bounds
    the unclipped side too, −min(min(ρ, δ)·A, …): without it a bad token that has become likely pulls without limit.
    With `centre` (M,), q, the range is q − clip_range … q + clip_range_high: it lies about where the policy was before
    this update, if an older one took the step (generalised clipping, GePPO, Queeney et al. 2021, arXiv 2111.00072).
    """
    ratio = (logp - old_logp).exp()
    high = clip_range if clip_range_high is None else clip_range_high
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    if centre is None:
        clipped = ratio.clamp(1 - clip_range, 1 + high)
    else:
        clipped = ratio.maximum(centre - clip_range).minimum(centre + high)
    return -th.min(bounded * advantage, clipped * advantage)


def cispo_surrogate(logp: Tensor, old_logp: Tensor, advantage: Tensor, ratio_max: float) -> Tensor:
    """−stop_grad(min(ρ, ratio_max))·A·logp per row (M,): no token loses its gradient (CISPO, arXiv 2506.13585)."""
    return -(logp - old_logp).exp().clamp(max=ratio_max).detach() * advantage * logp


def sapo_surrogate(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """−(4/τ)·σ(τ(ρ − 1))·A per row (M,), τ by the sign of A: a soft gate in place of the clip (SAPO, arXiv 2511.20347).

    At ρ = 1 its gradient is that of −ρ·A.
    """
    tau = th.where(advantage > 0, tau_positive, tau_negative)
    return -(4 / tau) * th.sigmoid(tau * ((logp - old_logp).exp() - 1)) * advantage


def segment_log_ratio(logp: Tensor, old_logp: Tensor, segment: Tensor, mean: bool = True) -> Tensor:
    """Σ or mean of log ρ over the segment of each row (M,): the log-ratio of whole completions.

    Args:
        segment: (M,) int64, ascending from 0.
        mean: GSPO's length-normalised ratio (arXiv 2507.18071); False: the completion's own.
    """
    log_ratio = logp - old_logp
    total = log_ratio.new_zeros(int(segment[-1]) + 1 if len(segment) else 0).index_add(0, segment, log_ratio)
    if mean:
        total = total / th.bincount(segment, minlength=len(total)).clamp(min=1)
    return total[segment]


# --- losses by name ---------------------------------------------------------------------------------------------------
class Clipping(NamedTuple):
    """What a loss may need beside the rows: ε, ε_high (None: ε), δ (None: ∞), the rows' segments (M,), and what ρ is
    clipped about (M,) (None: 1)."""

    low: float
    high: float | None = None
    delta: float | None = None
    segment: Tensor | None = None
    centre: Tensor | None = None


Aggregation = Literal["mean", "row_mean", "rollout_mean", "constant"]


class Loss(NamedTuple):
    """A surrogate, (logp, old_logp, advantage, clipping) → (M,), and what its sum is divided by."""

    surrogate: Callable[[Tensor, Tensor, Tensor, Clipping], Tensor]
    aggregation: Aggregation = "mean"
    needs_segments: bool = False


def _clipped(logp: Tensor, old_logp: Tensor, advantage: Tensor, clipping: Clipping) -> Tensor:
    return clipped_surrogate(logp, old_logp, advantage, clipping.low, clipping.high, clipping.delta, clipping.centre)


def _of_segments(mean: bool) -> Callable[[Tensor, Tensor, Tensor, Clipping], Tensor]:
    def surrogate(logp: Tensor, old_logp: Tensor, advantage: Tensor, clipping: Clipping) -> Tensor:
        assert clipping.segment is not None
        log_ratio = segment_log_ratio(logp, old_logp, clipping.segment, mean)
        return _clipped(log_ratio, th.zeros_like(log_ratio), advantage, clipping)

    return surrogate


def _cispo(logp: Tensor, old_logp: Tensor, advantage: Tensor, clipping: Clipping) -> Tensor:
    assert clipping.high is not None, "clip_range_high is checked at construction"
    return cispo_surrogate(logp, old_logp, advantage, clipping.high)


LOSSES: dict[str, Loss] = {
    "clipped": Loss(_clipped),
    "grpo": Loss(_clipped, "row_mean", True),
    "bnpo": Loss(_clipped),
    "dapo": Loss(_clipped, "rollout_mean", True),
    "dr_grpo": Loss(_clipped, "constant", True),
    "gspo": Loss(_of_segments(mean=True), "row_mean", True),
    "rloo": Loss(_of_segments(mean=False), "row_mean", True),
    "cispo": Loss(_cispo, "rollout_mean"),
    "sapo": Loss(lambda logp, old_logp, advantage, clipping: sapo_surrogate(logp, old_logp, advantage), "row_mean"),
}
"""Name → loss. Over steps, which have no segments, every aggregation is the mean, and those that need them are not
offered. `rloo` is −ρ·A with the ratio of the whole completion: its gradient at ρ = 1 is −A · ∇ Σ logp."""


def row_weights(
    aggregation: Aggregation, lengths: Tensor, rollout_tokens: int, minibatches: int, max_length: int
) -> Tensor:
    """What each token of R completions weighs (R,), so that Σ weight · loss is the aggregation over a minibatch.

    Args:
        aggregation: "mean": Σ loss/Σ lengths; "row_mean": the mean over rows of their means; "rollout_mean": Σ loss
            over the tokens of the whole rollout, times the number of minibatches, so that their mean is the rollout's;
            "constant": Σ loss/(R · max_length).
        lengths: (R,) trained tokens of each row of the minibatch. Rows of length 0 count in R.
        rollout_tokens: trained tokens of all minibatches. max_length: what a completion may have.
    """
    rows = max(len(lengths), 1)
    if aggregation == "row_mean":
        return 1.0 / (rows * lengths.clamp(min=1).float())
    share = {
        "mean": 1.0 / max(int(lengths.sum()), 1),
        "rollout_mean": minibatches / max(rollout_tokens, 1),
        "constant": 1.0 / (rows * max_length),
    }[aggregation]
    return th.full((len(lengths),), share, device=lengths.device)


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


def kl_unbiased(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
    """ρ·k3 per row: over samples of the policy behind old_logp its value AND its gradient as a loss are those of
    KL(π‖ref), on and off policy (DeepSeek-V3.2, arXiv 2512.02556)."""
    return (logp - old_logp).exp() * kl_k3(logp, ref_logp)


KL_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": lambda logp, ref_logp, old_logp: kl_k1(logp, ref_logp),
    "k2": lambda logp, ref_logp, old_logp: kl_k2(logp, ref_logp),
    "k3": lambda logp, ref_logp, old_logp: kl_k3(logp, ref_logp),
    "unbiased": kl_unbiased,
}
"""Name → (logp, ref_logp, old_logp) → the KL's loss per row. As a loss "k1" has gradient 0 on average and "k3" that of
another divergence, KL(ref‖π); "k2" (on policy) and "unbiased" (anywhere) have that of KL(π‖ref)."""


# --- diagnostics ------------------------------------------------------------------------------------------------------
@th.no_grad()
def approx_kl(logp: Tensor, old_logp: Tensor, weight: Tensor | None = None) -> Tensor:
    """mean((ρ − 1) − log ρ) over the rows: SB3's estimate of KL(π_old‖π) from samples of π_old. Scalar, no gradient.

    Samples of another policy μ need `weight` (M,), proportional to π_old/μ: the mean is then weighted by it.
    """
    kl = kl_k3(old_logp, logp)
    return kl.mean() if weight is None else (weight * kl).sum() / weight.sum()


@th.no_grad()
def clip_fraction(
    ratio: Tensor,
    clip_range: float,
    weight: Tensor | None = None,
    *,
    advantage: Tensor | None = None,
    clip_range_high: float | None = None,
    centre: Tensor | float = 1.0,
) -> Tensor:
    """Share of rows whose ratio left the clip range about `centre`, weighted by `weight` (equal when None). Scalar.

    Without `advantage` this is SB3's number, |ρ − 1| > ε. With it, only active clips count, those that stop the
    gradient: ρ below the range with A < 0, or above it with A > 0.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    below, above = ratio < centre - clip_range, ratio > centre + high
    if advantage is not None:
        below, above = below & (advantage < 0), above & (advantage > 0)
    clipped = (below | above).float()
    return clipped.mean() if weight is None else (weight * clipped).sum() / weight.sum()


@th.no_grad()
def clip_ratios(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, clipping: Clipping, loss_type: str
) -> dict[str, Tensor]:
    """Shares of tokens whose clip is active: ρ below the range with A < 0, above it with A > 0, and either."""
    log_ratio = logp - old_logp
    if loss_type in ("gspo", "rloo") and clipping.segment is not None:
        log_ratio = segment_log_ratio(logp, old_logp, clipping.segment, mean=loss_type == "gspo")
    ratio = log_ratio.exp()
    below = (ratio < 1 - clipping.low) & (advantage < 0)
    above = (ratio > 1 + (clipping.low if clipping.high is None else clipping.high)) & (advantage > 0)
    shares = {"low": below, "high": above, "region": below | above}
    return {f"clip_ratio/{name}_mean": active.float().mean() for name, active in shares.items()}
