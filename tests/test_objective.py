"""Losses per row: numbers by hand, SB3's PPO formula, and what must not depend on how a batch is split."""

import math
from typing import Any

import pytest
import torch as th
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from grpo_rl.errors import ConfigError
from grpo_rl.objective import (
    KL_LOSSES,
    LOSSES,
    Clipping,
    aggregate,
    approx_kl,
    clip_fraction,
    clip_ratios,
    clipped_surrogate,
    entropy_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    masked_standardize,
    row_weights,
    value_loss,
)


def test_clipped_surrogate_by_hand() -> None:
    # ε = 0.2, all four corners: ρ = 0.7 and 1.3 with A = +1 and −1
    ratio, advantage = th.tensor([0.7, 0.7, 1.3, 1.3]), th.tensor([1.0, -1.0, 1.0, -1.0])
    loss = clipped_surrogate(ratio.log(), th.zeros(4), advantage, 0.2)
    # −min(0.7, 0.8), −min(−0.7, −0.8), −min(1.3, 1.2), −min(−1.3, −1.2)
    assert_close(loss, th.tensor([-0.7, 0.8, -1.2, 1.3]))
    higher = clipped_surrogate(ratio.log(), th.zeros(4), advantage, 0.2, clip_range_high=0.28)
    assert_close(higher, th.tensor([-0.7, 0.8, -1.28, 1.3]))  # only the upper clip of A > 0 moves


def test_gradient_stops_exactly_at_active_clips() -> None:
    logp = th.tensor([0.7, 0.7, 1.3, 1.3]).log().requires_grad_()
    clipped_surrogate(logp, th.zeros(4), th.tensor([1.0, -1.0, 1.0, -1.0]), 0.2).sum().backward()
    # ∂(−ρA)/∂logp = −ρA where the clip is not active
    assert_close(logp.grad, th.tensor([-0.7, 0.0, 0.0, 1.3]))


def test_at_the_old_policy_loss_is_zero_and_its_gradient_is_not() -> None:
    logp = th.tensor([-1.0, -2.0], requires_grad=True)
    loss = aggregate(clipped_surrogate(logp, logp.detach(), th.tensor([1.0, -1.0]), 0.2), th.full((2,), 0.5))
    loss.backward()
    assert loss == 0.0
    assert_close(logp.grad, th.tensor([-0.5, 0.5]))


def test_clip_fraction() -> None:
    ratio = th.tensor([0.7, 0.7, 1.3, 1.3, 1.0])
    advantage = th.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    assert_close(clip_fraction(ratio, 0.2), th.tensor(0.8))  # SB3's: four of five are outside 0.8 … 1.2
    assert_close(clip_fraction(ratio, 0.2, advantage=advantage), th.tensor(0.4))  # active: 0.7 with −1, 1.3 with +1
    assert_close(clip_fraction(ratio[:3], 0.2, advantage=-th.ones(3)), th.tensor(2 / 3))  # 1.3 with −1 is not
    assert_close(clip_fraction(ratio, 0.2, th.tensor([1.0, 0.0, 0.0, 0.0, 3.0])), th.tensor(0.25))
    assert_close(clip_fraction(ratio, 0.2, clip_range_high=0.4), th.tensor(0.4))


def test_value_loss_by_hand() -> None:
    values, returns, old = th.tensor([3.0, 1.5, 0.0]), th.tensor([5.0, 5.0, 5.0]), th.ones(3)
    assert value_loss(values, returns).tolist() == [4.0, 12.25, 25.0]
    # clipped to 1 ± 1: 2, 1.5, 0 → errors 3, 3.5, 5. SB3 takes this alone, even where it is larger
    assert value_loss(values, returns, old, 1.0).tolist() == [9.0, 12.25, 25.0]
    with pytest.raises(ConfigError, match="needs old_values"):
        value_loss(values, returns, clip_range=0.2)


def test_entropy_loss() -> None:
    logp = th.tensor([-1.0, -3.0])
    assert entropy_loss(th.tensor([0.5, 2.0]), logp).tolist() == [-0.5, -2.0]
    assert entropy_loss(None, logp).tolist() == [-1.0, -3.0]  # −(−logp)


def random_batch(rows: int = 12) -> tuple[Tensor, ...]:
    rng = th.Generator().manual_seed(0)
    old_logp, advantage, returns, old_values, noise = th.randn(5, rows, generator=rng).unbind()
    return old_logp, advantage, returns, old_values, 0.3 * noise


