"""Exact snapshots of a wrapped Gymnasium env: `capture`, `restore` and `transfer`.

Exact means bit-equal: after a transfer both envs give the same observation, reward, terminated and truncated for the
same actions, beyond the end of the episode too. `copy.deepcopy` does not give that (a MuJoCo env rebuilds itself and
comes back in another state, in silence), so each layer of the wrapper chain has a rule, found by its type alone:

- classic control and toy text: the instance's attributes;
- MuJoCo: all of mjData (Ant and Humanoid read `xpos` before they step, and that lags `qpos` by a substep), the
  instance's attributes, and the float64 fields and options of mjModel, which a wrapper may have randomised;
- a known wrapper: the attributes that belong to the episode. Running statistics, logs and files stay with their env;
- a class with `get_snapshot()` and `set_snapshot(state)`: what these give and take, for that layer alone (the copies
  are made here, and so are those of generators);
- a wrapper without attributes of its own: nothing. Everything else is refused, with a reason.

Random generators, the env's and its spaces', are copied, so that siblings meet the same noise; `fresh_rng` parts them.
What shows or records (renderers, windows, `RecordVideo`, `RenderCollection`, `HumanRendering`) is never touched: a
video jumps where its env was forked. Functions given to wrappers (`TransformObservation`, …) are taken to be pure.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import operator
import time
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.errors import ForkError

ATTRIBUTES, MUJOCO, CUSTOM = "attributes", "mjData and attributes", "get_snapshot"

# Attributes of a base env that are not its state: how it was built, spaces and generators (handled apart), rendering.
_OWN = frozenset(
    [
        *("spec", "metadata", "action_space", "observation_space", "render_mode", "_np_random", "fullpath"),
        *("_ezpickle_args", "_ezpickle_kwargs", "model", "data", "mujoco_renderer", "viewer", "screen", "surf"),
        *("clock", "isopen", "window", "window_surface", "taxi_imgs", "taxi_full_imgs", "passenger_img", "house_img"),
        *("destination_img", "background_img", "ice_img", "ice_crack_imgs", "hole_img", "agent_img", "goal_flag_img"),
        *("letter_s_img", "letter_g_img", "start_img", "goal_img", "cliff_imgs", "ground_img"),
    ]
)
# Attributes that are replaced but never changed in place: copied by reference. P is the transition table of toy text.
_SHARED = frozenset({"P", "_previous_data"})
# What gymnasium's own Wrapper and RecordConstructorArgs keep.
_BARE = frozenset(["env", "_saved_kwargs", "_action_space", "_observation_space", "_metadata", "_cached_spec"])

# The episode state of each known wrapper, by package and class name.
_WRAPPERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("gymnasium", "TimeLimit"): ("_elapsed_steps",),
    ("gymnasium", "OrderEnforcing"): ("_has_reset",),
    ("gymnasium", "PassiveEnvChecker"): ("checked_step", "checked_data_reuse", "_previous_data"),
    ("gymnasium", "Autoreset"): ("autoreset",),
    ("gymnasium", "RecordEpisodeStatistics"): ("episode_start_time", "episode_returns", "episode_lengths"),
    ("gymnasium", "NormalizeReward"): ("discounted_reward",),
    ("gymnasium", "FrameStackObservation"): ("obs_queue",),
    ("gymnasium", "DelayObservation"): ("observation_queue",),
    ("gymnasium", "TimeAwareObservation"): ("timesteps",),
    ("gymnasium", "MaxAndSkipObservation"): ("_obs_buffer",),
    ("gymnasium", "StickyAction"): ("last_action", "is_sticky_actions", "num_repeats", "repeats_taken"),
    ("stable_baselines3", "Monitor"): ("rewards", "needs_reset", "current_reset_info"),
}
_STATELESS = [
    *(
        "NormalizeObservation",
        "TransformObservation",
        "FilterObservation",
        "FlattenObservation",
        "GrayscaleObservation",
    ),
    *("ResizeObservation", "ReshapeObservation", "RescaleObservation", "DtypeObservation", "AddRenderObservation"),
    *("DiscretizeObservation", "TransformAction", "ClipAction", "RescaleAction", "DiscretizeAction", "RepeatAction"),
    *("TransformReward", "ClipReward", "RenderCollection", "RecordVideo", "HumanRendering", "AddWhiteNoise"),
    *("ObstructView", "ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"),
]
_WRAPPERS |= {("gymnasium", name): () for name in _STATELESS}
_NEWER = frozenset({"checked_data_reuse", "_previous_data"})  # absent before gymnasium 1.4

_REMEDY = "give it get_snapshot() and set_snapshot(state), or use grouping='seed'"


@dataclass(frozen=True)
class Support:
    """Whether an env can be forked exactly.

    Args:
        exact: True if `capture`, `restore` and `transfer` are bit-exact for it.
        how: What is copied of the base env: `ATTRIBUTES`, `MUJOCO` or `CUSTOM`; "" if it cannot be.
        reason: Why, in words, and what to do if it cannot be.
    """

    exact: bool
    how: str
    reason: str


@dataclass(slots=True)
class Layer:
    """The state of one layer of a wrapper chain.

    Args:
        attributes: Name and value of each attribute that is state.
        custom: What `get_snapshot()` gave, for classes that have it.
        rng: The base env's generator; None for wrappers and where it was never used.
        space_rngs: The generators of the layer's own spaces, parts of composite spaces included; None where unused.
        data: MjData, for MuJoCo envs.
        model: The float64 fields of MjModel as bytes, and its options, for MuJoCo envs.
    """

    attributes: dict[str, Any] = field(default_factory=dict)
    custom: Any = None
    rng: np.random.Generator | None = None
    space_rngs: list[np.random.Generator | None] = field(default_factory=list)
    data: Any = None
    model: tuple[bytes, tuple[Any, ...]] | None = None


def kinds(env: gym.Env) -> tuple[type, ...]:
    """The types of the wrapper chain of `env`, outermost first."""
    return tuple(map(type, _layers(env)))


def require_alike(source: tuple[type, ...], target: tuple[type, ...]) -> None:
    """Raises ForkError unless the chains of two envs, given by their `kinds`, are made of the same types."""
    if source != target:
        raise ForkError(
            f"expected two envs built alike, got the state of {_chain(source)} for {_chain(target)}: "
            "build both with the same function"
        )


@dataclass(frozen=True)
class Snapshot:
    """Everything an exact fork needs, independent of the env that it was taken from.

    Args:
        kinds: The types of the wrapper chain, outermost first.
        layers: The state of each layer, in the same order.
        obs: The observation that goes with it, where `GroupVecEnv.snapshot` took it: {key: row}, key None if plain.
    """

    kinds: tuple[type, ...]
    layers: tuple[Layer, ...]
    obs: dict[Any, np.ndarray] | None = None

    def __repr__(self) -> str:
        return f"Snapshot({_chain(self.kinds)})"


def fork_support(env: gym.Env) -> Support:
    """Says whether `env` can be forked exactly, by the types of its chain alone: nothing is stepped or reset."""
    layers = _layers(env)
    for layer in layers:
        if reason := _refusal(layer):
            return Support(False, "", reason)
    base = type(layers[-1])
    how = _rule(base).how
    return Support(True, how, f"{base.__name__} {'defines get_snapshot' if how == CUSTOM else 'is a known family'}")


def require_exact(env: gym.Env) -> None:
    """Raises ForkError, with the reason, unless `fork_support` says that `env` can be forked exactly."""
    support = fork_support(env)
    if not support.exact:
        raise ForkError(f"this env cannot be forked exactly: {support.reason}", support.reason)


def trusts_own_snapshots(env: gym.Env) -> bool:
    """Whether a layer of `env` brings its own get_snapshot and set_snapshot, which only a probe shows to be exact."""
    return any(_rule(type(layer)).how == CUSTOM for layer in _layers(env))


def capture(env: gym.Env) -> Snapshot:
    """Takes a snapshot of `env`, which later steps of `env` do not change.

    Raises:
        ForkError: The env cannot be captured exactly; the message says why.
    """
    return Snapshot(kinds(env), tuple(_clone(_read(layer)) for layer in _layers(env)))


def restore(env: gym.Env, snapshot: Snapshot) -> None:
    """Puts `env` into the state of `snapshot`, which stays as it is and can be restored again.

    Raises:
        ForkError: The chain of `env` differs from the one that the snapshot was taken from.
    """
    require_alike(snapshot.kinds, kinds(env))
    for layer, state in zip(_layers(env), snapshot.layers, strict=True):
        _write(layer, state)


def transfer(src: gym.Env, *dst: gym.Env) -> None:
    """Lets each of `dst` continue from the exact state of `src`: `restore(dst, capture(src))` without the snapshot.

    Raises:
        ForkError: The env cannot be captured exactly, or the chains differ.
    """
    states = [_read(layer) for layer in _layers(src)]
    for env in dst:
        require_alike(kinds(src), kinds(env))
        if env is not src:
            for layer, state in zip(_layers(env), states, strict=True):
                _write(layer, state)


def fresh_rng(env: gym.Env, seed: int) -> None:
    """Gives the env's generator, and those of its spaces that are in use, new streams, without a reset.

    For resets that cannot be seeded; `env.reset(seed=…)` renews the env's generator but not those of its spaces.
    """
    streams = np.random.SeedSequence(seed)

    def fresh() -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(streams.spawn(1)[0]))

    layers = _layers(env)
    layers[-1].np_random = fresh()
    for layer in layers:
        for space in _spaces(layer):
            if space._np_random is not None:
                space._np_random = fresh()


# ------------------------------------------------------------------------------------------------------- rules by type


@dataclass(frozen=True)
class _Rule:
    """How a class of layer is handled.

    Args:
        how: For a base env, what `Support.how` says.
        names: The attributes that are state; None means all but `_OWN`.
        reason: Why the class cannot be handled; "" if it can.
        bare: Only instances without attributes of their own can be.
    """

    how: str = ""
    names: tuple[str, ...] | None = ()
    reason: str = ""
    bare: bool = False


_rules: dict[type, _Rule] = {}


def _rule(cls: type) -> _Rule:
    if cls not in _rules:
        _rules[cls] = _wrapper_rule(cls) if issubclass(cls, gym.Wrapper) else _base_rule(cls)
    return _rules[cls]


def _wrapper_rule(cls: type) -> _Rule:
    if custom := _custom_rule(cls):
        return custom
    names = _WRAPPERS.get((cls.__module__.partition(".")[0], cls.__name__))
    return _Rule(bare=True) if names is None else _Rule(names=names)


def _base_rule(cls: type) -> _Rule:
    name, families = cls.__name__, [base.__module__.removeprefix("gymnasium.envs.") for base in cls.__mro__]
    if custom := _custom_rule(cls):
        return custom
    if families[0].startswith(("classic_control.", "toy_text.")):
        return _Rule(ATTRIBUTES, None)
    if families[0].startswith("mujoco.") and "mujoco.mujoco_env" in families:
        return _Rule(MUJOCO, None)
    if any(family.startswith("box2d.") for family in families):
        return _Rule(reason=f"{name} keeps its world in Box2D objects, which cannot be copied: use grouping='seed'")
    if cls.__module__.startswith("ale_py"):
        return _Rule(reason=f"{name} keeps its last sticky action inside the ALE emulator: use grouping='seed'")
    for base, family in zip(cls.__mro__, families, strict=True):
        if family.startswith(("classic_control.", "toy_text.", "mujoco.")):
            return _Rule(reason=f"{name} may have added state of its own to {base.__name__}: {_REMEDY}")
    return _Rule(reason=f"{name} ({cls.__module__}) is an unknown env class: {_REMEDY}")


def _custom_rule(cls: type) -> _Rule | None:
    has = [hasattr(cls, method) for method in ("get_snapshot", "set_snapshot")]
    if any(has) and not all(has):
        return _Rule(reason=f"{cls.__name__} has one of get_snapshot() and set_snapshot(state), but not the other")
    return _Rule(CUSTOM) if all(has) else None


def _refusal(layer: Any) -> str:
    """Why this layer cannot be captured; "" if it can."""
    rule, values, name = _rule(type(layer)), vars(layer), type(layer).__name__
    if rule.bare and (extra := values.keys() - _BARE):
        return f"{name} is an unknown wrapper class with attributes ({', '.join(sorted(extra))}): {_REMEDY}"
    if rule.names and not values.keys() >= set(rule.names) and set(rule.names) - values.keys() - _NEWER:
        return f"{name} lacks one of the attributes {rule.names}: its version is not known"
    return rule.reason


def _layers(env: Any) -> list[Any]:
    """The chain of `env`: wrappers from the outermost to the innermost, then the base env."""
    layers = [env]
    while isinstance(env, gym.Wrapper):
        env = env.env
        layers.append(env)
    return layers


def _chain(kinds: tuple[type, ...]) -> str:
    return "<".join(kind.__name__ for kind in kinds) + ">" * (len(kinds) - 1)


# ----------------------------------------------------------------------------------------------- read, clone and write


def _read(layer: Any) -> Layer:
    """The layer's state as live references, valid until the env moves on."""
    if reason := _refusal(layer):
        raise ForkError(f"this env cannot be forked exactly: {reason}", reason)
    rule, values = _rule(type(layer)), vars(layer)
    state = Layer(space_rngs=[space._np_random for space in _spaces(layer)])
    if rule.names is None:
        state.attributes = {name: value for name, value in values.items() if name not in _OWN}
    else:
        state.attributes = {name: values[name] for name in rule.names if name in values}
    if rule.how == CUSTOM:
        state.custom = layer.get_snapshot()
    if rule.how == MUJOCO:
        state.data, state.model = layer.data, _read_model(layer.model)
    if not isinstance(layer, gym.Wrapper):
        state.rng = layer._np_random
    return state


