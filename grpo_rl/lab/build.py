"""From a recipe to what it describes: environments, an agent, an agent that was saved, a run's folder."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from grpo_rl import registry
from grpo_rl.checkpoint import checkpoint_steps, load_checkpoint
from grpo_rl.curriculum import Curriculum, CurriculumCallback, full_difficulty
from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.groups.make import make_group_env
from grpo_rl.groups.mujoco import MujocoVecEnv, supports
from grpo_rl.groups.observations import batchable
from grpo_rl.grpo import GRPO
from grpo_rl.loading import open_zip
from grpo_rl.mujoco_log import quiet_build
from grpo_rl.policies.language import CausalLMPolicy
from grpo_rl.recipes import (
    Environment,
    Recipe,
    algorithm_class,
    load_object,
    load_recipe,
    parameters,
    resolve,
    takes_schedule,
)
from grpo_rl.schedules import parse_schedule
from grpo_rl.text.prompt_env import PromptEnv
from grpo_rl.text.vec_env import TextVecEnv, is_text

CHECKPOINT = "checkpoint.safetensors"
"""Of a run, in its folder."""


def make_env(environment: Environment, training: bool = False, **kwargs: Any) -> gymnasium.Env:
    """One environment of the recipe with its wrappers; `kwargs` (such as render_mode) are added to its own.

    Its curriculum is followed in `training`; elsewhere the environment has the full difficulty.

    Raises:
        ConfigError: A package is missing, or the environment does not know an argument.
    """
    kwargs = environment.kwargs | ({} if training else environment.evaluation) | kwargs
    try:
        with quiet_build():
            if environment.class_ is not None:
                env = load_object(environment.class_)(**kwargs)
                env = env.column() if isinstance(env, TextVecEnv) else env
            else:
                env = registry.make(str(environment.id), **kwargs)
        for wrapper in environment.wrappers:
            settings = wrapper if isinstance(wrapper, Mapping) else {"class": wrapper}
            env = load_object(settings["class"])(env, **settings.get("kwargs", {}))
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        name = environment.id or environment.class_
        raise ConfigError(f"cannot make environment {name}: {' '.join(str(error).split())}") from error
    if environment.curriculum is None:
        return env
    settings = resolve(environment.curriculum)
    if not training:
        settings["difficulty"] = full_difficulty(settings["difficulty"])
    return Curriculum(env, **settings)


def env_maker(environment: Environment) -> Callable[[], gymnasium.Env]:
    """What makes the environments of an evaluation; of a `PromptEnv` the dataset is read once for all of them."""
    made = None if environment.class_ is None else load_object(environment.class_)
    if isinstance(made, type) and issubclass(made, PromptEnv):
        return make_env(environment).column  # type: ignore[attr-defined]
    return partial(make_env, environment)


def build_env(recipe: Recipe) -> VecEnv:
    """The training environment: groups for GRPO where exact forks are possible, else SB3's DummyVecEnv."""
    environment, algorithm = recipe.environment, algorithm_class(recipe)
    if (text := _text_env(recipe)) is not None:
        return text
    make = partial(make_env, environment, training=True)
    n_envs = environment.n_groups
    if issubclass(algorithm, GRPO):
        group_size = setting(recipe, "group_size")
        n_envs *= group_size
        workers = recipe.resources.workers
        plain = environment.id and not environment.wrappers and environment.curriculum is None and workers is None
        if plain and not supports(str(environment.id), environment.kwargs):
            return MujocoVecEnv(
                str(environment.id),
                n_envs,
                group_size,
                recipe.training.seed,
                n_threads=recipe.resources.threads,
                **environment.kwargs,
            )
        where: dict[str, Any] = (
            {} if workers is None else {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"n_workers": workers}}
        )
        try:
            return make_group_env(make, environment.n_groups, group_size, seed=recipe.training.seed, **where)
        except ForkError as error:
            if workers is not None:
                raise ConfigError(f"resources.workers={workers} is for envs that can be forked: {error}") from error
            # groups form in another way, which GRPO chooses and announces
    elif recipe.resources.workers is not None:
        raise ConfigError(f"resources.workers is for GRPO, not for {algorithm.__name__}: leave it out")
    env: VecEnv = DummyVecEnv([lambda: Monitor(batchable(make()))] * n_envs)
    return VecNormalize(env, gamma=setting(recipe, "gamma")) if environment.normalize else env


def talks(recipe: Recipe) -> bool:
    """Whether the recipe's agent is a language model of ours."""
    policy = recipe.model["policy"]
    return issubclass(algorithm_class(recipe).policy_aliases.get(policy, BaseAlgorithm), CausalLMPolicy)


