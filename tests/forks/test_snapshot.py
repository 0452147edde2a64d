"""Exact snapshots: what follows a fork is compared bit for bit, for every family that the library trusts by type."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from courses import bits, check_exact, scrambled, trace
from gymnasium import wrappers
from stable_baselines3.common.monitor import Monitor

from grpo_rl.errors import ForkError
from grpo_rl.forks import snapshot as snapshots
from grpo_rl.forks.probe import probe_fork
from grpo_rl.forks.snapshot import capture, fork_support, fresh_rng, restore, transfer

CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]
TOY = ["Taxi-v4", "FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1"]
LEGGED = ["Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "Walker2d-v5"]
MUJOCO = [
    *LEGGED,
    *(
        "HumanoidStandup-v5",
        "InvertedDoublePendulum-v5",
        "InvertedPendulum-v5",
        "Pusher-v5",
        "Reacher-v5",
        "Swimmer-v5",
    ),
]


@pytest.fixture(autouse=True)
def nothing_was_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_trusted", set())


# -------------------------------------------------------------------------------------------------- families, moments


@pytest.mark.parametrize("env_id", CLASSIC + TOY + MUJOCO)
def test_forks_are_exact_amid_an_episode(env_id: str) -> None:
    original, *others = (gym.make(env_id) for _ in range(3))
    original.reset(seed=0)
    trace(original, seed=0, steps=30)
    check_exact(original, *map(scrambled, others))


@pytest.mark.parametrize("env_id", LEGGED)
def test_forks_are_exact_with_contacts(env_id: str) -> None:
    kwargs = {} if env_id == "HalfCheetah-v5" else {"terminate_when_unhealthy": False}
    original, *others = (gym.make(env_id, **kwargs) for _ in range(3))
    original.reset(seed=0)
    trace(original, seed=0, steps=60)
    steps = 0
    while original.unwrapped.data.ncon == 0 and steps < 50:
        original.step(original.action_space.sample())
        steps += 1
    assert original.unwrapped.data.ncon > 0
    check_exact(original, *map(scrambled, others))


@pytest.mark.parametrize("env_id", CLASSIC + TOY + MUJOCO)
def test_forks_are_exact_after_an_earlier_episode(env_id: str) -> None:
    original, *others = (gym.make(env_id, max_episode_steps=30) for _ in range(3))
    original.reset(seed=0)
    while not any(original.step(original.action_space.sample())[2:4]):
        pass
    original.reset()  # not seeded: the generator goes on
    check_exact(original, *map(scrambled, others))


@pytest.mark.parametrize("env_id", CLASSIC + TOY + MUJOCO)
def test_forks_are_exact_one_step_before_truncation(env_id: str) -> None:
    limit = 1 if env_id == "Blackjack-v1" else 8
    original, *others = (gym.make(env_id, max_episode_steps=limit) for _ in range(3))
    for seed in range(100):  # an episode that lasts that long
        original.reset(seed=seed)
        if not any(any(original.step(original.action_space.sample())[2:4]) for _ in range(limit - 1)):
            break
    course = check_exact(original, *map(scrambled, others))
    truncated, terminated = course[0][3], course[0][2]
    assert bits(True) in (truncated, terminated)  # the very next step ends the episode


@pytest.mark.parametrize("env_id", CLASSIC + MUJOCO)
def test_no_state_leaks_from_a_fork_into_the_next_episode(env_id: str) -> None:
    original, forked, fresh = (gym.make(env_id) for _ in range(3))
    scrambled(original, 1)
    scrambled(forked, 2)
    transfer(original, forked)
    restore(forked, capture(original))
    assert bits(forked.reset(seed=7)[0]) == bits(fresh.reset(seed=7)[0])
    assert trace(forked, seed=3, steps=10) == trace(fresh, seed=3, steps=10)


def test_the_harness_sees_a_wrong_fork() -> None:
    """deepcopy rebuilds a MuJoCo env: another state, in silence. Positions and velocities alone miss what Ant reads."""
    hopper, ant, other = gym.make("Hopper-v5"), gym.make("Ant-v5"), gym.make("Ant-v5")
    for env in (hopper, ant):
        env.reset(seed=0)
        trace(env, seed=0, steps=25)
    wrong = copy.deepcopy(hopper)
    wrong.reset(seed=0)
    assert trace(wrong, seed=1, steps=5) != trace(hopper, seed=1, steps=5)
    scrambled(other)
    other.unwrapped.set_state(ant.unwrapped.data.qpos, ant.unwrapped.data.qvel)
    assert trace(other, seed=1, steps=1) != trace(ant, seed=1, steps=1)


# ------------------------------------------------------------------------------------------------------------ wrappers


def stack() -> gym.Env:
    env = wrappers.StickyAction(gym.make("Pendulum-v1", max_episode_steps=40), 0.25, (1, 3))
    env = wrappers.NormalizeObservation(wrappers.TimeAwareObservation(env, flatten=True))
    return wrappers.RecordEpisodeStatistics(wrappers.FrameStackObservation(wrappers.NormalizeReward(env), 3))


def test_a_stack_of_wrappers_is_forked_exactly_and_keeps_its_running_statistics() -> None:
    original, by_transfer, by_restore = stack(), stack(), stack()
    original.reset(seed=0)
    trace(original, seed=0, steps=50)  # amid the second episode
    others = scrambled(by_transfer, 5), scrambled(by_restore, 6)
    names = "obs_rms", "return_rms"
    before = [copy.deepcopy([vars(env.get_wrapper_attr(name)) for name in names]) for env in others]
    transfer(original, by_transfer)
    restore(by_restore, capture(original))
    for env in others:
        for name in ("episode_start_time", "episode_lengths"):
            assert env.get_wrapper_attr(name) == original.get_wrapper_attr(name)
    after = [[vars(env.get_wrapper_attr(name)) for name in names] for env in others]
    np.testing.assert_equal(after, before)
    assert [len(env.get_wrapper_attr("return_queue")) for env in (original, *others)] == [1, 0, 0]
    for env in others:  # with equal statistics the courses are equal, truncations and statistics of episodes included
        for name in names:
            vars(env.get_wrapper_attr(name)).update(copy.deepcopy(vars(original.get_wrapper_attr(name))))
    expected = trace(original, seed=1)
    assert [trace(env, seed=1) for env in others] == [expected] * 2
    queues = [list(env.get_wrapper_attr("return_queue")) for env in (original, *others)]
    assert len(queues[1]) == 5  # (10 + 200) // 40
    assert queues[0][1:] == queues[1] == queues[2]


WRAPPERS = {
    "delay": lambda env: wrappers.DelayObservation(env, 3),
    "max_and_skip": lambda env: wrappers.MaxAndSkipObservation(env, 4),
    "autoreset": wrappers.Autoreset,
    "repeat": lambda env: wrappers.RepeatAction(env, 2),
    "sticky": lambda env: wrappers.StickyAction(env, 0.5, (2, 4)),
    "time_aware": wrappers.TimeAwareObservation,
    "frames": lambda env: wrappers.FrameStackObservation(env, 4, padding_type="zero"),
    "flatten": wrappers.FlattenObservation,
    "transform": lambda env: wrappers.TransformObservation(env, lambda obs: 2 * obs, env.observation_space),
    "reward": lambda env: wrappers.TransformReward(env, lambda reward: reward / 2),
    "action": lambda env: wrappers.ClipAction(wrappers.RescaleAction(env, np.float32(-1), np.float32(1))),
    "monitor": Monitor,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_each_wrapper_is_forked_exactly_at_any_moment(name: str) -> None:
    original, *others = (WRAPPERS[name](gym.make("Pendulum-v1", max_episode_steps=17)) for _ in range(3))
    original.reset(seed=0)
    for step in range(20):
        trace(original, seed=step, steps=1)
        check_exact(original, *map(scrambled, others), steps=20)


def test_an_autoreset_that_is_due_is_forked() -> None:
    source, target = (wrappers.Autoreset(gym.make("Pendulum-v1", max_episode_steps=3)) for _ in range(2))
    source.reset(seed=0)
    target.reset(seed=1)
    action = np.zeros(1, np.float32)
    while not source.step(action)[3]:
        pass
    transfer(source, target)
    for _ in range(8):
        assert bits(target.step(action)[:4]) == bits(source.step(action)[:4])


def test_an_env_that_was_never_reset_can_be_the_target() -> None:
    original, fresh = gym.make("Hopper-v5"), gym.make("Hopper-v5")
    scrambled(original)
    transfer(original, fresh)
    assert trace(fresh, seed=1, steps=30) == trace(original, seed=1, steps=30)


def test_what_the_source_does_not_have_the_target_loses() -> None:
    source, target = gym.make("Pendulum-v1"), gym.make("Pendulum-v1")
    blank = capture(source)  # never reset: no state yet
    scrambled(target)
    restore(target, blank)
    assert not hasattr(target.unwrapped, "state")
    assert bits(target.reset(seed=1)[0]) == bits(source.reset(seed=1)[0])


def test_monitor_logs_only_ends_of_episodes_and_never_steps_a_finished_one(tmp_path: Any) -> None:
    def build(name: str) -> Monitor:
        return Monitor(gym.make("Pendulum-v1", max_episode_steps=10), str(tmp_path / name), reset_keywords=("options",))

    source, target = build("source"), build("target")
    source.reset(seed=0, options={"x_init": 1.0})
    target.reset(seed=0, options={"x_init": 2.0})
    action = np.zeros(1, np.float32)
    for _ in range(10):
        target.step(action)  # target's episode is over, and logged
    rewards = [source.step(action)[1] for _ in range(4)]
    transfer(source, target)  # needs_reset comes from source: no RuntimeError
    for _ in range(6):
        _, reward, _, _, info = target.step(action)
        rewards.append(reward)
    assert info["episode"]["options"] == {"x_init": 1.0}
    assert target.episode_lengths == [10, 10]  # 4 of source's steps and 6 of its own
    assert target.episode_returns[1] == pytest.approx(sum(rewards))
    assert target.get_total_steps() == 16
    assert source.rewards == rewards[:4]
    assert source.episode_lengths == []
    rows = [len((tmp_path / f"{name}.monitor.csv").read_text().splitlines()) - 2 for name in ("source", "target")]
    assert rows == [0, 2]


def test_a_fork_onto_a_finished_source_is_finished() -> None:
    source, target = (Monitor(gym.make("Pendulum-v1", max_episode_steps=1)) for _ in range(2))
    source.reset(seed=0)
    target.reset(seed=0)
    source.step(np.zeros(1, np.float32))
    transfer(source, target)
    with pytest.raises(RuntimeError, match="needs reset"):
        target.step(np.zeros(1, np.float32))


class Heavier(gym.Wrapper):
    """Randomises the dynamics at each reset, as wrappers for sim-to-real do; no attributes of its own."""

    def reset(self, **kwargs: Any) -> Any:
        out = self.env.reset(**kwargs)
        model = self.unwrapped.model
        model.body_mass[1:] *= self.np_random.uniform(0.5, 2.0, model.nbody - 1)
        model.opt.gravity[2] = -9.81 * self.np_random.uniform(0.8, 1.2)
        model.opt.viscosity = self.np_random.uniform(0.0, 0.1)
        return out


def test_a_randomised_model_travels_with_the_state() -> None:
    original, *others = (scrambled(Heavier(gym.make("Hopper-v5")), seed) for seed in range(3))
    masses = [env.unwrapped.model.body_mass.copy() for env in (original, *others)]
    assert not np.array_equal(masses[0], masses[1])
    check_exact(original, *others)
    transfer(original, others[0])
    np.testing.assert_array_equal(others[0].unwrapped.model.body_mass, original.unwrapped.model.body_mass)
    assert others[0].unwrapped.model.opt.viscosity == original.unwrapped.model.opt.viscosity


# -------------------------------------------------------------------------------------------- independence, generators


def test_siblings_share_nothing_that_can_change() -> None:
    source, target = gym.make("Blackjack-v1"), gym.make("Blackjack-v1")
    source.reset(seed=0)
    target.reset(seed=1)
    transfer(source, target)
    hand = list(source.unwrapped.player)
    target.unwrapped.player.append(10)
    target.np_random.random(5)
    assert source.unwrapped.player == hand
    assert source.np_random is not target.np_random
    assert source.np_random.bit_generator.state != target.np_random.bit_generator.state


def test_spaces_draw_alike_after_a_fork_and_apart_after_fresh_rng() -> None:
    source, target = gym.make("Pendulum-v1"), gym.make("Pendulum-v1")
    for seed, env in enumerate((source, target)):
        env.reset(seed=seed)
        env.action_space.seed(seed)
    transfer(source, target)
    assert [source.action_space.sample() for _ in range(3)] == [target.action_space.sample() for _ in range(3)]
    state = source.unwrapped.state.copy()
    fresh_rng(target, 3)
    np.testing.assert_array_equal(target.unwrapped.state, state)  # no reset
    assert source.action_space.sample() != target.action_space.sample()
    assert not np.array_equal(source.reset()[0], target.reset()[0])
    fresh_rng(source, 3)
    fresh_rng(target, 3)
    assert source.action_space.sample() == target.action_space.sample()
    np.testing.assert_array_equal(source.reset()[0], target.reset()[0])


class Drawing(gym.Env):
    """Draws its observations from its own composite space, as SB3's IdentityEnv draws from its action space."""

    def __init__(self) -> None:
        parts = gym.spaces.Tuple([gym.spaces.Discrete(1000), gym.spaces.Box(0.0, 1.0, (2,))])
        self.observation_space = gym.spaces.Dict({"parts": parts, "plain": gym.spaces.MultiBinary(40)})
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: int) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {}

    def get_snapshot(self) -> None:
        return None

    def set_snapshot(self, state: None) -> None:
        pass


