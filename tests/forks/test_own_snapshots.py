"""Snapshots that an env brings itself are believed where they cannot be checked, and checked where they can."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from grpo_rl import GRPO, make_group_env
from grpo_rl.errors import ForkError


class Drift(gym.Env):
    """Observes [x, t/20] and truncates at t = 20; `forgets`: its snapshot lacks t."""

    observation_space = gym.spaces.Box(-100, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = float(self.np_random.normal()), 0
        return np.array([self.x, 0], np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x, self.t = self.x + 0.1 * action, self.t + 1
        return np.array([self.x, self.t / 20], np.float32), self.x, False, self.t == 20, {}

    def get_snapshot(self) -> Any:
        return self.x, None if self.forgets else self.t

    def set_snapshot(self, snapshot: Any) -> None:
        self.x = snapshot[0]
        if not self.forgets:
            self.t = snapshot[1]


def test_a_factory_whose_snapshots_are_wrong_is_refused() -> None:
    make_group_env(Drift, 1, 2)
    with pytest.raises(ForkError, match="do not give an exact copy: observation"):
        make_group_env(lambda: Drift(forgets=True), 1, 2)


def test_an_env_that_cannot_be_built_again_is_taken_at_its_word_which_is_said() -> None:
    model = GRPO("MlpPolicy", Drift(), n_steps=256)
    assert model.groups.means == "fork"
    assert "probe_fork tells" in model.groups.reason
    assert "probe_fork" not in GRPO("MlpPolicy", make_group_env(Drift, 1, 8)).groups.reason
