"""`SubprocGroupVecEnv`: groups in worker processes, each a `GroupVecEnv` of whole groups.

Same numbers as one `GroupVecEnv` in this process, bit for bit, since each group has its own stream of reset seeds. A
message goes to each worker and comes back at each step, with all of its columns. Forks inside a worker stay there, and
so do snapshots until they are asked for elsewhere; what crosses workers moves through the pipes. It differs from SB3's
`SubprocVecEnv` in that, and in that an env's error arrives as it was raised, with the env's own traceback, and ends all
workers; ctrl-C reaches the parent alone, which can still save what the workers hold.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.util import dict_to_obs, obs_space_info

from grpo_rl.errors import ConfigError, WorkerError
from grpo_rl.forks.snapshot import Snapshot, require_alike
from grpo_rl.groups.process import Worker, start_context
from grpo_rl.groups.threads import usable_cores
from grpo_rl.groups.vec_env import (
    check_column,
    check_frozen,
    check_group,
    check_sources,
    check_state,
    count_groups,
    reset_streams,
)


class HeldSnapshot:
    """A snapshot that stays in the worker where it was taken, as long as this object lives; `fetch` brings it here.

    A copy of it, or what comes of pickling it, is a `Snapshot`.
    """

    def __init__(self, env: SubprocGroupVecEnv, worker: Worker, key: int) -> None:
        self._env, self._worker, self._key = env, worker, key
        weakref.finalize(self, worker.released.append, key).atexit = False

    def fetch(self) -> Snapshot:
        """The snapshot itself; raises ForkError if it does not pickle."""
        return pickle.loads(self.portable())

    def portable(self) -> bytes:
        """The snapshot as bytes."""
        return self._env._ask([(self._worker, "fetch", self._key)])[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.portable(),)


class SubprocGroupVecEnv(VecEnv):
    """`GroupVecEnv` in worker processes: P groups of G envs, N = P·G columns, each group inside one worker.

    Worth its pipes where the env is slow: see docs/forking.md for measured figures. Attributes that `get_attr` gives
    are copies. A script that uses it needs `if __name__ == "__main__":`, as for SB3's SubprocVecEnv.

    Args:
        env_fns: One function per column (N), each building a new env, all alike. They reach the workers by cloudpickle.
        group_size: G.
        n_workers: 1 … P processes. None: as many as cores that this process may use, at most P.
        start_method: "forkserver", "spawn" or "fork". None: forkserver where the system has it, else spawn.

    Attributes:
        n_groups, group_size, group_of, frozen, reset_infos: As in `GroupVecEnv`.
        n_workers: Processes.
        closed: True after `close`, and after an error in a step or a reset, which ends all workers.

    Raises:
        ConfigError: N is not a multiple of G, or n_workers is out of range.
        ForkError: An env cannot be forked exactly, or two are not made of the same types.
        WorkerError: A worker died.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        group_size: int,
        n_workers: int | None = None,
        start_method: str | None = None,
    ) -> None:
        self.n_groups, self.group_size = count_groups(len(env_fns), group_size), group_size
        self.n_workers = _choose_workers(n_workers, self.n_groups)
        self.group_of = np.repeat(np.arange(self.n_groups), group_size)
        self.frozen = np.zeros(len(env_fns), dtype=bool)
        self.closed = False
        self._stepping: list[Worker] = []
        self._held = 0
        self._workers: list[Worker] = []
        context = start_context(start_method)
        shares = np.array_split(np.arange(self.n_groups), self.n_workers)
        try:
            for index, share in enumerate(shares):
                groups = slice(int(share[0]), int(share[-1]) + 1)
                self._workers.append(Worker(context, index, groups, group_size, env_fns, self._workers))
            self._owner = [worker for worker in self._workers for _ in range(worker.columns.start, worker.columns.stop)]
            (observation_space, action_space, first), *others = self._ask_all("layout", fatal=True)
            for _, _, other in others:
                require_alike(first, other)
            keys, shapes, dtypes = obs_space_info(observation_space)
            self.buf_obs = {key: np.zeros((len(env_fns), *shapes[key]), dtype=dtypes[key]) for key in keys}
            super().__init__(len(env_fns), observation_space, action_space)
        except BaseException:
            self.close()
            raise

    @property
    def frozen(self) -> np.ndarray:
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: Any) -> None:
        self._frozen = check_frozen(frozen, len(self.group_of))

    # ------------------------------------------------------------------------------------------------- SB3's interface

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """As `GroupVecEnv.seed`."""
        seeds = super().seed(seed)
        streams = reset_streams(seeds[0], self.n_groups)
        self._ask([(worker, "seed", seeds[worker.columns], streams[worker.groups]) for worker in self._workers])
        return seeds

    def reset(self) -> VecEnvObs:
        """Resets and thaws every column; gives obs (N, …)."""
        requests = [
            (worker, "reset", self._seeds[worker.columns], self._options[worker.columns]) for worker in self._workers
        ]
        for worker, (rows, infos) in zip(self._workers, self._ask(requests, fatal=True), strict=True):
            self._write(worker, rows)
            self.reset_infos[worker.columns] = infos
        self.frozen[:] = False
        self._reset_seeds()
        self._reset_options()
        return self._obs()

    def step_async(self, actions: np.ndarray) -> None:
        """Sends the actions to the workers that have a column to step."""
        self._stepping = [worker for worker in self._workers if not self.frozen[worker.columns].all()]
        self._send(
            [(worker, "step", actions[worker.columns], self.frozen[worker.columns]) for worker in self._stepping],
            fatal=True,
        )

    def step_wait(self) -> VecEnvStepReturn:
        """Steps the columns that are not frozen, resets the finished ones; gives obs, reward, done (N, …) and infos."""
        rewards, dones = np.zeros(self.num_envs, dtype=np.float32), np.zeros(self.num_envs, dtype=bool)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        answers = self._receive(self._stepping, fatal=True)
        for worker, (rows, its_rewards, its_dones, its_infos, starts) in zip(self._stepping, answers, strict=True):
            self._write(worker, rows)
            rewards[worker.columns], dones[worker.columns], infos[worker.columns] = its_rewards, its_dones, its_infos
            for column, info in starts.items():
                self.reset_infos[worker.columns.start + column] = info
        return self._obs(), rewards, dones, infos

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return self._call("get_attr", indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        self._call("set_attr", indices, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> Any:
        return self._call("env_method", indices, method_name, *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        return self._call("env_is_wrapped", indices, wrapper_class)

    def has_attr(self, attr_name: str) -> bool:
        return all(self._ask_all("call", "has_attr", (attr_name,), {}))

    def get_images(self) -> Sequence[np.ndarray | None]:
        return [image for images in self._ask_all("call", "get_images", (), {}) for image in images]

    def close(self) -> None:
        """Ends all workers, by force those that do not end within five seconds."""
        if self.closed:
            return
        self.closed = True
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join()

    # ----------------------------------------------------------------------------------------------------------- forks

    def fork(self, sources: np.ndarray | Sequence[int]) -> VecEnvObs:
        """As `GroupVecEnv.fork`. What crosses workers moves through the pipes, and raises ForkError if it cannot."""
        sources = check_sources(sources, self.num_envs)
        moved = np.flatnonzero(sources != np.arange(self.num_envs)).tolist()
        abroad = [column for column in moved if self._owner[column] is not self._owner[sources[column]]]
        travelling = sorted({int(sources[column]) for column in abroad})
        states = {source: self._ask([self._place(source, "send_off")])[0] for source in travelling}
        requests: list[tuple[Any, ...]] = []
        for worker in {self._owner[column].index: self._owner[column] for column in moved}.values():
            start, stop = worker.columns.start, worker.columns.stop
            inside, arrivals = np.arange(stop - start), []
            for column in moved:
                if self._owner[column] is worker and column in abroad:
                    arrivals.append((column - start, states[int(sources[column])]))
                elif self._owner[column] is worker:
                    inside[column - start] = sources[column] - start
            requests.append((worker, "fork", inside, arrivals))
        for (worker, *_), rows in zip(requests, self._ask(requests), strict=True):
            self._write(worker, rows)
        infos = [dict(self.reset_infos[sources[column]]) for column in moved]
        for column, info in zip(moved, infos, strict=True):
            self.reset_infos[column] = info
        return self._obs()

    def snapshot(self, column: int) -> HeldSnapshot:
        """The exact state of one column, with its observation. It stays in its worker until it is needed elsewhere."""
        check_column(column, self.num_envs)
        self._held += 1
        worker, command, column = self._place(column, "hold")
        self._ask([(worker, command, column, self._held)])
        return HeldSnapshot(self, worker, self._held)

    def restore(self, column: int, snapshot: HeldSnapshot | Snapshot) -> VecEnvObs:
        """As `GroupVecEnv.restore`; takes snapshots of this env, of another one, and of a `GroupVecEnv`."""
        check_column(column, self.num_envs)
        worker, command, inside = self._place(column, "restore")
        if not isinstance(snapshot, HeldSnapshot):
            what: int | bytes = cloudpickle.dumps(snapshot)
        else:
            what = snapshot._key if snapshot._worker is worker else snapshot.portable()
        (row,) = self._ask([(worker, command, inside, what)])
        for key, value in row.items():
            self.buf_obs[key][column] = value
        return dict_to_obs(self.observation_space, row)

    def reset_group(self, group: int) -> VecEnvObs:
        """As `GroupVecEnv.reset_group`."""
        check_group(group, self.n_groups)
        worker = self._owner[group * self.group_size]
        ((rows, infos),) = self._ask([(worker, "reset_group", group - worker.groups.start)], fatal=True)
        self._write(worker, rows)
        columns = slice(group * self.group_size, (group + 1) * self.group_size)
        inside = slice(columns.start - worker.columns.start, columns.stop - worker.columns.start)
        self.reset_infos[columns] = infos[inside]
        self.frozen[columns] = False
        return self._obs()

    def state(self) -> dict[str, Any]:
        """As `GroupVecEnv.state`, and the same tree: a run may go on in one process or in another number of workers."""
        parts = self._ask_all("state")
        state = {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
        state |= {"seeds": list(self._seeds), "options": list(self._options), "frozen": self.frozen.tolist()}
        return state | {"reset_infos": list(self.reset_infos)}

    def set_state(self, state: dict[str, Any]) -> None:
        """As `GroupVecEnv.set_state`."""
        check_state(state, self.num_envs, self.n_groups)
        requests: list[tuple[Any, ...]] = []
        for worker in self._workers:
            part = {name: state[name][worker.columns] for name in state if name != "streams"}
            requests.append((worker, "set_state", part | {"streams": state["streams"][worker.groups]}))
        for worker, rows in zip(self._workers, self._ask(requests), strict=True):
            self._write(worker, rows)
        self.reset_infos = [dict(info) for info in state["reset_infos"]]
        self._seeds, self._options = list(state["seeds"]), [dict(options) for options in state["options"]]
        self.frozen[:] = state["frozen"]

    # -------------------------------------------------------------------------------------------------------- messages

    def _place(self, column: int, command: str) -> tuple[Worker, str, int]:
        """Where a request about one column goes: (worker, command, its column there)."""
        column = range(self.num_envs)[column]
        return self._owner[column], command, column - self._owner[column].columns.start

    def _send(self, requests: Sequence[tuple[Any, ...]], fatal: bool = False) -> None:
        if self.closed:
            raise WorkerError("the workers were ended, by close() or by an error before: build the env anew")
        with self._ending_workers(fatal):
            for worker, command, *args in requests:
                worker.send(command, *args)

    def _receive(self, workers: Sequence[Worker], fatal: bool = False) -> list[Any]:
        """The answers of `workers`, all of which are read before the first error is raised."""
        answers, errors = [], []
        with self._ending_workers(fatal):
            for worker in workers:
                try:
                    answers.append(worker.receive())
                except Exception as error:
                    errors.append(error)
            if errors:
                raise errors[0]
        return answers

    @contextlib.contextmanager
    def _ending_workers(self, fatal: bool) -> Iterator[None]:
        """Ends all workers if one died, or at any error if it is `fatal`."""
        try:
            yield
        except Exception as error:
            if fatal or isinstance(error, WorkerError):
                self.close()
            raise

    def _ask(self, requests: Sequence[tuple[Any, ...]], fatal: bool = False) -> list[Any]:
        """Sends (worker, command, *args), one for each worker at most; gives their answers in order."""
        self._send(requests, fatal)
        return self._receive([request[0] for request in requests], fatal)

    def _ask_all(self, command: str, *args: Any, fatal: bool = False) -> list[Any]:
        return self._ask([(worker, command, *args) for worker in self._workers], fatal)

    def _call(self, name: str, indices: VecEnvIndices, *args: Any, **keywords: Any) -> list[Any]:
        """Calls a method of the workers' envs for some columns; gives one entry per column, in their order."""
        places = [self._place(column, "call") for column in self._get_indices(indices)]
        inside: dict[int, list[int]] = {}
        for worker, _, column in places:
            inside.setdefault(worker.index, []).append(column)
        requests = [
            (self._workers[index], "call", name, args, keywords | {"indices": columns})
            for index, columns in inside.items()
        ]
        answers = {index: iter(answer or ()) for index, answer in zip(inside, self._ask(requests), strict=True)}
        return [next(answers[worker.index], None) for worker, _, _ in places]

    def _write(self, worker: Worker, rows: dict[Any, np.ndarray]) -> None:
        for key, array in rows.items():
            self.buf_obs[key][worker.columns] = array

    def _obs(self) -> VecEnvObs:
        return dict_to_obs(self.observation_space, {key: rows.copy() for key, rows in self.buf_obs.items()})


def _choose_workers(n_workers: int | None, n_groups: int) -> int:
    if n_workers is None:
        return min(n_groups, usable_cores())
    if not 1 <= n_workers <= n_groups:
        raise ConfigError(
            f"n_workers: expected 1 … {n_groups}, since a group stays inside one worker, got {n_workers}:"
            f" use at most {n_groups}, or more groups"
        )
    return n_workers
