"""One worker process: what it does, and the parent's end of its pipe.

A request is (command, arguments, keys of snapshots that nobody has any more); an answer is (True, what it gave) or
(False, (the error, its traceback)).
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from grpo_rl.errors import ConfigError, ForkError, WorkerError
from grpo_rl.forks.snapshot import Snapshot, kinds
from grpo_rl.groups.vec_env import GroupVecEnv


class Host:
    """What a worker does when it is asked: each method is a command of the parent."""

    def __init__(self, env: GroupVecEnv) -> None:
        self.env = env
        self.held: dict[int, Snapshot] = {}

    def layout(self) -> tuple[Any, ...]:
        env = self.env
        return env.observation_space, env.action_space, kinds(env.envs[0])

    def step(self, actions: Any, frozen: np.ndarray) -> tuple[Any, ...]:
        self.env.frozen[:] = frozen
        _, rewards, dones, infos = self.env.step(actions)
        ended = np.flatnonzero(dones).tolist()
        return self.env.buf_obs, rewards, dones, infos, {column: self.env.reset_infos[column] for column in ended}

    def reset(self, seeds: list[int | None], options: list[dict[str, Any]]) -> tuple[Any, ...]:
        self.env._seeds, self.env._options = seeds, options
        self.env.reset()
        return self.env.buf_obs, self.env.reset_infos

    def reset_group(self, group: int) -> tuple[Any, ...]:
        self.env.reset_group(group)
        return self.env.buf_obs, self.env.reset_infos

    def seed(self, seeds: list[int | None], streams: list[np.random.Generator]) -> None:
        self.env._seeds, self.env._streams = seeds, streams

    def fork(self, sources: np.ndarray, arrivals: list[tuple[int, bytes]]) -> Any:
        """`sources` inside this worker, then states that came from other ones."""
        self.env.fork(sources)
        for column, state in arrivals:
            self.env.restore(column, pickle.loads(state))
        return self.env.buf_obs

    def send_off(self, column: int) -> bytes:
        """The state of a column that forks to another worker: siblings share its generator until its next reset."""
        state = _portable(self.env.snapshot(column))
        self.env._stale[column] = True
        return state

    def hold(self, column: int, key: int) -> None:
        self.held[key] = self.env.snapshot(column)

    def fetch(self, key: int) -> bytes:
        return _portable(self.held[key])

    def restore(self, column: int, snapshot: int | bytes) -> Any:
        self.env.restore(column, self.held[snapshot] if isinstance(snapshot, int) else pickle.loads(snapshot))
        return {key: rows[column] for key, rows in self.env.buf_obs.items()}

    def state(self) -> dict[str, Any]:
        return self.env.state()

    def set_state(self, state: dict[str, Any]) -> Any:
        self.env.set_state(state)
        return self.env.buf_obs

    def call(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return getattr(self.env, name)(*args, **keywords)


def _portable(snapshot: Snapshot) -> bytes:
    try:
        return cloudpickle.dumps(snapshot)
    except Exception as error:
        raise ForkError(
            f"{snapshot} cannot leave its worker, since it does not pickle ({error}): fork inside the groups of one"
            " worker, or use n_workers=1",
        ) from error


def dump(message: Any) -> bytes:
    """cloudpickle knows classes and functions of notebooks and scripts; plain pickle is faster, for steps."""
    if type(message) is tuple and message[0] in ("step", True):
        with contextlib.suppress(Exception):
            return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return cloudpickle.dumps(message)


def _failure(error: Exception) -> bytes:
    """The error as it is if it survives pickling, else its text alone; and its traceback."""
    text = traceback.format_exc()
    try:
        payload = cloudpickle.dumps((False, (error, text)))
        pickle.loads(payload)
    except Exception:
        payload = cloudpickle.dumps((False, (None, text)))
    return payload


def _work(connection: Connection, inherited: list[Connection], env_fns: CloudpickleWrapper, group_size: int) -> None:
    """A worker's life: build the envs, answer requests, go when the parent goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in inherited:  # or this worker would keep its siblings' pipes open when the parent dies
        other.close()
    np.random.seed()  # a forked process would share the parent's stream
    host: Host | None = None
    try:
        while True:
            command, args, released = pickle.loads(connection.recv_bytes())
            try:
                if command == "close":
                    break
                if host is None:
                    host = Host(GroupVecEnv(env_fns.var, group_size))
                for key in released:
                    host.held.pop(key, None)
                payload = dump((True, getattr(host, command)(*args)))
            except Exception as error:
                payload = _failure(error)
            connection.send_bytes(payload)
    except (EOFError, OSError):
        pass
    finally:
        if host is not None:
            host.env.close()


