"""Families of envs: what a simulator keeps besides the attributes of its env, and how that is read and written.

A `Family` is the same few methods for each: `prepare`, `read` (live), `clone`, `write`, `reseed`. Which one a class
belongs to, and which attributes go with it, says its `Rule`, found by type alone (`rule_of`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.errors import ForkError
from grpo_rl.forks import mujoco_state
from grpo_rl.forks.copying import copied
from grpo_rl.forks.recording import Recorder, TrackedALE, plain_attributes, with_generator
from grpo_rl.forks.wrappers import BARE, known_wrapper

ATTRIBUTES, MUJOCO, CUSTOM = "attributes", "mjData and attributes", "get_snapshot"
ALE, REPLAY = "emulator's state and sticky action", "replay of the episode"
REMEDY = "give it get_snapshot() and set_snapshot(state), or use grouping='seed'"

# Attributes of a base env that are not its state: how it was built, spaces and generators (handled apart), rendering.
_OWN = frozenset(
    [
        *("spec", "metadata", "action_space", "observation_space", "render_mode", "_np_random", "fullpath"),
        *("_ezpickle_args", "_ezpickle_kwargs", "mujoco_renderer", "viewer", "screen", "surf"),
        *("clock", "isopen", "window", "window_surface", "taxi_imgs", "taxi_full_imgs", "passenger_img", "house_img"),
        *("destination_img", "background_img", "ice_img", "ice_crack_imgs", "hole_img", "agent_img", "goal_flag_img"),
        *("letter_s_img", "letter_g_img", "start_img", "goal_img", "cliff_imgs", "ground_img"),
    ]
)


class Family:
    """Envs whose state is in their attributes alone.

    Attributes:
        how: What is copied, in words.
        own: Attributes that stay with their env.
        grows: The cost of a fork grows with the age of the episode.
        seeds_resets: After `reseed` the next reset still wants a seed: it may renew more than `reseed` knows of.
    """

    how = ATTRIBUTES
    own = _OWN
    grows = False
    seeds_resets = True

    def says(self, env: Any) -> str:
        """What `Support.how` says of this env."""
        return self.how

    def refusal(self, env: Any) -> str:
        """Why this very env cannot be captured, although its class is known; "" if it can."""
        return ""

    def prepare(self, env: Any) -> None:
        """Hangs on the env what a later `read` needs; again and again if one likes."""

    def read(self, env: Any) -> Any:
        """What the attributes do not hold, live: valid until the env moves on."""
        return None

    def clone(self, native: Any, memo: dict[int, Any]) -> Any:
        """A copy of what `read` gave that the env does not change; `memo` as in `copied`."""
        return None

    def write(self, env: Any, native: Any, memo: dict[int, Any]) -> None:
        """Gives the env a copy of what `read` or `clone` gave."""

    def reseed(self, env: Any, seeds: np.random.SeedSequence) -> None:
        """A new random stream, without a reset."""
        env.np_random = np.random.Generator(np.random.PCG64(seeds.spawn(1)[0]))


class Custom(Family):
    """A class with get_snapshot() and set_snapshot(state): what these give and take. The copies are made here."""

    how = CUSTOM

    def read(self, env: Any) -> Any:
        return env.get_snapshot()

    def clone(self, native: Any, memo: dict[int, Any]) -> Any:
        return copied(native, memo)

    def write(self, env: Any, native: Any, memo: dict[int, Any]) -> None:
        env.set_snapshot(copied(native, memo))


class Mujoco(Family):
    """Envs that hold an MjModel and an MjData, under whatever names: all of mjData, and the model's numbers."""

    how = MUJOCO
    own = _OWN | {"model", "data"}

    def __init__(self) -> None:
        self._names: dict[type, list[str]] = {}  # those of the MjModel and the MjData of a class

    def _simulation(self, env: Any) -> tuple[Any, Any]:
        values = vars(env)
        if type(env) not in self._names:
            names = {type(value).__name__: name for name, value in reversed(values.items())}
            self._names[type(env)] = [names.get(kind, "") for kind in ("MjModel", "MjData")]
        model, data = self._names[type(env)]
        return values[model], values[data]

    def read(self, env: Any) -> Any:
        return mujoco_state.read(*self._simulation(env))

    def clone(self, native: Any, memo: dict[int, Any]) -> Any:
        return mujoco_state.clone(native)

    def write(self, env: Any, native: Any, memo: dict[int, Any]) -> None:
        mujoco_state.write(*self._simulation(env), native)