def test_generators_of_the_parts_of_a_space_are_copied() -> None:
    check_exact(*(scrambled(Drawing(), seed) for seed in range(3)))


def test_a_shared_generator_is_parted() -> None:
    source, target = gym.make("Pendulum-v1"), gym.make("Pendulum-v1")
    source.unwrapped.np_random = target.unwrapped.np_random = np.random.default_rng(0)
    source.reset()
    target.reset()
    transfer(source, target)
    assert source.np_random is not target.np_random
    assert source.np_random.random() == target.np_random.random()


def test_the_transition_table_is_shared_and_a_random_map_travels() -> None:
    source, target = (gym.make("FrozenLake-v1", desc=None) for _ in range(2))
    scrambled(source)
    target.reset(seed=0)
    transfer(source, target)
    assert target.unwrapped.P is source.unwrapped.P
    assert trace(target, seed=1) == trace(source, seed=1)


def test_windows_are_not_copied() -> None:
    pytest.importorskip("pygame")
    source, target = (gym.make("CartPole-v1", render_mode="rgb_array") for _ in range(2))
    source.reset(seed=0)
    target.reset(seed=0)
    source.render()
    assert source.unwrapped.screen is not None
    transfer(source, target)
    assert target.unwrapped.screen is None
    restore(target, capture(source))
    assert target.unwrapped.screen is None


