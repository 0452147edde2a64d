"""GroupVecEnv: forks by any map, frozen columns, seeds after forks, and SB3's semantics elsewhere."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.forks.snapshot import capture
from grpo_rl.groups.make import make_group_env
from grpo_rl.groups.mujoco import MujocoVecEnv
from grpo_rl.groups.vec_env import GroupVecEnv


def pendulums(n_groups: int = 1, group_size: int = 4, limit: int = 1000, seed: int = 0) -> GroupVecEnv:
    """Pendulums in different states."""
    env = make_group_env("Pendulum-v1", n_groups, group_size, seed=seed, max_episode_steps=limit)
    env.reset()
    for _ in range(5):
        env.step(np.linspace(-2, 2, env.num_envs, dtype=np.float32)[:, None])
    return env


def states(env: GroupVecEnv) -> np.ndarray:
    """(N, 2): angle and velocity of each pendulum."""
    return np.stack([column.unwrapped.state for column in env.envs])


# ---------------------------------------------------------------------------------------------------------------- fork


@pytest.mark.parametrize(
    "sources",
    [
        [0, 1, 2, 3, 4, 5],  # nothing
        [0, 0, 0, 0, 0, 0],  # one to all
        [5, 5, 5, 5, 5, 5],
        [1, 0, 3, 2, 5, 4],  # swaps
        [1, 2, 3, 4, 5, 0],  # one cycle
        [1, 2, 0, 4, 5, 3],  # two cycles
        [1, 2, 0, 0, 3, 4],  # a cycle with a tail: 5 from 4 from 3 from 0
        [3, 3, 1, 0, 2, 5],
    ],
)
def test_fork_gives_each_column_the_state_of_its_source(sources: list[int]) -> None:
    env = pendulums(2, 3)
    before, obs_before = states(env), env._obs_from_buf()
    obs = env.fork(sources)
    np.testing.assert_array_equal(states(env), before[sources])
    np.testing.assert_array_equal(obs, obs_before[sources])
    np.testing.assert_array_equal(env.buf_obs[None], obs)
    lengths = [column.get_wrapper_attr("_elapsed_steps") for column in env.envs]
    assert lengths == [5] * 6


def test_any_map_is_right() -> None:
    env, rng = pendulums(1, 6), np.random.default_rng(0)
    for _ in range(50):
        sources = rng.integers(6, size=6)
        before = states(env)
        env.fork(sources)
        np.testing.assert_array_equal(states(env), before[sources])
        env.step(rng.uniform(-2, 2, (6, 1)).astype(np.float32))


def test_siblings_go_on_alike_and_then_apart() -> None:
    env = make_group_env("Hopper-v5", 1, 4, seed=0)
    env.reset()
    rng = np.random.default_rng(0)
    for _ in range(10):
        env.step(rng.uniform(-0.1, 0.1, (4, 3)))
    obs = env.fork([2] * 4)
    for _ in range(5):
        np.testing.assert_array_equal(obs, obs[[2] * 4])
        obs, rewards, _, _ = env.step(np.tile(rng.uniform(-0.1, 0.1, (1, 3)), (4, 1)))
        np.testing.assert_array_equal(rewards, rewards[[2] * 4])
    snapshot, qpos = env.snapshot(0), env.get_attr("data")[0].qpos.copy()
    env.step(np.arange(12).reshape(4, 3) / 12)
    obs, *_ = env.step(np.zeros((4, 3)))
    assert len(np.unique(obs, axis=0)) == 4
    assert not np.array_equal(env.get_attr("data")[0].qpos, qpos)
    env.restore(0, snapshot)  # which stayed as it was
    np.testing.assert_array_equal(env.get_attr("data")[0].qpos, qpos)


def test_fork_returns_no_view_and_keeps_reset_infos() -> None:
    env = pendulums()
    env.reset_infos = [{"start": i} for i in range(4)]
    obs = env.fork([3, 1, 2, 3])
    obs[:] = 0
    assert env.buf_obs[None].any()
    assert env.reset_infos == [{"start": 3}, {"start": 1}, {"start": 2}, {"start": 3}]
    env.reset_infos[0]["start"] = 9
    assert env.reset_infos[3] == {"start": 3}


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([0, 1], r"expected \(4,\) integers, got int64 of shape \(2,\)"),
        ([[0, 1, 2, 3]], r"shape \(1, 4\)"),
        ([0.0, 1.0, 2.0, 3.0], "got float64"),
        ([True, True, True, True], "got bool"),
        ([0, 1, 2, 4], r"expected 0 … 3, got 0 … 4"),
        ([-1, 1, 2, 3], r"got -1 … 3"),
    ],
)
def test_bad_sources(sources: Any, words: str) -> None:
    env = pendulums()
    before = states(env)
    with pytest.raises(ConfigError, match=words):
        env.fork(sources)
    np.testing.assert_array_equal(states(env), before)


def test_fork_past_the_end_of_an_episode() -> None:
    """Column 0 is reset by itself at its time limit; forks across that never step a finished Monitor."""
    env = pendulums(limit=7)
    action = np.zeros((4, 1), np.float32)
    for i in range(20):
        env.fork(np.roll(np.arange(4), i))
        *_, infos = env.step(action)
        assert all(("episode" in info) == info["TimeLimit.truncated"] for info in infos)
    assert all(length == 7 for column in env.envs for length in column.get_wrapper_attr("episode_lengths"))


def test_dict_observations_and_discrete_ones() -> None:
    def build() -> gym.Env:
        return wrappers.TimeAwareObservation(gym.make("CartPole-v1"), flatten=False)

    env = make_group_env(build, 1, 2, seed=0)
    env.reset()
    env.step(np.array([0, 1]))
    obs = env.fork([1, 1])
    assert set(obs) == {"obs", "time"}
    np.testing.assert_array_equal(obs["obs"][0], obs["obs"][1])
    row = env.restore(0, env.snapshot(1))
    np.testing.assert_array_equal(row["obs"], obs["obs"][1])
    taxi = make_group_env("Taxi-v4", 1, 3, seed=0)
    obs = taxi.reset()
    np.testing.assert_array_equal(taxi.fork([2, 2, 2]), obs[[2, 2, 2]])


# ------------------------------------------------------------------------------------------- snapshot, restore, resets


def test_snapshot_and_restore() -> None:
    env = pendulums()
    snapshot, obs, state = env.snapshot(1), env.buf_obs[None][1].copy(), states(env)[1]
    env.step(np.ones((4, 1), np.float32))
    for column in (0, 1, 1):
        np.testing.assert_array_equal(env.restore(column, snapshot), obs)
        np.testing.assert_array_equal(states(env)[column], state)
        np.testing.assert_array_equal(env.buf_obs[None][column], obs)
        env.step(np.ones((4, 1), np.float32))
    with pytest.raises(ForkError, match=r"take it with GroupVecEnv\.snapshot"):
        env.restore(0, capture(env.envs[0]))


def starts(seed: int, sources: list[int]) -> np.ndarray:
    """(2, N, 3): the observations after the next two ends of episodes, three steps after a fork."""
    env = pendulums(limit=8, seed=seed)
    env.fork(sources)
    found = []
    for step in range(3 + 8):
        obs, _, dones, _ = env.step(np.zeros((len(sources), 1), np.float32))
        assert dones.all() == (step in (2, 10))
        if dones.all():
            found.append(obs)
    return np.stack(found)


def test_siblings_start_apart_after_a_fork_and_again_under_the_same_seed() -> None:
    found = starts(0, [1, 1, 1, 3])
    assert len(np.unique(found.reshape(8, 3), axis=0)) == 8
    np.testing.assert_array_equal(found, starts(0, [1, 1, 1, 3]))
    unforked = starts(0, [0, 1, 2, 3])
    np.testing.assert_array_equal(found[:, 3], unforked[:, 3])  # took no part in the fork: keeps its stream
    assert not (found[:, :3] == unforked[:, :3]).all(axis=-1).any()
    assert not (found == starts(1, [1, 1, 1, 3])).all(axis=-1).any()


def test_an_explicit_reset_after_a_fork() -> None:
    env = pendulums()
    env.fork([0, 0, 0, 0])
    assert len(np.unique(env.reset(), axis=0)) == 4
    env.fork([0, 0, 0, 0])
    env.seed(7)  # an explicit seed wins
    np.testing.assert_array_equal(env.reset(), make_group_env("Pendulum-v1", 1, 4, seed=7).reset())


def test_spaces_draw_alike_after_a_fork_and_apart_after_the_next_reset() -> None:
    def draws() -> int:
        return len({float(column.action_space.sample()[0]) for column in env.envs})

    env = pendulums(limit=8)
    env.fork([0, 0, 0, 0])
    assert draws() == 1
    for _ in range(3):
        _, _, dones, _ = env.step(np.zeros((4, 1), np.float32))
    assert dones.all()
    assert draws() == 4


def test_a_reset_after_a_fork_gets_a_seed_where_it_wants_one() -> None:
    """ALE does not: it would load its ROM again, and `fresh_rng` has renewed all that it draws from."""
    pytest.importorskip("ale_py")

    def seeds(env_id: str) -> list[int | None]:
        given: list[int | None] = []

        class Listening(gym.Wrapper):
            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                given.append(seed)
                return super().reset(seed=seed)

        env = make_group_env(lambda: Listening(gym.make(env_id)), 1, 2, seed=0)
        env.reset()
        env.fork([1, 1])
        env.reset()
        env.close()
        return given[-4:]

    first, second, *after = seeds("CartPole-v1")
    assert [first, second] == [0, 1]
    assert None not in after
    assert len(set(after)) == 2
    assert seeds("ALE/Breakout-v5") == [0, 1, None, None]


def test_restored_columns_start_apart() -> None:
    env = pendulums(limit=8)
    snapshot = env.snapshot(0)
    for column in range(4):
        env.restore(column, snapshot)
    for _ in range(3):
        obs, _, dones, _ = env.step(np.zeros((4, 1), np.float32))
    assert dones.all()
    assert len(np.unique(obs, axis=0)) == 4


def test_reset_group_gives_all_members_one_start_and_leaves_the_others() -> None:
    env = pendulums(2, 3)
    env.frozen[:] = True
    before = states(env)
    obs = env.reset_group(1)
    np.testing.assert_array_equal(obs[3:], obs[[3, 3, 3]])
    np.testing.assert_array_equal(states(env)[:3], before[:3])
    assert env.frozen.tolist() == [True] * 3 + [False] * 3
    assert [column.get_wrapper_attr("_elapsed_steps") for column in env.envs] == [5, 5, 5, 0, 0, 0]
    again = env.reset_group(1)
    assert not np.array_equal(again[3], obs[3])
    np.testing.assert_array_equal(pendulums(2, 3).reset_group(1), obs)  # reproducible under the seed
    unused = [make_group_env("Pendulum-v1", 1, 2, seed=5).reset_group(0) for _ in range(2)]
    np.testing.assert_array_equal(*unused)  # also as the very first reset
    with pytest.raises(ConfigError, match=r"group: expected 0 … 1, got 2"):
        env.reset_group(2)


def test_groups_have_streams_of_their_own() -> None:
    """Fresh starts of group 1 do not depend on what group 0 does: groups may live in any process."""
    found = []
    for rounds in (0, 3):
        env = pendulums(2, 3)
        for _ in range(rounds):
            env.reset_group(0)
        found.append(np.stack([env.reset_group(1)[3] for _ in range(2)]))
    np.testing.assert_array_equal(*found)
    starts = [
        env.reset_group(group)[3 * group] for env in (pendulums(2, 3), pendulums(2, 3, seed=1)) for group in (0, 1)
    ]
    assert len(np.unique(starts, axis=0)) == 4


def test_a_state_continues_bit_for_bit() -> None:
    """In an env of another seed and past: the next steps, ends of episodes, starts after forks, logs and counts."""

    def future(env: GroupVecEnv) -> list[Any]:
        found: list[Any] = [env.reset_infos, env.frozen.tolist()]
        for step in range(20):
            obs, rewards, dones, infos = env.step(np.full((4, 1), 0.1 * step, np.float32))
            found += [obs, rewards, dones, [info["episode"]["l"] for info in infos if "episode" in info]]
        totals = env.env_method("get_total_steps")
        return [
            *found,
            totals,
            env.get_attr("episode_lengths"),
            env.get_attr("episode_returns"),
            env.reset(),
            env.reset(),
        ]

    env, other = pendulums(2, 2, limit=8), pendulums(2, 2, limit=8, seed=5)
    for step in range(9):
        env.step(np.full((4, 1), 0.2 * step, np.float32))
    env.fork([1, 1, 0, 3])
    env.frozen[2] = True
    env.reset_infos[1] = {"start": 1}
    env.seed(3)  # for a reset that has not come yet
    state = env.state()
    expected = future(env)
    for _ in range(2):  # a state is not used up
        other.set_state(state)
        np.testing.assert_equal(future(other), expected)
    with pytest.raises(ConfigError, match=r"expected the state of 4 envs in 1 groups, got that of 4 envs in 2 groups"):
        pendulums().set_state(state)


# -------------------------------------------------------------------------------------------------------------- frozen


def test_frozen_columns_are_not_stepped() -> None:
    env = pendulums()
    env.frozen[[1, 3]] = True
    before, obs_before = states(env), env.buf_obs[None].copy()
    steps = [column.get_wrapper_attr("total_steps") for column in env.envs]
    actions = np.full((4, 1), np.nan, np.float32)
    actions[[0, 2]] = 1.0
    obs, rewards, dones, infos = env.step(actions)
    np.testing.assert_array_equal(obs[[1, 3]], obs_before[[1, 3]])
    np.testing.assert_array_equal(states(env)[[1, 3]], before[[1, 3]])
    assert rewards[[1, 3]].tolist() == [0, 0]
    assert rewards[[0, 2]].all()
    assert not dones.any()
    assert [infos[1], infos[3]] == [{}, {}]
    counts = [column.get_wrapper_attr("total_steps") for column in env.envs]
    assert [after - start for after, start in zip(counts, steps, strict=True)] == [1, 0, 1, 0]
    env.reset()
    assert not env.frozen.any()


# ------------------------------------------------------------------------------------------------------ SB3's semantics


def test_unforked_it_is_a_dummy_vec_env() -> None:
    """Same observations, rewards, dones, infos and reset infos as SB3's, over ends of episodes."""
    ours = make_group_env("CartPole-v1", 2, 2, seed=3)
    theirs = make_vec_env("CartPole-v1", 4, seed=3)
    assert isinstance(ours, DummyVecEnv)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(100):
        actions = rng.integers(2, size=4)
        (obs, rewards, dones, infos), expected = ours.step(actions), theirs.step(actions)
        for a, b in zip((obs, rewards, dones), expected, strict=False):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        for info, other in zip(infos, expected[3], strict=True):
            assert info.keys() == other.keys()
            assert info["TimeLimit.truncated"] == other["TimeLimit.truncated"]
            if "episode" in info:
                ends += 1
                assert info["episode"]["r"] == other["episode"]["r"]
                np.testing.assert_array_equal(info["terminal_observation"], other["terminal_observation"])
    assert ends > 5
    assert ours.action_space.sample() == theirs.action_space.sample()
    assert ours.render_mode == theirs.render_mode == "rgb_array"


