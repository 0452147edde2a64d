"""Forks through SB3's VecEnvWrappers: the env's exact state and the wrappers' per-column arrays move together.

A `VecEnvWrapper` forwards an unknown method to the env below and keeps its own arrays, so a bare `venv.fork(...)` would
leave `VecNormalize.returns` or the frames of `VecFrameStack` behind. `Forker` walks the chain once, knows what each
wrapper keeps per column, and refuses wrappers that it does not know.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
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

from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.forks.probe import require_exact
from grpo_rl.forks.snapshot import Snapshot, capture, fresh_rng, kinds, prepare, require_alike, restore
from grpo_rl.groups.vec_env import GroupVecEnv
from grpo_rl.groups.workers import HeldSnapshot, SubprocGroupVecEnv


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

_LASTING: dict[type[VecEnvWrapper], tuple[str, ...]] = {
    VecNormalize: ("obs_rms", "ret_rms", "old_obs", "old_reward"),
    VecMonitor: ("episode_count",),
}
"""What forks leave alone and a checkpoint needs: running statistics, the last raw observations, counts."""


def _plain(value: Any) -> Any:
    """Running statistics, and dicts of them, as plain values."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return copy.deepcopy(vars(value) if isinstance(value, RunningMeanStd) else value)


def _put(owner: Any, name: str, value: Any) -> None:
    """Gives `owner` what `_plain` gave; statistics keep their objects, which others may hold."""
    now = getattr(owner, name)
    if isinstance(now, RunningMeanStd):
        now.__dict__.update(copy.deepcopy(value))
    elif isinstance(now, dict) and any(isinstance(item, RunningMeanStd) for item in now.values()):
        for key, item in now.items():
            item.__dict__.update(copy.deepcopy(value[key]))
    else:
        setattr(owner, name, copy.deepcopy(value))


class Root(NamedTuple):
    """One column's exact state: the env's snapshot and one row of each wrapper's arrays."""

    env: Snapshot | HeldSnapshot
    rows: list[np.ndarray]


class Forker:
    """Captures, restores and forks columns of a wrapped vectorised env, exactly or not at all.

    Args:
        venv: the outermost env. Its base must be a `GroupVecEnv`, a `SubprocGroupVecEnv`, or a `DummyVecEnv` of envs
            with exact snapshots. An env of unknown kind in a `DummyVecEnv` is probed on fresh instances that its spec
            builds, never stepped itself.

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
        self.group_env: GroupVecEnv | SubprocGroupVecEnv | None = None
        self._envs: list[gym.Env] = []
        taken_at_its_word = False
        if isinstance(venv, GroupVecEnv | SubprocGroupVecEnv):
            self.group_env = venv
        elif type(venv) is DummyVecEnv:
            self._envs = venv.envs
            taken_at_its_word = require_exact(self._envs[0]).probe
            for env in self._envs:
                require_alike(kinds(self._envs[0]), kinds(env))
                prepare(env)
        else:
            raise ForkError(
                f"{type(venv).__name__} gives no access to its envs' state"
                " (make_group_env(..., n_groups, group_size) builds an env that does, with"
                " vec_env_cls=SubprocVecEnv in worker processes)"
            )
        self._base = venv
        words = ", if their get_snapshot and set_snapshot are exact: probe_fork tells"
        self.proviso = words if taken_at_its_word else ""
        self._seeds = np.random.SeedSequence(np.random.randint(2**31))

    @property
    def can_freeze(self) -> bool:
        """Columns can be left out of a step: a GroupVecEnv with nothing around it that counts steps of its own."""
        return self.group_env is not None and all(type(w) is VecTransposeImage for w in self._wrappers)

    def _arrays(self) -> list[np.ndarray]:
        return [array for wrapper in self._wrappers for array in _PER_COLUMN[type(wrapper)](wrapper)]

    def capture(self, column: int) -> Root:
        """The exact state of `column`, independent of what happens to it later."""
        env = self.group_env.snapshot(column) if self.group_env else capture(self._envs[column])
        return Root(env, [array[column].copy() for array in self._arrays()])

    def restore(self, column: int, root: Root) -> None:
        """Column `column` continues from `root`, in a DummyVecEnv with a fresh random stream (see `fork`)."""
        if self.group_env:
            self.group_env.restore(column, root.env)  # type: ignore[arg-type]
        else:
            restore(self._envs[column], root.env)  # type: ignore[arg-type]
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
            snapshots = {source: capture(self._envs[source]) for source in set(sources[copies].tolist())}
            for column in copies.tolist():
                restore(self._envs[column], snapshots[sources[column]])
                self._refresh(column)
        for array in self._arrays():
            array[:] = array[sources]

    def state(self) -> dict[str, Any]:
        """All that a run needs to go on exactly: every env with its logs, and what the wrappers keep, as a tree."""
        base = self.group_env.state() if self.group_env else self._dummy_state()
        return {
            "env": base,
            "rows": [array.copy() for array in self._arrays()],
            "wrappers": [
                {name: _plain(getattr(w, name)) for name in _LASTING.get(type(w), ()) if hasattr(w, name)}
                for w in self._wrappers
            ],
            "seeds": {name: getattr(self._seeds, name) for name in ("entropy", "spawn_key", "n_children_spawned")},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from what `state` gave, of an env built alike; `state` stays as it is.

        Raises:
            ConfigError: The state of another number of envs, or of other wrappers.
            ForkError: Envs of another chain of types.
        """
        arrays = self._arrays()
        shapes = [array.shape for array in state["rows"]]
        if [array.shape for array in arrays] != shapes or len(state["wrappers"]) != len(self._wrappers):
            raise ConfigError(
                f"expected the state of an env inside {[type(w).__name__ for w in self._wrappers]}, whose arrays have"
                f" the shapes {[array.shape for array in arrays]}, got {shapes}: build it as the one of the state"
            )
        if self.group_env:
            self.group_env.set_state(state["env"])
        else:
            self._set_dummy_state(state["env"])
        for array, rows in zip(arrays, state["rows"], strict=True):
            array[:] = rows
        for wrapper, values in zip(self._wrappers, state["wrappers"], strict=True):
            for name, value in values.items():
                _put(wrapper, name, value)
        self._seeds = np.random.SeedSequence(**state["seeds"])

    def _dummy_state(self) -> dict[str, Any]:
        base = self._base
        named = {"reset_infos": base.reset_infos, "seeds": base._seeds, "options": base._options}
        return {"columns": [capture(env, lasting=True) for env in self._envs]} | copy.deepcopy(named)

    def _set_dummy_state(self, state: dict[str, Any]) -> None:
        if len(state["columns"]) != self.num_envs:
            raise ConfigError(f"expected the state of {self.num_envs} envs, got that of {len(state['columns'])}")
        for env, snapshot in zip(self._envs, state["columns"], strict=True):
            restore(env, snapshot)
        self._base.reset_infos = copy.deepcopy(state["reset_infos"])
        self._base._seeds, self._base._options = list(state["seeds"]), copy.deepcopy(state["options"])

    def _refresh(self, column: int) -> None:
        """Gives a DummyVecEnv's column a fresh random stream."""
        fresh_rng(self._envs[column], int(self._seeds.spawn(1)[0].generate_state(1)[0]))