def _clone(state: Layer) -> Layer:
    """A copy of `state` that shares nothing with the live env that can change."""
    memo: dict[int, Any] = {}
    return Layer(
        {name: value if name in _SHARED else _copy(value, memo) for name, value in state.attributes.items()},
        _copy(state.custom, memo),
        copy.deepcopy(state.rng),
        [copy.deepcopy(rng) for rng in state.space_rngs],
        copy.copy(state.data),  # MjData's own copy: all of it
        state.model,
    )


def _write(layer: Any, state: Layer) -> None:
    """Gives the layer a copy of `state` of its own."""
    rule, values = _rule(type(layer)), vars(layer)
    memo: dict[int, Any] = {}
    if rule.names is None:
        for name in [name for name in values if name not in state.attributes and name not in _OWN]:
            del values[name]
    for name, value in state.attributes.items():
        values[name] = value if type(value) in _ATOMS or name in _SHARED else _copy(value, memo)
    if rule.how == CUSTOM:
        layer.set_snapshot(_copy(state.custom, memo))
    if rule.how == MUJOCO:
        _write_mujoco(layer, state)
    if state.rng is not None:
        layer._np_random = _copy_rng(state.rng, layer._np_random)
    for space, rng in zip(_spaces(layer), state.space_rngs, strict=True):
        if rng is not None and rng is not space._np_random:
            space._np_random = _copy_rng(rng, space._np_random)