@pytest.mark.parametrize("clip_range_vf", [None, 0.1])
@pytest.mark.parametrize("closed_form", [True, False])
def test_total_loss_and_gradient_equal_sb3_ppo(clip_range_vf: float | None, closed_form: bool) -> None:
    old_logp, raw_advantage, returns, old_values, noise = random_batch()
    ent_coef, vf_coef, clip_range = 0.01, 0.5, 0.2

    def inputs() -> tuple[Tensor, Tensor, Tensor | None]:
        log_prob = (old_logp + noise).requires_grad_()
        return log_prob, (old_values + noise).requires_grad_(), log_prob.exp() if closed_form else None

    # stable_baselines3/ppo/ppo.py, PPO.train, line by line
    log_prob, values, entropy = inputs()
    advantages = (raw_advantage - raw_advantage.mean()) / (raw_advantage.std() + 1e-8)
    ratio = th.exp(log_prob - old_logp)
    policy_loss_1 = advantages * ratio
    policy_loss_2 = advantages * th.clamp(ratio, 1 - clip_range, 1 + clip_range)
    policy_loss = -th.min(policy_loss_1, policy_loss_2).mean()
    values_pred = values
    if clip_range_vf is not None:
        values_pred = old_values + th.clamp(values - old_values, -clip_range_vf, clip_range_vf)
    entropy_term = -th.mean(-log_prob) if entropy is None else -th.mean(entropy)
    sb3 = policy_loss + ent_coef * entropy_term + vf_coef * F.mse_loss(returns, values_pred)
    log_ratio = log_prob - old_logp
    sb3_kl = th.mean((th.exp(log_ratio) - 1) - log_ratio)
    sb3_clip_fraction = th.mean((th.abs(ratio - 1) > clip_range).float())
    sb3_grads = th.autograd.grad(sb3, (log_prob, values))

    logp, values, entropy = inputs()
    advantage = masked_standardize(raw_advantage)
    loss = (
        clipped_surrogate(logp, old_logp, advantage, clip_range)
        + ent_coef * entropy_loss(entropy, logp)
        + vf_coef * value_loss(values, returns, old_values, clip_range_vf)
    )
    ours = aggregate(loss, th.full_like(logp, 1 / len(logp)))
    assert_close(ours, sb3, atol=1e-6, rtol=0)
    assert_close(th.autograd.grad(ours, (logp, values)), sb3_grads, atol=1e-6, rtol=0)
    assert_close(approx_kl(logp, old_logp), sb3_kl, atol=1e-6, rtol=0)
    assert_close(clip_fraction(ratio, clip_range), sb3_clip_fraction)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_micro_batches_accumulate_to_the_same_gradient(splits: int) -> None:
    # Rows of unequal weight, as of completions of unequal length; weights are set once over all of them.
    old_logp, advantage, _, _, noise = random_batch(12)
    weight = th.arange(1.0, 13.0) / 78
    parameter = th.zeros(12, requires_grad=True)

    def gradient(parts: list[Tensor]) -> Tensor:
        parameter.grad = None
        for rows in parts:
            logp = (old_logp + noise + parameter)[rows]
            loss = clipped_surrogate(logp, old_logp[rows], advantage[rows], 0.2) + 0.1 * kl_k3(logp, old_logp[rows])
            aggregate(loss, weight[rows]).backward()
        assert parameter.grad is not None
        return parameter.grad

    whole = gradient([th.arange(12)])
    unequal = gradient([th.arange(12)[:5], th.arange(12)[5:]])
    assert_close(unequal, whole, atol=0, rtol=0)
    assert_close(gradient(list(th.arange(12).chunk(splits))), whole, atol=0, rtol=0)


# --- KL estimators on a policy of three actions, enumerated ----------------------------------------------------------
LOGITS = th.tensor([0.3, -1.0, 0.8], dtype=th.float64)
REFERENCE = th.tensor([0.2, 0.5, 0.3], dtype=th.float64).log()


