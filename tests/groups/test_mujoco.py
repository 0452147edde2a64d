"""The batched MuJoCo engine against Gymnasium's own envs: numbers, forks, seeds, infos, and SB3's interface."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco import MujocoEnv
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from grpo_rl import GRPO
from grpo_rl.errors import ConfigError
from grpo_rl.groups.forker import Forker
from grpo_rl.groups.mujoco import MujocoVecEnv, make_vec, supports
from grpo_rl.groups.physics import NativePhysics, ThreadPhysics
from grpo_rl.groups.vec_env import GroupVecEnv
from grpo_rl.lab.film import offscreen_backends

SETTINGS: dict[str, dict[str, Any]] = {
    "Ant-v5": {
        "frame_skip": 4,
        "forward_reward_weight": 1.3,
        "ctrl_cost_weight": 0.3,
        "contact_cost_weight": 0.01,
        "healthy_reward": 0.7,
        "main_body": "front_left_leg",
        "healthy_z_range": (0.3, 0.9),
        "contact_force_range": (-0.5, 2.0),
        "reset_noise_scale": 0.05,
        "exclude_current_positions_from_observation": False,
        "include_cfrc_ext_in_observation": False,
    },
    "HalfCheetah-v5": {
        "frame_skip": 3,
        "forward_reward_weight": 2,
        "ctrl_cost_weight": 0.25,
        "reset_noise_scale": 0.2,
        "exclude_current_positions_from_observation": False,
    },
    "Hopper-v5": {
        "frame_skip": 3,
        "forward_reward_weight": 0.5,
        "ctrl_cost_weight": 0.1,
        "healthy_reward": 2,
        "terminate_when_unhealthy": False,
        "healthy_state_range": (-3.0, 3.0),
        "healthy_z_range": (0.8, 1.4),
        "healthy_angle_range": (-0.1, 0.3),
        "reset_noise_scale": 0.02,
        "exclude_current_positions_from_observation": False,
    },
    "Humanoid-v5": {
        "frame_skip": 4,
        "forward_reward_weight": 2.0,
        "ctrl_cost_weight": 0.3,
        "contact_cost_weight": 1e-4,
        "contact_cost_range": (0.001, 2.0),
        "healthy_reward": 3.0,
        "terminate_when_unhealthy": False,
        "healthy_z_range": (1.1, 1.5),
        "reset_noise_scale": 0.05,
        "exclude_current_positions_from_observation": False,
        "include_cinert_in_observation": False,
        "include_cvel_in_observation": False,
        "include_qfrc_actuator_in_observation": False,
    },
    "HumanoidStandup-v5": {
        "frame_skip": 4,
        "ctrl_cost_weight": 0.3,
        "impact_cost_weight": 1e-4,
        "impact_cost_range": (0.001, 2.0),
        "reset_noise_scale": 0.05,
        "exclude_current_positions_from_observation": False,
        "include_cvel_in_observation": False,
        "include_cfrc_ext_in_observation": False,
    },
    "InvertedDoublePendulum-v5": {"frame_skip": 3, "healthy_reward": 5.0, "reset_noise_scale": 0.02},
    "InvertedPendulum-v5": {"frame_skip": 1, "reset_noise_scale": 0.1},
    "Pusher-v5": {
        "frame_skip": 3,
        "reward_near_weight": 0.3,
        "reward_dist_weight": 2.0,
        "reward_control_weight": 0.4,
        "xml_file": "pusher_v5.xml",
    },
    "Reacher-v5": {"frame_skip": 3, "reward_dist_weight": 0.3, "reward_control_weight": 2.0},
    "Swimmer-v5": {
        "frame_skip": 3,
        "forward_reward_weight": 2.0,
        "ctrl_cost_weight": 0.1,
        "reset_noise_scale": 0.3,
        "exclude_current_positions_from_observation": False,
    },
    "Walker2d-v5": {
        "frame_skip": 3,
        "xml_file": "walker2d.xml",
        "forward_reward_weight": 0.5,
        "ctrl_cost_weight": 0.1,
        "healthy_reward": 2,
        "healthy_z_range": (0.9, 1.4),
        "healthy_angle_range": (-0.5, 0.6),
        "reset_noise_scale": 0.02,
        "exclude_current_positions_from_observation": False,
    },
}
"""Every task, with arguments that are none of the defaults."""

CASES = [
    pytest.param(name, settings, id=f"{name}-{'other' if settings else 'default'}")
    for name, other in SETTINGS.items()
    for settings in ({}, other)
]


CONTACTS = ("Ant-v5", "Humanoid-v5", "HumanoidStandup-v5")  # they read contact forces
HAS_BATCH = importlib.util.find_spec("mujoco.batch") is not None


def one_by_one(env_id: str, n_envs: int, group_size: int, seed: int, **settings: Any) -> GroupVecEnv:
    """The generic engine: Gymnasium's envs, stepped one after another."""
    env = GroupVecEnv([lambda: Monitor(gym.make(env_id, **settings)) for _ in range(n_envs)], group_size)
    env.seed(seed)
    return env


