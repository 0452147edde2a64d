"""Forks through SB3's VecEnvWrappers: the env's exact state and the wrappers' per-column arrays move together.

A `VecEnvWrapper` forwards an unknown method to the env below and keeps its own arrays, so a bare `venv.fork(...)` would
leave `VecNormalize.returns` or the frames of `VecFrameStack` behind. `Forker` walks the chain once, knows what each
wrapper keeps per column, and refuses wrappers that it does not know.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

from grpo_rl.errors import ForkError
from grpo_rl.groups.snapshot import (
    Snapshot,
    capture,
    fresh_rng,
    kinds,
    require_alike,
    require_exact,
    restore,
    trusts_own_snapshots,
)
from grpo_rl.groups.vec_env import GroupVecEnv


def _stacks(stacked: StackedObservations) -> list[np.ndarray]:
    if hasattr(stacked, "sub_stacked_observations"):
        return [array for sub in stacked.sub_stacked_observations.values() for array in _stacks(sub)]
    return [stacked.stacked_obs]


_PER_COLUMN: dict[type[VecEnvWrapper], Callable[[Any], list[np.ndarray]]] = {
    VecNormalize: lambda wrapper: [wrapper.returns],
    VecFrameStack: lambda wrapper: _stacks(wrapper.stacked_obs),
    VecMonitor: lambda wrapper: [wrapper.episode_returns, wrapper.episode_lengths],
    VecTransposeImage: lambda wrapper: [],
    VecExtractDictObs: lambda wrapper: [],
    VecCheckNan: lambda wrapper: [],
}
"""What each known wrapper keeps per column: arrays (N, ...), read anew each time since wrappers replace them."""


class Root(NamedTuple):
    """One column's exact state: the env's snapshot and one row of each wrapper's arrays."""

    env: Snapshot
    rows: list[np.ndarray]


class Forker:
    """Captures, restores and forks columns of a wrapped vectorised env, exactly or not at all.

    Args:
        venv: the outermost env. Its base must be a `GroupVecEnv` or a `DummyVecEnv` of envs with exact snapshots.

    Raises:
        ForkError: the chain cannot be forked exactly; the message names the class and the reason.
    """

    def __init__(self, venv: VecEnv) -> None:
        self.num_envs = venv.num_envs
        self._wrappers: list[VecEnvWrapper] = []
        while isinstance(venv, VecEnvWrapper):
            if type(venv) not in _PER_COLUMN:
                raise ForkError(f"the wrapper {type(venv).__name__} may keep per-env state that a fork would not move")
            self._wrappers.append(venv)
            venv = venv.venv
        if isinstance(venv, GroupVecEnv):
            self.group_env: GroupVecEnv | None = venv
        elif type(venv) is DummyVecEnv:
            self.group_env = None
            for env in venv.envs:
                require_exact(env)
                require_alike(kinds(venv.envs[0]), kinds(env))
        else:
            raise ForkError(
                f"{type(venv).__name__} gives no access to its envs' state"
                " (make_group_env(..., n_groups, group_size) builds an env that does)"
            )
        self._base: DummyVecEnv = venv
        own = self.group_env is None and any(trusts_own_snapshots(env) for env in venv.envs)
        self.proviso = ", if their get_snapshot and set_snapshot are exact: probe_fork tells" if own else ""
        self._seeds = np.random.SeedSequence(np.random.randint(2**31))

    @property
    def can_freeze(self) -> bool:
        """Columns can be left out of a step: a GroupVecEnv with nothing around it that counts steps of its own."""
        return self.group_env is not None and all(type(w) is VecTransposeImage for w in self._wrappers)

    def _arrays(self) -> list[np.ndarray]:
        return [array for wrapper in self._wrappers for array in _PER_COLUMN[type(wrapper)](wrapper)]

    def capture(self, column: int) -> Root:
        """The exact state of `column`, independent of what happens to it later."""
        env = self.group_env.snapshot(column) if self.group_env else capture(self._base.envs[column])
        return Root(env, [array[column].copy() for array in self._arrays()])

    def restore(self, column: int, root: Root) -> None:
        """Column `column` continues from `root`, in a DummyVecEnv with a fresh random stream (see `fork`)."""
        if self.group_env:
            self.group_env.restore(column, root.env)
        else:
            restore(self._base.envs[column], root.env)
            self._refresh(column)
        for array, row in zip(self._arrays(), root.rows, strict=True):
            array[column] = row

    def fork(self, sources: np.ndarray) -> None:
        """Member i continues from the exact state of member `sources[i]`, sources (N,) int; itself means untouched.

        In a GroupVecEnv siblings share the random stream up to their next reset. A DummyVecEnv resets its envs where
        nobody can seed them, so there each copy gets a fresh stream at once, or all siblings would share later starts.
        """
        sources = np.asarray(sources)
        copies = np.flatnonzero(sources != np.arange(self.num_envs))
        if self.group_env:
            self.group_env.fork(sources)
        else:
            snapshots = {source: capture(self._base.envs[source]) for source in set(sources[copies].tolist())}
            for column in copies.tolist():
                restore(self._base.envs[column], snapshots[sources[column]])
                self._refresh(column)
        for array in self._arrays():
            array[:] = array[sources]

    def _refresh(self, column: int) -> None:
        """Gives a DummyVecEnv's column a fresh random stream."""
        fresh_rng(self._base.envs[column], int(self._seeds.spawn(1)[0].generate_state(1)[0]))
