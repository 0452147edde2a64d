"""`gymnasium.vector` envs as SB3 vec envs.

The two differ in what a finished env does: SB3 resets it in the same step and puts the last observation into
info["terminal_observation"]; Gymnasium's default resets it in the next step, which ignores its action. So a VectorEnv
is never wrapped: its columns are built anew from what it was built from, and the one given is not stepped.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from grpo_rl.errors import ConfigError, ForkError, warn
from grpo_rl.groups.vec_env import GroupVecEnv


def from_vector_env(env: VectorEnv) -> VecEnv:
    """An SB3 vec env of as many columns as `env` has: a `GroupVecEnv` of one group, or a DummyVecEnv if it cannot fork.

    Built from the functions of a SyncVectorEnv or AsyncVectorEnv, else from the spec. Says in a warning that the env
    given is not stepped.

    Raises:
        ConfigError: Wrapped by a VectorWrapper, or built from neither, or from functions that give existing envs.
    """
    build, source = _builders(env)
    own = {id(column.unwrapped) for column in env.envs} if isinstance(env, SyncVectorEnv) else set()

    def monitored(make: Callable[[], gym.Env]) -> gym.Env:
        made = make()
        if id(made.unwrapped) in own:
            raise _refusal(env, "its functions return envs that exist already, which would be stepped twice")
        if made.observation_space != env.single_observation_space or made.action_space != env.single_action_space:
            made.close()
            raise _refusal(env, f"its {source} gives an env with other spaces than its own")
        return made if is_wrapped(made, Monitor) else Monitor(made)

    columns: list[Callable[[], gym.Env]] = [functools.partial(monitored, make) for make in build]
    try:
        made: VecEnv = GroupVecEnv(columns, group_size=len(columns))
    except ForkError:
        made = DummyVecEnv(columns)
    warn(
        f"{env} is a gymnasium VectorEnv: {env.num_envs} new envs were built from its {source}, with SB3's way to"
        " reset, and the one that was given is not stepped. make_group_env(id_or_factory, n_groups, group_size) builds"
        " them without this warning, and more than one group."
    )
    return made


def _builders(env: VectorEnv) -> tuple[Sequence[Callable[[], gym.Env]], str]:
    if isinstance(env, VectorWrapper):
        raise _refusal(env, f"what {type(env).__name__} does to all columns would be lost")
    if isinstance(env, SyncVectorEnv | AsyncVectorEnv):
        return env.env_fns, "env_fns"
    if env.spec is None or env.spec.entry_point is None:
        raise _refusal(env, "it says neither by env_fns nor by a spec how to build one of its envs")
    spec = copy.deepcopy(env.spec)
    kwargs: dict[str, Any] = {
        name: value
        for name, value in spec.kwargs.items()
        if name not in ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
    }
    spec.kwargs = {}
    return [functools.partial(gym.make, spec, **kwargs)] * env.num_envs, "spec"


def _refusal(env: VectorEnv, reason: str) -> ConfigError:
    name = "your_function" if env.spec is None else f'"{env.spec.id}"'
    return ConfigError(
        f"{env} is a gymnasium VectorEnv, not an SB3 VecEnv, and cannot be converted: {reason}. Write"
        f" GRPO(policy, make_group_env({name}, n_groups=1, group_size={env.num_envs}))"
    )
