"""`GroupVecEnv`, an SB3 vec env whose columns can continue from one another's exact state.

Where it differs from SB3's `DummyVecEnv`: columns can `fork`; `frozen` columns are left out of a step; a column whose
random generator was copied takes a fresh seed at its next reset, or siblings would share every later start; infos are
the env's own dicts copied one level deep, where DummyVecEnv copies all of them to the bottom at each step.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs

from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.forks.probe import require_exact
from grpo_rl.forks.snapshot import Snapshot, capture, fresh_rng, kinds, prepare, require_alike, restore, transfer
from grpo_rl.groups.observations import batchable


def count_groups(n_envs: int, group_size: int) -> int:
    """P of N columns in groups of G; raises ConfigError where they do not divide."""
    if group_size < 1 or n_envs < 1:
        raise ConfigError(f"expected at least one env and group_size ≥ 1, got {n_envs} envs, {group_size=}")
    if n_envs % group_size:
        below = n_envs // group_size * group_size
        nearest = " or ".join(str(n) for n in (below, below + group_size) if n)
        divisors = ", ".join(str(size) for size in range(1, n_envs + 1) if n_envs % size == 0)
        raise ConfigError(
            f"expected a multiple of group_size={group_size} envs, got {n_envs}: "
            f"use {nearest} envs, or a group_size of {divisors}"
        )
    return n_envs // group_size


def reset_streams(seed: int | None, n_groups: int) -> list[np.random.Generator]:
    """Each group's stream of seeds for resets that follow forks: its own, so that groups may live in any process."""
    first = np.random.SeedSequence(seed, spawn_key=(1,))
    return [np.random.default_rng(sequence) for sequence in (first, *first.spawn(n_groups - 1))]


def check_sources(sources: np.ndarray | Sequence[int], n_envs: int) -> np.ndarray:
    """`sources` (N,) as integers in 0 … N-1; raises ConfigError for what is not."""
    sources = np.asarray(sources)
    if sources.shape != (n_envs,) or sources.dtype.kind not in "iu":
        raise ConfigError(
            f"sources: expected ({n_envs},) integers, got {sources.dtype} of shape {sources.shape}: "
            "give one source for each column, sources[i] = i where column i stays as it is"
        )
    if sources.min() < 0 or sources.max() >= n_envs:
        raise ConfigError(f"sources: expected 0 … {n_envs - 1}, got {sources.min()} … {sources.max()}")
    return sources


def check_frozen(frozen: Any, n_envs: int) -> np.ndarray:
    """`frozen` (N,) bool as an array of its own, from a list too; raises ConfigError for what is not."""
    found = np.array(frozen)
    if found.shape != (n_envs,) or found.dtype != bool:
        raise ConfigError(
            f"frozen: expected ({n_envs},) booleans, one for each column, got {found.dtype} of shape {found.shape}"
        )
    return found


def check_begun(begun: bool, what: str) -> None:
    """Raises ConfigError before the first reset: there is no state yet."""
    if not begun:
        raise ConfigError(f"{what} before the first reset(): there is no state to go on from; call reset() first")


def check_column(column: Any, n_envs: int) -> None:
    """Raises ConfigError for a column that does not exist."""
    if isinstance(column, bool) or not isinstance(column, int | np.integer) or not -n_envs <= column < n_envs:
        raise ConfigError(f"column: expected 0 … {n_envs - 1}, got {column!r:.80}")


def check_group(group: int, n_groups: int) -> None:
    """Raises ConfigError for a group that does not exist."""
    if not 0 <= group < n_groups:
        raise ConfigError(f"group: expected 0 … {n_groups - 1}, got {group}")


def check_state(state: dict[str, Any], n_envs: int, n_groups: int) -> None:
    """Raises ConfigError for the state of an env of another layout."""
    if (len(state["columns"]), len(state["streams"])) != (n_envs, n_groups):
        raise ConfigError(
            f"expected the state of {n_envs} envs in {n_groups} groups, got that of {len(state['columns'])} envs in"
            f" {len(state['streams'])} groups: build the env as the one that the state was taken from"
        )


def _checked(build: Callable[[], gym.Env]) -> gym.Env:
    return batchable(build())


