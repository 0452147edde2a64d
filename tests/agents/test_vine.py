"""VineGRPO: values from the group's own members, on forks in the middle of episodes."""

import numpy as np
import pytest
import torch as th

from grpo_rl import advantages as adv
from grpo_rl.buffers import GroupBuffer
from grpo_rl.lab.build import build_agent, build_env
from grpo_rl.recipes import load_recipe


def vine(*overrides):
    recipe = load_recipe("vine", ["optimization.n_epochs=1", *overrides])
    return build_agent(recipe, build_env(recipe))


def rollout(agent, group, age, mask):
    """A finished rollout, as far as the advantage reads it."""
    buffer = GroupBuffer(agent.observation_space, agent.action_space, "cpu")
    buffer.group, buffer.age, buffer.mask = (np.asarray(array) for array in (group, age, mask))
    return buffer


def test_advantages_by_hand():
    # γ = 1, λ = 1/2, two members of one group, three steps with returns R = (6, 4, 2) and (4, 2, 0).
    # V = (5, 3, 1), so the surprises R − V are (1, 1, 1) and (−1, −1, −1), and δ = (0, 0, 1) and (0, 0, −1):
    # a member that stays as far ahead as it was has done nothing new. A = δ_2, δ_2/2, δ_2/4 backwards.
    agent = vine("optimization.gamma=1", "optimization.gae_lambda=0.5")
    returns = th.tensor([[6.0, 4], [4, 2], [2, 0]])
    ends = th.tensor([[False, False], [False, False], [True, True]])
    steps = rollout(agent, np.zeros((3, 2), int), np.arange(3)[:, None].repeat(2, 1), np.ones((3, 2), bool))
    assert agent.group_advantages(steps, returns, ends).tolist() == [[0.25, -0.25], [0.5, -0.5], [1, -1]]


@pytest.mark.parametrize("seed", range(3))
def test_lambda_one_is_the_baseline_mean(seed):
    agent = vine("optimization.gae_lambda=1", "optimization.gamma=0.9")
    rng = np.random.default_rng(seed)
    shape = (20, 8)
    ends = rng.random(shape) < 0.2
    ends[-1] = True
    age, mask = np.zeros(shape, int), np.ones(shape, bool)
    for t in range(1, len(age)):
        age[t] = np.where(ends[t - 1], 0, age[t - 1] + 1)
    mask[10:, 3] = False  # a column that is frozen after an end
    ends[9, 3] = True
    group = np.broadcast_to(np.arange(8) // 4, shape).copy()
    tensors = [th.as_tensor(array) for array in (group, age, mask)]
    returns = adv.reward_to_go(th.randn(shape), th.as_tensor(ends), th.zeros(shape), 0.9)
    expected = adv.group_advantages(returns, *tensors, baseline="mean")
    th.testing.assert_close(
        agent.group_advantages(rollout(agent, group, age, mask), returns, th.as_tensor(ends)), expected
    )


def test_the_recipe_forks_in_mid_episode_and_trains():
    agent = vine()
    before = [parameter.clone() for parameter in agent.policy.parameters()]
    depths = []
    for _ in range(3):
        agent.learn(1, reset_num_timesteps=False)  # one rollout
        depths += agent._sampler.fork_depths
    assert agent.num_timesteps == 3 * 128 * 16, "n_steps · n_envs a rollout, forked members counted"
    assert len(depths) > 0
    assert np.mean(depths) > 0, "forked from the middle of episodes"
    assert not any(th.equal(a, b) for a, b in zip(before, agent.policy.parameters(), strict=True))
    assert agent.policy.has_value is False
