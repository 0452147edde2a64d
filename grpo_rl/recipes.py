"""Recipes: one YAML file says what is trained, where, for how long and with which settings.

    description: one line for `grpo-rl list`
    class: GRPO                    # or vine.py:VineGRPO, a file next to the recipe, or module:Name
    training:      {steps: 1e6, seed: 0}
    environment:   {id: Hopper-v5, n_groups: 1, kwargs: {}, wrappers: []}     # or the name of a file in envs/
    model:         {policy: MlpPolicy, net_arch: [64, 64], log_std_init: -1}  # the policy, and SB3's policy_kwargs
    optimization:  {learning_rate: {start: 3e-4, end: 0}, value_head: true}   # GRPO's own arguments
    resources:     {device: cpu, threads: 1}

`optimization` is checked against the signature of the class, `model` against that of the policy: there is no second
list of their arguments. In both, and for `class` and `wrappers`, `file.py:Name` or `module:Name` names Python code;
files are looked up from the folder of the recipe. Importing this module loads neither torch nor SB3.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_rl.errors import ConfigError, did_you_mean, nearest
from grpo_rl.plain_yaml import dump_yaml, parse_yaml
from grpo_rl.schedules import parse_schedule

if TYPE_CHECKING:
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
    from stable_baselines3.common.policies import BasePolicy

PACKAGE = Path(__file__).parent


@dataclass
class Training:
    """How long, and with which random numbers.

    Attributes:
        steps: Environment steps in all; those of forked members count.
        seed: Of the agent and its environments.
        episodes: Of each evaluation after training: so many with the mode of the policy, so many with sampled actions.
        wandb: A project of Weights & Biases that the run is logged to.
    """

    steps: int = 100_000
    seed: int = 0
    episodes: int = 20
    wandb: str | None = None


@dataclass
class Environment:
    """What the agent acts in.

    Attributes:
        id: A Gymnasium id. Either this or `class_`.
        class_: `class` in YAML: a `gymnasium.Env` by `file.py:Name` or `module:Name`.
        kwargs: Given to the environment's constructor.
        evaluation: The same for evaluations, over `kwargs`: held-out data, for example.
        wrappers: From the inside out; each `module:Name`, or {class: module:Name, kwargs: {...}}.
        n_groups: Groups side by side, of `optimization.group_size` members each (of one, where the class has none).
        curriculum: Arguments of `grpo_rl.curriculum.Curriculum`, for training; evaluations are at the full difficulty.
        normalize: Put SB3's VecNormalize around it: for SB3's own algorithms. GRPO normalises in its policy.
    """

    id: str | None = None
    class_: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Any] = field(default_factory=list)
    n_groups: int = 1
    curriculum: dict[str, Any] | None = None
    normalize: bool = False


@dataclass
class Resources:
    """On what it runs.

    Attributes:
        device: A torch device. "auto" takes a GPU if there is one, which pays for images and large networks.
        threads: Of torch on the CPU, and of MuJoCo's physics where it is stepped as a batch; None leaves them their own
            choice. Small networks are fastest with one.
        workers: Processes that hold the environments, whole groups each; None: they live in this one.
    """

    device: str = "cpu"
    threads: int | None = 1
    workers: int | None = None


@dataclass
class Recipe:
    """A checked recipe. `model` and `optimization` hold what YAML held; `source` is what messages call it."""

    name: str
    source: str
    description: str = ""
    class_: str = "GRPO"
    training: Training = field(default_factory=Training)
    environment: Environment = field(default_factory=Environment)
    model: dict[str, Any] = field(default_factory=lambda: {"policy": "MlpPolicy"})
    optimization: dict[str, Any] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)

    def to_yaml(self) -> str:
        """The whole recipe, defaults included; `load_recipe` reads it back. Code files are named by absolute path."""
        data = {key.rstrip("_"): value for key, value in asdict(self).items() if key != "source"}
        data["environment"] = {key.rstrip("_"): value for key, value in data["environment"].items()}
        if self.training.wandb is None:  # no setting that a study's numbers depend on
            del data["training"]["wandb"]
        if self.environment.curriculum is None:
            del data["environment"]["curriculum"]
        if not self.environment.evaluation:
            del data["environment"]["evaluation"]
        if self.resources.workers is None:
            del data["resources"]["workers"]
        return dump_yaml(data)


SECTIONS = ("training", "environment", "model", "optimization", "resources")
_TOP = ("name", "description", "class", *SECTIONS)
# Arguments of an algorithm that other sections, or the run itself, provide.
NOT_OPTIMIZATION = {
    *("self", "policy", "env", "policy_kwargs", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"),
    *("rollout_buffer_class", "rollout_buffer_kwargs"),
}
NOT_MODEL = {"self", "observation_space", "action_space", "lr_schedule", "value_head", "normalize_obs", "use_sde"}


# ---------------------------------------------------------------------------------------------------------------- files


def shipped() -> Path:
    """The folder of agents/, envs/ and experiments/: the root of a checkout, else grpo_rl/_recipes/ of the wheel."""
    project = PACKAGE.parent / "pyproject.toml"
    if project.is_file() and 'name = "grpo_rl"' in project.read_text(encoding="utf-8"):
        return PACKAGE.parent
    return PACKAGE / "_recipes"


def names(folder: str = "agents") -> list[str]:
    """Names of the YAML files in agents/, envs/ or experiments/, sorted."""
    return sorted(path.stem for path in (shipped() / folder).glob("*.yaml"))


def find(name: str | Path, folder: str = "agents") -> Path:
    """The file behind a name ("hopper": agents/hopper.yaml), or behind a path (a Path, or with a slash or .yaml in it).

    Raises:
        ConfigError: There is none.
    """
    path = Path(name)
    if isinstance(name, Path) or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not _is_file(path):
            raise ConfigError(
                f"no file {path}: give the path of a YAML file, or one of the names {', '.join(names(folder))}"
            )
        return path
    if str(name) not in names(folder):
        kind = {"agents": "recipe", "envs": "environment", "experiments": "study"}[folder]
        raise ConfigError(f'unknown {kind} "{name}": {did_you_mean(str(name), names(folder))}')
    return shipped() / folder / f"{name}.yaml"


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: No YAML, or no mapping.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; expected YAML") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        found = "nothing: the file is empty" if data is None else type(data).__name__
        raise ConfigError(f"{path}: expected sections ({', '.join(SECTIONS)}), found {found}")
    return data


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping of several, the later ones winning key by key, at any depth."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


# -------------------------------------------------------------------------------------------------------------- recipes


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name or path, with `section.key=value` overrides, checked.

    Raises:
        ConfigError: Names the file, the section and the nearest valid names.
    """
    path = find(name)
    return make_recipe(read_recipe(path), label(path), path.parent, overrides)


