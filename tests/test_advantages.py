"""Returns, baselines and advantages: each number is worked out in the test that expects it."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor
from torch.testing import assert_close

from grpo_rl.advantages import (
    alive_tail,
    compress,
    gae,
    group_advantages,
    group_baseline,
    has_sibling,
    lookup,
    masked_mean,
    masked_standardize,
    masked_std,
    mix,
    moving_average,
    outcome_returns,
    reward_to_go,
    segment_lengths,
)
from grpo_rl.errors import ConfigError

T, F = True, False
NAN = float("nan")


def column(*values: float | bool) -> Tensor:
    """(T, 1)."""
    return th.tensor(values).unsqueeze(1)


def one_step(*values: float) -> dict[str, Tensor]:
    """One group whose members each took one step, side by side: arrays (1, N)."""
    n = len(values)
    zeros = th.zeros(1, n, dtype=th.int64)
    return {"returns": th.tensor([values]), "group": zeros, "age": zeros, "mask": th.ones(1, n, dtype=th.bool)}


def random_rollout(seed: int, steps: int = 12, columns: int = 6) -> dict[str, Tensor]:
    """Segments of random length one after another in each column, in three groups; some steps masked."""
    rng = th.Generator().manual_seed(seed)
    ends = th.rand(steps, columns, generator=rng) < 0.25
    ends[-1] = True
    group, age = th.zeros(2, steps, columns, dtype=th.int64).unbind()
    for n in range(columns):
        for t in range(steps):
            first = t == 0 or bool(ends[t - 1, n])
            age[t, n] = 0 if first else age[t - 1, n] + 1
            group[t, n] = int(th.randint(3, (), generator=rng)) * 10**12 - 7 if first else group[t - 1, n]
    return {
        "returns": th.randn(steps, columns, generator=rng),
        "group": group,
        "age": age,
        "mask": th.rand(steps, columns, generator=rng) < 0.9,
        "ends": ends,
    }


def grouped(rollout: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: rollout[name] for name in ("returns", "group", "age", "mask")}


# --- masked statistics ------------------------------------------------------------------------------------------------
def test_masked_mean_and_std_divide_by_the_counted() -> None:
    x, mask = th.tensor([[1.0, NAN], [4.0, 7.0]]), th.tensor([[T, F], [T, T]])
    assert masked_mean(x, mask) == 4.0  # (1 + 4 + 7)/3
    assert masked_std(x, mask) == 3.0  # sqrt((9 + 0 + 9)/(3 − 1))
    assert_close(masked_std(x, mask, correction=0), th.tensor(6.0).sqrt())  # sqrt(18/3)
    nothing = th.zeros_like(mask)
    assert masked_mean(x, nothing) == masked_std(x, nothing) == 0.0


def test_masked_standardize() -> None:
    x, mask = th.tensor([1.0, NAN, 4.0, 7.0]), th.tensor([T, F, T, T])
    assert_close(masked_standardize(x, mask), th.tensor([-1.0, 0.0, 0.0, 1.0]))
    assert masked_standardize(th.tensor([5.0])).tolist() == [5.0]  # one row: unchanged, not NaN
    assert masked_standardize(th.full((7,), 0.35)).tolist() == [0.0] * 7  # exactly, though 7 · 0.35 rounds
    assert masked_standardize(th.zeros(0)).shape == (0,)


# --- returns ----------------------------------------------------------------------------------------------------------
def test_reward_to_go_stops_at_ends() -> None:
    # γ = 0.5. The first segment terminates after two steps, the second is cut at T-1 with 8 beyond.
    returns = reward_to_go(column(1.0, 2.0, 3.0, 4.0), column(F, T, F, T), column(NAN, 0.0, NAN, 8.0), gamma=0.5)
    # R_3 = 4 + 0.5·8 = 8, R_2 = 3 + 0.5·8 = 7; R_1 = 2 + 0.5·0 = 2, R_0 = 1 + 0.5·2 = 2
    assert returns.flatten().tolist() == [2.0, 2.0, 7.0, 8.0]


def test_a_time_limit_does_not_lower_the_credit_of_late_steps() -> None:
    # reward 1 for ever, γ = 0.9: every step is worth 1/(1 − 0.9) = 10, if the cut bootstraps 10
    rewards, ends = th.ones(8, 1), th.zeros(8, 1, dtype=th.bool)
    ends[-1] = True
    beyond = alive_tail(rewards, ~th.zeros_like(ends), 0.9)
    assert_close(beyond, th.tensor(10.0))
    assert_close(reward_to_go(rewards, ends, beyond.expand(8, 1), 0.9), th.full((8, 1), 10.0))


def test_alive_tail() -> None:
    rewards, mask = column(1.0, 3.0, NAN), column(T, T, F)
    assert_close(alive_tail(rewards, mask, 0.75), th.tensor(8.0))  # r̄ = 2, 2/(1 − 0.75)
    assert alive_tail(rewards, mask, 1.0) == 0.0
    assert alive_tail(rewards, th.zeros_like(mask), 0.75) == 0.0


def test_open_columns_are_refused_by_name() -> None:
    rewards, ends = th.ones(2, 3), th.tensor([[F, F, F], [T, F, T]])
    with pytest.raises(ConfigError, match=r"columns \[1\] are open.*Set ends\[-1\] = True"):
        reward_to_go(rewards, ends, rewards, 0.9)
    with pytest.raises(ConfigError, match=r"got \(2, 3\), \(2, 2\), \(2, 3\)"):
        reward_to_go(rewards, ends[:, :2], rewards, 0.9)


def test_gae_by_hand() -> None:
    # γ = 0.5, λ = 0.5. Rewards 1, 2, 3; values 4, 2, 6; a time limit after step 1 with V = 8 beyond; then termination.
    advantages, returns = gae(
        column(1.0, 2.0, 3.0), column(4.0, 2.0, 6.0), column(F, T, T), column(NAN, 8.0, 0.0), gamma=0.5, lam=0.5
    )
    # δ_2 = 3 + 0 − 6 = −3; δ_1 = 2 + 0.5·8 − 2 = 4; δ_0 = 1 + 0.5·2 − 4 = −2
    # A_2 = −3; A_1 = 4 (cut); A_0 = −2 + 0.25·4 = −1
    assert advantages.flatten().tolist() == [-1.0, 4.0, -3.0]
    assert returns.flatten().tolist() == [3.0, 6.0, 3.0]


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_equals_sb3(lam: float) -> None:
    rng, (steps, columns), gamma = np.random.default_rng(0), (32, 5), 0.99
    buffer = RolloutBuffer(
        steps, spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,)), gae_lambda=lam, gamma=gamma, n_envs=columns
    )
    rewards, values = rng.normal(size=(2, steps, columns)).astype(np.float32)
    dones = rng.random((steps, columns)) < 0.2
    truncated = dones & (rng.random((steps, columns)) < 0.5)
    last_values = rng.normal(size=columns).astype(np.float32)
    beyond = rng.normal(size=(steps, columns)).astype(np.float32)
    buffer.values, buffer.rewards = values.copy(), rewards + gamma * beyond * truncated  # as collect_rollouts does
    buffer.episode_starts = np.concatenate([np.zeros((1, columns)), dones[:-1]]).astype(np.float32)
    buffer.compute_returns_and_advantage(th.as_tensor(last_values), dones[-1])

    ends, tails = dones.copy(), beyond * truncated
    ends[-1], tails[-1] = True, np.where(dones[-1], tails[-1], last_values)
    advantages, returns = gae(*map(th.as_tensor, (rewards, values, ends, tails)), gamma, lam)
    assert_close(advantages.numpy(), buffer.advantages, atol=1e-5, rtol=1e-5)
    assert_close(returns.numpy(), buffer.returns, atol=1e-5, rtol=1e-5)


def test_gae_with_lambda_one_is_reward_to_go() -> None:
    rollout = random_rollout(0)
    rewards, ends, tails = rollout["returns"], rollout["ends"], th.randn(12, 6)
    _, returns = gae(rewards, th.randn(12, 6), ends, tails, gamma=0.9, lam=1.0)
    assert_close(returns, reward_to_go(rewards, ends, tails, 0.9), atol=1e-5, rtol=1e-5)


def test_frozen_rows_after_an_end_never_reach_back() -> None:
    rewards, ends, tails = column(1.0, NAN, NAN), column(T, F, T), column(0.0, NAN, NAN)
    assert reward_to_go(rewards, ends, tails, 0.9)[0] == 1.0
    assert gae(rewards, column(0.5, NAN, NAN), ends, tails, 0.9, 0.95)[0][0] == 0.5


def test_outcome_returns_carry_the_first_return_through_its_segment() -> None:
    returns, ends = column(5.0, 4.0, 3.0, 9.0, 8.0), column(F, F, T, F, T)
    assert outcome_returns(returns, ends).flatten().tolist() == [5.0, 5.0, 5.0, 9.0, 9.0]


def test_segment_lengths_count_valid_steps() -> None:
    ends, mask = th.tensor([[F, T], [T, F], [F, F], [F, T]]), th.tensor([[T, T], [T, T], [T, T], [F, T]])
    assert segment_lengths(ends, mask).T.tolist() == [[2, 2, 1, 0], [1, 3, 3, 3]]


# --- baselines --------------------------------------------------------------------------------------------------------
def test_leave_one_out_is_the_mean_of_the_others() -> None:
    assert group_baseline(**one_step(1.0, 2.0, 6.0)).tolist() == [[4.0, 3.5, 1.5]]  # (2+6)/2, (1+6)/2, (1+2)/2


def test_mean_includes_the_step_itself() -> None:
    assert group_baseline(**one_step(1.0, 2.0, 6.0), kind="mean").tolist() == [[3.0] * 3]


def test_weighted_by_length() -> None:
    weights = th.tensor([[1.0, 2.0, 5.0]])
    baseline = group_baseline(**one_step(1.0, 2.0, 6.0), kind="weighted", weights=weights)
    assert_close(baseline, th.full((1, 3), 4.375))  # (1·1 + 2·2 + 5·6)/8
    equal = group_baseline(**one_step(1.0, 2.0, 6.0), kind="weighted", weights=th.full((1, 3), 7.0))
    assert_close(equal, th.full((1, 3), 3.0))  # of equal length: the mean


def test_only_members_alive_at_the_same_age_are_compared() -> None:
    # One group of three; member 1 dies after one step, member 2 after two.
    returns = th.tensor([[9.0, 1.0, 3.0], [8.0, NAN, 2.0], [7.0, NAN, NAN]])
    mask = th.tensor([[T, T, T], [T, F, T], [T, F, F]])
    age = th.arange(3).unsqueeze(1).expand(3, 3)
    baseline = group_baseline(returns, th.zeros(3, 3, dtype=th.int64), age, mask)
    # age 0: (1+3)/2, (9+3)/2, (9+1)/2; age 1: each other; age 2: nobody to compare with, so its own return
    assert baseline.tolist() == [[2.0, 6.0, 5.0], [2.0, 0.0, 8.0], [7.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", ["leave_one_out", "mean"])
def test_without_siblings_other_groups_of_that_age_step_in(kind: str) -> None:
    # Group 5 has two members, groups 6 and 7 one each; the last step is of another age.
    returns = th.tensor([[1.0, 3.0, 11.0, 5.0, 100.0]])
    group, age = th.tensor([[5, 5, 6, 7, 7]]), th.tensor([[0, 0, 0, 0, 4]])
    baseline = group_baseline(returns, group, age, th.ones_like(group, dtype=th.bool), kind=kind)
    own = [3.0, 1.0] if kind == "leave_one_out" else [2.0, 2.0]
    # group 6: (1 + 3 + 5)/3 = 3; group 7 at age 0: (1 + 3 + 11)/3 = 5; at age 4 nobody: its own 100
    assert baseline.tolist() == [[*own, 3.0, 5.0, 100.0]]


def test_members_of_one_group_one_after_another_in_a_column() -> None:
    # Two segments of group 3 in one column: ages 0, 1 and 0, 1. They are siblings, though never in one row.
    returns, age = column(1.0, 2.0, 5.0, 9.0), column(0, 1, 0, 1)
    baseline = group_baseline(returns, th.full_like(age, 3), age, th.ones(4, 1, dtype=th.bool))
    assert baseline.flatten().tolist() == [5.0, 9.0, 1.0, 2.0]


def test_nothing_valid_gives_zeros() -> None:
    rollout = one_step(1.0, 2.0)
    rollout["mask"] = th.zeros(1, 2, dtype=th.bool)
    for scale in ("none", "group", "batch"):
        assert group_advantages(**rollout, scale=scale).tolist() == [[0.0, 0.0]]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from(["none", "group", "batch"]))
def test_permuting_columns_permutes_advantages(seed: int, scale: str) -> None:
    rollout = grouped(random_rollout(seed))
    order = th.randperm(6, generator=th.Generator().manual_seed(seed))
    straight = group_advantages(**rollout, scale=scale)
    permuted = group_advantages(**{name: x[:, order] for name, x in rollout.items()}, scale=scale)
    assert_close(permuted, straight[:, order], atol=1e-4, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_layout_of_the_buffer_does_not_matter(seed: int) -> None:
    rollout = grouped(random_rollout(seed))
    straight = group_advantages(**rollout)
    stacked = group_advantages(**{name: x.T.reshape(-1, 1) for name, x in rollout.items()})
    renamed = group_advantages(**{**rollout, "group": -rollout["group"] // 3})
    assert_close(stacked, straight.T.reshape(-1, 1), atol=1e-5, rtol=1e-5)
    assert_close(renamed, straight, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_baseline_equals_a_plain_loop(seed: int) -> None:
    rollout = grouped(random_rollout(seed))
    returns, group, age, mask = rollout.values()
    steps = [tuple(index) for index in mask.nonzero().tolist()]
    expected = th.zeros_like(returns)
    for i in steps:
        others = [j for j in steps if j != i and age[j] == age[i]]
        siblings = [returns[j] for j in others if group[j] == group[i]]
        compared = siblings or [returns[j] for j in others] or [returns[i]]
        expected[i] = th.stack(compared).mean()
    assert_close(group_baseline(**rollout), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.floats(-100, 100), factor=st.floats(0.1, 10))
def test_advantages_follow_units_not_offsets(seed: int, shift: float, factor: float) -> None:
    rollout = grouped(random_rollout(seed))
    moved = {**rollout, "returns": factor * rollout["returns"] + shift}
    assert_close(group_advantages(**moved), factor * group_advantages(**rollout), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("baseline", "discount", "expected"),
    [
        ("leave_one_out", 1.0, -0.75),
        ("leave_one_out", 0.9, -0.75),  # what stays in does not depend on the step's own action: no bias
        ("mean", 1.0, -0.375),  # (1 − 1/2) of it
        ("mean", 0.9, -0.4125),  # (1 − 0.9/2)
    ],
)
def test_expected_policy_gradient(baseline: str, discount: float, expected: float) -> None:
    # Two actions, π = (¼, ¾), returns (1, 5): the gradient of E[R] by logit 0 is π_0·(r_0 − E[R]) = ¼·(1 − 4) = −¾.
    policy, reward, score = [0.25, 0.75], [1.0, 5.0], [0.75, -0.25]  # score: ∂ log π(a)/∂ logit_0
    total = 0.0
    for i in range(2):
        for j in range(2):  # every group of two, with its probability
            a, b = group_advantages(
                **one_step(reward[i], reward[j]),
                baseline=baseline,
                baseline_discount=discount,
            )[0].tolist()
            total += policy[i] * policy[j] * (a * score[i] + b * score[j]) / 2
    assert total == pytest.approx(expected)


def test_a_discounted_baseline_moves_groups_of_equal_returns() -> None:
    two_groups = {**one_step(1.0, 1.0, 9.0, 9.0), "group": th.tensor([[0, 0, 1, 1]])}
    assert_close(group_advantages(**two_groups, baseline_discount=0.9), th.tensor([[0.1, 0.1, 0.9, 0.9]]))


# --- scales -----------------------------------------------------------------------------------------------------------
def test_scale_none_is_return_minus_baseline() -> None:
    assert group_advantages(**one_step(1.0, 2.0, 6.0)).tolist() == [[-3.0, -1.5, 4.5]]
    assert_close(
        group_advantages(**one_step(1.0, 2.0, 6.0), baseline="mean", baseline_discount=0.5),
        th.tensor([[-0.5, 0.5, 4.5]]),  # R − 0.5·3
    )


def test_scale_group_is_the_z_score_with_sample_std() -> None:
    advantages = group_advantages(**one_step(1.0, 4.0, 7.0), scale="group")
    z = 3 / (3 + 1e-4)  # mean 4, sample std sqrt((9 + 0 + 9)/2) = 3
    assert_close(advantages, th.tensor([[-z, 0.0, z]]))
    assert advantages.dtype == th.float32
    tiny = group_advantages(**one_step(0.0, 1e-4, 2e-4), scale="group")  # std 1e-4, as the constant added to it
    assert_close(tiny, th.tensor([[-0.5, 0.0, 0.5]]))


def test_scale_group_for_each_group_and_age_alone() -> None:
    returns, group = th.tensor([[0.0, 2.0, 100.0, 300.0]]), th.tensor([[0, 0, 1, 1]])
    advantages = group_advantages(
        returns, group, th.zeros_like(group), th.ones_like(group, dtype=th.bool), scale="group"
    )
    z = 1 / 2**0.5  # in both groups: (max − mean)/sample std = d/(√2·d)
    assert_close(advantages, th.tensor([[-z, z, -z, z]]), atol=1e-4, rtol=1e-4)


def test_scale_batch_standardises_over_all_counted_steps() -> None:
    rollout = random_rollout(3)
    advantages = group_advantages(**grouped(rollout), scale="batch")[rollout["mask"]]
    assert_close(advantages.mean(), th.tensor(0.0), atol=1e-6, rtol=0)
    assert_close(advantages.std(), th.tensor(1.0))


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("value", [0.35, 1 / 3, 1e8, -7.77e-5])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 49])
def test_equal_returns_have_advantage_exactly_zero(scale: str, value: float, size: int) -> None:
    assert group_advantages(**one_step(*[value] * size), scale=scale).tolist() == [[0.0] * size]


def test_the_case_that_needs_it_exists() -> None:
    # The float mean of three times 0.1 differs from 0.1 by an ulp; divided by a std of an ulp this would be O(1).
    values = th.tensor([0.1, 0.1, 0.1], dtype=th.float64)
    assert values.sum() / 3 != values[0]
    assert masked_standardize(values).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_one_outlier_among_equals_is_bounded(scale: str) -> None:
    # NeMo-RL#4161: the others' std is float residue there, and A ≈ 4000. A z-score is at most (G − 1)/√G = 2.47.
    for other in (1.0, 0.35 + 3e-8, 0.35 - 1e-7):
        advantages = group_advantages(**one_step(*[0.35] * 7, other), scale=scale)
        assert advantages.isfinite().all()
        assert advantages.abs().max() <= 2.48
    assert_close(group_advantages(**one_step(*[0.35] * 7, 1.0))[0, -1], th.tensor(0.65))  # 1 − 0.35


def test_a_single_member_has_no_z_score() -> None:
    assert group_advantages(**one_step(7.0), scale="group").tolist() == [[0.0]]


def test_masked_rows_are_zero_and_never_read() -> None:
    rollout = {**one_step(1.0, NAN, 4.0), "mask": th.tensor([[T, F, T]])}
    assert group_advantages(**rollout).tolist() == [[-3.0, 0.0, 3.0]]
    for scale in ("group", "batch"):
        advantages = group_advantages(**rollout, scale=scale)
        assert advantages[0, 1] == 0
        assert advantages.isfinite().all()


def test_half_precision_returns_are_worked_in_fp32() -> None:
    rollout = one_step(0.5, 0.25, 0.75)
    half = {**rollout, "returns": rollout["returns"].bfloat16()}
    assert group_advantages(**half, scale="group").dtype == th.float32
    assert_close(group_advantages(**half, scale="group"), group_advantages(**rollout, scale="group"))


def test_mistakes_are_named() -> None:
    rollout = one_step(1.0, 2.0)
    with pytest.raises(ConfigError, match='unknown baseline "weigthed": did you mean "weighted"'):
        group_advantages(**rollout, baseline="weigthed")
    with pytest.raises(ConfigError, match='unknown scale "std": valid: none, group, batch'):
        group_advantages(**rollout, scale="std")
    with pytest.raises(ConfigError, match='"weighted" came with no weights'):
        group_advantages(**rollout, baseline="weighted")
    with pytest.raises(ConfigError, match='"mean" came with weights'):
        group_advantages(**rollout, baseline="mean", weights=th.ones(1, 2))
    with pytest.raises(ConfigError, match=r"baseline_discount 0\.9"):
        group_advantages(**rollout, scale="group", baseline_discount=0.9)
    with pytest.raises(ConfigError, match="one shape"):
        group_advantages(**{**rollout, "age": th.zeros(2, 2, dtype=th.int64)})


# --- moving average, compression, mixing ------------------------------------------------------------------------------
def test_moving_average_by_age() -> None:
    returns, age, mask = th.tensor([[2.0, 4.0], [6.0, NAN]]), th.tensor([[0, 0], [1, 1]]), th.tensor([[T, T], [T, F]])
    first = moving_average(th.zeros(0), returns, age, mask)
    assert first.tolist() == [3.0, 6.0]  # ages seen for the first time: their means, not 0.1 of them
    second = moving_average(first, column(13.0), column(0), column(T), momentum=0.9)
    assert_close(second, th.tensor([4.0, 6.0]))  # 0.9·3 + 0.1·13; age 1 not seen: as it was
    assert first.tolist() == [3.0, 6.0]


def test_moving_average_grows_without_nan() -> None:
    table = moving_average(th.tensor([1.0]), column(2.0, 6.0), column(0, 3), column(T, T), momentum=0.5)
    assert table.tolist() == [1.5, 4.0, 4.0, 6.0]  # ages 1 and 2 are a gap: the batch's mean (2 + 6)/2
    assert moving_average(table, column(NAN), column(9), column(F)).tolist() == table.tolist()


def test_lookup_reads_the_last_entry_beyond_the_table() -> None:
    assert lookup(th.tensor([1.0, 2.0]), th.tensor([[0, 1, 7]])).tolist() == [[1.0, 2.0, 2.0]]
    assert lookup(th.zeros(0), th.tensor([[0, 3]])).tolist() == [[0.0, 0.0]]


def test_compress() -> None:
    advantages, mask = th.tensor([[0.0, 1000.0, NAN, -1000.0]]), th.tensor([[T, T, F, T]])
    assert compress(advantages, mask, None).tolist() == [[0.0, 1000.0, 0.0, -1000.0]]
    assert compress(advantages, mask, "tanh").tolist() == [[0.0, 1.0, 0.0, -1.0]]
    z = 1.5**0.5  # population std of (0, 1000, −1000) is 1000·√(2/3)
    assert_close(compress(advantages, mask, "layer_norm"), th.tensor([[0.0, z, 0.0, -z]]))
    assert compress(th.full((1, 7), 0.35), th.ones(1, 7, dtype=th.bool), "layer_norm").tolist() == [[0.0] * 7]
    with pytest.raises(ConfigError, match='unknown compression "tan": did you mean "tanh"'):
        compress(advantages, mask, "tan")


def test_mix_hands_over_from_gae_to_group() -> None:
    group, critic = th.tensor([[4.0]]), th.tensor([[8.0]])
    assert [float(mix(group, critic, w)) for w in (0.0, 0.25, 1.0)] == [8.0, 7.0, 4.0]


def test_has_sibling_looks_for_another_member_alive_at_the_same_age() -> None:
    group = th.tensor([[0, 0, 1], [0, 0, 1]])
    age = th.tensor([[0, 0, 0], [1, 1, 1]])
    mask = th.tensor([[True, True, True], [True, False, True]])  # the second member of group 0 is dead at age 1
    expected = [[True, True, False], [False, False, False]]
    assert has_sibling(group, age, mask).tolist() == expected