def random_actions(env: VecEnv, rng: np.random.Generator) -> np.ndarray:
    space: Any = env.action_space
    return rng.uniform(space.low, space.high, (env.num_envs, *space.shape)).astype(np.float32)


def assert_alike(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Results of a step: observations and ends bit-equal, infos to 1e-12; rewards come as float32 here."""
    for mine, other in ((ours[0], theirs[0]), (ours[2], theirs[2])):
        assert (mine.dtype, mine.shape, mine.tobytes()) == (other.dtype, other.shape, other.tobytes())
    assert ours[1].dtype == theirs[1].dtype
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
    for mine, other in zip(ours[3], theirs[3], strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            if key == "episode":
                assert mine[key].keys() == value.keys()
                assert (mine[key]["r"], mine[key]["l"]) == (pytest.approx(value["r"], abs=2e-6), value["l"])
            else:
                np.testing.assert_allclose(mine[key], value, rtol=1e-12, atol=1e-12, err_msg=key)
            assert isinstance(mine[key], np.ndarray) == isinstance(value, np.ndarray)


def rewards(env: VecEnv) -> np.ndarray:
    """All rewards of the running episodes in float64."""
    return np.array([reward for column in env.get_attr("rewards") for reward in column])


# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(("env_id", "settings"), CASES)
def test_the_same_numbers_as_gymnasium(env_id: str, settings: dict[str, Any]) -> None:
    limit = {"max_episode_steps": 70} if settings else {}
    ours = make_vec(env_id, 2, seed=3, n_threads=2, **settings, **limit)
    theirs = make_vec_env(env_id, 2, 3, env_kwargs=settings | limit)
    assert type(ours) is MujocoVecEnv and type(theirs) is DummyVecEnv
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    assert ours.action_space.sample().tolist() == theirs.action_space.sample().tolist()
    rng, ends = np.random.default_rng(0), 0
    assert ours.reset().tobytes() == theirs.reset().tobytes()  # type: ignore[union-attr]
    for _ in range(300):
        actions = random_actions(ours, rng)
        if settings:
            actions = actions.astype(np.float64)  # the control cost keeps the type of the actions
        mine, other = ours.step(actions), theirs.step(actions)
        assert_alike(mine, other)
        np.testing.assert_allclose(rewards(ours), rewards(theirs), rtol=1e-12, atol=1e-12)
        ends += int(other[2].sum())
    assert_same_resets(ours.reset_infos, theirs.reset_infos)
    unending = env_id in ("HalfCheetah-v5", "HumanoidStandup-v5", "Swimmer-v5") and not settings
    assert ends > 0 or unending
    ours.close()
    theirs.close()


def assert_same_resets(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            np.testing.assert_array_equal(mine[key], value)


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "settings"), CASES)
def test_the_same_numbers_over_a_thousand_steps(env_id: str, settings: dict[str, Any]) -> None:
    ours, theirs = make_vec(env_id, 2, seed=5, **settings), make_vec_env(env_id, 2, 5, env_kwargs=settings)
    rng = np.random.default_rng(1)
    assert ours.reset().tobytes() == theirs.reset().tobytes()  # type: ignore[union-attr]
    for _ in range(1000):
        actions = random_actions(ours, rng)
        assert_alike(ours.step(actions), theirs.step(actions))
    np.testing.assert_allclose(rewards(ours), rewards(theirs), rtol=1e-12, atol=1e-12)


def test_any_number_of_threads_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """MuJoCo's own threads and Python's, which older versions take."""
    envs = [MujocoVecEnv("Walker2d-v5", 7, seed=0, n_threads=n) for n in (1, 2, 5)]
    monkeypatch.setitem(sys.modules, "mujoco.batch", None)
    envs += [MujocoVecEnv("Walker2d-v5", 7, seed=0, n_threads=n) for n in (1, 2, 5)]
    kinds = [type(env._physics) for env in envs]
    assert kinds == 3 * [NativePhysics if HAS_BATCH else ThreadPhysics] + 3 * [ThreadPhysics]
    rng = np.random.default_rng(0)
    for env in envs:
        env.reset()
    for _ in range(60):
        actions = random_actions(envs[0], rng)
        first, *others = [env.step(actions) for env in envs]
        for other in others:
            assert [part.tobytes() for part in first[:3]] == [part.tobytes() for part in other[:3]]


# --------------------------------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("physics", ["native", "threads"])
@pytest.mark.parametrize("env_id", SETTINGS)
def test_forks_snapshots_resets_and_frozen_columns_are_those_of_gymnasiums_envs(
    env_id: str, physics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One script of operations, chosen at random, on both engines: everything that comes back is equal."""
    if physics == "threads":
        monkeypatch.setitem(sys.modules, "mujoco.batch", None)  # as in a MuJoCo before 4
    elif env_id in CONTACTS or not HAS_BATCH:
        pytest.skip("not with mujoco.batch")
    ours = MujocoVecEnv(env_id, 6, group_size=3, seed=1, n_threads=2, max_episode_steps=23)
    theirs = one_by_one(env_id, 6, 3, 1, max_episode_steps=23)
    envs, rng = (ours, theirs), np.random.default_rng(2)
    held: dict[GroupVecEnv, Any] = {}

    def both(operation: Callable[[GroupVecEnv], Any]) -> None:
        mine, other = map(operation, envs)
        assert mine.tobytes() == other.tobytes()

    both(lambda env: env.reset())
    for round_ in range(12):
        for _ in range(5):
            actions = random_actions(ours, rng)
            assert_alike(ours.step(actions), theirs.step(actions))
        sources = rng.integers(6, size=6) if round_ % 3 else rng.permutation(6)
        both(lambda env, sources=sources: env.fork(sources))  # type: ignore[misc]
        np.testing.assert_allclose(rewards(ours), rewards(theirs), rtol=1e-12, atol=1e-12)
        if round_ == 4:
            held |= {env: env.snapshot(2) for env in envs}
        if round_ == 6:
            both(lambda env, held=held: env.restore(5, held[env]))  # type: ignore[misc]
        if round_ == 8:
            both(lambda env: env.reset_group(1))
        for env in envs:
            env.frozen[:] = rng.permutation(6) < 2 if env is ours else ours.frozen
    both(lambda env: env.reset())
    assert not ours.frozen.any()


def test_a_copy_and_its_source_go_on_alike_until_a_reset() -> None:
    """All of mjData moves: Ant's first reward after a fork reads positions that lag those of the joints."""
    env = MujocoVecEnv("Ant-v5", 3, seed=0)
    env.reset()
    rng = np.random.default_rng(0)
    for _ in range(25):
        env.step(random_actions(env, rng))
    obs: Any = env.fork([0, 0, 2])
    assert obs[0].tobytes() == obs[1].tobytes() != obs[2].tobytes()
    for _ in range(60):
        actions = random_actions(env, rng)
        actions[1] = actions[0]
        obs, reward, dones, infos = env.step(actions)
        assert reward[0] == reward[1]
        if dones[0]:
            assert infos[0]["terminal_observation"].tobytes() == infos[1]["terminal_observation"].tobytes()
            assert obs[0].tobytes() != obs[1].tobytes()  # siblings start apart
            return
        assert obs[0].tobytes() == obs[1].tobytes()
        assert obs[0].tobytes() != obs[2].tobytes()


def test_frozen_columns_are_not_stepped() -> None:
    env = MujocoVecEnv("Hopper-v5", 4, seed=0)
    obs: Any = env.reset()
    env.frozen[[1, 3]] = True
    rng = np.random.default_rng(0)
    for _ in range(3):
        new_obs, reward, dones, infos = env.step(random_actions(env, rng))
    assert np.array_equal(new_obs[[1, 3]], obs[[1, 3]]) and not (new_obs[[0, 2]] == obs[[0, 2]]).all(axis=1).any()
    assert (reward[1], reward[3]) == (0, 0) and reward[0] != 0 and reward[2] != 0
    assert (infos[1], infos[3]) == ({}, {}) and "x_velocity" in infos[2]
    assert env.get_attr("_elapsed_steps") == [3, 0, 3, 0]
    assert [data.time for data in env.get_attr("data")] == pytest.approx([3 * 0.008, 0, 3 * 0.008, 0])  # dt 0.008 s
    env.frozen[:] = True
    again, reward, dones, infos = env.step(random_actions(env, rng))
    assert np.array_equal(again, new_obs) and not reward.any() and not dones.any() and infos == [{}] * 4


def test_a_state_continues_bit_for_bit_in_another_env() -> None:
    first = MujocoVecEnv("Reacher-v5", 4, group_size=2, seed=0, max_episode_steps=9)
    other = MujocoVecEnv("Reacher-v5", 4, group_size=2, seed=77, max_episode_steps=9)
    rng = np.random.default_rng(0)
    first.reset()
    other.reset()
    for _ in range(7):
        first.step(random_actions(first, rng))
    first.fork([1, 1, 3, 2])
    other.set_state(first.state())
    for _ in range(25):
        actions = random_actions(first, rng)
        for mine, theirs in zip(first.step(actions)[:3], other.step(actions)[:3], strict=True):
            assert mine.tobytes() == theirs.tobytes()  # type: ignore[union-attr]


def test_a_state_moves_between_the_engines() -> None:
    """A run that was saved on the one goes on, on the other, from the same state."""
    ours, theirs = MujocoVecEnv("Walker2d-v5", 4, seed=0), one_by_one("Walker2d-v5", 4, 4, 5)
    rng = np.random.default_rng(0)
    ours.reset()
    theirs.reset()
    for env, other in ((ours, theirs), (theirs, ours)):
        for _ in range(12):
            env.step(random_actions(env, rng))
        other.set_state(env.state())
        for _ in range(40):
            actions = random_actions(env, rng)
            assert_alike(ours.step(actions), theirs.step(actions))


def test_a_forker_moves_the_rows_of_vec_normalize_with_it() -> None:
    env = VecNormalize(MujocoVecEnv("HalfCheetah-v5", 4, seed=0))
    env.reset()
    rng = np.random.default_rng(0)
    for _ in range(4):
        env.step(random_actions(env, rng))
    before = env.returns.copy()
    Forker(env).fork(np.array([2, 1, 2, 2]))
    np.testing.assert_array_equal(env.returns, before[[2, 1, 2, 2]])
    obs: Any = env.step(np.zeros((4, 6), np.float32))[0]
    assert obs[0].tobytes() == obs[2].tobytes() == obs[3].tobytes() != obs[1].tobytes()


# -------------------------------------------------------------------------------------------------- episodes and seeds


def test_a_time_limit_is_no_termination() -> None:
    env = MujocoVecEnv("HalfCheetah-v5", 2, seed=0, max_episode_steps=3)
    env.reset()
    for step in range(1, 4):
        obs, _, dones, infos = env.step(np.full((2, 6), 0.1, np.float32))
        assert dones.tolist() == 2 * [step == 3]
        assert [info["TimeLimit.truncated"] for info in infos] == 2 * [step == 3]
        if step < 3:
            assert "episode" not in infos[0] and "terminal_observation" not in infos[0]
    assert infos[0]["episode"]["l"] == 3
    assert infos[1]["episode"]["r"] == pytest.approx(env.get_attr("episode_returns")[1][0], abs=1e-6)
    assert infos[0]["terminal_observation"].shape == (17,)
    assert not (infos[0]["terminal_observation"] == obs[0]).all()  # that is already the next start


def test_termination_at_the_limit_is_no_truncation() -> None:
    """A pendulum under full force tips after some steps; a limit of as many steps ends it in the same one."""

    def play(**limit: int) -> tuple[int, bool]:
        """Length of the first episode, and whether it was cut short."""
        env = MujocoVecEnv("InvertedPendulum-v5", 1, seed=0, **limit)
        env.reset()
        for step in range(1, 100):
            _, _, dones, infos = env.step(np.full((1, 1), 3.0, np.float32))
            if dones[0]:
                return step, infos[0]["TimeLimit.truncated"]
        raise AssertionError("it never tips")

    length, _ = play()
    assert 1 < length < 99
    assert play(max_episode_steps=length) == (length, False)
    assert play(max_episode_steps=length + 1) == (length, False)
    assert play(max_episode_steps=length - 1) == (length - 1, True)


def test_seeds() -> None:
    def start(seed: int | None) -> np.ndarray:
        env = MujocoVecEnv("Hopper-v5", 3)
        env.seed(seed)
        return np.asarray(env.reset())

    assert np.array_equal(start(4), start(4))
    assert np.array_equal(start(4)[1:], start(5)[:2])  # column i starts from seed + i
    assert not np.array_equal(start(None), start(None))
    assert len({row.tobytes() for row in start(4)}) == 3


def test_results_are_no_views() -> None:
    env = MujocoVecEnv("Hopper-v5", 2, seed=0)
    obs: Any = env.reset()
    kept = obs.copy()
    later: Any = env.step(np.zeros((2, 3), np.float32))[0]
    assert np.array_equal(obs, kept)
    later[:] = 7
    assert not (np.asarray(env.step(np.zeros((2, 3), np.float32))[0]) == 7).any()


# --------------------------------------------------------------------------------------------------- SB3's other doors


def test_attributes_and_methods_are_those_of_the_columns() -> None:
    env = MujocoVecEnv("Hopper-v5", 3, seed=0)
    env.reset()
    env.step(np.zeros((3, 3), np.float32))
    assert env.get_attr("_max_episode_steps") == [1000] * 3
    assert env.env_is_wrapped(Monitor) == [True] * 3
    assert MujocoVecEnv("Hopper-v5", 2, monitor=False).env_is_wrapped(Monitor) == [False] * 2
    env.set_attr("nickname", "hop", indices=1)
    assert env.get_attr("nickname", indices=1) == ["hop"] and not env.has_attr("nickname")
    heights = [com[2] for com in env.env_method("get_body_com", "torso")]
    assert heights == pytest.approx([data.body("torso").xpos[2] for data in env.get_attr("data")])
    assert len(set(heights)) == 3
    assert len({id(model) for model in env.get_attr("model")}) == 1  # compiled once
    before = [data.time for data in env.get_attr("data")]
    env.step(np.zeros((3, 3), np.float32))
    assert [data.time for data in env.get_attr("data")] == pytest.approx([time + 0.008 for time in before])
    assert env.render_mode == "rgb_array"
    assert env.get_attr("spec")[0].id == "Hopper-v5"


def test_a_state_that_a_user_sets_is_stepped_from() -> None:
    env = MujocoVecEnv("HalfCheetah-v5", 2, seed=0)
    env.reset()
    qpos, qvel = np.full(9, 0.2), np.zeros(9)
    env.env_method("set_state", qpos, qvel, indices=1)
    _, _, _, infos = env.step(np.zeros((2, 6), np.float32))
    data = env.get_attr("data")[1]
    assert infos[1]["x_velocity"] == pytest.approx((data.qpos[0] - 0.2) / 0.05, abs=1e-12)  # dt 0.05 s


@pytest.mark.skipif(not offscreen_backends(), reason="no GL to render with")
def test_each_column_renders_itself(tmp_path: Path) -> None:
    # MuJoCo takes its GL from the environment when it is first imported, so a process of its own draws.
    code = f"""
import numpy
from grpo_rl.groups.mujoco import MujocoVecEnv
env = MujocoVecEnv("Hopper-v5", 2, seed=0, width=64, height=48)
env.reset()
for column in (0, 1):
    for _ in range(20 * column):
        env.step(numpy.ones((2, 3), numpy.float32))
    numpy.save({str(tmp_path)!r} + f"/{{column}}.npy", env.env_method("render", indices=column)[0])
assert env.render().shape == (96, 64, 3)  # both, tiled
env.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"MUJOCO_GL": offscreen_backends()[0]})
    first, second = (np.load(tmp_path / f"{column}.npy") for column in (0, 1))
    assert first.shape == second.shape == (48, 64, 3)
    assert first.std() > 10 and np.abs(first.astype(int) - second).max() > 50


def test_ppo_learns_on_it() -> None:
    model = PPO("MlpPolicy", make_vec("InvertedPendulum-v5", 4, seed=0), n_steps=16, batch_size=32, seed=0)
    model.learn(64)
    assert len(model.ep_info_buffer) > 0  # type: ignore[arg-type]


def test_mistakes() -> None:
    env = MujocoVecEnv("Hopper-v5", 2)
    with pytest.raises(gym.error.ResetNeeded, match="before the first step"):
        env.step(np.zeros((2, 3), np.float32))
    env.reset()
    with pytest.raises(ConfigError, match=r"actions: expected shape \(2, 3\), got \(2, 4\)"):
        env.step(np.zeros((2, 4), np.float32))
    with pytest.raises(ConfigError, match="n_envs=0: expected a whole number, 1 or more"):
        MujocoVecEnv("Hopper-v5", 0)
    with pytest.raises(ConfigError, match="n_threads=0: expected a whole number, 1 or more"):
        MujocoVecEnv("Hopper-v5", 2, n_threads=0)
    for arguments, words in (
        ((5,), "expected a registered id"),
        (("Hopper-v5", "8"), "n_envs='8': expected a whole n"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_vec(*arguments)
    with pytest.raises(ConfigError, match="seed=-1: expected a whole number, 0 or more"):
        make_vec("CartPole-v1", 2, seed=-1)
    with pytest.raises(ConfigError, match="CartPole-v1 is not one of Gymnasium's MuJoCo v5 tasks"):
        MujocoVecEnv("CartPole-v1", 2)
    with pytest.raises(ConfigError, match="multiple of group_size=2"):
        MujocoVecEnv("Hopper-v5", 3, group_size=2)


# ------------------------------------------------------------------------------------------------- what it is not for


@pytest.mark.parametrize(
    ("env_id", "settings", "words"),
    [
        ("Hopper-v5", {"reset_noise_scale": 0.1, "width": 64, "max_episode_steps": 5}, ""),
        ("Hopper-v4", {}, "not one of Gymnasium's MuJoCo v5 tasks"),
        ("CartPole-v1", {}, "not one of Gymnasium's MuJoCo v5 tasks"),
        ("Hoper-v5", {}, "Hoper"),
        ("Hopper-v5", {"sutton": 1}, "no argument sutton"),
        ("Hopper-v5", {"render_mode": "human"}, "opens a window"),
    ],
)
def test_supports_says_why_not(env_id: str, settings: dict[str, Any], words: str) -> None:
    reason = supports(env_id, settings)
    assert (words in reason) if words else reason == ""


def test_ids_that_others_register() -> None:
    wrapped = gym.envs.registration.WrapperSpec("Clip", "gymnasium.wrappers:ClipAction", {})
    entry = "gymnasium.envs.mujoco.hopper_v5:HopperEnv"
    gym.register("Bent-v0", entry, max_episode_steps=7, kwargs={"frame_skip": 2})
    gym.register("Wrapped-v0", entry, additional_wrappers=(wrapped,))
    try:
        assert supports("Bent-v0") == ""
        env = MujocoVecEnv("Bent-v0", 1)
        assert env.get_attr("frame_skip") == [2] and env.get_attr("_max_episode_steps") == [7]
        assert supports("Wrapped-v0") == "Wrapped-v0 is registered with wrappers of its own"
    finally:
        del gym.registry["Bent-v0"], gym.registry["Wrapped-v0"]


def test_anything_else_is_stepped_one_by_one_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match="CartPole-v1 is stepped one env after another.*not one of Gymnasium's MuJoCo"):
        env = make_vec("CartPole-v1", 2, seed=0)
    assert type(env) is DummyVecEnv
    assert np.array_equal(env.reset(), make_vec_env("CartPole-v1", 2, 0).reset())


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """xml_file: any model that Gymnasium's own class takes."""
    spec = mujoco.MjSpec.from_file(str(Path(inspect.getfile(MujocoEnv)).parent / "assets" / "hopper.xml"))
    spec.body("torso").add_site(name="lamp")
    spec.option.timestep = 0.001
    path = tmp_path / "hopper.xml"
    path.write_text(spec.to_xml())
    settings = {"xml_file": str(path), "frame_skip": 5}
    ours, theirs = make_vec("Hopper-v5", 2, 0, **settings), make_vec_env("Hopper-v5", 2, 0, env_kwargs=settings)
    ours.reset()
    theirs.reset()
    rng = np.random.default_rng(0)
    for _ in range(30):
        actions = random_actions(ours, rng)
        assert_alike(ours.step(actions), theirs.step(actions))


def test_grpo_learns_the_same_on_both_engines() -> None:
    envs = MujocoVecEnv("Hopper-v5", 4, group_size=4, seed=0), one_by_one("Hopper-v5", 4, 4, 0)
    learned = []
    for env in envs:
        model = GRPO(
            "MlpPolicy", env, group_size=4, n_steps=32, batch_size=32, seed=0, group_kind="window", fork_prob=0.5
        )
        model.learn(512)
        learned.append([parameter.detach().numpy() for parameter in model.policy.parameters()])
        assert model.groups.means == "fork"
    for mine, theirs in zip(*learned, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
