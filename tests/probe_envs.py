"""Probe environments: each has one known answer, so that a test which fails says what is broken."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def box(*shape: int, low: float = -np.inf, high: float = np.inf) -> spaces.Box:
    return spaces.Box(low, high, shape, np.float32)


class Probe(gym.Env):
    """The state is `vars(self)` without spaces: `get_snapshot` copies it, so the library forks every probe exactly."""

    observation_space: spaces.Space = box(1)
    action_space: spaces.Space = spaces.Discrete(2)
    t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self) -> Any:
        return np.zeros(self.observation_space.shape, np.float32)

    def get_snapshot(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_np_random", "spec")}

    def set_snapshot(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Bandit(Probe):
    """One step; arm 1 pays 1, arm 0 nothing."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observe(), float(action == 1), True, False, {}


class Delayed(Probe):
    """Two steps; only the first action matters, and it is paid after the second, which is free. Obs: the step."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.first = 0
        return super().reset(**kwargs)

    def observe(self) -> Any:
        return np.array([float(self.t)], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.first = int(action) if self.t == 0 else self.first
        self.t += 1
        return self.observe(), float(self.first) if self.t == 2 else 0.0, self.t == 2, False, {}


class Mirror(Probe):
    """One step; the observation is +1 or -1, and the action has to agree with it."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        gym.Env.reset(self, **kwargs)
        self.side = int(self.np_random.integers(2))
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([2.0 * self.side - 1], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observe(), float(action == self.side), True, False, {}


class Counter(Probe):
    """Observation [episode, t], reward 100·episode + t; action 0 goes on, 1 terminates, 2 truncates.

    `episode` counts resets, so that the course of several segments is known exactly. `steps` counts all calls of step.
    """

    observation_space = box(2)
    action_space = spaces.Discrete(3)
    episode = -1
    steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.episode += 1
        return super().reset(**kwargs)

    def observe(self) -> Any:
        return np.array([self.episode, self.t], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        type(self).steps += 1
        reward = 100.0 * self.episode + self.t
        self.t += 1
        return self.observe(), reward, int(action) == 1, int(action) == 2, {}


class Walk(Probe):
    """A random walk on a line with a noisy start: obs [x], reward 1 - x², ends at |x| > 3 or after `length` steps.

    `truncates` makes the length a time limit. Continuous action in [-1, 1], never out of bounds (asserted).
    """

    action_space = box(1, low=-1, high=1)

    def __init__(self, length: int = 10, truncates: bool = False) -> None:
        self.length, self.truncates, self.x = length, truncates, 0.0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        gym.Env.reset(self, **kwargs)
        self.t, self.x = 0, float(self.np_random.normal())
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([self.x], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(np.asarray(action, np.float32)), action
        self.t += 1
        self.x += 0.3 * float(action[0]) + 0.1 * float(self.np_random.normal())
        out, late = abs(self.x) > 3, self.t >= self.length
        return self.observe(), 1 - self.x**2, out or (late and not self.truncates), late and self.truncates, {}


class Constant(Probe):
    """Reward 1 at each of `length` steps, then the end: terminated, or truncated if `truncates`, or both."""

    def __init__(self, length: int = 8, terminates: bool = True, truncates: bool = False) -> None:
        self.length, self.terminates, self.truncates = length, terminates, truncates

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        late = self.t >= self.length
        return self.observe(), 1.0, late and self.terminates, late and self.truncates, {}


class Unknown(gym.Env):
    """An env that the library cannot fork, but whose resets follow the seed."""

    observation_space = box(1)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 6, seeded: bool = True) -> None:
        self.length, self.seeded = length, seeded

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.x = float((self.np_random if self.seeded else np.random.default_rng()).normal())
        return np.array([self.x], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([self.x + self.t], np.float32), float(action), self.t >= self.length, False, {}


class Spaces(Probe):
    """Random observations and any action, `length` steps: for every pair of spaces that SB3 supports."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, length: int = 8) -> None:
        self.observation_space, self.action_space, self.length = observation_space, action_space, length

    def observe(self) -> Any:
        return self.observation_space.sample()

    def get_snapshot(self) -> dict[str, Any]:
        return {"t": self.t}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not isinstance(self.action_space, spaces.MultiBinary):  # whose samples are floats in SB3
            assert self.action_space.contains(action), action
        self.t += 1
        return self.observe(), 1.0, self.t >= self.length, False, {}


def grpo(env: Any = "CartPole-v1", policy: Any = "MlpPolicy", **settings: Any) -> Any:
    """A small GRPO agent: 64 steps a rollout with two envs, groups of two, one epoch, one hidden layer of 8."""
    from grpo_rl import GRPO

    small = {
        "n_steps": 32,
        "batch_size": 32,
        "n_epochs": 1,
        "group_size": 2,
        "seed": 0,
        "device": "cpu",
        "policy_kwargs": {"net_arch": [8]},
    }
    return GRPO(policy, env, **(small | settings))
