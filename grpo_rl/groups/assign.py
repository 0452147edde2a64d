"""Who is in a group: which steps of a rollout are compared with which.

Four ways, the best that the env allows, chosen once and announced with the reason:

- ``fork``: members start from exactly the same state, by snapshots, across columns and (where there are fewer columns
  than members) one after another;
- ``seed``: members start from resets with one seed, for envs whose state cannot be copied;
- ``batch``: every column is compared with every other at the same age.

And two kinds of group: ``episode`` (from a reset to the end of every member) and ``window`` (n_steps from wherever the
members are, for tasks that go on for long).
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from stable_baselines3.common.vec_env import VecEnv

from grpo_rl.errors import ConfigError, ForkError, did_you_mean
from grpo_rl.groups.forker import Forker

Kind = Literal["episode", "window"]
Means = Literal["fork", "seed", "batch"]

LONG_EPISODE = 500
"""A time limit above this many steps (or none) makes windows the default kind."""


@dataclass(frozen=True)
class Grouping:
    """How groups form: `kind`, `means`, and `reason`, a sentence for the log. `forker` is there when means is fork.

    Completions of a language model are compared by "prompt", which no env of steps can.
    """

    kind: Kind
    means: Means | Literal["prompt"]
    reason: str
    forker: Forker | None = None

    def __str__(self) -> str:
        return f"groups: {self.kind}, by {self.means} ({self.reason})"


def time_limit(env: VecEnv) -> int | None:
    """The episode limit in steps of the env's TimeLimit, or None.

    Not the spec's: a worker process cannot send a spec whose arguments do not pickle, and would die of it.
    """
    limits = _attributes(env, "_max_episode_steps", [0])
    return int(limits[0]) if limits and limits[0] else None


def _attributes(env: VecEnv, name: str, indices: list[int] | None = None) -> list[Any]:
    """The attribute of each env; none where they have it not, or a foreign VecEnv does not say."""
    try:
        return env.get_attr(name, indices) if env.has_attr(name) else []
    except (AttributeError, NotImplementedError):
        return []


def choose_grouping(env: VecEnv, group_size: int, kind: str, means: str, bootstraps: bool) -> Grouping:
    """The best grouping that `env` allows.

    Args:
        env: the outermost vectorised env.
        group_size: G; 1 means no groups at all (plain PPO).
        kind: "episode", "window" or "auto": window with values or a time limit above 500 steps, else episode.
        means: "fork", "seed", "batch" or "auto": the first of them that works. A named one that cannot be had raises.
        bootstraps: whether values of states, a network's or a regression's, stand for what follows a window.

    Raises:
        ConfigError: an unknown kind or means, or means="seed" for windows or for envs that may not be reset early.
        ForkError: means="fork" and the env cannot be forked exactly.
    """
    if kind not in ("auto", *get_args(Kind)):
        raise ConfigError(f"group_kind={kind!r} is unknown: {did_you_mean(kind, ['auto', *get_args(Kind)])}")
    if means not in ("auto", *get_args(Means)):
        raise ConfigError(f"grouping={means!r} is unknown: {did_you_mean(means, ['auto', *get_args(Means)])}")
    if kind == "auto" and means == "seed":
        kind = "episode"
    if kind == "auto":
        limit = time_limit(env)
        kind = "window" if bootstraps or limit is None or limit > LONG_EPISODE else "episode"
    if group_size == 1:
        return Grouping(kind, "batch", "group_size=1, no groups")  # type: ignore[arg-type]
    if means == "batch":
        return Grouping(kind, "batch", "as asked")  # type: ignore[arg-type]
    reason = "as asked"
    if means in ("auto", "fork"):
        try:
            forker = Forker(env)
            same = "members start from exactly the same state" + forker.proviso
            return Grouping(kind, "fork", same, forker)  # type: ignore[arg-type]
        except ForkError as error:
            if means == "fork":
                raise
            reason = f"no exact forks: {error}"
    if kind == "episode" and all(_attributes(env, "allow_early_resets")):
        return Grouping("episode", "seed", reason)
    if kind == "episode":  # seeded groups reset all columns together, in the middle of some episodes
        strict = "a Monitor with allow_early_resets=False forbids the resets that start groups by seed"
        if means == "seed":
            raise ConfigError(f"{strict}: use Monitor(env, allow_early_resets=True), or grouping='batch'")
        return Grouping("episode", "batch", f"{reason}; {strict}")
    if means == "seed":
        raise ConfigError("grouping='seed' starts groups by a reset, so it needs group_kind='episode', not 'window'")
    return Grouping("window", "batch", reason)
