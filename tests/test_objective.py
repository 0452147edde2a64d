"""Losses per row: numbers by hand, SB3's PPO formula, and what must not depend on how a batch is split."""

import math

import pytest
import torch as th
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from grpo_rl.errors import ConfigError
from grpo_rl.objective import (
    aggregate,
    approx_kl,
    clip_fraction,
    clipped_surrogate,
    entropy_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    masked_standardize,
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