def exact_kl(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(0)
    return (logp.exp() * (logp - REFERENCE)).sum()


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    logp = LOGITS.log_softmax(0)
    policy = logp.exp()
    assert_close((policy * kl_k1(logp, REFERENCE)).sum(), exact_kl(LOGITS))
    assert_close((policy * kl_k3(logp, REFERENCE)).sum(), exact_kl(LOGITS))
    assert (kl_k3(logp, REFERENCE) >= 0).all()
    assert not (kl_k1(logp, REFERENCE) >= 0).all()
    # d = ref − logp = 0: 0; d = ln 2: 2 − ln 2 − 1
    assert_close(kl_k3(th.zeros(2), th.tensor([0.0, math.log(2)])), th.tensor([0.0, 1 - math.log(2)]))
    assert_close(kl_k2(th.tensor([1.0]), th.tensor([-2.0])), th.tensor([4.5]))  # 3²/2


def test_the_gradient_of_k2_is_that_of_the_kl_and_that_of_k3_is_not() -> None:
    def gradient(estimator: object) -> Tensor:
        logits = LOGITS.clone().requires_grad_()
        logp = logits.log_softmax(0)
        policy = logp.exp().detach()  # samples come from the policy; the loss does not differentiate the sampling
        return th.autograd.grad((policy * estimator(logp, REFERENCE)).sum(), logits)[0]

    logits = LOGITS.clone().requires_grad_()
    exact = th.autograd.grad(exact_kl(logits), logits)[0]
    assert_close(gradient(kl_k2), exact)
    assert_close(gradient(kl_k1), th.zeros(3, dtype=th.float64))  # E[∇ log π] = 0: no gradient at all
    assert (gradient(kl_k3) - exact).abs().max() > 0.01


def test_approx_kl_estimates_kl_of_old_from_new() -> None:
    old, new = REFERENCE, LOGITS.log_softmax(0)
    samples = th.tensor([0] * 2 + [1] * 5 + [2] * 3)  # in proportion to the old policy: 0.2, 0.5, 0.3
    assert_close(approx_kl(new[samples], old[samples]), (old.exp() * (old - new)).sum())
    assert not approx_kl(new.clone().requires_grad_(), old).requires_grad


# --- losses by name ---------------------------------------------------------------------------------------------------
ROWS = th.tensor([0, 0, 1, 1, 1])


def surrogate(name: str, ratio: list[float], advantage: list[float], **clipping: float) -> th.Tensor:
    logp = th.tensor(ratio).log()
    rows = ROWS[: len(ratio)]
    settings = {"low": 0.2} | clipping
    return LOSSES[name].surrogate(logp, th.zeros_like(logp), th.tensor(advantage), Clipping(**settings, segment=rows))


def test_two_sided_clip_by_hand() -> None:
    """ρ = 6, A = −1: −min(min(6, 4)·−1, 1.2·−1) = 4 with δ = 4, and 6 without; A = 1: 1.2 either way."""
    th.testing.assert_close(surrogate("grpo", [6, 6], [-1, 1], delta=4.0), th.tensor([4.0, -1.2]))
    th.testing.assert_close(surrogate("grpo", [6, 6], [-1, 1]), th.tensor([6.0, -1.2]))


def test_gspo_by_hand() -> None:
    """Rows (2, 8) and (1, 1, 1): sequence ratios exp(mean log) = 4 and 1. A = −1: a token's loss is its row's ratio."""
    loss = surrogate("gspo", [2, 8, 1, 1, 1], [-1] * 5)
    th.testing.assert_close(loss, th.tensor([4.0, 4, 1, 1, 1]))
    th.testing.assert_close(surrogate("gspo", [2, 8, 1, 1, 1], [1] * 5)[0], th.tensor(-1.2))


def test_rloo_by_hand() -> None:
    """The ratio of a whole row is the product: 2 · 1/4 = 1/2, below the range; with A = −1 the clip is at 0.8."""
    th.testing.assert_close(surrogate("rloo", [2, 0.25], [1, 1]), th.tensor([-0.5, -0.5]))
    th.testing.assert_close(surrogate("rloo", [2, 0.25], [-1, -1]), th.tensor([0.8, 0.8]))


def test_rloos_gradient_at_the_start_is_the_score_functions() -> None:
    """−A · Σ ∇logp, each token 1: weights of "row_mean" with one row of two tokens, A = 3."""
    logp = th.zeros(2, requires_grad=True)
    loss = LOSSES["rloo"].surrogate(logp, th.zeros(2), th.full((2,), 3.0), Clipping(0.2, segment=ROWS[:2]))
    aggregate(loss, row_weights("row_mean", th.tensor([2]), 2, 1, 8)[ROWS[:2]]).backward()
    th.testing.assert_close(logp.grad, th.tensor([-3.0, -3.0]))


def test_cispo_by_hand() -> None:
    """ρ = (2, 9), ε_high = 5: the gradient is −min(ρ, 5)·A = −2, −5, where a clip would have none."""
    logp = th.tensor([2.0, 9.0]).log().requires_grad_()
    LOSSES["cispo"].surrogate(logp, th.zeros(2), th.ones(2), Clipping(0.2, 5.0)).sum().backward()
    th.testing.assert_close(logp.grad, th.tensor([-2.0, -5.0]))


def test_sapo_by_hand() -> None:
    """At ρ = 1: −(4/τ)·σ(0)·A = −2A for A > 0 and −2A/1.05 below; its gradient there is −A, the plain one."""
    logp = th.zeros(2, requires_grad=True)
    loss = LOSSES["sapo"].surrogate(logp, th.zeros(2), th.tensor([1.0, -1.0]), Clipping(0.2))
    th.testing.assert_close(loss.detach(), th.tensor([-2.0, 2 / 1.05]))
    loss.sum().backward()
    th.testing.assert_close(logp.grad, th.tensor([-1.0, 1.0]))


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_loss_starts_with_the_policy_gradient(name: str) -> None:
    """At ρ = 1 the gradient of each is −w·A, with w = 1, or the row's length for the ratio of a whole row."""
    logp, advantage = th.zeros(5, requires_grad=True), th.tensor([1.0, 1, -2, -2, -2])
    LOSSES[name].surrogate(logp, th.zeros(5), advantage, Clipping(0.2, 5.0, segment=ROWS)).sum().backward()
    lengths = th.tensor([2.0, 2, 3, 3, 3])
    th.testing.assert_close(logp.grad, -advantage * (lengths if name == "rloo" else 1))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("mean", (1 / 5, 1 / 5)),  # Σ mL / Σ m
        ("row_mean", (1 / 4, 1 / 6)),  # mean over 2 rows of their means
        ("rollout_mean", (2 / 20, 2 / 20)),  # 20 tokens in 2 minibatches
        ("constant", (1 / 16, 1 / 16)),  # N · max_new_tokens = 2 · 8
    ],
)
def test_aggregations_by_hand(aggregation: Any, expected: tuple[float, float]) -> None:
    """Rows of 2 and 3 tokens in a minibatch; the rollout has 20 tokens in 2 minibatches, completions at most 8."""
    weights = row_weights(aggregation, th.tensor([2, 3]), 20, 2, 8)
    th.testing.assert_close(weights, th.tensor(expected))


