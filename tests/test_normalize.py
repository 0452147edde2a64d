"""Normalisers: SB3's numbers, exact statistics in any order and split, and buffers that travel with the module."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch.testing import assert_close

from grpo_rl.errors import ConfigError, GRPOError, NonFiniteError
from grpo_rl.normalize import ReturnScale, RunningNorm


class Still(gym.Env[np.ndarray, int]):
    """An env that VecNormalize can wrap and nobody steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,))
    action_space = spaces.Discrete(2)


def test_by_hand() -> None:
    norm = RunningNorm((2,), clip=3.0, eps=0.0)
    norm.update(th.tensor([[1.0, 0.0], [3.0, 0.0]]))
    norm.update(th.tensor([[5.0, 6.0]]))
    assert_close(norm.mean, th.tensor([3.0, 2.0], dtype=th.float64))
    assert_close(norm.var, th.tensor([8 / 3, 8.0], dtype=th.float64))  # ((−2)² + 0 + 2²)/3, (4 + 4 + 16)/3
    assert norm.count == 3
    out = norm(th.tensor([[3.0, 2.0], [3.0, 1000.0], [3 + (8 / 3) ** 0.5, 2 - 8**0.5]]))
    assert_close(out, th.tensor([[0.0, 0.0], [0.0, 3.0], [1.0, -1.0]]))
    assert out.dtype == th.float32


def test_identity_until_something_was_seen() -> None:
    x = th.tensor([[1e6], [-0.1]])
    assert RunningNorm((1,))(x).tolist() == x.tolist()
    norm = RunningNorm((1,))
    norm.update(x, mask=th.tensor([False, False]))
    assert norm.count == 0
    assert norm(x).tolist() == x.tolist()


def test_equals_sb3() -> None:
    rng = np.random.default_rng(0)
    sb3, norm = RunningMeanStd(epsilon=0, shape=(3,)), RunningNorm((3,))
    for size in (1, 7, 32):
        batch = rng.normal(5, [1, 10, 0.1], size=(size, 3)).astype(np.float32)
        sb3.update(batch.astype(np.float64))
        norm.update(th.as_tensor(batch))
    assert_close(norm.mean.numpy(), sb3.mean)
    assert_close(norm.var.numpy(), sb3.var)
    assert norm.count == sb3.count == 40
    x = rng.normal(5, 20, size=(4, 3)).astype(np.float32)
    venv = VecNormalize(DummyVecEnv([Still]), clip_obs=10.0, epsilon=1e-8)
    venv.obs_rms = sb3
    assert_close(norm(th.as_tensor(x)).numpy(), venv.normalize_obs(x))
    scale = ReturnScale()
    scale.load_state_dict({"mean": norm.mean[1], "var": norm.var[1], "count": norm.count})
    venv.ret_rms = RunningMeanStd(shape=())
    venv.ret_rms.var = sb3.var[1]
    rewards = np.array([0.5, -3.0, 1e9], np.float32)
    assert_close(scale(th.as_tensor(rewards)).numpy(), venv.normalize_reward(rewards))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 49), max_size=5, unique=True),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_order_and_split_do_not_matter(seed: int, cuts: list[int], offset: float) -> None:
    rng = th.Generator().manual_seed(seed)
    x = th.randn(50, 2, generator=rng) + offset
    whole, parts = RunningNorm((2,)), RunningNorm((2,))
    whole.update(x)
    for part in x[th.randperm(50, generator=rng)].tensor_split(sorted(cuts)):
        parts.update(part)
    assert parts.count == whole.count
    assert_close(parts.mean, whole.mean, atol=1e-9, rtol=1e-12)
    assert_close(parts.var, whole.var, atol=1e-9, rtol=1e-9)
    assert_close(whole.var, x.double().var(dim=0, correction=0), atol=1e-9, rtol=1e-9)


def test_masked_rows_and_leading_axes() -> None:
    x, mask = th.tensor([[[1.0], [float("nan")]], [[3.0], [5.0]]]), th.tensor([[True, False], [True, True]])
    norm = RunningNorm((1,))
    norm.update(x, mask)  # (T, N, 1)
    assert (norm.mean.item(), norm.count.item()) == (3.0, 3)
    assert norm(x[:1, :1]).shape == (1, 1, 1)


def test_statistics_are_never_tracked_and_inputs_are() -> None:
    norm, x = RunningNorm((1,)), th.tensor([[1.0], [3.0]], requires_grad=True)
    norm.update(x * 2)
    assert not norm.mean.requires_grad
    assert not norm.var.requires_grad
    assert list(norm.parameters()) == []
    norm(x).sum().backward()
    assert_close(x.grad, th.full((2, 1), 0.5))  # population std of (2, 6) is 2


def test_checkpoints_carry_the_statistics() -> None:
    norm, other = RunningNorm((3,)), RunningNorm((3,))
    norm.update(th.randn(10, 3))
    other.load_state_dict(copy.deepcopy(norm.state_dict()))
    assert [x.dtype for x in norm.state_dict().values()] == [th.float64, th.float64, th.int64]
    assert all(th.equal(a, b) for a, b in zip(norm.state_dict().values(), other.state_dict().values(), strict=True))
    x = th.randn(4, 3)
    assert th.equal(norm(x), other(x))


def test_a_return_scale_divides_and_never_shifts() -> None:
    scale = ReturnScale(eps=0.0, clip=2.0)
    assert scale(th.tensor([7.0])).tolist() == [7.0]
    scale.update(th.tensor([[98.0, 102.0], [float("inf"), 100.0]]), mask=th.tensor([[True, True], [False, False]]))
    assert scale(th.tensor([1.0, 0.0, -3.0, 100.0])).tolist() == [0.5, 0.0, -1.5, 2.0]  # std 2, clipped at 2


def test_mistakes_are_named() -> None:
    norm = RunningNorm((3,))
    for wrong in (th.zeros(3), th.zeros(5, 2)):
        with pytest.raises(ConfigError, match=r"expected samples of shape \(\*, 3\)"):
            norm.update(wrong)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        norm.update(th.tensor([[0.0, float("inf"), 1.0]]))
    assert norm.count == 0
    assert issubclass(NonFiniteError, GRPOError)
