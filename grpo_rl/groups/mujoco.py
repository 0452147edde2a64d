"""`MujocoVecEnv`: Gymnasium's eleven MuJoCo v5 tasks stepped as one batch, on all cores, with exact forks; `make_vec`.

Columns share one model and have an mjData each. A step is `mj_step` for every column on a few threads (`physics`), then
array functions over the batch (`mujoco_tasks`). Resets are Gymnasium's own code. Observations, ends and random streams
are bit-equal to those of Gymnasium's envs, rewards to 1e-12.

Where it differs from Gymnasium's envs: all columns share the model, so what changes it changes all of them; the
settings are fixed when the env is built; cacc, cfrc_int and cfrc_ext are filled for tasks that read them only; a
column's mjData is up to date when `get_attr` or `env_method` reaches it, not if it was kept from before a step.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from grpo_rl.errors import ConfigError, check_seed, check_whole, warn
from grpo_rl.forks.snapshot import Snapshot
from grpo_rl.groups.mujoco_tasks import TASKS, Task
from grpo_rl.groups.observations import batchable
from grpo_rl.groups.physics import make_physics
from grpo_rl.groups.threads import usable_cores
from grpo_rl.groups.vec_env import GroupVecEnv, check_column
from grpo_rl.mujoco_log import quiet_build
from grpo_rl.registry import find_env, make_rendered

_FOLDER = "gymnasium.envs.mujoco."
_MAKE = frozenset(["max_episode_steps", "disable_env_checker"])  # arguments of gym.make that the engine honours


def supports(env_id: str, kwargs: dict[str, Any] | None = None) -> str:
    """Why `gym.make(env_id, **kwargs)` cannot be stepped as a batch; "" if it can."""
    kwargs = {} if kwargs is None else kwargs
    try:
        find_env(env_id)
        spec = gym.spec(env_id)
    except (gym.error.Error, ConfigError) as error:
        return str(error)
    if _task_class(spec) is None:
        return f"{env_id} is not one of Gymnasium's MuJoCo v5 tasks"
    if spec.additional_wrappers:
        return f"{env_id} is registered with wrappers of its own"
    try:
        import mujoco  # type: ignore[import-untyped]

        known = _arguments(spec)
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        return f"MuJoCo cannot be imported: {error}"
    if not hasattr(mujoco, "mj_copyData"):
        return "this MuJoCo has no mj_copyData in Python: 3.5 has"
    if unknown := sorted(kwargs.keys() - known - _MAKE):
        return f"it has no argument {', '.join(unknown)}"
    if kwargs.get("render_mode") == "human":
        return "render_mode='human' opens a window for each env"
    return ""


def _task_class(spec: Any) -> type[Task] | None:
    entry = spec.entry_point if isinstance(spec.entry_point, str) else ""
    return TASKS.get(entry.removeprefix(_FOLDER)) if entry.startswith(_FOLDER) else None


def _arguments(spec: Any) -> set[str]:
    """The names of a task's constructor arguments, those for rendering included."""
    task: Any = gym.envs.registration.load_env_creator(spec.entry_point)
    names = set(inspect.signature(task).parameters) | set(inspect.signature(task.__mro__[1]).parameters)
    return names - {"kwargs", "model_path", "observation_space"}


def _settings(base: gym.Env, given: dict[str, Any]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(type(base)).parameters.items()} | given


# ------------------------------------------------------------------------------------------------------------- the env