# ---------------------------------------------------------------------------------------------------- the parent's side


class Worker:
    """One process and its pipe. `columns` and `groups` are the slices of the whole that live there."""

    def __init__(
        self, context: Any, index: int, groups: slice, group_size: int, env_fns: Sequence[Any], others: list[Worker]
    ) -> None:
        self.index, self.groups = index, groups
        self.columns = slice(groups.start * group_size, groups.stop * group_size)
        self.owed = 0  # answers that have not been read
        self.released: collections.deque[int] = collections.deque()  # keys of held snapshots that nobody has any more
        self.connection, theirs = context.Pipe()
        forks = context.get_start_method() == "fork"
        inherited = [*(worker.connection for worker in others), self.connection] if forks else []
        args = (theirs, inherited, CloudpickleWrapper(list(env_fns[self.columns])), group_size)
        self.process = context.Process(target=_work, args=args, daemon=True, name=f"grpo_rl worker {index}")
        self.process.start()
        theirs.close()

    def __str__(self) -> str:
        first, last = self.groups.start, self.groups.stop - 1
        return f"worker {self.index} (group{f's {first} … {last}' if last > first else f' {first}'})"

    def send(self, command: str, *args: Any) -> None:
        while self.owed:  # of a call that was interrupted
            self.receive()
        released = [self.released.popleft() for _ in range(len(self.released))]
        try:
            self.connection.send_bytes(dump((command, args, released)))
        except OSError as error:
            raise self._died() from error
        self.owed += 1

    def receive(self) -> Any:
        """The next answer; raises what the worker raised, with its traceback as a note."""
        try:
            self.connection.poll(None)  # the wait that ctrl-C may interrupt: nothing is half read here
            message = self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._died() from error
        self.owed -= 1
        fine, answer = pickle.loads(message)
        if fine:
            return answer
        raised, text = answer
        if raised is None:
            raise WorkerError(f"{self}: {text.strip().splitlines()[-1]}\n\n{text}")
        raised.add_note(f"grpo_rl: raised in {self}:\n\n{text}")
        raise raised

    def _died(self) -> WorkerError:
        self.owed = 0
        self.process.join(5)
        code = self.process.exitcode
        how = f"was ended by signal {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        return WorkerError(
            f"{self} {how}, with nothing said. SIGKILL is often the system short of memory, SIGSEGV a crash inside the"
            " env's native code; an env that ends its process must not. The other workers were ended too"
        )

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send_bytes(dump(("close", (), [])))
        self.connection.close()

    def join(self) -> None:
        for end in (lambda: None, self.process.terminate, self.process.kill):
            end()
            self.process.join(5)
            if not self.process.is_alive():
                return


def start_context(start_method: str | None) -> Any:
    methods = multiprocessing.get_all_start_methods()
    if start_method is not None and start_method not in methods:
        raise ConfigError(f"start_method={start_method!r} is unknown here: use {', '.join(methods)} or None")
    context = multiprocessing.get_context(start_method or ("forkserver" if "forkserver" in methods else "spawn"))
    if context.get_start_method() == "forkserver":  # its first start imports this once for all workers
        context.set_forkserver_preload(["__main__", __name__])
    return context
