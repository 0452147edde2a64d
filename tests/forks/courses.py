"""Courses of envs, compared bit for bit: what tests of exact forks share."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.forks.snapshot import capture, restore, transfer, transfer_lasting

STEPS = 200


def bits(value: Any) -> Any:
    """A value that is equal only for bit-equal observations or scalars."""
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [bits(part) for part in value]
    return np.asarray(value).dtype.str, np.asarray(value).shape, np.asarray(value).tobytes()


def trace(env: gym.Env, seed: int, steps: int = STEPS) -> list[Any]:
    """Plays random actions on; ends are followed by resets, every other one seeded. The whole course, in bits."""
    rng, space = np.random.default_rng(seed), copy.deepcopy(env.action_space)
    space.seed(seed)
    course: list[Any] = []
    resets = 0
    for _ in range(steps):
        obs, reward, terminated, truncated, _ = env.step(space.sample())
        course.append(bits((obs, reward, terminated, truncated)))
        if terminated or truncated:
            resets += 1
            course.append(bits(env.reset(seed=int(rng.integers(2**31)) if resets % 2 else None)[0]))
    return course


def scrambled(env: gym.Env, seed: int = 99) -> gym.Env:
    """`env` in some other state: an earlier episode, another seed, a few steps."""
    env.reset(seed=seed)
    trace(env, seed, 7)
    return env


def check_exact(
    original: gym.Env, by_transfer: gym.Env, by_restore: gym.Env, steps: int = STEPS, lasting: bool = False
) -> list[Any]:
    """Both ways of forking `original` give its course, also once it has moved on; gives that course.

    lasting: Running statistics move too, or different ones would give different observations.
    """
    snapshot = capture(original, lasting)
    transfer(original, by_transfer)
    if lasting:
        transfer_lasting(original, by_transfer)
    expected = trace(original, 1, steps)
    assert trace(by_transfer, 1, steps) == expected
    for _ in range(2):  # a snapshot can be used again
        restore(by_restore, snapshot)
        assert trace(by_restore, 1, steps) == expected
    return expected
