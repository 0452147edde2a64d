"""gymnasium.vector envs become SB3 vec envs with SB3's resets, built anew, or are refused with the line to write."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from probe_envs import Constant, Unknown, Walk
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from grpo_rl import GroupVecEnv
from grpo_rl.errors import ConfigError
from grpo_rl.groups.vector import from_vector_env


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (lambda: gym.make_vec("CartPole-v1", 3), "spec"),  # an entry point of its own, without envs inside
        (lambda: gym.make_vec("CartPole-v1", 3, vectorization_mode="sync"), "env_fns"),
        (lambda: gym.make_vec("CartPole-v1", 3, vectorization_mode="async"), "env_fns"),
    ],
    ids=["vector entry point", "sync", "async"],
)
def test_it_plays_as_sb3s_own(make: Any, source: str) -> None:
    """The same steps and ends as make_vec_env's envs: a finished env is reset in the same step."""
    given = make()
    with pytest.warns(UserWarning, match=rf"3 new envs were built from its {source}, .* is not stepped"):
        env = from_vector_env(given)
    given.close()
    assert type(env) is GroupVecEnv
    theirs = make_vec_env("CartPole-v1", 3, seed=0)
    env.seed(0)
    np.testing.assert_array_equal(env.reset(), theirs.reset())
    rng, ends = np.random.default_rng(0), 0
    for _ in range(60):
        actions = rng.integers(2, size=3)
        (obs, rewards, dones, infos), expected = env.step(actions), theirs.step(actions)
        np.testing.assert_array_equal(obs, expected[0])
        np.testing.assert_array_equal(rewards, expected[1])
        np.testing.assert_array_equal(dones, expected[2])
        for column in np.flatnonzero(dones):
            ends += 1
            np.testing.assert_array_equal(
                infos[column]["terminal_observation"], expected[3][column]["terminal_observation"]
            )
            assert infos[column]["episode"]["l"] == expected[3][column]["episode"]["l"]
    assert ends > 3


@pytest.mark.filterwarnings("ignore:.*is a gymnasium VectorEnv")
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_no_mode_of_gymnasium_reaches_the_columns(mode: AutoresetMode) -> None:
    """Episodes of 3 steps: done at steps 3, 6, 9, and each observation counts from its own reset."""
    env = from_vector_env(SyncVectorEnv([lambda: Constant(3)] * 2, autoreset_mode=mode))
    env.reset()
    ends = [env.step(np.zeros(2, int))[2].tolist() for _ in range(9)]
    assert ends == [[False] * 2, [False] * 2, [True] * 2] * 3


@pytest.mark.filterwarnings("ignore:.*is a gymnasium VectorEnv")
def test_what_it_was_built_with_goes_with_it() -> None:
    given = gym.make_vec("Hopper-v5", 2, wrappers=[gym.wrappers.ClipAction], healthy_reward=0.25)
    env = from_vector_env(given)
    assert env.get_attr("_healthy_reward") == [0.25] * 2
    assert env.env_is_wrapped(gym.wrappers.ClipAction) == env.env_is_wrapped(Monitor) == [True] * 2
    given.close()
    env = from_vector_env(gym.make_vec("CartPole-v1", 2, max_episode_steps=7))
    assert env.get_attr("_max_episode_steps") == [7, 7]
    assert len(set(map(id, env.get_attr("unwrapped")))) == 2


@pytest.mark.filterwarnings("ignore:.*is a gymnasium VectorEnv")
def test_envs_that_cannot_fork_become_a_dummy_vec_env() -> None:
    env = from_vector_env(SyncVectorEnv([lambda: Unknown(seeded=False)] * 2))
    assert type(env) is DummyVecEnv
    assert env.env_is_wrapped(Monitor) == [True, True]


class Batched(VectorEnv):
    """A simulator of many envs at once, without a way to build one."""

    num_envs = 4
    single_observation_space = gym.spaces.Box(-1, 1, (1,))
    single_action_space = gym.spaces.Discrete(2)


def test_what_cannot_be_built_anew_is_refused_with_the_line_to_write() -> None:
    own = [Walk(), Walk()]
    cases: list[tuple[VectorEnv, str, str]] = [
        (Batched(), "neither by env_fns nor by a spec", "your_function, n_groups=1, group_size=4"),
        (
            gym.wrappers.vector.NormalizeObservation(gym.make_vec("CartPole-v1", 2)),
            "what NormalizeObservation does to all columns would be lost",
            '"CartPole-v1", n_groups=1, group_size=2',
        ),
        (SyncVectorEnv([lambda: own[0], lambda: own[1]]), "return envs that exist already", "your_function"),
        (
            SyncVectorEnv(
                [lambda: Walk()] * 2, observation_mode=(gym.spaces.Box(-9, 9, (2, 1)), gym.spaces.Box(-9, 9, (1,)))
            ),
            "other spaces than its own",
            "your_function",
        ),
    ]
    for env, reason, line in cases:
        with pytest.raises(ConfigError) as caught:
            from_vector_env(env)
        assert reason in str(caught.value)
        assert f"GRPO(policy, make_group_env({line}" in str(caught.value)
    assert own[0].t == own[1].t == 0


def test_an_async_env_keeps_its_processes() -> None:
    """They are the caller's to close."""
    given = AsyncVectorEnv([lambda: Constant(3)] * 2)
    with pytest.warns(UserWarning, match="is not stepped"):
        from_vector_env(given)
    assert given.reset()[0].shape == (2, 1)
    given.close()
