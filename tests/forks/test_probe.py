"""Envs and wrappers of unknown classes: their attributes are copied once a probe on fresh instances was bit-equal."""

from __future__ import annotations

import copy
import io
import multiprocessing
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from stable_baselines3.common.monitor import Monitor

from grpo_rl.errors import ForkError
from grpo_rl.forks import snapshot as snapshots
from grpo_rl.forks.probe import probe_fork, require_exact
from grpo_rl.forks.snapshot import ATTRIBUTES, MUJOCO, capture, fork_support, restore, transfer


@pytest.fixture(autouse=True)
def nothing_was_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_trusted", set())


class Base(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.start()
        return self.observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.move(int(action))
        obs = self.observe()
        return obs, float(obs[0]), abs(obs[0]) > 30, False, {}

    def start(self) -> None:
        self.x = float(self.np_random.normal())

    def move(self, action: int) -> None:
        self.x += action - 1 + 0.1 * float(self.np_random.normal())

    def observe(self) -> np.ndarray:
        return np.array([self.x])


class Plain(Base):
    """Numbers, lists, dicts, sets and a generator of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)
        self.seen: set[int] = set()

    def move(self, action: int) -> None:
        super().move(action)
        self.seen.add(round(self.x))
        self.x += 0.01 * len(self.seen) + float(self.own.normal())


class Ball:
    """A plain object that knows its env, and its neighbour: a cycle."""

    def __init__(self, env: Any) -> None:
        self.env, self.height, self.other = env, 0.0, self

    def fall(self) -> None:
        self.height += self.env.x


class Objects(Base):
    """Objects that refer to the env, and two names for one array."""

    def start(self) -> None:
        super().start()
        self.ball = Ball(self)
        self.history = self.view = np.zeros(3)
        self.phase = self.first

    def first(self) -> None:
        self.phase = self.second

    def second(self) -> None:
        self.x += 0.5
        self.phase = self.first

    def move(self, action: int) -> None:
        super().move(action)
        self.phase()
        self.ball.fall()
        self.history[0] += 1
        self.x += self.view[0] + 0.001 * self.ball.height


class Handles(Base):
    """A module, a lock, and a closure: handles stay with their env."""

    def __init__(self) -> None:
        self.numpy, self.lock = np, threading.Lock()
        self.scale = lambda: 2.0 if self is not None else 0.0

    def observe(self) -> np.ndarray:
        with self.lock:
            return self.numpy.array([self.scale() * self.x])


class Nested(Base):
    """Holds another env."""

    def __init__(self) -> None:
        self.inner = Plain()

    def start(self) -> None:
        super().start()
        self.inner.reset(seed=int(self.np_random.integers(1000)))

    def move(self, action: int) -> None:
        self.x += float(self.inner.step(action)[0][0])


class Sealed(Base):
    """Keeps its state in something that cannot be copied: a generator of Python's."""

    def start(self) -> None:
        super().start()
        self.course = (0.1 * step for step in range(10**6))

    def move(self, action: int) -> None:
        self.x += next(self.course)


class FarHopper(HopperEnv):
    """A subclass with state of its own, which the reward depends on."""

    def __init__(self, **kwargs: Any) -> None:
        self.far = 0.0
        super().__init__(**kwargs)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        self.far = max(self.far, float(self.data.qpos[0]))
        return obs, reward + self.far, *rest


class GlobalCartPole(CartPoleEnv):
    """State outside of the instance."""

    pushes: ClassVar[list[int]] = [0]

    def step(self, action: Any) -> Any:
        self.pushes[0] += 1
        obs, reward, *rest = super().step(action)
        return obs, reward + self.pushes[0], *rest


class Growing(gym.Wrapper):
    """A wrapper that counts, and knows the base env."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.count, self.base = 0, env.unwrapped

    def step(self, action: Any) -> Any:
        assert self.base is self.unwrapped
        self.count += 1
        obs, _, *rest = self.env.step(action)
        return obs, self.count, *rest


EXACT: dict[str, tuple[Callable[[], gym.Env], str]] = {
    "plain": (Plain, ATTRIBUTES),
    "objects": (Objects, ATTRIBUTES),
    "handles": (Handles, ATTRIBUTES),
    "nested": (Nested, ATTRIBUTES),
    "subclass of a MuJoCo env": (lambda: gym.wrappers.TimeLimit(FarHopper(), 100), MUJOCO),
    "wrapper": (lambda: Monitor(Growing(gym.make("CartPole-v1"))), ATTRIBUTES),
}


def play(env: gym.Env, seed: int, steps: int) -> list[Any]:
    rng, course = np.random.default_rng(seed), []
    env.action_space.seed(seed)
    for _ in range(steps):
        obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        course.append((np.asarray(obs).tobytes(), reward, terminated, truncated))
        if terminated or truncated:
            course.append(np.asarray(env.reset(seed=int(rng.integers(2**31)))[0]).tobytes())
    return course


@pytest.mark.parametrize("name", EXACT)
def test_an_unknown_class_is_exact_once_it_was_probed(name: str) -> None:
    build, how = EXACT[name]
    original, by_transfer, by_restore = (build() for _ in range(3))
    for seed, env in enumerate((original, by_transfer, by_restore)):
        env.reset(seed=seed)
        play(env, seed, 10 + seed)
    support = fork_support(original)
    assert (support.exact, support.probe) == (False, True)
    with pytest.raises(ForkError, match=r"unknown|may have added"):
        capture(original)
    state = capture_state(original)
    assert require_exact(original, build).how == how
    assert capture_state(original) == state  # the probe had instances of its own
    snapshot = capture(original)
    transfer(original, by_transfer)
    expected = play(original, 5, 200)
    assert play(by_transfer, 5, 200) == expected
    for _ in range(2):
        restore(by_restore, snapshot)
        assert play(by_restore, 5, 200) == expected


def capture_state(env: gym.Env) -> dict[str, Any]:
    values = vars(env.unwrapped)
    return {name: value for name, value in values.items() if isinstance(value, float | int | tuple)}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Sealed, r"observation 0 steps after a fork: .* \(not copied: course of Sealed\)"),
        (GlobalCartPole, r"reward 0 steps after .*does it draw from np\.random, random or torch, or read a clock"),
    ],
)
def test_what_attributes_do_not_hold_is_refused_with_the_first_difference(build: Any, words: str) -> None:
    with pytest.raises(ForkError, match=words):
        require_exact(build(), build)
    assert not fork_support(build()).exact
    assert fork_support(build()).probe


def test_a_class_that_passed_is_probed_again_for_another_factory() -> None:
    class Sometimes(Plain):
        def __init__(self, sealed: bool) -> None:
            super().__init__()
            self.numbers = (number for number in range(10**6)) if sealed else None

        def observe(self) -> np.ndarray:
            return super().observe() + (next(self.numbers) if self.numbers else 0.0)

    require_exact(Sometimes(False), lambda: Sometimes(False))
    with pytest.raises(ForkError, match="not copied: numbers of Sometimes"):
        require_exact(Sometimes(True), lambda: Sometimes(True))


def test_without_a_factory_the_spec_builds_and_without_a_spec_nothing_does() -> None:
    gym.register("Unknown-v0", Plain, max_episode_steps=50)
    try:
        assert require_exact(Monitor(gym.make("Unknown-v0"))).exact
    finally:
        del gym.registry["Unknown-v0"]
    with pytest.raises(ForkError, match=r"unknown env class.*pass the factory"):
        require_exact(Objects())
    with pytest.raises(ForkError, match="Growing is an unknown wrapper"):  # it does not say how it was made
        require_exact(Growing(gym.make("CartPole-v1")))


def test_an_env_inside_a_container_is_refused() -> None:
    class Hoard(Base):
        def start(self) -> None:
            super().start()
            self.envs = [Plain()]

    report = probe_fork(Hoard)
    assert not report.exact
    assert "Plain is an env kept inside another one" in report.reason


class OwnSnapshots(Plain):
    def get_snapshot(self) -> Any:
        return copy.deepcopy((self.x, self.own, self.seen, self._np_random))

    def set_snapshot(self, state: Any) -> None:
        self.x, self.own, self.seen, self._np_random = copy.deepcopy(state)


class Forgetful(OwnSnapshots):
    def set_snapshot(self, state: Any) -> None:
        super().set_snapshot((0.0, *state[1:]))


class Closing(gym.Wrapper):
    """What its function counts is in a closure."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        count = [0.0]

        def f() -> float:
            count[0] += 1
            return count[0]

        self.f = f

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, float(reward) + self.f(), *rest


def test_the_class_whose_fault_it_is_is_named() -> None:
    def build() -> gym.Env:
        return Closing(OwnSnapshots())

    with pytest.raises(ForkError, match=r"this env cannot be forked exactly: .*\(not copied: f of Closing\)"):
        require_exact(build(), build)
    with pytest.raises(ForkError, match=r"get_snapshot and set_snapshot of Forgetful do .*does get_snapshot leave"):
        require_exact(Forgetful(), Forgetful)


class Beside(gym.Wrapper):
    """Holds what a test gives it, and does nothing with it."""

    given: ClassVar[Callable[[], Any]]

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.held = type(self).given()


def test_what_goes_on_by_itself_is_refused_and_what_has_ended_is_not(tmp_path: Path) -> None:
    stop, ended = threading.Event(), threading.Thread(target=int)
    thread = threading.Thread(target=stop.wait, daemon=True)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own, peer = socket.socketpair()
    connection, other = multiprocessing.Pipe()
    written = (tmp_path / "log").open("w")
    read = Path(__file__).open()  # noqa: SIM115
    thread.start()
    ended.start()
    ended.join()

    def report(value: Any) -> str:
        Beside.given = staticmethod(lambda: value)
        return str(probe_fork(lambda: Beside(Plain()), steps=5))

    try:
        for value, words in [
            (thread, "Beside holds held, a running Thread, which"),
            ([thread], "a running Thread"),
            ({"a": types.SimpleNamespace(b=own)}, "an open socket"),
            (process, "a running Popen"),
            (connection, "an open Connection"),
            (written, "a file that is open for writing: TextIOWrapper"),
        ]:
            assert words in report(value)
        for closed in (process.stdin, own, peer, connection, other, written):
            closed.close()
        process.wait()
        for value in (ended, process, own, connection, written, read, sys.stdout, io.StringIO(), threading.Lock()):
            assert "exact forks by" in report(value), value
    finally:
        stop.set()
        process.kill()
        read.close()
