"""`make_group_env`: groups of an env, in the fastest of the vec envs that can hold them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from grpo_rl.errors import ConfigError, check_seed, check_whole, did_you_mean
from grpo_rl.groups.mujoco import MujocoVecEnv, supports
from grpo_rl.groups.vec_env import GroupVecEnv
from grpo_rl.groups.workers import SubprocGroupVecEnv
from grpo_rl.mujoco_log import quiet_build
from grpo_rl.registry import make_rendered


def make_group_env(
    env: str | Callable[..., gym.Env],
    n_groups: int = 1,
    group_size: int = 8,
    seed: int | None = None,
    monitor: bool = True,
    wrapper: Callable[[gym.Env], gym.Env] | None = None,
    vec_env_cls: type[VecEnv] | None = None,
    vec_env_kwargs: dict[str, Any] | None = None,
    **env_kwargs: Any,
) -> GroupVecEnv | SubprocGroupVecEnv:
    """Builds P groups of G envs.

    Args:
        env: A registered id, or an env class or factory called once per column.
        n_groups: P ≥ 1.
        group_size: G ≥ 1.
        seed: Seeds the first resets (seed + column), the action spaces and the stream of seeds for resets after forks.
        monitor: Wrap each env in SB3's Monitor, unless it is already, so that infos carry episode returns and lengths.
        wrapper: Applied to each env after Monitor, as SB3's `wrapper_class`.
        vec_env_cls: None: a `MujocoVecEnv` for the id of a MuJoCo v5 task, which is stepped as a batch on all cores,
            else a `GroupVecEnv`. DummyVecEnv: a `GroupVecEnv`. SubprocVecEnv: a `SubprocGroupVecEnv`, whole groups in
            worker processes. All give the same numbers (`MujocoVecEnv`: rewards to 1e-12).
        vec_env_kwargs: For SubprocVecEnv: `n_workers`, `start_method`.
        env_kwargs: For `gym.make`, the class or the factory.

    Raises:
        ConfigError: An unknown id, an env that cannot be made, observations that SB3 cannot batch, a number that is out
            of range, or another vec_env_cls.
        ForkError: The env cannot be forked exactly; the message says why and what to do. Snapshots that an env brings
            itself are probed on two more instances (`probe_fork`).
    """
    check_whole("n_groups", n_groups)
    check_whole("group_size", group_size)
    check_seed(seed)
    if isinstance(env, gym.Env) or not (isinstance(env, str) or callable(env)):
        raise ConfigError(f"expected an id, a class or a factory, got {env}: every column needs an env of its own")
    if not (wrapper is None or callable(wrapper)):
        raise ConfigError(f"wrapper={wrapper!r}: expected a wrapper's class, or a function (env) -> env")

    make = _group_class(vec_env_cls, vec_env_kwargs or {})
    if isinstance(env, str) and wrapper is None and vec_env_cls is None and not supports(env, env_kwargs):
        return MujocoVecEnv(env, n_groups * group_size, group_size, seed, monitor, **env_kwargs)

    def build(column: int) -> gym.Env:
        with quiet_build():
            made = make_rendered(env, **env_kwargs) if isinstance(env, str) else env(**env_kwargs)
        if not isinstance(made, gym.Env):
            raise ConfigError(f"{env}: expected that it makes a gymnasium.Env, got {made!r:.80}")
        if seed is not None:
            made.action_space.seed(seed + column)
        if monitor and not is_wrapped(made, Monitor):
            made = Monitor(made)
        return made if wrapper is None else wrapper(made)

    def builder(column: int) -> Callable[[], gym.Env]:
        return lambda: build(column)

    group_env = make([builder(column) for column in range(n_groups * group_size)], group_size)
    group_env.seed(seed)
    return group_env


def _group_class(vec_env_cls: type[VecEnv] | None, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What builds the groups: the class that holds them, with its arguments."""
    if vec_env_cls in (SubprocVecEnv, SubprocGroupVecEnv):
        if unknown := kwargs.keys() - {"n_workers", "start_method"}:
            raise ConfigError(f"vec_env_kwargs: {did_you_mean(min(unknown), ['n_workers', 'start_method'])}")
        return functools.partial(SubprocGroupVecEnv, **kwargs)
    if vec_env_cls not in (None, DummyVecEnv, GroupVecEnv):
        raise ConfigError(
            f"vec_env_cls={vec_env_cls!r}: groups live in this process (DummyVecEnv, the default) or in worker"
            " processes (SubprocVecEnv); another VecEnv keeps its envs where forks cannot reach them"
        )
    if kwargs:
        raise ConfigError(f"vec_env_kwargs={kwargs}: they are for vec_env_cls=SubprocVecEnv")
    return GroupVecEnv