def read_recipe(name: str | Path) -> dict[str, Any]:
    """What the file of a recipe holds, unchecked; its code references hold absolute paths, its name is the file's."""
    path = find(name)
    data = read_yaml(path)
    return {"name": path.stem} | {key: anchor(value, path.parent) for key, value in data.items()}


def make_recipe(
    data: Mapping[str, Any], source: str, folder: Path | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """A checked recipe from what a YAML file holds.

    Args:
        data: Top-level keys and sections. Not changed.
        source: What messages call it.
        folder: Where `file.py:Name` and the files of `environment` are looked up; the current folder for overrides.
        overrides: `section.key=value`, deeper for mappings (`environment.kwargs.gravity=-5`).

    Raises:
        ConfigError: Anything unknown, of a wrong type or missing; one line, however long what it quotes.
    """
    try:
        return _make_recipe(data, source, folder or Path.cwd(), overrides)
    except ConfigError as error:
        raise ConfigError(textwrap.shorten(str(error), 1500, placeholder=" …")) from error.__cause__


def _make_recipe(data: Mapping[str, Any], source: str, folder: Path, overrides: Sequence[str]) -> Recipe:
    data = dict(data)
    for key in data:
        if key not in _TOP:
            raise ConfigError(f'{source}: unknown section "{key}": {did_you_mean(str(key), _TOP)}')
    environment = data.get("environment")
    if isinstance(environment, str):
        path = find(environment if environment in names("envs") else folder / environment, "envs")
        data["environment"] = anchor(read_yaml(path), path.parent)
    for key in SECTIONS:
        section = data.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise ConfigError(f"{source}, {key}: expected a mapping of settings, got {section!r}")
        for name in section or {}:
            if not isinstance(name, str):
                raise ConfigError(f"{source}, {key}: expected names of settings, got {name!r}")
        data[key] = anchor(section or {}, folder)
    changes = dict(_parse_override(text) for text in overrides)
    for dotted, value in changes.items():
        section, *keys = dotted.split(".")
        data[section] = merge(data[section], _nest(keys, anchor(value, Path.cwd())))

    def where(section: str, key: str) -> str:
        return "command line" if any(f"{dotted}.".startswith(f"{section}.{key}.") for dotted in changes) else source

    class_ = anchor(data.get("class", "GRPO"), folder)
    sections = {}
    for section, kind in {"training": Training, "environment": Environment, "resources": Resources}.items():
        hints = typing.get_type_hints(kind)
        valid = {item.name.rstrip("_"): hints[item.name] for item in fields(kind)}
        checked = check(section, data[section], valid, where)
        sections[section] = kind(**{"class_" if key == "class" else key: value for key, value in checked.items()})
    recipe = Recipe(
        name=check_name(str(data.get("name", "run")), source),
        source=source,
        description=str(data.get("description", "")),
        class_=class_,
        model={"policy": "MlpPolicy"} | data["model"],
        optimization=data["optimization"],
        **sections,
    )
    _check_environment(recipe, where)
    algorithm = algorithm_class(recipe)
    if recipe.environment.normalize and "normalize_obs" in parameters(algorithm):
        raise ConfigError(
            f"{where('environment', 'normalize')}, environment.normalize: is for SB3's own algorithms; "
            "say optimization.normalize_obs and optimization.normalize_reward"
        )
    recipe.optimization = check("optimization", recipe.optimization, parameters(algorithm, NOT_OPTIMIZATION), where)
    policy = _policy_class(recipe, algorithm, where)
    valid = {"policy": str, **parameters(policy, NOT_MODEL)}
    recipe.model = check("model", recipe.model, valid, where)
    return recipe


def algorithm_class(recipe: Recipe) -> type[OnPolicyAlgorithm]:
    """The class that a recipe trains: GRPO, a subclass of it, or another on-policy algorithm with SB3's interface."""
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

    if recipe.class_ == "GRPO":
        from grpo_rl.grpo import GRPO

        return GRPO
    found = load_object(recipe.class_)
    if not (isinstance(found, type) and issubclass(found, OnPolicyAlgorithm)):
        raise ConfigError(
            f"{recipe.source}, class: {recipe.class_} is not GRPO, nor another on-policy algorithm of SB3"
        )
    return found


def _policy_class(
    recipe: Recipe, algorithm: type[OnPolicyAlgorithm], where: Callable[[str, str], str]
) -> type[BasePolicy]:
    policy = str(recipe.model["policy"])
    if ":" in policy:
        found = load_object(policy)
        if not isinstance(found, type):
            raise ConfigError(f"{where('model', 'policy')}, model.policy: {policy} is no class")
        return found
    if policy not in algorithm.policy_aliases:
        near = did_you_mean(policy, algorithm.policy_aliases)
        raise ConfigError(f'{where("model", "policy")}, model: unknown policy "{policy}": {near}')
    return algorithm.policy_aliases[policy]


def _check_environment(recipe: Recipe, where: Callable[[str, str], str]) -> None:
    environment = recipe.environment
    if (environment.id is None) == (environment.class_ is None):
        raise ConfigError(f"{recipe.source}, environment: give either an id or a class")
    if environment.n_groups < 1:
        raise ConfigError(f"{where('environment', 'n_groups')}, environment.n_groups: expected 1 or more")
    if recipe.training.steps < 1:
        raise ConfigError(
            f"{where('training', 'steps')}, training.steps: expected 1 or more, got {recipe.training.steps}"
        )
    if not 0 <= recipe.training.seed < 1 << 31:
        raise ConfigError(
            f"{where('training', 'seed')}, training.seed: expected 0 to {(1 << 31) - 1}, got {recipe.training.seed}"
        )
    for wrapper in environment.wrappers:
        if not _is_code(wrapper.get("class") if isinstance(wrapper, Mapping) else wrapper):
            raise ConfigError(
                f"{where('environment', 'wrappers')}, environment.wrappers: expected module:Name, or"
                f" {{class: module:Name, kwargs: {{…}}}}, got {wrapper!r}"
            )
    if environment.curriculum is not None:
        _check_curriculum(environment.curriculum, where("environment", "curriculum"))
    if environment.id is not None:
        check_env_id(environment.id, f"{where('environment', 'id')}, environment.id")


def _check_curriculum(settings: Mapping[str, Any], source: str) -> None:
    from grpo_rl.curriculum import Curriculum, parse_difficulty

    check("environment.curriculum", settings, parameters(Curriculum, {"self", "env"}), lambda section, key: source)
    try:
        parse_difficulty(resolve(settings.get("difficulty")))
    except ConfigError as error:
        raise ConfigError(f"{source}, environment.curriculum: {error}") from None


def check_env_id(env_id: str, source: str) -> None:
    """As `registry.find_env`; its message begins with `source`."""
    from grpo_rl.registry import find_env

    try:
        find_env(env_id)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


# ----------------------------------------------------------------------------------------------------------------- code


def load_object(reference: str) -> Any:
    """What `file.py:Name` or `module:Name` names. A file is run once, as a module of its own.

    Raises:
        ConfigError: No such file, module or name.
    """
    if not _is_code(reference):
        raise ConfigError(f'"{reference}" names no code: expected file.py:Name or module:Name')
    place, _, name = str(reference).rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"{reference}: {error}") from error
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f'{place} has no "{name}": {_nearest(name, public)}')
    return getattr(module, name)


