"""A gridworld that shows what a custom env needs to be forked exactly: `get_snapshot` and `set_snapshot`.

    S  start, one of them at each reset        #  wall        .  floor
    o  coin, +1 the first time                 G  goal, +1 and the end
    x  pit, -1 and the end

Each step costs 0.01, and the time is limited. With probability `slip` a step goes where the wind wants, so two forks
agree only if the random generator is copied too; grpo_rl does that for `self.np_random`, as for every Gymnasium env.
"""

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

MAP = (
    "#########",
    "#S..o..S#",
    "#.##.##.#",
    "#..x.x..#",
    "#.##.##.#",
    "#S..oG..#",
    "#########",
)
MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])  # up, right, down, left
COLORS = {"#": (60, 60, 60), ".": (240, 240, 240), "S": (240, 240, 240), "o": (240, 200, 40)}
COLORS |= {"x": (200, 60, 60), "G": (60, 170, 90), "@": (60, 90, 200)}
STEP, COIN, GOAL, PIT = -0.01, 1.0, 1.0, -1.0

Obs = NDArray[np.float32]


class State(NamedTuple):
    """All that changes from step to step, and nothing else."""

    position: tuple[int, int]
    coins: NDArray[np.bool_]  # (H, W), those still there
    steps: int  # since the reset: a counter is what a snapshot forgets most easily


class Gridworld(gym.Env[Obs, np.int64]):
    """Take the coins, then find the goal.

    Observations are a Box (2·H·W + 1,) float32: where the agent is and where coins are, one number per cell, and the
    share of the time that is left. As the time is seen, its end is a termination, not a truncation. Actions are
    Discrete(4): up, right, down, left.

    Args:
        slip: Chance that a step goes in a random direction, 0 … 1.
        max_steps: Time limit in steps.
        rows: The map: strings of equal length with a wall all round, see the module.
        render_mode: "rgb_array" or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012, as Gymnasium declares it

    def __init__(
        self, slip: float = 0.1, max_steps: int = 60, rows: tuple[str, ...] = MAP, render_mode: str | None = None
    ) -> None:
        self.slip = slip
        self.render_mode = render_mode
        self.max_steps = max_steps
        self.map = np.array([list(row) for row in rows])
        self.starts = np.argwhere(self.map == "S")
        self.observation_space = spaces.Box(0.0, 1.0, (2 * self.map.size + 1,), np.float32)
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        row, column = self.np_random.choice(self.starts).tolist()
        self.state = State((row, column), self.map == "o", 0)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        slips = self.np_random.random() < self.slip
        move = MOVES[self.np_random.integers(4) if slips else action]
        row, column = (self.state.position + move).tolist()
        if self.map[row, column] == "#":
            row, column = self.state.position
        cell, coins = self.map[row, column], self.state.coins.copy()
        reward = STEP + COIN * coins[row, column] + GOAL * (cell == "G") + PIT * (cell == "x")
        coins[row, column] = False
        self.state = State((row, column), coins, self.state.steps + 1)
        over = cell in "Gx" or self.state.steps == self.max_steps
        return self._observe(), float(reward), bool(over), False, {}

    def render(self) -> NDArray[np.uint8]:
        """The map as a picture (20·H, 20·W, 3), a square for each cell."""
        cells = np.where(self.map == "o", ".", self.map)
        cells[self.state.coins] = "o"
        cells[self.state.position] = "@"
        colors = np.array([[COLORS[cell] for cell in row] for row in cells], np.uint8)
        return colors.repeat(20, axis=0).repeat(20, axis=1)

    # --- forks: what grpo_rl asks of a custom env ---------------------------------------------------------------------

    def get_snapshot(self) -> State:
        """The state. Not in it: random generators and what wrappers keep, which grpo_rl copies itself."""
        return self.state

    def set_snapshot(self, state: State) -> None:
        """Continues from `state`, which is a copy and this env's to keep."""
        self.state = state

    def _observe(self) -> Obs:
        agent = np.zeros(self.map.shape, np.float32)
        agent[self.state.position] = 1
        time_left = np.float32(1 - self.state.steps / self.max_steps)
        return np.concatenate([agent.ravel(), self.state.coins.ravel(), [time_left]]).astype(np.float32)