class MujocoVecEnv(GroupVecEnv):
    """P groups of G columns of one MuJoCo v5 task, N = P·G, stepped as a batch.

    Args:
        env_id: An id for which `supports` gives no reason against it.
        n_envs: N.
        group_size: G; None for N, one group.
        seed: Seeds the first resets (seed + column), the action spaces and the seeds of resets that follow forks.
        monitor: Keep episode statistics as SB3's Monitor does, so that infos carry episode returns and lengths.
        n_threads: Threads that step, the caller's among them; None for one per usable core, but four columns for each.
        env_kwargs: For `gym.make`.

    Raises:
        ConfigError: The engine does not support this env, or a number is out of range.
    """

    def __init__(
        self,
        env_id: str,
        n_envs: int = 1,
        group_size: int | None = None,
        seed: int | None = None,
        monitor: bool = True,
        n_threads: int | None = None,
        **env_kwargs: Any,
    ) -> None:
        if reason := supports(env_id, env_kwargs):
            raise ConfigError(f"{env_id} cannot be stepped as a batch: {reason}. make_vec gives an env that can do it")
        check_whole("n_envs", n_envs)
        check_whole("n_threads", 1 if n_threads is None else n_threads)
        check_seed(seed)
        with quiet_build():
            made: dict[str, Any] = {"render_mode": "rgb_array"} | env_kwargs
            first = gym.make(env_id, **made)
        template, spec = Monitor(first) if monitor else first, first.spec
        super().__init__([lambda: _column(template) for _ in range(n_envs)], group_size or n_envs)
        bases: list[Any] = [env.unwrapped for env in self.envs]
        task_class = _task_class(spec)
        assert spec is not None and task_class is not None
        self.task = task_class(_settings(bases[0], spec.kwargs), bases[0])
        (self._obs,) = self.buf_obs.values()  # (N, D), where every reset and fork writes
        self._bases, self._datas = bases, [base.data for base in bases]
        self._model = bases[0].model
        self._limits: list[Any] = [_layer(env, TimeLimit) for env in self.envs]
        self._monitors: list[Any] = [_layer(env, Monitor) for env in self.envs]
        self._spare: list[Any] = []
        self._written = False  # whether someone may have written to the columns' MjData
        names = tuple(dict.fromkeys((*self.task.reads, *self.task.moves)))
        n_threads = n_threads or min(usable_cores(), -(-n_envs // 4))
        self._physics = make_physics(self._model, self._datas, bases[0].frame_skip, names, self.task.rne, n_threads)
        if seed is not None:
            for column, env in enumerate(self.envs):
                env.action_space.seed(seed + column)
        self.seed(seed)

    # ---------------------------------------------------------------------------------------------------------- step

    def step_wait(self) -> VecEnvStepReturn:
        """Steps the columns that are not frozen, resets the finished ones; gives obs, reward, done (N, …) and infos."""
        n_envs, rows = self.num_envs, self._obs
        active = np.flatnonzero(~self.frozen).tolist() if self.frozen.any() else list(range(n_envs))
        if not active:
            return rows.copy(), np.zeros(n_envs, np.float32), np.zeros(n_envs, bool), [{} for _ in range(n_envs)]
        some = slice(None) if len(active) == n_envs else active
        actions = np.asarray(self.actions)
        if actions.shape != (n_envs, self._model.nu):
            raise ConfigError(f"actions: expected shape ({n_envs}, {self._model.nu}), got {actions.shape}")
        obs, outcome = self._simulate(active, actions, some)
        ended = outcome.terminated | self._count(active, outcome.reward)
        rows[some] = obs
        rewards, dones = np.zeros(n_envs, np.float32), np.zeros(n_envs, bool)
        rewards[some], dones[some] = outcome.reward, ended
        infos = _as_dicts(outcome.infos | {"TimeLimit.truncated": ended & ~outcome.terminated})
        for k in np.flatnonzero(ended).tolist():
            self._finish(active[k], infos[k], obs[k])
        if len(active) < n_envs:
            known = dict(zip(active, infos, strict=True))
            infos = [known.get(column, {}) for column in range(n_envs)]
        return rows.copy(), rewards, dones, infos

    def _simulate(self, active: list[int], actions: np.ndarray, some: Any) -> tuple[np.ndarray, Any]:
        """Physics for the `active` columns, and what the task makes of it: obs (n, D) and the outcome."""
        if self._written:
            self._physics.adopt(range(self.num_envs))
            self._written = False
        task, velocity = self.task, None
        before = task.position(self._physics.read(active, task.moves)) if task.moves else None
        self._physics.step(active, actions)
        fields = self._physics.read(active)
        if before is not None:
            velocity = (task.position(fields) - before) / task.dt
        return task.observe(fields), task.outcome(fields, velocity, actions[some])

    def _count(self, active: list[int], reward: np.ndarray) -> np.ndarray:
        """Counts a step in TimeLimit and Monitor; (n,) bool: which columns have reached their limit."""
        values, limits, monitors = reward.tolist(), self._limits, self._monitors
        reached = np.zeros(len(active), dtype=bool)
        for k, column in enumerate(active):
            if (limit := limits[column]) is not None:
                if limit._elapsed_steps is None:
                    raise gym.error.ResetNeeded(f"expected reset() before the first step() of column {column}")
                limit._elapsed_steps += 1
                reached[k] = limit._elapsed_steps >= limit._max_episode_steps
            if (monitor := monitors[column]) is not None:
                monitor.rewards.append(values[k])
                monitor.total_steps += 1
        return reached

    def _finish(self, column: int, info: dict[str, Any], obs: np.ndarray) -> None:
        """The end of an episode: Monitor's entry, the last observation, and a reset."""
        if (monitor := self._monitors[column]) is not None:
            total, length, seconds = sum(monitor.rewards), len(monitor.rewards), time.time() - monitor.t_start
            monitor.episode_returns.append(total)
            monitor.episode_lengths.append(length)
            monitor.episode_times.append(seconds)
            info["episode"] = {"r": round(total, 6), "l": length, "t": round(seconds, 6)}
        info["terminal_observation"] = obs.copy()
        self._obs[column] = self._reset_column(column)

    def close(self) -> None:
        """Ends the threads and closes the renderers."""
        self._physics.close()
        super().close()

    # ---------------------------------------------------- what reads or writes the columns' own envs and their MjData

    def _get_target_envs(self, indices: VecEnvIndices) -> list[gym.Env]:
        """The envs whose attributes and methods are asked for: up to date, and read again before the next step."""
        if hasattr(self, "_physics"):  # SB3 asks for the render mode before there is any
            self._physics.settle(range(self.num_envs))
            self._written = True
        return super()._get_target_envs(indices)

    def get_images(self) -> Sequence[np.ndarray | None]:
        """One image of each column, (height, width, 3) uint8."""
        self._physics.settle(range(self.num_envs))
        return super().get_images()

    def snapshot(self, column: int) -> Snapshot:
        """See `GroupVecEnv.snapshot`."""
        check_column(column, self.num_envs)
        self._physics.settle([column])
        return super().snapshot(column)

    def restore(self, column: int, snapshot: Snapshot) -> VecEnvObs:
        """See `GroupVecEnv.restore`."""
        obs = super().restore(column, snapshot)
        self._physics.adopt([column])
        return obs

    def state(self) -> dict[str, Any]:
        """See `GroupVecEnv.state`."""
        self._physics.settle(range(self.num_envs))
        return super().state()

    def reset(self) -> VecEnvObs:
        """Resets and thaws every column; gives obs (N, D)."""
        obs = super().reset()
        self._physics.adopt(range(self.num_envs))
        return obs

    def reset_group(self, group: int) -> VecEnvObs:
        """See `GroupVecEnv.reset_group`."""
        obs = super().reset_group(group)
        self._physics.adopt(np.flatnonzero(self.group_of == group).tolist())
        return obs

    def _reset_column(self, column: int) -> Any:
        obs = super()._reset_column(column)
        self._physics.adopt([column])
        return obs

    def _copy_states(self, source_of: dict[int, int]) -> None:
        """Copies states as if all at once: {column: its source}.

        mjData, step counts and drawn goals are all that differs between columns. Generators need not be copied: the
        tasks draw at resets only, and each copy takes a fresh seed there.
        """
        import mujoco

        model, datas = self._model, self._datas
        sources = set(source_of.values())
        self._physics.settle(sorted(sources))
        counted = {source: self._counts(source) for source in sources}
        origin, overwritten = dict(enumerate(datas)), source_of.keys() & sources
        while len(self._spare) < len(overwritten):
            self._spare.append(mujoco.MjData(model))
        for spare, column in zip(self._spare, overwritten, strict=False):
            mujoco.mj_copyData(spare, model, datas[column])
            origin[column] = spare
        for column, source in source_of.items():
            mujoco.mj_copyData(datas[column], model, origin[source])
            elapsed, rewards, drawn = counted[source]
            if (limit := self._limits[column]) is not None:
                limit._elapsed_steps = elapsed
            if (monitor := self._monitors[column]) is not None:
                monitor.rewards, monitor.needs_reset = list(rewards), False
            for name, value in drawn.items():
                setattr(self._bases[column], name, value)
        self._physics.adopt(list(source_of))

    def _counts(self, column: int) -> tuple[int | None, list[float], dict[str, Any]]:
        limit, monitor, base = self._limits[column], self._monitors[column], self._bases[column]
        drawn = {name: getattr(base, name) for name in self.task.drawn}
        return limit and limit._elapsed_steps, monitor.rewards if monitor else [], drawn


def _layer(env: Any, kind: type) -> Any:
    """The wrapper of this type in the chain of `env`, or None."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, kind):
            return env
        env = env.env
    return None


def _column(env: Any) -> Any:
    """A copy of a wrapped env with an MjData of its own that shares its model, without compiling it again."""
    import mujoco

    made = object.__new__(type(env))  # not copy.copy: EzPickle would build a new env
    vars(made).update({name: _own(value) for name, value in vars(env).items()})
    if isinstance(env, gym.Wrapper):
        made.env = _column(env.env)
        return made
    made.data = mujoco.MjData(made.model)
    made._np_random = None
    made.mujoco_renderer = copy.copy(env.mujoco_renderer)
    made.mujoco_renderer.data, made.mujoco_renderer._viewers = made.data, {}
    return made


def _own(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, np.ndarray | list | dict | gym.Space) else value


def _as_dicts(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """n dicts from arrays (n,) or (n, k); numbers come as Python's."""
    lists = [values.tolist() if values.ndim == 1 else list(values.copy()) for values in columns.values()]
    rows = map(zip, itertools.repeat(tuple(columns)), zip(*lists, strict=True))
    return list(map(dict, rows))  # half the time of a comprehension


def make_vec(
    env_id: str, n_envs: int = 1, seed: int | None = None, n_threads: int | None = None, **env_kwargs: Any
) -> VecEnv:
    """The fastest SB3 VecEnv for an id: `MujocoVecEnv` where it can be, else SB3's DummyVecEnv, and a warning says so.

    Both give the same numbers for the same seed, and both monitor episodes.

    Args:
        env_id: A registered id.
        n_envs: N ≥ 1.
        seed: Seeds the first reset of column i with seed + i, and its action space.
        n_threads: See `MujocoVecEnv`.
        env_kwargs: For `gym.make`.

    Raises:
        ConfigError: No such id, an env that cannot be made, or a number that is out of range.
    """
    if not isinstance(env_id, str):
        raise ConfigError(
            f"make_vec: expected a registered id, such as 'HalfCheetah-v5', got {env_id!r:.80}; for a class or a"
            " factory take SB3's make_vec_env"
        )
    check_whole("n_envs", n_envs)
    check_whole("n_threads", 1 if n_threads is None else n_threads)
    check_seed(seed)
    if reason := supports(env_id, env_kwargs):
        warn(f"{env_id} is stepped one env after another, not as a batch: {reason}")
        build = functools.partial(make_rendered, env_id)
        return make_vec_env(build, n_envs, seed, env_kwargs=env_kwargs, wrapper_class=batchable)
    return MujocoVecEnv(env_id, n_envs, seed=seed, n_threads=n_threads, **env_kwargs)
