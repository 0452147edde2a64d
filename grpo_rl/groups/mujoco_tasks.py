"""The eleven MuJoCo v5 tasks of Gymnasium as functions over a batch: what they observe, reward and call an end.

Each class says the same as the `step` of its namesake in `gymnasium.envs.mujoco`, in the same order of operations, so
that observations are bit-equal; resets are left to Gymnasium's own code. Settings have the names and defaults of
Gymnasium's constructors and are fixed when the task is made. n is the number of columns that a call is about.

Control costs are float32 where actions are, as in Gymnasium, which squares the action that it is given.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from grpo_rl.groups.physics import Fields


class Outcome(NamedTuple):
    """What a step gave.

    Args:
        reward: (n,) float64.
        terminated: (n,) bool.
        infos: The entries of Gymnasium's infos, each (n,) or (n, k).
    """

    reward: np.ndarray
    terminated: np.ndarray
    infos: dict[str, np.ndarray]


class Task:
    """One task.

    Args:
        settings: The arguments of Gymnasium's constructor, all of them.
        env: A Gymnasium env of the task, built with these settings: its model, its `dt` and its initial state are read.

    Attributes:
        reads: The fields of mjData that observations, rewards and ends are made of.
        moves: Further fields, which `position` is made of, before the step and after; none where no velocity counts.
        rne: Whether a field is among them that only `mj_rnePostConstraint` fills.
        drawn: Attributes of Gymnasium's env that a reset draws, for forks.
    """

    reads: ClassVar[tuple[str, ...]] = ("qpos", "qvel")
    moves: ClassVar[tuple[str, ...]] = ()
    rne: ClassVar[bool] = False
    drawn: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: dict[str, Any], env: Any) -> None:
        self.settings = SimpleNamespace(**settings)
        self.model, self.dt = env.model, env.dt
        self.init_qpos = env.init_qpos.copy()
        self.prepare()

    def prepare(self) -> None:
        """Looks up what `settings` name in the model."""

    def position(self, fields: Fields) -> np.ndarray:
        """(n,) or (n, 2): what velocities are differences of, metres."""
        raise NotImplementedError

    def observe(self, fields: Fields) -> np.ndarray:
        """(n, D) float64."""
        raise NotImplementedError

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        """What a step with `actions` (n, A) gave that ended in `fields`; velocity (n,) or (n, 2), m/s, or None."""
        raise NotImplementedError


def _strictly_inside(values: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    return (bounds[0] < values) & (values < bounds[1])


def _weighted_squares(weight: Any, values: np.ndarray) -> np.ndarray:
    """(n,): weight · Σ values², in the type that a single row gives (NumPy before 2 made it float64 there)."""
    squares = np.square(values).sum(axis=1)
    return weight * squares.astype((squares.dtype.type(0) * weight).dtype, copy=False)


def _never(fields: Fields) -> np.ndarray:
    return np.zeros(len(fields.qpos), dtype=bool)


def _distance(vectors: np.ndarray) -> np.ndarray:
    return np.linalg.norm(vectors, axis=1)


# ----------------------------------------------------------------------------------------------- runners in a plane


class HalfCheetah(Task):
    """Runs on, never ends."""

    moves = ("qpos",)

    def position(self, fields: Fields) -> np.ndarray:
        return fields.qpos[:, 0]

    def observe(self, fields: Fields) -> np.ndarray:
        skipped = 1 * bool(self.settings.exclude_current_positions_from_observation)
        return np.concatenate((fields.qpos[:, skipped:], fields.qvel), axis=1)

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        forward = self.settings.forward_reward_weight * velocity
        control = _weighted_squares(self.settings.ctrl_cost_weight, actions)
        infos = {
            "x_position": fields.qpos[:, 0],
            "x_velocity": velocity,
            "reward_forward": forward,
            "reward_ctrl": -control,
        }
        return Outcome(forward - control, _never(fields), infos)


class Walker2d(HalfCheetah):
    """Runs on two legs, ends where it falls."""

    def observe(self, fields: Fields) -> np.ndarray:
        skipped = 1 * bool(self.settings.exclude_current_positions_from_observation)
        return np.concatenate((fields.qpos[:, skipped:], np.clip(fields.qvel, -10, 10)), axis=1)

    def healthy(self, fields: Fields) -> np.ndarray:
        return _strictly_inside(fields.qpos[:, 1], self.settings.healthy_z_range) & _strictly_inside(
            fields.qpos[:, 2], self.settings.healthy_angle_range
        )

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        healthy = self.healthy(fields)
        forward = self.settings.forward_reward_weight * velocity
        survive = healthy * self.settings.healthy_reward
        control = _weighted_squares(self.settings.ctrl_cost_weight, actions)
        infos = {
            "x_position": fields.qpos[:, 0],
            "z_distance_from_origin": fields.qpos[:, 1] - self.init_qpos[1],
            "x_velocity": velocity,
            "reward_forward": forward,
            "reward_ctrl": -control,
            "reward_survive": survive,
        }
        return Outcome(forward + survive - control, ~healthy & bool(self.settings.terminate_when_unhealthy), infos)


class Hopper(Walker2d):
    """Hops on one leg, ends where it falls or any state runs away."""

    def healthy(self, fields: Fields) -> np.ndarray:
        state = np.concatenate((fields.qpos[:, 2:], fields.qvel), axis=1)
        return super().healthy(fields) & _strictly_inside(state, self.settings.healthy_state_range).all(axis=1)


class Swimmer(Task):
    """Swims on, never ends."""

    moves = ("qpos",)

    def position(self, fields: Fields) -> np.ndarray:
        return fields.qpos[:, :2]

    def observe(self, fields: Fields) -> np.ndarray:
        skipped = 2 * bool(self.settings.exclude_current_positions_from_observation)
        return np.concatenate((fields.qpos[:, skipped:], fields.qvel), axis=1)

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        forward = self.settings.forward_reward_weight * velocity[:, 0]
        control = _weighted_squares(self.settings.ctrl_cost_weight, actions)
        infos = _travel(fields, velocity) | {"reward_forward": forward, "reward_ctrl": -control}
        return Outcome(forward - control, _never(fields), infos)


def _travel(fields: Fields, velocity: Any) -> dict[str, np.ndarray]:
    return {
        "x_position": fields.qpos[:, 0],
        "y_position": fields.qpos[:, 1],
        "distance_from_origin": _distance(fields.qpos[:, :2]),
        "x_velocity": velocity[:, 0],
        "y_velocity": velocity[:, 1],
    }


# -------------------------------------------------------------------------------------- in space, with contact forces


class Ant(Task):
    """Runs on four legs, ends where it flips or jumps off."""

    reads = ("qpos", "qvel", "cfrc_ext")
    moves = ("xpos",)
    rne = True

    def prepare(self) -> None:
        self.body = self.model.body(self.settings.main_body).id

    def position(self, fields: Fields) -> np.ndarray:
        return fields.xpos[:, self.body, :2]

    def forces(self, fields: Fields) -> np.ndarray:
        return np.clip(fields.cfrc_ext, *self.settings.contact_force_range)

    def observe(self, fields: Fields) -> np.ndarray:
        skipped = 2 * bool(self.settings.exclude_current_positions_from_observation)
        parts = [fields.qpos[:, skipped:], fields.qvel]
        if self.settings.include_cfrc_ext_in_observation:
            parts.append(self.forces(fields)[:, 1:].reshape(len(fields.qpos), -1))
        return np.concatenate(parts, axis=1)

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        low, high = self.settings.healthy_z_range
        finite = np.isfinite(fields.qpos).all(axis=1) & np.isfinite(fields.qvel).all(axis=1)
        healthy = finite & (low <= fields.qpos[:, 2]) & (fields.qpos[:, 2] <= high)
        forward = velocity[:, 0] * self.settings.forward_reward_weight
        survive = healthy * self.settings.healthy_reward
        control = _weighted_squares(self.settings.ctrl_cost_weight, actions)
        contact = _weighted_squares(self.settings.contact_cost_weight, self.forces(fields).reshape(len(actions), -1))
        infos = _travel(fields, velocity) | {
            "reward_forward": forward,
            "reward_ctrl": -control,
            "reward_contact": -contact,
            "reward_survive": survive,
        }
        reward = forward + survive - (control + contact)
        return Outcome(reward, ~healthy & bool(self.settings.terminate_when_unhealthy), infos)


class HumanoidStandup(Task):
    """Gets up, never ends."""

    reads = ("qpos", "qvel", "ctrl", "cinert", "cvel", "qfrc_actuator", "cfrc_ext", "ten_length", "ten_velocity")
    rne = True

    def observe(self, fields: Fields) -> np.ndarray:
        settings, n = self.settings, len(fields.qpos)
        parts = [fields.qpos[:, 2 * bool(settings.exclude_current_positions_from_observation) :], fields.qvel]
        for included, field, first in (
            (settings.include_cinert_in_observation, fields.cinert, 1),
            (settings.include_cvel_in_observation, fields.cvel, 1),
            (settings.include_qfrc_actuator_in_observation, fields.qfrc_actuator, 6),
            (settings.include_cfrc_ext_in_observation, fields.cfrc_ext, 1),
        ):
            if included is True:
                parts.append(field[:, first:].reshape(n, -1))
        return np.concatenate(parts, axis=1)

    def contact_cost(self, fields: Fields, weight: float, bounds: tuple[float, float]) -> np.ndarray:
        return np.clip(_weighted_squares(weight, fields.cfrc_ext.reshape(len(fields.qpos), -1)), *bounds)

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        settings = self.settings
        height = fields.qpos[:, 2] / self.model.opt.timestep
        control = _weighted_squares(settings.ctrl_cost_weight, fields.ctrl)
        impact = self.contact_cost(fields, settings.impact_cost_weight, settings.impact_cost_range)
        infos = {
            "x_position": fields.qpos[:, 0],
            "y_position": fields.qpos[:, 1],
            "z_distance_from_origin": fields.qpos[:, 2] - self.init_qpos[2],
            "tendon_length": fields.ten_length,
            "tendon_velocity": fields.ten_velocity,
            "reward_linup": height,
            "reward_quadctrl": -control,
            "reward_impact": -impact,
        }
        return Outcome(height - control - impact + 1, _never(fields), infos)


class Humanoid(HumanoidStandup):
    """Walks upright, ends where it falls."""

    moves = ("xipos",)

    def position(self, fields: Fields) -> np.ndarray:
        mass = self.model.body_mass
        return np.einsum("b,nbj->nj", mass, fields.xipos[:, :, :2]) / mass.sum()

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        settings = self.settings
        healthy = _strictly_inside(fields.qpos[:, 2], settings.healthy_z_range)
        forward = settings.forward_reward_weight * velocity[:, 0]
        survive = healthy * settings.healthy_reward
        control = _weighted_squares(settings.ctrl_cost_weight, fields.ctrl)
        contact = self.contact_cost(fields, settings.contact_cost_weight, settings.contact_cost_range)
        infos = _travel(fields, velocity) | {
            "tendon_length": fields.ten_length,
            "tendon_velocity": fields.ten_velocity,
            "reward_survive": survive,
            "reward_forward": forward,
            "reward_ctrl": -control,
            "reward_contact": -contact,
        }
        reward = forward + survive - (control + contact)
        return Outcome(reward, ~healthy & bool(settings.terminate_when_unhealthy), infos)


# ------------------------------------------------------------------------------------------------- pendulums and arms


class InvertedPendulum(Task):
    """Balances a pole, ends where it tips."""

    def observe(self, fields: Fields) -> np.ndarray:
        return np.concatenate((fields.qpos, fields.qvel), axis=1)

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        seen = self.observe(fields)
        terminated = ~np.isfinite(seen).all(axis=1) | (np.abs(seen[:, 1]) > 0.2)
        survive = (~terminated).astype(np.float64)
        return Outcome(survive, terminated, {"reward_survive": survive})


class InvertedDoublePendulum(Task):
    """Balances two poles, ends where their tip is low."""

    reads = ("qpos", "qvel", "qfrc_constraint", "site_xpos")

    def observe(self, fields: Fields) -> np.ndarray:
        angles = np.ascontiguousarray(fields.qpos[:, 1:])
        clipped = (np.clip(fields.qvel, -10, 10), np.clip(fields.qfrc_constraint[:, :1], -10, 10))
        return np.concatenate((fields.qpos[:, :1], np.sin(angles), np.cos(angles), *clipped), axis=1)

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        x, y = fields.site_xpos[:, 0, 0], fields.site_xpos[:, 0, 2]
        terminated = y <= 1
        distance = 0.01 * x**2 + (y - 2) ** 2
        speed = 0.001 * fields.qvel[:, 1] ** 2 + 0.005 * fields.qvel[:, 2] ** 2
        alive = self.settings.healthy_reward * ~terminated
        infos = {"reward_survive": alive, "distance_penalty": -distance, "velocity_penalty": -speed}
        return Outcome(alive - distance - speed, terminated, infos)


class Reacher(Task):
    """Reaches for a target, never ends."""

    reads = ("qpos", "qvel", "xpos")
    drawn = ("goal",)

    def prepare(self) -> None:
        self.finger, self.target = self.model.body("fingertip").id, self.model.body("target").id

    def offset(self, fields: Fields) -> np.ndarray:
        return fields.xpos[:, self.finger] - fields.xpos[:, self.target]

    def observe(self, fields: Fields) -> np.ndarray:
        angles = np.ascontiguousarray(fields.qpos[:, :2])
        rest = (fields.qpos[:, 2:], fields.qvel[:, :2], self.offset(fields)[:, :2])
        return np.concatenate((np.cos(angles), np.sin(angles), *rest), axis=1)

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        distance = -_distance(self.offset(fields)) * self.settings.reward_dist_weight
        control = -_weighted_squares(self.settings.reward_control_weight, actions)
        return Outcome(distance + control, _never(fields), {"reward_dist": distance, "reward_ctrl": control})


class Pusher(Task):
    """Pushes an object to a goal, never ends."""

    reads = ("qpos", "qvel", "xpos")
    drawn = ("goal_pos", "cylinder_pos")

    def prepare(self) -> None:
        self.bodies = [self.model.body(name).id for name in ("tips_arm", "object", "goal")]

    def observe(self, fields: Fields) -> np.ndarray:
        bodies = fields.xpos[:, self.bodies].reshape(len(fields.qpos), -1)
        return np.concatenate((fields.qpos[:, :7], fields.qvel[:, :7], bodies), axis=1)

    def outcome(self, fields: Fields, velocity: Any, actions: np.ndarray) -> Outcome:
        tip, thing, goal = (fields.xpos[:, body] for body in self.bodies)
        near = -_distance(thing - tip) * self.settings.reward_near_weight
        distance = -_distance(thing - goal) * self.settings.reward_dist_weight
        control = -_weighted_squares(self.settings.reward_control_weight, actions)
        infos = {"reward_dist": distance, "reward_ctrl": control, "reward_near": near}
        return Outcome(distance + control + near, _never(fields), infos)


TASKS: dict[str, type[Task]] = {
    "ant_v5:AntEnv": Ant,
    "half_cheetah_v5:HalfCheetahEnv": HalfCheetah,
    "hopper_v5:HopperEnv": Hopper,
    "humanoid_v5:HumanoidEnv": Humanoid,
    "humanoidstandup_v5:HumanoidStandupEnv": HumanoidStandup,
    "inverted_double_pendulum_v5:InvertedDoublePendulumEnv": InvertedDoublePendulum,
    "inverted_pendulum_v5:InvertedPendulumEnv": InvertedPendulum,
    "pusher_v5:PusherEnv": Pusher,
    "reacher_v5:ReacherEnv": Reacher,
    "swimmer_v5:SwimmerEnv": Swimmer,
    "walker2d_v5:Walker2dEnv": Walker2d,
}
"""The task of each entry point in Gymnasium's registry, which are relative to `gymnasium.envs.mujoco`."""