def _text_env(recipe: Recipe) -> TextVecEnv | None:
    """The training environment where the recipe's class is one of texts: a PromptEnv, or what makes a TextVecEnv."""
    environment = recipe.environment
    made = None if environment.class_ is None else load_object(environment.class_)
    if made is None or (isinstance(made, type) and not issubclass(made, (PromptEnv, TextVecEnv))):
        return None
    try:
        made = made(**environment.kwargs)
    except TypeError as error:
        raise ConfigError(f"cannot make environment {environment.class_}: {error}") from error
    if not is_text(made):
        made.close()
        return None
    for name in ("wrappers", "curriculum", "normalize"):
        if getattr(environment, name):
            raise ConfigError(f"{recipe.source}, environment.{name}: not for texts, which are sampled as a whole")
    return TextVecEnv.of(made)


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


def load_agent(recipe: Recipe, path: Path, trust: bool = False) -> OnPolicyAlgorithm:
    """The agent saved at `path`, without an environment; code comes from the recipe, not from the file.

    Args:
        recipe: Its class and policy are loaded, and with them the files of code that it names.
        path: A zip that `save` has written.
        trust: Whether the zip may execute code.

    Raises:
        ConfigError: There is no such file, or it is damaged.
        UntrustedError: It would execute code, and `trust` is False.
    """
    if not path.is_file():
        raise ConfigError(f"no saved agent {path}")
    set_threads(recipe)
    policy, algorithm = _policy(recipe), algorithm_class(recipe)
    code = {"policy_kwargs": policy["policy_kwargs"]}
    if not isinstance(policy["policy"], str):
        code["policy_class"] = policy["policy"]
    elif talks(recipe):
        code = {}  # a file of a language model holds its configuration and tokenizer as plain data
    checked: dict[str, Any] = (
        {"trust": True} if issubclass(algorithm, GRPO) else {}
    )  # by open_zip, SB3's own algorithms too
    with open_zip(path, code, trust) as (file, _):
        return algorithm.load(file, device=recipe.resources.device, custom_objects=code, **checked)


def read_run(path: Path) -> Recipe:
    """The recipe of a run's folder.

    Raises:
        ConfigError: No such folder.
    """
    if not (path / "recipe.yaml").is_file():
        near = f"; runs there: {', '.join(sorted(p.parent.name for p in path.parent.glob('*/recipe.yaml'))) or 'none'}"
        raise ConfigError(f"{path} is no run: expected a folder with a recipe.yaml, such as runs/hopper-0-…{near}")
    return load_recipe(path / "recipe.yaml")


def open_run(
    path: Path, trust: bool = False, say: Callable[[str], None] = lambda line: None
) -> tuple[Recipe, OnPolicyAlgorithm]:
    """The recipe and the agent of a run's folder: model.zip, or the checkpoint where that is further.

    Args:
        path: The folder.
        trust: Whether its model.zip may execute code. A checkpoint never does.
        say: Takes the line that says which of the two it is.

    Raises:
        ConfigError: No such folder, or nothing that can be loaded in it.
        UntrustedError: As `load_agent`.
    """
    recipe, model, checkpoint = read_run(path), path / "model.zip", path / CHECKPOINT
    agent = load_agent(recipe, model, trust) if model.is_file() else None
    if agent is None and not checkpoint.is_file():
        raise ConfigError(f"{path} holds no saved agent (model.zip or {CHECKPOINT})")
    statistics = recipe.environment.normalize and checkpoint.is_file()  # VecNormalize's are in the checkpoint alone
    further = checkpoint.is_file() and agent is not None and checkpoint_steps(checkpoint) > agent.num_timesteps
    if agent is not None and not further and not statistics:
        say(f"{model}, {agent.num_timesteps:,} steps")
        return recipe, agent
    env = build_env(recipe)
    try:
        agent = build_agent(recipe, env)
        load_checkpoint(agent, checkpoint, say=lambda line: None)
    finally:
        env.close()
    say(f"{checkpoint}, after {agent.num_timesteps:,} of {recipe.training.steps:,} steps")
    return recipe, agent


def seen_by(agent: BaseAlgorithm) -> Callable[[Any], Any]:
    """Observations as the agent's VecNormalize, if it has one, shows them to it; no statistics move."""
    normalizer = agent.get_vec_normalize_env()
    return (lambda obs: obs) if normalizer is None else normalizer.normalize_obs


def drivers(agent: OnPolicyAlgorithm) -> list[BaseCallback]:
    """Callbacks that drive the curriculum of an agent's envs, where the agent does not do that itself."""
    env = agent.get_env()
    alone = env is not None and not isinstance(agent, GRPO) and any(env.env_is_wrapped(Curriculum))
    return [CurriculumCallback()] if alone else []


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


def setting(recipe: Recipe, name: str) -> Any:
    """An argument of the algorithm: the recipe's, else the default.

    Raises:
        KeyError: There is no such argument.
    """
    return recipe.optimization[name] if name in recipe.optimization else default(algorithm_class(recipe), name)


def default(cls: type, name: str) -> Any:
    """The default of an argument of a constructor, or of one that its **kwargs reach.

    Raises:
        KeyError: There is no such argument.
    """
    for base in cls.__mro__:
        found = inspect.signature(vars(base)["__init__"]).parameters.get(name) if "__init__" in vars(base) else None
        if found is not None:
            return found.default
    raise KeyError(name)
