"""From a recipe to its environments."""

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.groups.workers import SubprocGroupVecEnv
from grpo_rl.lab.build import build_env
from grpo_rl.recipes import load_recipe, make_recipe


def test_workers_hold_the_groups():
    env = build_env(load_recipe("cartpole", ["environment.n_groups=2", "resources.workers=2"]))
    try:
        assert isinstance(env, SubprocGroupVecEnv)
        assert (env.n_groups, env.num_envs) == (2, 16)
    finally:
        env.close()


NOISE = """
import gymnasium as gym
import numpy as np

class Noise(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.random.rand(1).astype(np.float32), {}  # nobody can copy numpy's global generator for one env

    def step(self, action):
        return *self.reset()[:1], 0.0, False, False, {}
"""


def test_workers_that_nothing_would_use_are_refused(tmp_path):
    (tmp_path / "noise.py").write_text(NOISE)
    seeded = {"environment": {"class": "noise.py:Noise"}, "resources": {"workers": 1}}
    with pytest.raises(ConfigError, match=r"resources.workers=1 is for envs that can be forked: .*observation 0 steps"):
        build_env(make_recipe(seeded, "mine.yaml", tmp_path))
    ppo = {"class": "stable_baselines3:PPO", "environment": {"id": "CartPole-v1"}, "resources": {"workers": 2}}
    with pytest.raises(ConfigError, match=r"resources.workers is for GRPO, not for PPO"):
        build_env(make_recipe(ppo, "mine.yaml"))