class Unknown(Mujoco):
    """Envs of no known class: their attributes, and all of mjData where there is one. A probe shows if that will do."""

    own = _OWN

    def says(self, env: Any) -> str:
        return ATTRIBUTES if self._simulation(env) is None else MUJOCO

    def _simulation(self, env: Any) -> Any:
        found = {type(value).__name__: value for value in reversed(vars(env).values())}
        return (found["MjModel"], found["MjData"]) if found.keys() >= {"MjModel", "MjData"} else None

    def read(self, env: Any) -> Any:
        return super().read(env) if self._simulation(env) else None

    def clone(self, native: Any, memo: dict[int, Any]) -> Any:
        return native and super().clone(native, memo)

    def write(self, env: Any, native: Any, memo: dict[int, Any]) -> None:
        if native is not None:
            super().write(env, native, memo)


class DmControl(Family):
    """Tasks of dm_control's suite, through shimmy: mjData, the task's attributes and the counter of steps."""

    how = MUJOCO
    own = _OWN | {"_env"}
    _COUNTERS = ("_step_count", "_reset_next_step")

    def refusal(self, env: Any) -> str:
        inner = type(env._env)
        if inner.__module__ != "dm_control.rl.control":
            return f"{inner.__name__} ({inner.__module__}) is not an env of dm_control's suite: use grouping='seed'"
        task = type(env._env.task)
        known = task.__module__.startswith("dm_control.suite.")
        return "" if known else f"{task.__name__} ({task.__module__}) is not a task of dm_control's suite: {REMEDY}"

    def read(self, env: Any) -> Any:
        inner = env._env
        physics = mujoco_state.read(inner.physics.model.ptr, inner.physics.data.ptr)
        return physics, vars(inner.task), {name: getattr(inner, name) for name in self._COUNTERS}

    def clone(self, native: Any, memo: dict[int, Any]) -> Any:
        physics, task, counters = native
        return mujoco_state.clone(physics), copied(task, memo), dict(counters)

    def write(self, env: Any, native: Any, memo: dict[int, Any]) -> None:
        physics, task, counters = native
        inner = env._env
        mujoco_state.write(inner.physics.model.ptr, inner.physics.data.ptr, physics)
        vars(inner.task).update(copied(task, memo))
        vars(inner).update(counters)

    def reseed(self, env: Any, seeds: np.random.SeedSequence) -> None:
        env.np_random = np.random.RandomState(np.random.MT19937(seeds.spawn(1)[0]))


class Atari(Family):
    """ALE: the emulator's state with its generators, and the action that is stuck in it."""

    how = ALE
    own = _OWN | {"ale", "_action_set"}
    seeds_resets = False  # a seed makes it load its ROM again, 90 ms

    def prepare(self, env: Any) -> None:
        if not isinstance(env.ale, TrackedALE):
            env.ale = TrackedALE(env.ale)

    def read(self, env: Any) -> Any:
        self.prepare(env)
        state = env.ale.read()
        return state, env.ale.known(state)

    def clone(self, native: Any, memo: dict[int, Any]) -> Any:
        return native

    def write(self, env: Any, native: Any, memo: dict[int, Any]) -> None:
        self.prepare(env)
        env.ale.write(*native)

    def reseed(self, env: Any, seeds: np.random.SeedSequence) -> None:
        super().reseed(env, seeds)
        self.prepare(env)
        state, stuck = self.read(env)
        generator = np.random.MT19937()
        generator._legacy_seeding(int(seeds.spawn(1)[0].generate_state(1)[0]))
        env.ale.write(with_generator(state, generator), stuck)


class Replayed(Family):
    """Box2D: the start of the episode and its actions, which the target plays again."""

    how = REPLAY
    own = _OWN | {"step", "reset", "_recorder", "_render", "world", "state", "_np_random_seed"}
    grows = True

    def prepare(self, env: Any) -> None:
        if "_recorder" not in vars(env):
            Recorder(env, self.own)

    def read(self, env: Any) -> Any:
        self.prepare(env)
        recorder = env._recorder
        if recorder.start is None:
            raise ForkError(
                f"{type(env).__name__} keeps its world in Box2D objects, which cannot be copied, and its episode was"
                " not recorded from its reset: fork from its next reset on, or use grouping='seed'"
            )
        return recorder.start, recorder.actions, recorder.draws, plain_attributes(env, self.own)

    def clone(self, native: Any, memo: dict[int, Any]) -> Any:
        start, actions, draws, outcome = native
        return start, list(actions), dict(draws), outcome

    def write(self, env: Any, native: Any, memo: dict[int, Any]) -> None:
        self.prepare(env)
        start, actions, draws, outcome = native
        env._recorder.play(start, actions, draws)
        found = plain_attributes(env, self.own)
        for name, value in outcome.items():
            if name not in found or not np.array_equal(found[name], value):
                raise ForkError(
                    f"a replay of {type(env).__name__} gave {name}={found.get(name)!r} instead of {value!r}: "
                    "something besides reset and step changed it; use grouping='seed'"
                )