def _spaces(layer: Any) -> list[Any]:
    """The spaces that the layer itself holds, each followed by its parts."""
    wrapper = isinstance(layer, gym.Wrapper)
    pair = (layer._action_space, layer._observation_space) if wrapper else (layer.action_space, layer.observation_space)
    found: list[Any] = [space for space in pair if space is not None]
    for space in found:  # grows while it is walked
        if parts := getattr(space, "spaces", None):
            found.extend(parts.values() if isinstance(parts, dict) else parts)
    return found


def _copy_rng(source: np.random.Generator, target: np.random.Generator | None) -> np.random.Generator:
    """`target` in the state of `source`; a new generator if target cannot take it or is shared with source."""
    if target is None or target is source or type(target.bit_generator) is not type(source.bit_generator):
        return copy.deepcopy(source)
    target.bit_generator.state = source.bit_generator.state
    return target


_ATOMS = frozenset({int, float, bool, str, bytes, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_})
_HANDLES = (
    np.generic,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    logging.Logger,
    io.IOBase,
)


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy that shares what cannot change, and handles; `memo` keeps one object one object, as in deepcopy."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _HANDLES):
        return value
    if id(value) in memo:
        return memo[id(value)]
    made: Any
    if kind is np.ndarray and not value.dtype.hasobject:
        made = value.copy()
    elif kind is tuple:
        made = value if _ATOMS.issuperset(map(type, value)) else tuple([_copy(item, memo) for item in value])
    elif kind is list:
        made = value.copy() if _ATOMS.issuperset(map(type, value)) else [_copy(item, memo) for item in value]
    elif kind is dict:
        made = {key: _copy(item, memo) for key, item in value.items()}
    elif kind is deque:
        made = deque([_copy(item, memo) for item in value], value.maxlen)
    elif isinstance(value, gym.Env):
        raise ForkError(f"{kind.__name__} is an env kept inside another one, which cannot be copied: {_REMEDY}")
    else:
        return copy.deepcopy(value, memo)
    memo[id(value)] = made
    return made


