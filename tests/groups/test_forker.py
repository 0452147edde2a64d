"""Forker: what vec env wrappers keep per column moves with forks, what they count does not; states of whole stacks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from probe_envs import Unknown, Walk, grpo
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecCheckNan,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from grpo_rl import make_group_env
from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.groups.forker import Forker


def in_workers(env: Any, n_groups: int, group_size: int, **settings: Any) -> VecEnv:
    kwargs = {"n_workers": n_groups}
    return make_group_env(env, n_groups, group_size, vec_env_cls=SubprocVecEnv, vec_env_kwargs=kwargs, **settings)


BASES: dict[str, Callable[..., VecEnv]] = {
    "group env": lambda env, **kwargs: make_group_env(env, 2, 2, **kwargs),
    "workers": lambda env, **kwargs: in_workers(env, 2, 2, **kwargs),
    "dummy": lambda env, seed, **kwargs: make_vec_env(env, 4, seed=seed, env_kwargs=kwargs),
}


pytestmark = pytest.mark.filterwarnings("ignore:The environment is already wrapped", "ignore:A rollout of")


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest) -> Iterator[Callable[..., VecEnv]]:
    """Builds four envs; closes them after the test."""
    made: list[VecEnv] = []

    def build(env: Any, **kwargs: Any) -> VecEnv:
        made.append(BASES[request.param](env, **({"seed": 0} | kwargs)))
        return made[-1]

    yield build
    for env in made:
        env.close()


class Program:
    """Random steps with forks by any map in between: calls `after_fork(sources)` and `after_step(what step gave)`."""

    def __init__(self, env: VecEnv, steps: int, actions: Callable[[np.random.Generator], np.ndarray]) -> None:
        self.forker, self.env, self.steps, self.actions = Forker(env), env, steps, actions

    def run(self, after_fork: Callable[[np.ndarray], None], after_step: Callable[..., None]) -> None:
        rng = np.random.default_rng(0)
        for step in range(self.steps):
            if step % 3 == 2:
                sources = rng.integers(4, size=4)
                self.forker.fork(sources)
                after_fork(sources)
            after_step(*self.env.step(self.actions(rng)))


def torques(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(-2, 2, (4, 1)).astype(np.float32)


def test_discounted_returns_of_vec_normalize_follow_forks(base: Any) -> None:
    """By hand: d ← 0.9·d + r, 0 after an end; a fork copies it. The count is one per row and step, whatever forks."""
    env = VecNormalize(base("Pendulum-v1", max_episode_steps=7), gamma=0.9)
    env.reset()
    expected, steps, ends = np.zeros(4), 0, 0

    def after_fork(sources: np.ndarray) -> None:
        nonlocal expected
        expected = expected[sources]
        np.testing.assert_allclose(env.returns, expected, rtol=1e-12)

    def after_step(obs: Any, rewards: Any, dones: np.ndarray, infos: Any) -> None:
        nonlocal expected, steps, ends
        expected = np.where(dones, 0, 0.9 * expected + env.get_original_reward())
        steps, ends = steps + 1, ends + int(dones.sum())
        np.testing.assert_allclose(env.returns, expected, rtol=1e-12)
        assert env.obs_rms.count == pytest.approx(1e-4 + 4 + 4 * steps)  # 4: SB3 counts the reset
        assert env.ret_rms.count == pytest.approx(1e-4 + 4 * steps)

    Program(env, 40, torques).run(after_fork, after_step)
    assert ends > 8


def test_frames_follow_forks(base: Any) -> None:
    """By hand: the last three observations of each column, zeros before its start."""
    env = VecFrameStack(base("Pendulum-v1", max_episode_steps=7), 3)
    first = env.reset()
    frames = [deque([np.zeros(3)] * 2 + [row[-3:]], 3) for row in first]

    def after_fork(sources: np.ndarray) -> None:
        frames[:] = [copy.copy(frames[source]) for source in sources]
        np.testing.assert_array_equal(env.stacked_obs.stacked_obs, np.stack([np.concatenate(f) for f in frames]))

    def after_step(obs: np.ndarray, rewards: Any, dones: np.ndarray, infos: Any) -> None:
        for column, stack in enumerate(frames):
            if dones[column]:
                terminal = np.concatenate([*list(stack)[1:], infos[column]["terminal_observation"][-3:]])
                np.testing.assert_array_equal(infos[column]["terminal_observation"], terminal)
                stack.extend([np.zeros(3)] * 3)
            stack.append(obs[column, -3:].copy())
        np.testing.assert_array_equal(obs, np.stack([np.concatenate(stack) for stack in frames]))

    Program(env, 40, torques).run(after_fork, after_step)


def test_episodes_of_vec_monitor_follow_forks(base: Any) -> None:
    env = VecMonitor(base("Pendulum-v1", max_episode_steps=7))
    env.reset()
    returns, lengths = np.zeros(4, np.float32), np.zeros(4, int)

    def after_fork(sources: np.ndarray) -> None:
        returns[:], lengths[:] = returns[sources], lengths[sources]

    def after_step(obs: Any, rewards: np.ndarray, dones: np.ndarray, infos: Any) -> None:
        returns[:], lengths[:] = returns + rewards, lengths + 1
        for column in np.flatnonzero(dones):
            assert infos[column]["episode"]["r"] == pytest.approx(returns[column])
            assert infos[column]["episode"]["l"] == lengths[column]
        returns[dones] = lengths[dones] = 0
        np.testing.assert_allclose(env.episode_returns, returns)

    Program(env, 40, torques).run(after_fork, after_step)


def test_a_root_brings_the_rows_of_all_wrappers_back(base: Any) -> None:
    env = VecFrameStack(VecNormalize(base("Pendulum-v1"), gamma=0.9), 2)
    forker = Forker(env)
    env.reset()
    for _ in range(3):
        env.step(np.ones((4, 1), np.float32))
    root = forker.capture(1)
    frames, returns = env.stacked_obs.stacked_obs[1].copy(), env.venv.returns[1]
    env.step(np.ones((4, 1), np.float32))
    for column in (0, 1, 3, 3):
        env.step(np.full((4, 1), -1, np.float32))
        count = env.venv.obs_rms.count
        forker.restore(column, root)
        np.testing.assert_array_equal(env.stacked_obs.stacked_obs[column], frames)
        assert env.venv.returns[column] == returns
        assert env.venv.obs_rms.count == count
    obs = env.step(np.ones((4, 1), np.float32))[0]
    assert not np.array_equal(obs[3], obs[2])
    assert forker.num_envs == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"group_kind": "episode"},
        {"group_kind": "window"},
        {"value_head": True},
        {"grouping": "seed"},
        {"grouping": "batch"},
        {"group_kind": "episode", "group_size": 8},  # more members than columns
    ],
    ids=str,
)
def test_statistics_count_the_counted_steps_and_no_others(base: Any, settings: dict[str, Any]) -> None:
    """Not forks, roots, resets of groups, the probe of an unknown class, nor an evaluation every ten steps."""
    env = VecNormalize(base(Walk))
    model = grpo(env, **settings)
    assert env.obs_rms.count == 1e-4
    evaluation = VecNormalize(make_vec_env(Walk, 1), training=False)
    model.learn(512, EvalCallback(evaluation, eval_freq=10, n_eval_episodes=1, verbose=0))
    assert model.num_timesteps >= 512
    assert env.obs_rms.count == pytest.approx(1e-4 + 4 + model.num_timesteps)  # 4: SB3 counts the first reset
    assert env.ret_rms.count == pytest.approx(1e-4 + model.num_timesteps)
    model.learn(256, reset_num_timesteps=False)  # goes on without a reset
    assert env.obs_rms.count == pytest.approx(1e-4 + 4 + model.num_timesteps)


def test_columns_can_wait_only_where_nothing_around_them_counts_their_steps(base: Any) -> None:
    env = base("Pendulum-v1")
    freezes = Forker(env).group_env is not None
    assert Forker(env).can_freeze is freezes
    for wrapper in (VecNormalize(env), VecFrameStack(env, 2), VecMonitor(env)):
        assert not Forker(wrapper).can_freeze

    class Images(Walk):
        observation_space = gym.spaces.Box(0, 255, (12, 12, 3), np.uint8)

        def observe(self) -> Any:
            return np.zeros((12, 12, 3), np.uint8)

    assert Forker(VecTransposeImage(make_group_env(Images, 1, 2))).can_freeze


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: env,
        lambda env: VecNormalize(env, gamma=0.9),
        lambda env: VecFrameStack(VecNormalize(VecMonitor(env)), 3),
        lambda env: VecCheckNan(VecNormalize(env, norm_obs=False)),
    ],
    ids=["bare", "normalize", "monitor, normalize, frames", "rewards alone"],
)
def test_a_state_continues_bit_for_bit(base: Any, wrap: Any) -> None:
    """All that steps and forks give over the next 30 steps, in an env that had another seed and another past."""

    def future(env: VecEnv, forker: Forker) -> list[Any]:
        rng, found = np.random.default_rng(1), []
        for step in range(30):
            if step % 5 == 1:
                forker.fork(rng.integers(4, size=4))
            obs, rewards, dones, infos = env.step(torques(rng))
            lengths = [info["episode"]["l"] for info in infos if "episode" in info]
            found += [obs.copy(), rewards, dones, lengths]
        return [*found, env.get_attr("episode_lengths"), env.reset()]

    def build(seed: int) -> tuple[VecEnv, Forker]:
        env = wrap(base("Pendulum-v1", max_episode_steps=7, seed=seed))
        env.reset()
        return env, Forker(env)

    env, forker = build(0)
    for _ in range(10):
        env.step(torques(np.random.default_rng(3)))
        forker.fork(np.array([1, 1, 3, 0]))
    state = forker.state()
    kept = copy.deepcopy(state["rows"])
    expected = future(env, forker)
    other, its_forker = build(8)
    for _ in range(2):  # a state is not used up
        its_forker.set_state(state)
        np.testing.assert_equal(future(other, its_forker), expected)
    np.testing.assert_equal(state["rows"], kept)


def test_statistics_keep_their_objects() -> None:
    """Others may hold them, such as an evaluation env that was synchronised."""
    env = VecNormalize(make_group_env("Pendulum-v1", 1, 2, seed=0))
    env.reset()
    forker, obs_rms = Forker(env), env.obs_rms
    state, mean = forker.state(), obs_rms.mean.copy()
    env.step(np.ones((2, 1), np.float32))
    forker.set_state(state)
    assert env.obs_rms is obs_rms
    np.testing.assert_array_equal(obs_rms.mean, mean)


def test_the_state_of_another_stack_is_refused() -> None:
    state = Forker(VecNormalize(make_group_env("Pendulum-v1", 1, 2))).state()
    with pytest.raises(ConfigError, match=r"inside \['VecFrameStack'\].*build it as"):
        Forker(VecFrameStack(make_group_env("Pendulum-v1", 1, 2), 2)).set_state(state)
    with pytest.raises(ConfigError, match=r"build it as"):
        Forker(VecNormalize(make_group_env("Pendulum-v1", 1, 4))).set_state(state)
    dummy = Forker(make_vec_env("Pendulum-v1", 2)).state()
    with pytest.raises(ConfigError, match="expected the state of 4 envs, got that of 2"):
        Forker(make_vec_env("Pendulum-v1", 4)).set_state(dummy)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Counted(Unknown):
    """Counts, over all instances, which of them were built, reset or stepped."""

    built: ClassVar[list[Any]] = []
    touched: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.built.append(self)

    def reset(self, **kwargs: Any) -> Any:
        self.touched.append(self)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.touched.append(self)
        return super().step(action)


def test_an_unknown_env_is_probed_on_fresh_instances_never_on_the_users_own() -> None:
    """It may be a real robot. Its spec says how to build more; without one it is refused."""
    gym.register("Counted-v0", Counted, disable_env_checker=True)
    try:
        user = gym.make("Counted-v0")
        forker = Forker(DummyVecEnv([lambda: user]))
        assert len(Counted.built) >= 2
        assert user.unwrapped not in Counted.touched
        assert forker.proviso == ""
    finally:
        del gym.registry["Counted-v0"]


def test_what_cannot_be_forked_is_refused_by_name() -> None:
    with pytest.raises(ForkError, match=r"Unknown.*factory"):
        Forker(DummyVecEnv([Unknown]))
    env = make_vec_env("CartPole-v1", 1, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"})
    with pytest.raises(ForkError, match=r"SubprocVecEnv gives no access .*vec_env_cls=SubprocVecEnv"):
        Forker(env)
    env.close()