def resolve(value: Any) -> Any:
    """`value` with every code reference in it, at any depth, replaced by what it names."""
    if _is_code(value):
        return load_object(value)
    if isinstance(value, Mapping):
        return {key: resolve(item) for key, item in value.items()}
    return [resolve(item) for item in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------------------------------------------- checks


def check(
    section: str, values: Mapping[str, Any], valid: Mapping[str, Any], where: Callable[[str, str], str]
) -> dict[str, Any]:
    """`values` with their types made right (1e6 for an int); ConfigError for an unknown key or a wrong type."""
    checked = {}
    for key, value in values.items():
        if key not in valid:
            homes = {"seed": "training.seed", "device": "resources.device", "policy": "model.policy"}
            hint = f"it is {homes[key]}" if key in homes else _nearest(key, valid)
            raise ConfigError(f'{where(section, key)}, {section}: unknown key "{key}": {hint}')
        try:
            checked[key] = _fit(value, valid[key])
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"{where(section, key)}, {section}.{key}: {error}") from None
    return checked


def _fit(value: Any, hint: Any) -> Any:
    """`value` as an annotation wants it: an int for 1e6, a float for 1. TypeError where it plainly cannot be."""
    if takes_schedule(hint) and isinstance(value, (str, Mapping)) and not _is_code(value):
        parse_schedule(value)
        return value
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if _fits(value, option):
            return option(value) if option in (int, float) else value
    raise TypeError(f"expected {' or '.join(map(_spell, options))}, got {value!r}")


