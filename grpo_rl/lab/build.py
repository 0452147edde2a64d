"""From a recipe to what it describes: environments, an agent, an agent that was saved."""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch as th
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.groups.vec_env import make_group_env
from grpo_rl.grpo import GRPO
from grpo_rl.recipes import Environment, Recipe, algorithm_class, load_object, parameters, resolve, takes_schedule
from grpo_rl.schedules import parse_schedule


def make_env(environment: Environment, **kwargs: Any) -> gymnasium.Env:
    """One environment of the recipe with its wrappers; `kwargs` (such as render_mode) are added to its own.

    Raises:
        ConfigError: A package is missing, or the environment does not know an argument.
    """
    kwargs = environment.kwargs | kwargs
    try:
        if environment.class_ is not None:
            env = load_object(environment.class_)(**kwargs)
        else:
            env = gymnasium.make(str(environment.id), **kwargs)
        for wrapper in environment.wrappers:
            settings = wrapper if isinstance(wrapper, Mapping) else {"class": wrapper}
            env = load_object(settings["class"])(env, **settings.get("kwargs", {}))
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        name = environment.id or environment.class_
        raise ConfigError(f"cannot make environment {name}: {' '.join(str(error).split())}") from error
    return env


def build_env(recipe: Recipe) -> VecEnv:
    """The training environment: groups for GRPO where exact forks are possible, else SB3's DummyVecEnv."""
    environment, algorithm = recipe.environment, algorithm_class(recipe)
    make = partial(make_env, environment)
    n_envs = environment.n_groups
    if issubclass(algorithm, GRPO):
        group_size = _setting(recipe, "group_size")
        n_envs *= group_size
        try:
            return make_group_env(make, environment.n_groups, group_size, seed=recipe.training.seed)
        except ForkError:
            pass  # groups form in another way, which GRPO chooses and announces
    env: VecEnv = DummyVecEnv([lambda: Monitor(make())] * n_envs)
    return VecNormalize(env, gamma=_setting(recipe, "gamma")) if environment.normalize else env


def build_agent(recipe: Recipe, env: VecEnv) -> OnPolicyAlgorithm:
    """The untrained agent of a recipe on `env`, silent."""
    set_threads(recipe)
    algorithm = algorithm_class(recipe)
    hints = parameters(algorithm)
    settings: dict[str, Any] = {
        key: parse_schedule(value) if takes_schedule(hints[key]) and value is not None else resolve(value)
        for key, value in recipe.optimization.items()
    }
    settings |= _policy(recipe)
    try:
        return algorithm(env=env, seed=recipe.training.seed, device=recipe.resources.device, **settings)
    except AssertionError as error:  # SB3's way to refuse an argument or a space
        raise ConfigError(f"{recipe.source}: {error}") from error


def load_agent(recipe: Recipe, path: Path) -> OnPolicyAlgorithm:
    """The agent saved at `path`, without an environment; code comes from the recipe, never from the file.

    Raises:
        ConfigError: There is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"no saved agent {path}")
    set_threads(recipe)
    policy = _policy(recipe)
    code = {"policy_kwargs": policy["policy_kwargs"]}
    if not isinstance(policy["policy"], str):
        code["policy_class"] = policy["policy"]
    try:
        return algorithm_class(recipe).load(path, device=recipe.resources.device, custom_objects=code)
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded, it may be damaged: {' '.join(str(error).split())}") from error


def set_threads(recipe: Recipe) -> None:
    """Sets torch's CPU threads, for the process."""
    if recipe.resources.threads is not None:
        th.set_num_threads(recipe.resources.threads)


def _policy(recipe: Recipe) -> dict[str, Any]:
    settings = dict(recipe.model)
    return {
        "policy": resolve(settings.pop("policy")),
        "policy_kwargs": {key: resolve(value) for key, value in settings.items()},
    }


def _setting(recipe: Recipe, name: str) -> Any:
    """An argument of the algorithm: the recipe's, else the default."""
    if name in recipe.optimization:
        return recipe.optimization[name]
    for base in algorithm_class(recipe).__mro__:
        found = inspect.signature(vars(base)["__init__"]).parameters.get(name) if "__init__" in vars(base) else None
        if found is not None:
            return found.default
    raise KeyError(name)
