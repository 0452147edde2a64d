"""Groups on every kind of env: who shares a start, and what is said where nobody can."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from probe_envs import Unknown, Walk, grpo
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from grpo_rl import make_group_env
from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.groups.assign import choose_grouping

pytestmark = pytest.mark.filterwarnings("ignore:A rollout of", "ignore:groups. ", "ignore:.*truncated mini-batch")


class Starts(BaseCallback):
    """Of each rollout, the observations (members, …) at the roots of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[np.ndarray] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.model.rollout_buffer
        roots = (buffer.age == 0) & buffer.mask
        for group in np.unique(buffer.group[roots]):
            self.groups.append(buffer.observations[roots & (buffer.group == group)])


@pytest.mark.parametrize("fork_prob", [0.0, 1.0], ids=["from starts", "from the middle"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: gym.make("Pendulum-v1", max_episode_steps=20),
        lambda: make_vec_env("Pendulum-v1", 3, env_kwargs={"max_episode_steps": 20}),
        lambda: make_group_env("Pendulum-v1", 2, 4, max_episode_steps=20),
        lambda: make_group_env("Pendulum-v1", 1, 8, max_episode_steps=20),
    ],
    ids=["one env, in turn", "3 envs", "groups of 4 envs", "8 envs"],
)
def test_groups_of_eight_start_in_one_state(make: Any, fork_prob: float) -> None:
    """Pendulum observes its whole state: all members of a group have the same bits at their root."""
    watch = Starts()
    model = grpo(make(), group_size=8, n_steps=200, group_kind="episode", fork_prob=fork_prob)
    model.learn(800, watch)
    assert model.groups.means == "fork"
    assert len(watch.groups) >= 3
    for members in watch.groups:
        assert len(members) >= 8
        np.testing.assert_array_equal(members, np.broadcast_to(members[0], members.shape))
    assert len(np.unique([members[0] for members in watch.groups], axis=0)) == len(watch.groups)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_windows_of_eight_start_in_one_state(n_envs: int) -> None:
    """Rounds from the same root: 8 of one env, 3 of three."""
    watch = Starts()
    env = make_vec_env("Pendulum-v1", n_envs)
    grpo(env, group_size=8, n_steps=64, group_kind="window", fork_prob=1.0, reset_prob=0.0).learn(
        3 * 64 * n_envs, watch
    )
    assert len(watch.groups) == 3
    for members in watch.groups:
        assert len(members) == (8 if n_envs == 1 else 9)
        np.testing.assert_array_equal(members, np.broadcast_to(members[0], members.shape))


class Remote(VecEnv):
    """A foreign VecEnv: no `.envs`, no attributes of its envs, no copies, no pickles. Walks `length` steps."""

    def __init__(self, n_envs: int, follows_seeds: bool) -> None:
        self._far = [Walk(length=6) for _ in range(n_envs)]
        self._follows = follows_seeds
        super().__init__(n_envs, Walk.observation_space, Walk.action_space)

    def reset(self) -> Any:
        seeds = self._seeds if self._follows else [None] * self.num_envs
        obs = np.stack([env.reset(seed=seed)[0] for env, seed in zip(self._far, seeds, strict=True)])
        self._reset_seeds()
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        rows = []
        for env, action in zip(self._far, self._actions, strict=True):
            obs, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                info |= {"terminal_observation": obs, "TimeLimit.truncated": not terminated}
                obs = env.reset()[0]
            rows.append((obs, reward, terminated or truncated, info))
        obs, rewards, dones, infos = zip(*rows, strict=True)
        return np.stack(obs), np.array(rewards, np.float32), np.array(dones), list(infos)

    def get_attr(self, attr_name: str, indices: Any = None) -> Any:
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def close(self) -> None: ...
    def set_attr(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def env_method(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")

    def __reduce__(self) -> Any:
        raise TypeError("no pickles")


def test_a_foreign_vec_env_that_cannot_be_copied_gets_seeded_groups() -> None:
    env = Remote(4, follows_seeds=True)
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            refused(env)
    watch = Starts()
    with pytest.warns(UserWarning, match=r"groups: episode, by seed \(no exact forks: Remote gives no access"):
        model = grpo(env, group_size=4, group_kind="episode")
    model.learn(256, watch)
    firsts = [members for members in watch.groups if len(members) >= 4]
    assert len(firsts) >= 4
    for members in firsts:
        np.testing.assert_array_equal(members, np.broadcast_to(members[0], members.shape))


def test_a_foreign_vec_env_that_ignores_seeds_gets_batch_groups() -> None:
    model = grpo(Remote(4, follows_seeds=False), group_size=4, group_kind="episode")
    with pytest.warns(UserWarning, match="starts differently after resets with one seed"):
        model.learn(256)
    assert model.num_timesteps >= 256
    window = grpo(Remote(4, follows_seeds=True), group_size=4)  # no time limit that anybody could read
    assert (window.groups.kind, window.groups.means) == ("window", "batch")
    assert window.learn(256).num_timesteps == 256


@pytest.mark.parametrize(("kind", "means"), [("episode", "seed"), ("window", "batch")])
def test_sb3s_own_worker_env_falls_back_with_the_reason(kind: str, means: str) -> None:
    env = make_vec_env("CartPole-v1", 2, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"})
    model = grpo(env, group_kind=kind)
    assert (model.groups.kind, model.groups.means) == (kind, means)
    assert "vec_env_cls=SubprocVecEnv" in model.groups.reason
    assert model.learn(64).num_timesteps >= 64
    with pytest.raises(ForkError, match="gives no access"):
        grpo(env, grouping="fork")
    env.close()


# --- Monitor(allow_early_resets=False) --------------------------------------------------------------------------------
def strict(n_envs: int) -> DummyVecEnv:
    return DummyVecEnv([lambda: Monitor(Unknown(), allow_early_resets=False)] * n_envs)


def test_a_monitor_that_forbids_early_resets_gets_batch_groups() -> None:
    """Seeded groups reset all columns in the middle of some episodes."""
    model = grpo(strict(2), group_kind="episode")
    assert (model.groups.kind, model.groups.means) == ("episode", "batch")
    assert "Unknown" in model.groups.reason
    assert "allow_early_resets=False" in model.groups.reason
    assert model.learn(128).num_timesteps == 128
    with pytest.raises(ConfigError, match=r"Monitor\(env, allow_early_resets=True\), or grouping='batch'"):
        choose_grouping(strict(2), 2, "episode", "seed", bootstraps=False)


def test_forks_need_no_early_resets() -> None:
    env = DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"), allow_early_resets=False)] * 2)
    model = grpo(env, group_kind="episode", fork_prob=0.5)
    assert model.groups.means == "fork"
    assert model.learn(256).num_timesteps >= 256