class GroupVecEnv(DummyVecEnv):
    """P groups of G envs in one process: N = P·G columns, those of a group side by side.

    Args:
        env_fns: One function per column (N), each building a new env, all alike: a fork moves state, not settings.
        group_size: G.

    Attributes:
        n_groups: P.
        group_size: G.
        group_of: (N,) int64, the group of each column.
        frozen: (N,) bool, yours to set: a frozen column is not stepped, keeps its observation, and gives reward 0, done
            False and an empty info. `reset` and `reset_group` thaw what they reset.

    Raises:
        ConfigError: N is not a multiple of G, or SB3 cannot batch the observations.
        ForkError: An env cannot be forked exactly, or two are not made of the same types.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]], group_size: int) -> None:
        n_envs, self.n_groups = len(env_fns), count_groups(len(env_fns), group_size)
        super().__init__([functools.partial(_checked, build) for build in env_fns])
        try:
            require_exact(self.envs[0], env_fns[0])
            for env in self.envs:
                require_alike(kinds(self.envs[0]), kinds(env))
                prepare(env)
        except Exception:
            self.close()
            raise
        self.group_size = group_size
        self.group_of = np.repeat(np.arange(self.n_groups), group_size)
        self.frozen = np.zeros(n_envs, dtype=bool)
        self._begun = False
        self._stale = np.zeros(n_envs, dtype=bool)  # columns whose generator was copied: fresh seed at the next reset
        self._streams = reset_streams(None, self.n_groups)

    @property
    def frozen(self) -> np.ndarray:
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: Any) -> None:
        self._frozen = check_frozen(frozen, self.num_envs)

    # ------------------------------------------------------------------------------------------------- SB3's interface

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds the next reset of column i with seed + i, as SB3 does, and the seeds of resets that follow forks."""
        seeds = super().seed(seed)
        self._streams = reset_streams(seeds[0], self.n_groups)
        return seeds

    def reset(self) -> VecEnvObs:
        """Resets and thaws every column; gives obs (N, …)."""
        for column in np.flatnonzero(self._stale).tolist():
            seed = self._refresh(column)
            if self._seeds[column] is None:
                self._seeds[column] = seed
        self.frozen[:] = False
        obs = super().reset()
        self._begun = True
        return obs

    def step_wait(self) -> VecEnvStepReturn:
        """Steps the columns that are not frozen, resets the finished ones; gives obs, reward, done (N, …) and infos."""
        rewards, dones = np.zeros(self.num_envs, dtype=np.float32), np.zeros(self.num_envs, dtype=bool)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(~self.frozen).tolist():
            obs, rewards[i], terminated, truncated, info = self.envs[i].step(self.actions[i])
            info = infos[i] = dict(info)
            info["TimeLimit.truncated"] = truncated and not terminated
            if terminated or truncated:
                dones[i] = True
                info["terminal_observation"] = copy.deepcopy(obs)
                obs = self._reset_column(i)
            self._save_obs(i, obs)
        return self._obs_from_buf(), rewards, dones, infos

    def _obs_from_buf(self) -> VecEnvObs:
        return dict_to_obs(self.observation_space, {key: rows.copy() for key, rows in self.buf_obs.items()})

    # ----------------------------------------------------------------------------------------------------------- forks

    def fork(self, sources: np.ndarray | Sequence[int]) -> VecEnvObs:
        """Member i continues from the exact state of member `sources[i]`; itself means untouched.

        Siblings share the random stream up to their next reset, which takes a fresh seed. What counts or logs over many
        episodes (running statistics, Monitor's lists and file) stays with its column, and so does `frozen`.

        Args:
            sources: (N,) int in 0 … N-1, any map: one to many, swaps, cycles.

        Returns:
            The observations (N, …) after the fork.

        Raises:
            ConfigError: Another shape, a dtype that is not an integer one, a column that does not exist, or no reset
                yet.
        """
        sources = check_sources(sources, self.num_envs)
        check_begun(self._begun, "fork")
        moved = np.flatnonzero(sources != np.arange(self.num_envs))
        self._copy_states(dict(zip(moved.tolist(), sources[moved].tolist(), strict=True)))
        for rows in self.buf_obs.values():
            rows[moved] = rows[sources[moved]]
        infos = [dict(self.reset_infos[source]) for source in sources[moved]]
        for column, info in zip(moved, infos, strict=True):
            self.reset_infos[column] = info
        self._stale[moved] = self._stale[sources[moved]] = True
        return self._obs_from_buf()

    def snapshot(self, column: int) -> Snapshot:
        """The exact state of one column, with its observation; later steps do not change it.

        Raises:
            ConfigError: No such column, or no reset yet.
        """
        check_column(column, self.num_envs)
        check_begun(self._begun, "snapshot")
        rows = {key: rows[column].copy() for key, rows in self.buf_obs.items()}
        return dataclasses.replace(capture(self.envs[column]), obs=rows)

    def restore(self, column: int, snapshot: Snapshot) -> VecEnvObs:
        """Puts one column into the state of a snapshot that `GroupVecEnv.snapshot` took; gives its observation row.

        Raises:
            ConfigError: No such column.
            ForkError: The snapshot is of another chain of types, or has no observation.
        """
        check_column(column, self.num_envs)
        if not isinstance(snapshot, Snapshot) or snapshot.obs is None:
            raise ForkError("expected a snapshot with an observation: take it with GroupVecEnv.snapshot, not capture")
        restore(self.envs[column], snapshot)
        for key, row in snapshot.obs.items():
            self.buf_obs[key][column] = row
        self._stale[column] = self._begun = True
        return dict_to_obs(self.observation_space, {key: row.copy() for key, row in snapshot.obs.items()})

    def reset_group(self, group: int) -> VecEnvObs:
        """Starts a group anew: its first member is reset with a fresh seed, the others continue from that same state.

        Thaws the group. Gives the observations of all columns (N, …).
        """
        check_group(group, self.n_groups)
        first, *others = columns = np.flatnonzero(self.group_of == group).tolist()
        self._stale[first] = True
        self._save_obs(first, self._reset_column(first))
        transfer(self.envs[first], *(self.envs[column] for column in others))
        for column in others:
            self.reset_infos[column] = dict(self.reset_infos[first])
        for rows in self.buf_obs.values():
            rows[columns] = rows[first]
        self._stale[columns] = self._begun = True
        self.frozen[columns] = False
        return self._obs_from_buf()

    def state(self) -> dict[str, Any]:
        """All that a run needs to go on exactly, as a tree of lists with one entry per column, or per group: `streams`.

        Unlike a fork it holds what counts or logs over many episodes, too.
        """
        columns = []
        for column, env in enumerate(self.envs):
            rows = {key: rows[column].copy() for key, rows in self.buf_obs.items()}
            columns.append(dataclasses.replace(capture(env, lasting=True), obs=rows))
        return {
            "columns": columns,
            "reset_infos": copy.deepcopy(self.reset_infos),
            "seeds": list(self._seeds),
            "options": copy.deepcopy(self._options),
            "stale": self._stale.tolist(),
            "frozen": self.frozen.tolist(),
            "streams": copy.deepcopy(self._streams),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from what `state` gave, of an env of the same layout; `state` stays as it is.

        Raises:
            ConfigError: Another number of columns or groups.
            ForkError: Envs of another chain of types.
        """
        check_state(state, self.num_envs, self.n_groups)
        for column, snapshot in enumerate(state["columns"]):
            self.restore(column, snapshot)
        self.reset_infos = copy.deepcopy(state["reset_infos"])
        self._seeds, self._options = list(state["seeds"]), copy.deepcopy(state["options"])
        self._stale[:], self.frozen[:] = state["stale"], state["frozen"]
        self._streams = copy.deepcopy(state["streams"])

    def _copy_states(self, source_of: dict[int, int]) -> None:
        """Copies states as if all at once: {column: its source}. A column is written once nobody waits to read it."""
        waiting = dict(source_of)
        while waiting:
            ready: dict[int, list[int]] = {}  # source: the columns to write
            for column in waiting.keys() - waiting.values():
                ready.setdefault(waiting.pop(column), []).append(column)
            for source, columns in ready.items():
                transfer(self.envs[source], *(self.envs[column] for column in columns))
            if not ready:  # only cycles are left: set one column's state aside and go round its cycle
                start = next(iter(waiting))
                aside, column = capture(self.envs[start]), start
                while (source := waiting.pop(column)) != start:
                    transfer(self.envs[source], self.envs[column])
                    column = source
                restore(self.envs[column], aside)

    def _reset_column(self, column: int) -> Any:
        """Resets one env, with a fresh seed if its generator was copied."""
        seed = self._refresh(column) if self._stale[column] else None
        obs, self.reset_infos[column] = self.envs[column].reset(seed=seed)
        return obs

    def _refresh(self, column: int) -> int | None:
        """Gives the column's generators a new stream and returns a seed for its reset, None where it needs none."""
        seed = int(self._streams[self.group_of[column]].integers(2**32))
        self._stale[column] = False
        return seed if fresh_rng(self.envs[column], seed) else None