@pytest.mark.parametrize("env_id", ["Hopper-v5", "CartPole-v1"])
def test_a_snapshot_can_be_pickled(env_id: str) -> None:
    original, target = gym.make(env_id), gym.make(env_id)
    scrambled(original)
    target.reset(seed=0)
    restore(target, pickle.loads(pickle.dumps(capture(original))))
    assert trace(target, seed=1, steps=50) == trace(original, seed=1, steps=50)


# ------------------------------------------------------------------------------------------------- by type, or refused


class Walk(gym.Env):
    """A random walk to ±20 that keeps its path in a list; without snapshots."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.path = [0.0]
        return np.array(self.path[-1:], np.float32), {}

    def step(self, action: int) -> Any:
        self.path.append(self.path[-1] + 2 * action - 1 + 0.1 * self.np_random.normal())
        return np.array(self.path[-1:], np.float32), self.path[-1], abs(self.path[-1]) > 20, False, {}


class SnapshotWalk(Walk):
    """Gives its live list away: the library makes the copies."""

    def get_snapshot(self) -> Any:
        return self.path

    def set_snapshot(self, state: Any) -> None:
        self.path = state


class ForgetfulWalk(Walk):
    def get_snapshot(self) -> Any:
        return None

    def set_snapshot(self, state: Any) -> None:
        pass


class HalfWalk(Walk):
    def get_snapshot(self) -> Any:
        return self.path


class Plain(gym.Wrapper):
    pass


class Counting(gym.Wrapper):
    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.count = 0


class SnapshotCounting(Counting):
    def step(self, action: Any) -> Any:
        self.count += 1
        obs, _, *rest = self.env.step(action)
        return obs, self.count, *rest

    def get_snapshot(self) -> int:
        return self.count

    def set_snapshot(self, state: int) -> None:
        self.count = state


def make_cart_pole_subclass() -> gym.Env:
    class MyCartPole(type(gym.make("CartPole-v1").unwrapped)):  # type: ignore[misc]
        pass

    return MyCartPole()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Walk, "Walk .* unknown env class: give it get_snapshot"),
        (HalfWalk, "HalfWalk has one of get_snapshot"),
        (make_cart_pole_subclass, "MyCartPole may have added state of its own to CartPoleEnv"),
        (lambda: Counting(gym.make("CartPole-v1")), r"Counting is an unknown wrapper class with attributes \(count\)"),
    ],
)
def test_what_is_not_known_is_refused_with_the_reason(build: Any, words: str) -> None:
    support = fork_support(build())
    assert not support.exact
    assert support.how == ""
    with pytest.raises(ForkError, match=words) as caught:
        capture(build())
    assert caught.value.reason == support.reason


def test_an_env_with_snapshots_of_its_own_is_forked_exactly() -> None:
    assert fork_support(SnapshotWalk()).how == "get_snapshot"
    check_exact(*(scrambled(wrappers.TimeLimit(SnapshotWalk(), 30), seed) for seed in range(3)))


def test_a_wrapper_with_snapshots_of_its_own_and_one_without_attributes_are_forked_exactly() -> None:
    check_exact(*(scrambled(SnapshotCounting(Plain(gym.make("CartPole-v1"))), seed) for seed in range(3)))


def test_a_wrapper_that_grows_an_attribute_later_is_refused_then() -> None:
    env = Plain(gym.make("CartPole-v1"))
    env.reset(seed=0)
    assert fork_support(env).exact
    env.seen = 1
    with pytest.raises(ForkError, match=r"Plain .* attributes \(seen\)"):
        capture(env)


def test_support_is_decided_without_touching_the_env() -> None:
    class Untouchable(SnapshotWalk):
        def _fail(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("touched")

        step = reset = get_snapshot = set_snapshot = _fail

    assert fork_support(Untouchable()).exact


@pytest.mark.parametrize("env_id", CLASSIC + TOY + MUJOCO)
def test_the_known_families_are_supported(env_id: str) -> None:
    support = fork_support(gym.make(env_id))
    assert support.exact
    assert support.how == ("mjData and attributes" if env_id in MUJOCO else "attributes")


def test_chains_must_be_alike() -> None:
    plain, limited = gym.make("CliffWalking-v1"), gym.make("CliffWalking-v1", max_episode_steps=5)
    message = "got the state of OrderEnforcing<PassiveEnvChecker<CliffWalkingEnv>> for TimeLimit<OrderEnforcing<"
    with pytest.raises(ForkError, match=message):
        transfer(plain, limited)
    with pytest.raises(ForkError, match=message):
        restore(limited, capture(plain))
    models = [gym.make("InvertedPendulum-v5"), gym.make("InvertedPendulum-v5", xml_file="reacher.xml")]
    with pytest.raises(ForkError, match="of one MuJoCo model"):
        transfer(*models)


# --------------------------------------------------------------------------------------------------------------- probe


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v5"])
def test_probe_of_an_id(env_id: str) -> None:
    report = probe_fork(env_id, steps=60)
    assert report.exact
    assert report.steps == 60
    assert str(report).startswith(f"{env_id}: exact forks by ")
    assert str(report).endswith(" µs per fork")


def test_probe_never_touches_the_users_own_env() -> None:
    env = Monitor(gym.make("CartPole-v1"))
    env.reset(seed=0)
    state = env.unwrapped.state.copy()
    assert probe_fork(env, steps=30).exact
    np.testing.assert_array_equal(env.unwrapped.state, state)
    assert env.get_total_steps() == 0


def test_probe_says_what_it_cannot_do() -> None:
    assert "no spec" in str(probe_fork(SnapshotWalk()))
    assert "unknown env class" in str(probe_fork(Walk()))
    assert "pass its factory instead" in str(probe_fork(Walk()))


def test_probe_finds_a_wrong_snapshot() -> None:
    assert probe_fork(SnapshotWalk).exact
    report = probe_fork(ForgetfulWalk)
    assert not report.exact
    assert "observation 0 steps after a fork" in str(report)


# -------------------------------------------------------------------------------------------------------- lasting state


def statistics(env: gym.Env) -> dict[str, Any]:
    return {
        "obs": vars(env.get_wrapper_attr("obs_rms")),
        "return": vars(env.get_wrapper_attr("return_rms")),
        "lengths": list(env.get_wrapper_attr("length_queue")),
        "returns": list(env.get_wrapper_attr("return_queue")),
        "count": env.get_wrapper_attr("episode_count"),
        "monitor": [env.get_episode_rewards(), env.get_episode_lengths(), env.get_total_steps()],
    }


def test_a_lasting_snapshot_takes_what_a_fork_leaves() -> None:
    source, target = Monitor(stack()), Monitor(stack())
    source.reset(seed=0)
    trace(source, seed=0, steps=50)
    scrambled(target)
    before = copy.deepcopy(statistics(target))
    restore(target, capture(source))
    np.testing.assert_equal(statistics(target), before)
    snapshot, expected = capture(source, lasting=True), copy.deepcopy(statistics(source))
    course = trace(source, seed=1)
    restore(target, snapshot)
    np.testing.assert_equal(statistics(target), expected)
    assert trace(target, seed=1) == course  # normalised observations and rewards included