def _fits(value: Any, option: Any) -> bool:
    origin = typing.get_origin(option) or option
    if origin is Any:
        return True
    if origin in (int, float):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > sys.float_info.max:
            return origin is float and isinstance(value, float)
        return origin is float or value == value // 1
    if origin is Literal:
        return value in typing.get_args(option)
    if origin in (bool, str, list, dict, types.NoneType):
        return isinstance(value, origin)
    # What YAML has no word for, a class or a function, comes as a code reference or within a mapping or a list.
    return _is_code(value) or isinstance(value, (Mapping, list))


def _spell(option: Any) -> str:
    origin = typing.get_origin(option)
    if origin is Literal:
        return " or ".join(repr(name) for name in typing.get_args(option))
    if option is types.NoneType:
        return "null"
    return "a schedule" if _is_callable(option) else getattr(origin or option, "__name__", str(option))


def _is_callable(option: Any) -> bool:
    origin = typing.get_origin(option) or option
    return origin is Callable or (isinstance(origin, type) and "__call__" in vars(origin) and origin is not type)


def takes_schedule(hint: Any) -> bool:
    """Whether an annotation is a number or a function of progress, as SB3's `float | Schedule`."""
    options = typing.get_args(hint)
    return float in options and any(_is_callable(option) for option in options)


