"""Env ids: the packages that register them are imported when one of their ids is asked for.

MiniGrid, ALE, gymnasium-robotics and Shimmy register their envs when they are imported, which Gymnasium does only for
ids written "module:id". Here their plain ids work too.
"""

import importlib
import re
from typing import Any

import gymnasium as gym

from grpo_rl.errors import ConfigError, GRPOError, nearest

# Pattern of ids, the module that registers them, what to install.
_PACKAGES = (
    (r"(MiniGrid|BabyAI)-", "minigrid", "grpo_rl[minigrid]"),
    (r"ALE/|\w+NoFrameskip-v\d+$", "ale_py", "grpo_rl[atari]"),
    (
        r"(Fetch(Reach|Push|Slide|PickAndPlace)|Hand(Reach|Manipulate)|AdroitHand|FrankaKitchen|PointMaze|AntMaze)",
        "gymnasium_robotics",
        "grpo_rl[robotics]",
    ),
    (r"dm_control/", "shimmy", "shimmy[dm-control]"),
)
_OLDER_MUJOCO = (
    "some of its envs need an older MuJoCo, such as mujoco 3.8.0 with dm_control 1.0.40 (docs/forking.md,"
    " constraints-robots.txt)"
)


def find_env(env_id: str) -> None:
    """Imports the package that registers `env_id`, if it is one of the known ones. "module:id" is left to Gymnasium.

    Raises:
        ConfigError: Its package is missing, or nothing registers it; the message begins with "Gymnasium knows no".
    """
    if re.match(r"[A-Za-z_][\w.]*:(?![\\/])", env_id) or _registered(env_id):
        return
    for pattern, module, install in _PACKAGES:
        if re.match(pattern, env_id):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f'Gymnasium knows no "{env_id}": {module} registers it and cannot be imported ({error}):'
                    f" pip install '{install}'"
                ) from error
    if not _registered(env_id):
        written = 'The id of a package that is not imported is written "module:id"'
        raise ConfigError(f'Gymnasium knows no "{env_id}": {nearest(env_id, gym.registry)}. {written}')


def _registered(env_id: str) -> bool:
    """Whether there is such an id; without "-v…" any version will do, as for `gym.make`."""
    return env_id in gym.registry or any(known.rpartition("-v")[0] == env_id for known in gym.registry)


def make(env_id: str, **kwargs: Any) -> gym.Env:
    """`gym.make`, whose mistakes are one line.

    Raises:
        ConfigError: `find_env` does not find it, its package is missing, or its constructor raised an error.
    """
    find_env(env_id)
    try:
        return gym.make(env_id, **kwargs)
    except GRPOError:
        raise
    except Exception as error:
        raise cannot_make(env_id, error) from error


def make_rendered(env_id: str, **kwargs: Any) -> gym.Env:
    """As `make`, with SB3's default render mode where the env takes one."""
    try:
        return make(env_id, **{"render_mode": "rgb_array"} | kwargs)
    except ConfigError as error:
        if not isinstance(error.__cause__, TypeError):
            raise
        return make(env_id, **kwargs)


def cannot_make(env_id: str, error: Exception) -> ConfigError:
    """The one line about an env whose constructor raised `error`, to be raised from it."""
    said = " ".join(str(error).split())
    if not isinstance(error, gym.error.Error | ImportError):
        said = f"its constructor raised {type(error).__name__}" + (f": {said}" if said else " without a message")
    return ConfigError(f"cannot make environment {env_id}: {said}{_hint(env_id, error)}")


def _hint(env_id: str, error: Exception) -> str:
    """What to do about an env of the families that the newest MuJoCo has left behind."""
    spec = gym.registry.get(env_id.rpartition(":")[2])
    module = str(spec.entry_point) if spec is not None else ""
    robots = module.startswith(("gymnasium_robotics.", "shimmy.dm_control"))
    return f"; {_OLDER_MUJOCO}" if robots and not isinstance(error, ImportError | TypeError) else ""
