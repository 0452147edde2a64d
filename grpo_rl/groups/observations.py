"""Which observations SB3 can put into one array per key."""

import gymnasium as gym
from gymnasium import spaces

from grpo_rl.errors import SpaceError

_PARTS = spaces.Dict | spaces.Tuple


def batchable(env: gym.Env) -> gym.Env:
    """`env`, if SB3 can batch its observations: a space with a shape, or a Dict or Tuple of such spaces.

    Raises:
        SpaceError: It cannot: Text, Sequence, Graph, and Dict or Tuple inside another one.
    """
    space = env.observation_space
    parts = _named(space) if isinstance(space, _PARTS) else {"": space}
    for key, part in parts.items():
        if isinstance(part, _PARTS) or part.shape is None:
            kind = type(part).__name__
            where = f"observation {key!r} is a" if key != "" else "the observation is a"
            raise SpaceError(f"{where} {kind}, which SB3 cannot batch: wrap the env, {_remedy(part)}")
    return env


def _named(space: spaces.Dict | spaces.Tuple) -> dict[object, spaces.Space]:
    return dict(space.spaces.items()) if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))


def _remedy(part: spaces.Space) -> str:
    if type(part).__module__.startswith("minigrid."):
        name = "minigrid.wrappers.ImgObsWrapper"
    elif isinstance(part, _PARTS) and part.is_np_flattenable:
        name = "gymnasium.wrappers.FlattenObservation"
    else:
        return (
            "so that it gives a Box, Discrete or a flat Dict of these: gymnasium.wrappers.FilterObservation drops keys"
            " of a Dict, TransformObservation does anything (wrapper=…; recipes: environment.wrappers)"
        )
    module, _, last = name.rpartition(".")
    return f"e.g. wrapper={name} (recipes: environment.wrappers: [{module}:{last}])"
