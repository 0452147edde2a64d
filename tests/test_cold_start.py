"""The first N steps are PPO's; then the share of group samples rises to 1."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback

from grpo_rl import GRPO, make_group_env
from grpo_rl.advantages import gae
from grpo_rl.errors import ConfigError


class Rollouts(BaseCallback):
    """Keeps, per rollout: env steps at its start, forks, GAE against the advantages that the update saw."""

    def _init_callback(self):
        self.rows = []

    def _on_rollout_start(self):
        self.start = self.model.num_timesteps

    def _on_rollout_end(self):
        buffer, model = self.model.rollout_buffer, self.model
        rewards, ends = buffer.tensor(buffer.rewards), buffer.tensor(buffer.ends)
        with th.no_grad():
            tails = model._values(buffer, rewards)[1]
        expected = gae(rewards, buffer.tensor(buffer.values), ends, tails, model.gamma, model.gae_lambda)[0]
        same = (expected == buffer.advantages)[buffer.tensor(buffer.mask)]
        self.rows.append((self.start, model._sampler.forks, same.float().mean().item()))

    def _on_step(self):
        return True


def hybrid(env, **settings):
    return GRPO("MlpPolicy", env, value_head=True, seed=0, n_steps=64, batch_size=128, n_epochs=1, **settings)


def rollouts(model, steps):
    log = Rollouts()
    model.learn(steps, callback=log)
    return log.rows


def test_share_rises_after_the_cold_start():
    model = hybrid(make_group_env("Pendulum-v1", 1, 4, seed=0), group_size=4, cold_start=1000, cold_start_ramp=500)
    shares = {}
    for steps in (0, 1000, 1250, 1500, 9999):
        model.num_timesteps = steps
        shares[steps] = model._group_share()
    assert shares == {0: 0.0, 1000: 0.0, 1250: 0.5, 1500: 1.0, 9999: 1.0}
    model.cold_start_ramp, model.num_timesteps = None, 1500  # over as many steps as the cold start has
    assert model._group_share() == 0.5


def test_windows_are_ppos_first_and_groups_in_the_end():
    env = make_group_env("Pendulum-v1", 1, 4, seed=0, max_episode_steps=100_000)
    settings = {"group_kind": "window", "fork_prob": 1.0, "reset_prob": 0.0}
    model = hybrid(env, group_size=4, cold_start=768, cold_start_ramp=1, **settings)
    rows = rollouts(model, 256 * 8)
    for start, forks, same in rows:
        if start < 768:
            assert forks == 0 and same == 1.0
        elif start > 768:  # all four columns have one root; and nothing ends, so each step has siblings
            assert forks == 3 and same < 0.05


def test_a_cold_start_is_plain_ppo():
    """As long as it lasts, not a bit differs from plain PPO with the same seed (group_size=1 of this class)."""

    def weights(**settings):
        env = make_group_env("Pendulum-v1", 1, 4, seed=0)
        model = hybrid(env, group_kind="window", **settings)
        np.random.seed(0)  # setting up groups draws a number
        model.learn(512)
        return model.policy.state_dict()

    cold, plain = weights(group_size=4, cold_start=10_000), weights(group_size=1)
    assert all(th.equal(cold[name], plain[name]) for name in plain)


def test_groups_of_episodes_count_as_groups_by_the_share():
    model = hybrid(
        make_group_env("CartPole-v1", 1, 4, seed=0),
        group_size=4,
        group_kind="episode",
        cold_start=1,
        cold_start_ramp=10**6,
    )
    model.learn(256)
    buffer = model.rollout_buffer
    model._sampler.group_share = 0.5
    np.random.seed(0)
    samples = np.stack([model._group_samples(buffer).numpy() for _ in range(200)])
    for group in np.unique(buffer.group):  # whole groups, half of the time: 200 draws, 3.5 standard errors are 0.12
        of_group = samples[:, buffer.group == group]
        assert (of_group.all(axis=1) | ~of_group.any(axis=1)).all()
        assert of_group.mean() == pytest.approx(0.5, abs=0.13)


def test_what_cannot_work_is_refused():
    env = gym.make("CartPole-v1")
    with pytest.raises(ConfigError, match="needs value_head=True and group_size 2 or more"):
        GRPO("MlpPolicy", env, cold_start=1000)
    with pytest.raises(ConfigError, match="follows a cold start: give cold_start"):
        GRPO("MlpPolicy", env, value_head=True, cold_start_ramp=1000)
    with pytest.raises(ConfigError, match=r"cold_start=-1 is outside \[0, inf\]"):
        GRPO("MlpPolicy", env, value_head=True, cold_start=-1)


def test_a_learn_that_ends_within_the_cold_start_says_so():
    model = hybrid(make_group_env("CartPole-v1", 1, 4, seed=0), group_size=4, cold_start=600)
    with pytest.warns(UserWarning, match="cold_start=600 lasts beyond the end of this learn at 300 steps"):
        model.learn(300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(300 + 600 - model.num_timesteps, reset_num_timesteps=False)