ATTRIBUTES_ONLY, CUSTOM_MADE, MUJOCO_ENV = Family(), Custom(), Mujoco()
UNKNOWN, DM_CONTROL, ATARI, REPLAYED = Unknown(), DmControl(), Atari(), Replayed()


@dataclass(frozen=True)
class Rule:
    """How a class of layer is handled.

    Args:
        family: What it keeps besides attributes.
        names: The attributes that are state; None means all but `own`.
        optional: Those of them that an instance may lack.
        lasting: Attributes that stay with their env at a fork and belong into a checkpoint.
        own: Attributes that stay with their env, where names is None.
        reason: Why the class cannot be handled; "" if it can.
        doubt: Why only a probe can tell; "" if the class is known.
        bare: An unknown wrapper, known as long as it has no attributes of its own.
        nests: Instances may hold another env, as the mazes of gymnasium_robotics do, whose layers count as theirs.
    """

    family: Family = ATTRIBUTES_ONLY
    names: tuple[str, ...] | None = ()
    optional: frozenset[str] = frozenset()
    lasting: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    reason: str = ""
    doubt: str = ""
    bare: bool = False
    nests: bool = False


_rules: dict[type, Rule] = {}


def rule_of(cls: type) -> Rule:
    """The rule of a class, by its name, its package and its bases."""
    if cls not in _rules:
        _rules[cls] = _wrapper_rule(cls) if issubclass(cls, gym.Wrapper) else _base_rule(cls)
    return _rules[cls]


def _custom_rule(cls: type) -> Rule | None:
    has = [hasattr(cls, method) for method in ("get_snapshot", "set_snapshot")]
    if any(has) and not all(has):
        return Rule(reason=f"{cls.__name__} has one of get_snapshot() and set_snapshot(state), but not the other")
    return Rule(CUSTOM_MADE) if all(has) else None


def _wrapper_rule(cls: type) -> Rule:
    known = known_wrapper(cls)
    if custom := _custom_rule(cls):
        return custom if known is None else replace(custom, lasting=known.lasting)
    if known is None:
        doubt = f"{cls.__name__} is an unknown wrapper class with attributes ({{}}): {_PROBE}"
        return Rule(names=None, own=BARE, doubt=doubt, bare=True)
    return Rule(names=known.episode, optional=known.optional, lasting=known.lasting)


_PROBE = f"{REMEDY}; or pass the factory, so that it can be probed"

# Modules whose classes are known, and their families. A class of the user's that inherits from one is of that family
# too, but only a probe shows what it added.
_KNOWN = (
    ("gymnasium.envs.classic_control.", ATTRIBUTES_ONLY),
    ("gymnasium.envs.toy_text.", ATTRIBUTES_ONLY),
    ("gymnasium.envs.mujoco.", MUJOCO_ENV),
    ("gymnasium.envs.box2d.", REPLAYED),
    ("minigrid.", ATTRIBUTES_ONLY),
    ("ale_py.", ATARI),
    ("gymnasium_robotics.envs.", ATTRIBUTES_ONLY),
    ("shimmy.dm_control_compatibility", DM_CONTROL),
)
# Of gymnasium_robotics, those that hold the simulation themselves; mazes and the kitchen hold an env that does.
_SIMULATES = ("MujocoEnv", "MujocoRobotEnv")


def _base_rule(cls: type) -> Rule:
    name = cls.__name__
    if custom := _custom_rule(cls):
        return custom
    for base in cls.__mro__:
        for module, family in _KNOWN:
            if base.__module__.startswith(module):
                if any(parent.__name__ in _SIMULATES for parent in cls.__mro__):
                    family = MUJOCO_ENV
                doubt = "" if base is cls else f"{name} may have added state of its own to {base.__name__}: {_PROBE}"
                nests = bool(doubt) or module.startswith("gymnasium_robotics")
                names = () if family is REPLAYED else None
                return Rule(family, names, own=family.own, doubt=doubt, nests=nests)
    doubt = f"{name} ({cls.__module__}) is an unknown env class: {_PROBE}"
    return Rule(UNKNOWN, None, own=_OWN, doubt=doubt, nests=True)