def parameters(cls: type, without: Set[str] = frozenset()) -> dict[str, Any]:
    """Argument names of a constructor with their annotations, following **kwargs to the base classes."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if init is None:
            continue
        try:
            hints = typing.get_type_hints(init)
        except NameError:  # a name inside is imported for type checkers only (SB3's GymEnv): the others still tell
            hints = {name: hint for name, hint in init.__annotations__.items() if not isinstance(hint, str)}
        parameters = inspect.signature(init).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                found.setdefault(parameter.name, hints.get(parameter.name, Any))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return {name: hint for name, hint in found.items() if name not in without}


def _nearest(name: str, valid: Iterable[str]) -> str:
    """`did_you_mean`; of many valid names only the nearest."""
    valid = sorted(valid)
    return did_you_mean(name, valid) if len(valid) <= 8 else nearest(name, valid)


# --------------------------------------------------------------------------------------------------------------- pieces


def label(path: Path) -> str:
    """agents/hopper.yaml for what is shipped, the path as given for the user's own."""
    return f"{path.parent.name}/{path.name}" if path.is_relative_to(shipped()) else str(path)


def _parse_override(text: str) -> tuple[str, Any]:
    dotted, equals, value = text.partition("=")
    section, _, key = dotted.partition(".")
    if not equals or not key:
        raise ConfigError(
            f'"{text}" is no setting: expected section.key=value, such as optimization.learning_rate=1e-4'
        )
    if section not in SECTIONS:
        raise ConfigError(f'command line: unknown section "{section}" in "{text}": {did_you_mean(section, SECTIONS)}')
    return dotted, parse_yaml(value, f'command line: cannot read the value of "{text}"')


def check_name(name: str, source: str) -> str:
    """`name`, if a run's folder may begin with it: it names no other folder, on any system.

    Raises:
        ConfigError: It does.
    """
    if not re.fullmatch(r'[^/\\:*?"<>|\x00-\x1f\x7f]{1,100}', name):
        raise ConfigError(
            f'{source}, name: expected up to 100 characters that a folder may have in its name, not / \\ : * ? " < > |,'
            f" got {name!r}"
        )
    return name


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    return {keys[0]: _nest(keys[1:], value) if keys[1:] else value}


def _is_code(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*", value) is not None


def anchor(value: Any, folder: Path) -> Any:
    """`value` with the paths of all `file.py:Name` in it made absolute."""
    if _is_code(value) and ".py:" in value:
        place, _, name = value.rpartition(":")
        return f"{(folder / place).resolve()}:{name}"
    if isinstance(value, Mapping):
        return {key: anchor(item, folder) for key, item in value.items()}
    return [anchor(item, folder) for item in value] if isinstance(value, list) else value


def _is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _load_file(path: Path) -> types.ModuleType:
    name = f"recipe_code_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if not _is_file(path) or spec is None or spec.loader is None:
            raise ConfigError(f"no file {path}")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