def test_results_are_no_views() -> None:
    env = pendulums()
    action = np.zeros((4, 1), np.float32)
    first = env.step(action)
    kept = copy.deepcopy(first)
    env.step(action)
    for a, b in zip(first[:3], kept[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    assert first[3] == kept[3]


class Reusing(gym.Env):
    """Returns one info dict and one observation array for ever."""

    observation_space = gym.spaces.Box(0, 9, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.obs, self.info = np.zeros(1, np.float32), {"kept": True}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.obs[:] = 0
        return self.obs, self.info

    def step(self, action: int) -> Any:
        self.obs += 1
        return self.obs, 0.0, bool(self.obs[0] == 2), False, self.info

    def get_snapshot(self) -> np.ndarray:
        return self.obs

    def set_snapshot(self, state: np.ndarray) -> None:
        self.obs = state


def test_an_env_that_reuses_its_objects_is_no_trouble() -> None:
    env = make_group_env(Reusing, 1, 2, monitor=False)
    env.reset()
    _, _, _, first = env.step(np.zeros(2, int))
    obs, _, dones, second = env.step(np.zeros(2, int))
    assert dones.all()
    assert obs.tolist() == [[0], [0]]
    assert second[0]["terminal_observation"].tolist() == [2]
    assert first[0] == {"kept": True, "TimeLimit.truncated": False}


def test_termination_at_the_limit_is_no_truncation() -> None:
    env = make_group_env(lambda: wrappers.TimeLimit(Reusing(), 2), 1, 2)
    env.reset()
    env.step(np.zeros(2, int))
    *_, dones, infos = env.step(np.zeros(2, int))
    assert dones.all()
    assert not infos[0]["TimeLimit.truncated"]


def test_env_methods_and_attributes() -> None:
    env = pendulums()
    assert env.get_attr("g") == [10.0] * 4
    assert env.env_is_wrapped(Monitor) == [True] * 4
    assert env.has_attr("max_speed")
    assert env.env_method("get_total_steps") == [5] * 4
    env.set_options({"x_init": 0.0, "y_init": 0.0})
    np.testing.assert_array_equal(env.reset(), [[1, 0, 0]] * 4)


# -------------------------------------------------------------------------------------------------------- construction


def test_groups_are_side_by_side() -> None:
    env = make_group_env("CartPole-v1", n_groups=2, group_size=3)
    assert (env.num_envs, env.n_groups, env.group_size) == (6, 2, 3)
    assert env.group_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert env.group_of.dtype == np.int64


def test_ids_classes_factories_and_wrappers() -> None:
    assert make_group_env(Reusing, 1, 2).env_is_wrapped(Monitor) == [True, True]
    assert make_group_env(lambda: Monitor(Reusing()), 1, 1).envs[0].env.unwrapped is not None
    assert type(make_group_env(lambda: Monitor(Reusing()), 1, 1).envs[0].env) is Reusing  # not twice
    assert type(make_group_env(Reusing, 1, 1, monitor=False).envs[0]) is Reusing
    env = make_group_env("Hopper-v5", 1, 2, wrapper=wrappers.ClipAction, terminate_when_unhealthy=False)
    assert isinstance(env.envs[0], wrappers.ClipAction)
    assert not env.get_attr("_terminate_when_unhealthy")[0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: make_group_env("Hoper-v5"), ConfigError, 'knows no "Hoper-v5": nearest: Hopper-v5'),
        (lambda: make_group_env("qqqqqqqq"), ConfigError, 'knows no "qqqqqqqq".*module:id'),
        (
            lambda: make_group_env("CartPole-v1", n_groups=0),
            ConfigError,
            "n_groups=0: expected a whole number, 1 or",
        ),
        (
            lambda: make_group_env("CartPole-v1", group_size=-1),
            ConfigError,
            "group_size=-1: expected a whole number",
        ),
        (lambda: make_group_env("CartPole-v1", "2"), ConfigError, "n_groups='2': expected a whole number, 1 or more"),
        (lambda: make_group_env("CartPole-v1", seed="x"), ConfigError, "seed='x': expected a whole number, 0 or more"),
        (
            lambda: make_group_env("CartPole-v1", wrapper="TimeLimit"),
            ConfigError,
            "wrapper='TimeLimit': expected a w",
        ),
        (lambda: make_group_env(5), ConfigError, "expected an id, a class or a factory, got 5"),
        (lambda: make_group_env(lambda: None), ConfigError, "expected that it makes a gymnasium.Env, got None"),
        (lambda: make_group_env(gym.make("CartPole-v1")), ConfigError, "needs an env of its own"),
        (lambda: GroupVecEnv([Reusing] * 7, 4), ConfigError, "got 7: use 4 or 8 envs, or a group_size of 1, 7"),
        (lambda: GroupVecEnv([Reusing] * 3, 4), ConfigError, "got 3: use 4 envs, or a group_size of 1, 3"),
        (lambda: GroupVecEnv([], 4), ConfigError, "at least one env"),
        (
            lambda: GroupVecEnv([Reusing, lambda: Monitor(Reusing())], 2),
            ForkError,
            "built alike, got the state of Reusing",
        ),
    ],
)
def test_errors_say_what_to_do(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("build", [lambda: make_group_env("CartPole-v1", 1, 4), lambda: MujocoVecEnv("Hopper-v5", 4)])
def test_there_is_no_state_before_the_first_reset(build: Any) -> None:
    env = build()
    for use in (lambda: env.fork([0, 0, 0, 0]), lambda: env.snapshot(0)):
        with pytest.raises(ConfigError, match=r"before the first reset\(\): .*call reset\(\) first"):
            use()
    env.reset()
    env.fork([0, 0, 0, 0])
    with pytest.raises(ConfigError, match="column: expected 0 … 3, got 'x'"):
        env.snapshot("x")
    with pytest.raises(ForkError, match="expected a snapshot"):
        env.restore(0, None)


@pytest.mark.parametrize("build", [lambda: make_group_env("CartPole-v1", 1, 4), lambda: MujocoVecEnv("Hopper-v5", 4)])
def test_frozen_takes_a_list_of_booleans_and_nothing_else(build: Any) -> None:
    env = build()
    env.reset()
    env.frozen = [True, False, False, True]
    actions = np.zeros((4, *env.action_space.shape), env.action_space.dtype)
    assert [info == {} for info in env.step(actions)[3]] == [True, False, False, True]
    for wrong in ([0], [0, 1, 0, 1], [True], 5, "x"):
        with pytest.raises(ConfigError, match=r"frozen: expected \(4,\) booleans, one for each column, got"):
            env.frozen = wrong
    assert env.frozen.tolist() == [True, False, False, True]
    env.reset()
    assert not env.frozen.any()


class Watched(gym.Env):
    """An unknown env, found exact by a probe unless its resets ignore the seed. Counts what happens to instances."""

    observation_space = gym.spaces.Box(-9, 9, (1,))
    action_space = gym.spaces.Discrete(2)
    seeded = True
    made: ClassVar[list[Watched]] = []

    def __init__(self) -> None:
        self.calls = 0
        self.made.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.calls += 1
        generator = self.np_random if self.seeded else np.random.default_rng()
        self.x, self.t = generator.normal(), 0
        return np.array([self.x], np.float32), {}

    def step(self, action: int) -> Any:
        self.calls += 1
        self.x, self.t = 0.9 * self.x + action, self.t + 1
        return np.array([self.x], np.float32), self.x, self.t >= 5, False, {}


class Unseeded(Watched):
    seeded = False


def test_an_unknown_env_is_probed_on_instances_of_its_own() -> None:
    Watched.made.clear()
    env = make_group_env(Watched, 2, 2)
    assert [column.unwrapped.calls for column in env.envs] == [0] * 4
    assert sum(one.calls > 200 for one in Watched.made) == 2
    start = env.reset()
    np.testing.assert_array_equal(env.fork([2, 2, 2, 2]), start[[2, 2, 2, 2]])


def test_an_env_that_cannot_be_forked_is_refused_at_construction() -> None:
    with pytest.raises(ForkError, match=r"cannot be forked exactly: ") as caught:
        make_group_env(Unseeded, 1, 2)
    assert caught.value.reason
