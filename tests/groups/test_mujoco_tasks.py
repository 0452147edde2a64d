"""What tasks reward and call an end, by hand; parity with Gymnasium is in test_mujoco.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from grpo_rl.groups.mujoco_tasks import TASKS, HalfCheetah, Hopper, InvertedDoublePendulum, Task, Walker2d


def made(kind: type[Task], nq: int, **settings: Any) -> Task:
    return kind(settings, SimpleNamespace(model=None, dt=0.008, init_qpos=np.zeros(nq)))


def test_half_cheetah() -> None:
    """2 · 3 m/s − 0.1 · (6 · 0.5²) = 6 − 0.15"""
    task = made(HalfCheetah, 9, forward_reward_weight=2.0, ctrl_cost_weight=0.1)
    fields = SimpleNamespace(qpos=np.full((2, 9), 0.7), qvel=np.zeros((2, 9)))
    outcome = task.outcome(fields, np.array([3.0, 0.0]), np.full((2, 6), 0.5))
    np.testing.assert_allclose(outcome.reward, [5.85, -0.15])
    assert not outcome.terminated.any()
    np.testing.assert_allclose(outcome.infos["reward_forward"], [6, 0])
    np.testing.assert_allclose(outcome.infos["x_position"], 0.7)


SETTINGS = {
    "forward_reward_weight": 1.0,
    "ctrl_cost_weight": 0.001,
    "healthy_reward": 1.0,
    "terminate_when_unhealthy": True,
    "healthy_z_range": (0.7, 1.5),
    "healthy_angle_range": (-0.2, 0.2),
    "healthy_state_range": (-100.0, 100.0),
    "exclude_current_positions_from_observation": True,
}


@pytest.mark.parametrize("kind", [Walker2d, Hopper])
def test_a_walker_that_falls(kind: type[Task]) -> None:
    """Height, angle: fine; too low; at the bound, which counts as outside; leaning."""
    task = made(kind, 6, **SETTINGS)
    qpos = np.zeros((4, 6))
    qpos[:, 1:3] = [[1.2, 0.0], [0.6, 0.0], [0.7, 0.0], [1.2, 0.3]]
    fields = SimpleNamespace(qpos=qpos, qvel=np.zeros((4, 6)))
    outcome = task.outcome(fields, np.full(4, 0.5), np.ones((4, 3)))
    assert outcome.terminated.tolist() == [False, True, True, True]
    np.testing.assert_allclose(outcome.reward, [0.5 + 1 - 0.003, 0.5 - 0.003, 0.5 - 0.003, 0.5 - 0.003])
    lasting = made(kind, 6, **SETTINGS | {"terminate_when_unhealthy": False})
    assert not lasting.outcome(fields, np.full(4, 0.5), np.ones((4, 3))).terminated.any()


def test_a_hopper_whose_state_runs_away() -> None:
    task = made(Hopper, 6, **SETTINGS)
    qpos, qvel = np.zeros((3, 6)), np.zeros((3, 6))
    qpos[:, 1] = 1.2
    qvel[1, 0], qpos[2, 0] = 101.0, 1e6  # the horizontal position may be anything
    outcome = task.outcome(SimpleNamespace(qpos=qpos, qvel=qvel), np.zeros(3), np.zeros((3, 3)))
    assert outcome.terminated.tolist() == [False, True, False]
    np.testing.assert_array_equal(task.observe(SimpleNamespace(qpos=qpos, qvel=20 * np.ones((3, 6))))[:, -6:], 10)


def test_double_pendulum() -> None:
    """10 − 0.01 · 0.3² − (1.5 − 2)² − 0.001 · 2² − 0.005 · 1² = 10 − 0.0009 − 0.25 − 0.004 − 0.005 = 9.7401"""
    task = made(InvertedDoublePendulum, 3, healthy_reward=10.0)
    fields = SimpleNamespace(
        site_xpos=np.array([[[0.3, 0.0, 1.5]], [[0.3, 0.0, 1.0]]]), qvel=np.array([[0, 2.0, 1.0]] * 2)
    )
    outcome = task.outcome(fields, None, np.zeros((2, 1)))
    assert outcome.terminated.tolist() == [False, True]
    np.testing.assert_allclose(outcome.reward, [9.7401, -0.0009 - 1 - 0.009])


def test_every_task_of_gymnasium_is_here() -> None:
    entries = {
        str(spec.entry_point).removeprefix("gymnasium.envs.mujoco.")
        for spec in gym.registry.values()
        if str(spec.entry_point).startswith("gymnasium.envs.mujoco.") and spec.id.endswith("-v5")
    }
    assert entries == TASKS.keys()
    assert all(entry.endswith(f":{task.__name__}Env") for entry, task in TASKS.items())