# --- KL losses, by enumeration ----------------------------------------------------------------------------------------
def enumerated(estimator: str, sampled_by: list[float] | None = None) -> tuple[float, th.Tensor, float, th.Tensor]:
    """(mean of the estimator, its mean gradient, the true KL, its gradient) over the 3 tokens of a policy."""
    logits = th.tensor([0.3, -0.5, 0.9], dtype=th.float64, requires_grad=True)
    ref = th.tensor([0.2, 0.5, 0.3], dtype=th.float64).log()
    log_p = logits.log_softmax(0)
    old = log_p.detach() if sampled_by is None else th.tensor(sampled_by, dtype=th.float64).log()
    loss = (old.exp() * KL_LOSSES[estimator](log_p, ref, old)).sum()
    true = (log_p.exp() * (log_p - ref)).sum()
    gradients = [th.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, true)]
    return loss.item(), gradients[0], true.item(), gradients[1]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", True, False), ("k2", False, True), ("k3", True, False), ("unbiased", True, True)],
)
def test_which_kl_losses_are_unbiased_on_policy(estimator: str, value: bool, gradient: bool) -> None:
    mean, mean_gradient, true, true_gradient = enumerated(estimator)
    assert (abs(mean - true) < 1e-9) == value
    assert (mean_gradient - true_gradient).abs().max().lt(1e-9).item() == gradient


def test_the_unbiased_kl_loss_stays_so_off_policy() -> None:
    mean, mean_gradient, true, true_gradient = enumerated("unbiased", [0.5, 0.25, 0.25])
    assert mean == pytest.approx(true)
    th.testing.assert_close(mean_gradient, true_gradient)
    assert (enumerated("k2", [0.5, 0.25, 0.25])[1] - true_gradient).abs().max() > 0.01


def test_only_active_clips_count() -> None:
    """ρ = (.7, 1.3, .7, 1.3), A = (1, 1, −1, −1), ε = .2: the second is clipped above, the third below."""
    logp = th.tensor([0.7, 1.3, 0.7, 1.3]).log()
    ratios = clip_ratios(logp, th.zeros(4), th.tensor([1.0, 1, -1, -1]), Clipping(0.2), "grpo")
    assert {name: value.item() for name, value in ratios.items()} == {
        "clip_ratio/low_mean": 0.25,
        "clip_ratio/high_mean": 0.25,
        "clip_ratio/region_mean": 0.5,
    }
