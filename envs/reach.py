"""A robot task with a dial: a two-link arm brings its hand to a target, on a table that tilts.

The dial is `difficulty`, 0 … 1. It moves the target away, and it changes the dynamics: the table tilts, so that gravity
pulls along it, the payload grows and the bearings lose their damping. At 0 the table is level, the hand nearly empty
and the target near; at 1 motors hold the stretched arm barely, and an arm that is let go swings. All of it is computed
from nominal values, so that setting the dial twice is the same as once, and setting it back brings the old arm back.
"""

from pathlib import Path
from typing import Any, NamedTuple

import mujoco  # type: ignore[import-untyped]
import numpy as np
from gymnasium import spaces
from gymnasium.envs.mujoco import MujocoEnv
from numpy.typing import NDArray

UPPER = FORE = 0.45  # m
NEAR, FAR = 0.15, 0.9  # m, from the hand at the start to the target, at difficulty 0 and 1
TILT = np.deg2rad(50)  # of the table at 1
PAYLOAD = 0.1, 0.6  # kg at 0 and 1
DAMPING = 1.0, 0.25  # times that of reach.xml at 0 and 1
CLOSE, SLOW = 0.06, 0.5  # success: m to the target, m/s of the hand
SUCCESS = 5.0

Obs = NDArray[np.float64]


class State(NamedTuple):
    """All that changes from step to step, and the dial."""

    difficulty: float
    physics: NDArray[np.float64]  # mjSTATE_INTEGRATION, the target's place included
    steps: int


class Reach(MujocoEnv):
    """Bring the hand to the target and stop there.

    Observations are a Box (10,) float64: cosine and sine of both joints, their velocities in rad/s, the target's place
    and the way from the hand to it in m. Actions are a Box (2,): the torques of shoulder and elbow, -1 … 1. A step of
    0.04 s costs the distance in m and a little for torque; reaching the target ends the episode and gives 5. At its end
    `info["is_success"]` says whether it was reached.

    Args:
        difficulty: The dial, 0 … 1; an attribute too.
        max_steps: Time limit in steps.
        render_mode: "human", "rgb_array", "depth_array", "rgbd_tuple" or None.
    """

    metadata = {  # noqa: RUF012, as Gymnasium declares it
        "render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"],
        "render_fps": 25,
    }

    def __init__(self, difficulty: float = 1.0, max_steps: int = 100, render_mode: str | None = None) -> None:
        space = spaces.Box(-np.inf, np.inf, (10,), np.float64)
        path = str(Path(__file__).with_name("reach.xml").resolve())
        super().__init__(path, 4, space, render_mode=render_mode, camera_name="top")
        self.max_steps = max_steps
        self.nominal_damping = self.model.dof_damping.copy()
        self.nominal_payload = self.model.body("payload").mass[0], self.model.body("payload").inertia.copy()
        self.scratch = mujoco.MjData(self.model)
        self.difficulty = difficulty

    @property
    def difficulty(self) -> float:
        return self._difficulty

    @difficulty.setter
    def difficulty(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(f"difficulty must be 0 … 1, got {value}")
        self._difficulty = float(value)
        tilt = value * TILT
        self.model.opt.gravity[:] = 9.81 * np.array([0, -np.sin(tilt), -np.cos(tilt)])
        self.model.dof_damping[:] = self.nominal_damping * np.interp(value, (0, 1), DAMPING)
        mass, inertia = self.nominal_payload
        payload = self.model.body("payload")
        payload.mass[:] = np.interp(value, (0, 1), PAYLOAD)
        payload.inertia[:] = inertia * payload.mass / mass
        mujoco.mj_setConst(self.model, self.scratch)  # what MuJoCo derives from masses; the state is left alone

    def reset_model(self) -> Obs:
        self.steps = 0
        qpos = self.np_random.uniform((-np.pi, -2.0), (np.pi, 2.0))
        self.set_state(qpos, self.np_random.uniform(-0.1, 0.1, 2))
        hand, reach = self._hand(), NEAR + self._difficulty * (FAR - NEAR)
        while True:  # any place that the arm can come to, not too near and at most `reach` away
            target = self.np_random.uniform(-UPPER - FORE, UPPER + FORE, 2)
            if CLOSE < np.linalg.norm(target - hand) <= reach and 0.25 < np.linalg.norm(target) < 0.85:
                break
        self.data.mocap_pos[0, :2] = target
        return self._observe()

    def step(self, action: NDArray[np.float32]) -> tuple[Obs, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        self.do_simulation(np.clip(action, -1, 1), self.frame_skip)
        self.steps += 1
        obs = self._observe()
        distance = float(np.hypot(*obs[8:]))
        success = distance < CLOSE and float(np.hypot(*self._hand_velocity())) < SLOW
        truncated = self.steps >= self.max_steps and not success
        reward = SUCCESS * success - distance - 0.02 * float(np.square(action).mean())
        info: dict[str, Any] = {"distance": distance}
        if success or truncated:
            info["is_success"] = success
        if self.render_mode == "human":
            self.render()
        return obs, reward, success, truncated, info

    def get_snapshot(self) -> State:
        """The state. Not in it: random generators and what wrappers keep, which grpo_rl copies itself."""
        physics = np.empty(mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(self.model, self.data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        return State(self._difficulty, physics, self.steps)

    def set_snapshot(self, state: State) -> None:
        """Continues from `state`, with its difficulty."""
        if state.difficulty != self._difficulty:
            self.difficulty = state.difficulty
        mujoco.mj_setState(self.model, self.data, state.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_kinematics(self.model, self.data)  # for pictures
        self.steps = state.steps

    def _hand(self) -> NDArray[np.float64]:
        """Place of the hand (2,) in m, from the joints: MuJoCo's own lags a substep behind them."""
        shoulder, both = self.data.qpos[0], self.data.qpos.sum()
        return UPPER * np.array([np.cos(shoulder), np.sin(shoulder)]) + FORE * np.array([np.cos(both), np.sin(both)])

    def _hand_velocity(self) -> NDArray[np.float64]:
        shoulder, both = self.data.qpos[0], self.data.qpos.sum()
        first, second = self.data.qvel[0], self.data.qvel.sum()
        across = UPPER * first * np.array([-np.sin(shoulder), np.cos(shoulder)])
        return across + FORE * second * np.array([-np.sin(both), np.cos(both)])

    def _observe(self) -> Obs:
        qpos, target = self.data.qpos, self.data.mocap_pos[0, :2]
        return np.concatenate([np.cos(qpos), np.sin(qpos), self.data.qvel, target, target - self._hand()])