# -------------------------------------------------------------------------------------------------------------- MuJoCo

_views: weakref.WeakKeyDictionary[Any, list[np.ndarray]] = weakref.WeakKeyDictionary()


def _model_views(model: Any) -> list[np.ndarray]:
    """Flat views of all float64 arrays of an MjModel and its options: masses, sizes, friction, gains, gravity, …"""
    if model not in _views:
        arrays = [getattr(owner, name) for owner in (model, model.opt) for name in dir(owner) if name[0] != "_"]
        arrays = [array for array in arrays if isinstance(array, np.ndarray) and array.size]
        _views[model] = [array.reshape(-1) for array in arrays if array.dtype == np.float64]
    return _views[model]


@functools.lru_cache(maxsize=1)
def _options() -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The fields of mjOption that are numbers (time step, solver, tolerances, flags, …), and their getter."""
    import mujoco  # type: ignore[import-untyped]

    option = mujoco.MjOption()
    names = tuple(name for name in dir(option) if isinstance(getattr(option, name), int | float))
    return names, operator.attrgetter(*names)


def _read_model(model: Any) -> tuple[bytes, tuple[Any, ...]]:
    return np.concatenate(_model_views(model)).tobytes(), _options()[1](model.opt)


def _write_mujoco(layer: Any, state: Layer) -> None:
    """Copies mjData into the layer's own, without an allocation, and the model's values if they differ."""
    import mujoco

    assert state.model is not None
    values, options = _read_model(layer.model)
    if len(values) != len(state.model[0]):
        raise ForkError(f"expected two {type(layer).__name__} of one MuJoCo model, got two models: build both alike")
    if options != state.model[1]:
        for name, value in zip(_options()[0], state.model[1], strict=True):
            setattr(layer.model.opt, name, value)
    if values != state.model[0]:  # bytes, so that NaN equals NaN
        views = _model_views(layer.model)
        parts = np.split(np.frombuffer(state.model[0]), np.cumsum([view.size for view in views])[:-1])
        for view, part in zip(views, parts, strict=True):
            view[:] = part
    mujoco.mj_copyData(layer.data, layer.model, state.data)


# --------------------------------------------------------------------------------------------------------------- probe

_PERIOD, _LIMIT = 25, 40  # steps between forks and in an episode of the probe: neither divides the other


@dataclass(frozen=True)
class ForkReport:
    """What `probe_fork` found; as text, one line.

    Args:
        env: The env's id, or the names of its chain.
        exact: It can be forked by its type, and every compared step was bit-equal.
        how: As in `Support`.
        reason: As in `Support`, or what differed first.
        steps: Steps compared.
        cost_us: Median time of a `transfer` in µs.
    """

    env: str
    exact: bool
    how: str
    reason: str
    steps: int = 0
    cost_us: float = float("nan")

    def __str__(self) -> str:
        if not self.exact:
            return f"{self.env}: no exact forks: {self.reason}"
        return f"{self.env}: exact forks by {self.how}, {self.steps} steps bit-equal, {self.cost_us:.0f} µs per fork"


def probe_fork(
    env: str | gym.Env | Callable[..., gym.Env], steps: int = 200, seed: int = 0, **env_kwargs: Any
) -> ForkReport:
    """Forks an env every 25 steps, across ends of episodes, and compares what follows bit for bit.

    Works on two fresh instances, never on the caller's own (it may be a real robot). Their time limits are cut to 40.

    Args:
        env: A registered id, a class or factory, or an env whose `spec` says how to build another one.
        steps: Random steps to compare.
        seed: Seeds resets and actions.
        env_kwargs: For `gym.make`, the class or the factory.
    """
    if isinstance(env, gym.Env):
        support = fork_support(env)
        if support.exact and env.unwrapped.spec is None:
            support = Support(False, "", "it has no spec to build another one to probe from: pass its factory instead")
        if not support.exact:
            return ForkReport(_name(env), False, "", support.reason)
    build = _builder(env, env_kwargs)
    original, copied = build(), build()
    try:
        support = fork_support(original)
        if not support.exact:
            return ForkReport(_name(original), False, "", support.reason)
        difference, cost_us = _compare(original, copied, steps, seed)
        reason = difference or support.reason
        return ForkReport(_name(original), not difference, support.how, reason, steps, cost_us)
    finally:
        original.close()
        copied.close()


def _name(env: gym.Env) -> str:
    spec = env.unwrapped.spec
    return _chain(kinds(env)) if spec is None else spec.id


def _builder(env: str | gym.Env | Callable[..., gym.Env], env_kwargs: dict[str, Any]) -> Callable[[], gym.Env]:
    if not isinstance(env, str | gym.Env):
        return functools.partial(env, **env_kwargs)
    while isinstance(env, gym.Wrapper) and type(env).__module__.startswith("stable_baselines3."):
        env = env.env  # Monitor does not record how it was built
    target = env if isinstance(env, str) else env.spec
    return functools.partial(gym.make, target, **env_kwargs)  # type: ignore[arg-type]


def _compare(original: gym.Env, copied: gym.Env, steps: int, seed: int) -> tuple[str, float]:
    """Steps both with a fork every `_PERIOD` steps: the first difference in words, or "", and the median cost in µs."""
    rng, costs, space = np.random.default_rng(seed), [], copy.deepcopy(original.action_space)
    space.seed(seed)
    for layer in _layers(original) + _layers(copied):
        if isinstance(layer, gym.wrappers.TimeLimit):
            layer._max_episode_steps = min(layer._max_episode_steps, _LIMIT)

    def play(env: gym.Env, length: int) -> None:
        env.reset(seed=int(rng.integers(2**31)))
        for _ in range(length):
            if any(env.step(space.sample())[2:4]):
                env.reset(seed=int(rng.integers(2**31)))

    play(original, _PERIOD)
    for step in range(steps):
        if step % _PERIOD == 0:
            play(copied, 3)
            start = time.perf_counter()
            transfer(original, copied)
            costs.append(1e6 * (time.perf_counter() - start))
        action = space.sample()
        left, right = original.step(action), copied.step(action)
        for what, a, b in zip(("observation", "reward", "terminated", "truncated"), left, right, strict=False):
            if not _same(a, b):
                return f"{what} {step % _PERIOD} steps after a fork: expected {a}, got {b}", float(np.median(costs))
        if left[2] or left[3]:
            again = int(rng.integers(2**31))
            original.reset(seed=again)
            copied.reset(seed=again)
    return "", float(np.median(costs))


def _same(a: Any, b: Any) -> bool:
    """Bit-equal observations or scalars, part by part; NaN equals NaN."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    left, right = np.asarray(a), np.asarray(b)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
