"""Exact snapshots of a wrapped Gymnasium env: `capture`, `restore` and `transfer`.

Exact means bit-equal: after a transfer both envs give the same observation, reward, terminated and truncated for the
same actions, beyond the end of the episode too. `copy.deepcopy` does not give that (a MuJoCo env rebuilds itself and
comes back in another state, in silence), so each layer of the wrapper chain has a rule, found by its type alone:

- a known family of envs (`families`): the instance's attributes, and what its simulator keeps besides;
- a known wrapper (`wrappers`): the attributes that belong to the episode. Running statistics, logs and files stay with
  their env; `capture(lasting=True)` takes statistics, lists and counts too, for checkpoints;
- a class with `get_snapshot()` and `set_snapshot(state)`: what these give and take, for that layer alone;
- a wrapper without attributes of its own: nothing;
- any other class: all its attributes, once a probe on fresh instances has shown that this is exact (`probe`).

Random generators, the env's and its spaces', are copied, so that siblings meet the same noise; `fresh_rng` parts them.
What shows or records (renderers, windows, `RecordVideo`, `RenderCollection`, `HumanRendering`) is never touched: a
video jumps where its env was forked. Functions given to wrappers (`TransformObservation`, …) are taken to be pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.errors import ForkError
from grpo_rl.forks.copying import ATOMS, KEPT, attribute, copied, copied_rng, into_snapshot, out_of_snapshot
from grpo_rl.forks.families import ALE, ATTRIBUTES, CUSTOM, MUJOCO, REPLAY, rule_of
from grpo_rl.forks.wrappers import BARE

__all__ = [
    "ALE",
    "ATTRIBUTES",
    "CUSTOM",
    "MUJOCO",
    "REPLAY",
    "Layer",
    "Snapshot",
    "Support",
    "capture",
    "fork_support",
    "fresh_rng",
    "kinds",
    "own_snapshots",
    "prepare",
    "require_alike",
    "restore",
    "transfer",
    "trust",
]

# Attributes of known classes that are replaced but never changed in place: copied by reference. P is the transition
# table of toy text.
_SHARED = frozenset({"P", "_previous_data"})


@dataclass(frozen=True)
class Support:
    """Whether an env can be forked exactly.

    Args:
        exact: True if `capture`, `restore` and `transfer` are bit-exact for it.
        how: What is copied of the base env: `ATTRIBUTES`, `MUJOCO`, `ALE`, `REPLAY` or `CUSTOM`; "" if it cannot be.
        reason: Why, in words, and what to do if it cannot be.
        probe: A layer is not known by its type, so only a probe on fresh instances shows whether it is exact.
        grows: A fork plays the episode again, so its cost grows with the episode's age.
    """

    exact: bool
    how: str
    reason: str
    probe: bool = False
    grows: bool = False


@dataclass(slots=True)
class Layer:
    """The state of one layer of an env.

    Args:
        attributes: Name and value of each attribute that is state.
        native: What the layer's family keeps besides, made of plain values, arrays and MjData (see `families`).
        rng: The base env's generator; None for wrappers and where it was never used.
        space_rngs: The generators of the layer's own spaces, parts of composite spaces included; None where unused.
        kept: Names of attributes that cannot be copied: each env keeps its own.
        lasting: What stays with its env at a fork, where the snapshot is one for a checkpoint.
    """

    attributes: dict[str, Any] = field(default_factory=dict)
    native: Any = None
    rng: Any = None
    space_rngs: list[Any] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    lasting: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """Everything an exact fork needs, independent of the env that it was taken from.

    Args:
        kinds: The types of the layers, outermost first.
        layers: The state of each layer, in the same order.
        obs: The observation that goes with it, where `GroupVecEnv.snapshot` took it: {key: row}, key None if plain.
    """

    kinds: tuple[type, ...]
    layers: tuple[Layer, ...]
    obs: dict[Any, np.ndarray] | None = None

    def __repr__(self) -> str:
        return f"Snapshot({chain_name(self.kinds)})"


def kinds(env: gym.Env) -> tuple[type, ...]:
    """The types of the layers of `env`, outermost first: its wrappers, itself, and envs that it holds."""
    return tuple(map(type, layers_of(env)))


def require_alike(source: tuple[type, ...], target: tuple[type, ...]) -> None:
    """Raises ForkError unless the layers of two envs, given by their `kinds`, are of the same types."""
    if source != target:
        raise ForkError(
            f"expected two envs built alike, got the state of {chain_name(source)} for {chain_name(target)}: "
            "build both with the same function"
        )


def fork_support(env: gym.Env) -> Support:
    """Says whether `env` can be forked exactly, by the types of its layers alone: nothing is stepped or reset."""
    layers = layers_of(env)
    base = next(layer for layer in layers if not isinstance(layer, gym.Wrapper))
    held = [rule_of(type(layer)).family for layer in layers]
    probe = bool(unproven(env))
    for layer in layers:
        if reason := _refusal(layer):
            hopeless = rule_of(type(layer)).reason or rule_of(type(layer)).family.refusal(layer)
            return Support(False, "", reason, probe and not hopeless)
    how = [family.says(layer) for family, layer in zip(held, layers, strict=True) if not isinstance(layer, gym.Wrapper)]
    found = next((one for one in how if one != ATTRIBUTES), ATTRIBUTES)
    name, known = type(base).__name__, not rule_of(type(base)).doubt
    reason = "defines get_snapshot" if found == CUSTOM else "is a known family" if known else "was probed"
    return Support(True, found, f"{name} {reason}", probe, any(family.grows for family in held))


def unproven(env: gym.Env) -> set[type]:
    """The types of layers whose snapshots only a probe shows to be exact: unknown ones, and those with their own."""
    found = set()
    for layer in layers_of(env):
        cls = type(layer)
        rule = rule_of(cls)
        own = rule.family.how == CUSTOM and not cls.__module__.startswith("grpo_rl.")
        if own or (rule.doubt and not (rule.bare and vars(layer).keys() <= BARE)):
            found.add(cls)
    return found


def own_snapshots(env: gym.Env) -> set[type]:
    """The types among `unproven` that bring their own get_snapshot and set_snapshot."""
    return {cls for cls in unproven(env) if rule_of(cls).family.how == CUSTOM}


_trusted: set[type] = set()


def trust(classes: Iterable[type]) -> set[type]:
    """Lets `capture` and `transfer` copy the attributes of unknown classes, once a probe has shown that to be exact.

    Gives those of `classes` that were not trusted before. Holds for this process.
    """
    new = set(classes) - _trusted
    _trusted.update(new)
    return new


def distrust(classes: Iterable[type]) -> None:
    """Takes `trust` back."""
    _trusted.difference_update(classes)


def prepare(env: gym.Env) -> None:
    """Lets an env that is to be forked note, from its next reset on, what a fork will need.

    For Box2D, whose episodes are recorded and played again, and ALE, whose sticky action is followed; nothing for other
    envs. Can be called again. `restore` and `transfer` do it for their targets.
    """
    for layer in layers_of(env):
        rule_of(type(layer)).family.prepare(layer)


def capture(env: gym.Env, lasting: bool = False) -> Snapshot:
    """Takes a snapshot of `env`, which later steps of `env` do not change.

    Args:
        env: A wrapped env, amid an episode or not.
        lasting: Also take what stays with its env at a fork: running statistics, Monitor's and
            RecordEpisodeStatistics' lists and counts, not their files. For checkpoints.

    Raises:
        ForkError: The env cannot be captured exactly; the message says why.
    """
    layers = layers_of(env)
    memo = into_snapshot(layers)
    states = tuple([_clone(layer, _read(layer), memo) for layer in layers])
    if lasting:
        for layer, state in zip(layers, states, strict=True):
            state.lasting = _lasting(layer)
    return Snapshot(tuple(map(type, layers)), states)


def restore(env: gym.Env, snapshot: Snapshot) -> None:
    """Puts `env` into the state of `snapshot`, which stays as it is and can be restored again.

    Raises:
        ForkError: The layers of `env` differ from those that the snapshot was taken from.
    """
    layers = layers_of(env)
    require_alike(snapshot.kinds, tuple(map(type, layers)))
    memo = out_of_snapshot(layers)
    for layer, state in zip(layers, snapshot.layers, strict=True):
        _write(layer, state, memo)
        if state.lasting:
            _put_lasting(layer, state.lasting)


def transfer(src: gym.Env, *dst: gym.Env) -> None:
    """Lets each of `dst` continue from the exact state of `src`: `restore(dst, capture(src))` without the snapshot.

    Raises:
        ForkError: The env cannot be captured exactly, or the layers differ.
    """
    sources = layers_of(src)
    states = [_read(layer) for layer in sources]
    source_kinds = tuple(map(type, sources))
    for env in dst:
        if env is not src:
            layers = layers_of(env)
            require_alike(source_kinds, tuple(map(type, layers)))
            memo: dict[int, Any] = dict(zip(map(id, sources), layers, strict=True))
            for layer, state in zip(layers, states, strict=True):
                _write(layer, state, memo)


def transfer_lasting(src: gym.Env, dst: gym.Env) -> None:
    """Gives `dst`, built alike, the running statistics, lists and counts of `src`, which a fork leaves alone."""
    for source, target in zip(layers_of(src), layers_of(dst), strict=True):
        _put_lasting(target, _lasting(source))


def fresh_rng(env: gym.Env, seed: int) -> bool:
    """Gives the env's generators, and those of its spaces that are in use, new streams, without a reset.

    For resets that cannot be seeded; `env.reset(seed=…)` renews the env's generator but not those of its spaces.

    Returns:
        Whether the next reset should have a seed all the same, where it can: there may be other generators.
    """
    streams = np.random.SeedSequence(seed)
    seeds_reset = False
    for layer in layers_of(env):
        family = rule_of(type(layer)).family
        if not isinstance(layer, gym.Wrapper):
            family.reseed(layer, streams)
            seeds_reset |= family.seeds_resets
        seeds_reset |= family.how == CUSTOM
        for space in _spaces(layer):
            if space._np_random is not None:
                space._np_random = np.random.Generator(np.random.PCG64(streams.spawn(1)[0]))
    return seeds_reset


# --------------------------------------------------------------------------------------------------------------- layers


def layers_of(env: Any) -> list[Any]:
    """Wrappers from the outermost to the innermost, the base env, and the layers of envs that it holds."""
    layers = [env]
    while isinstance(env, gym.Wrapper):
        env = env.env
        layers.append(env)
    if rule_of(type(env)).nests:
        for value in list(vars(env).values()):
            if isinstance(value, gym.Env) and not any(value is layer for layer in layers):
                layers.extend(layers_of(value))
    return layers


def chain_name(kinds: tuple[type, ...]) -> str:
    """Types of layers as text: Monitor<TimeLimit<HopperEnv>>."""
    return "<".join(kind.__name__ for kind in kinds) + ">" * (len(kinds) - 1)


def _refusal(layer: Any) -> str:
    """Why this layer cannot be captured; "" if it can."""
    rule, values, cls = rule_of(type(layer)), vars(layer), type(layer)
    if rule.doubt and cls not in _trusted and not (rule.bare and values.keys() <= BARE):
        return rule.doubt.format(", ".join(sorted(values.keys() - BARE)))
    if rule.names and not values.keys() >= set(rule.names) and set(rule.names) - values.keys() - rule.optional:
        return f"{cls.__name__} lacks one of the attributes {rule.names}: its version is not known"
    return rule.reason or rule.family.refusal(layer)


def _spaces(layer: Any) -> list[Any]:
    """The spaces that the layer itself holds, each followed by its parts."""
    wrapper = isinstance(layer, gym.Wrapper)
    pair = (layer._action_space, layer._observation_space) if wrapper else (layer.action_space, layer.observation_space)
    found: list[Any] = [space for space in pair if isinstance(space, gym.Space)]
    for space in found:  # grows while it is walked
        if parts := getattr(space, "spaces", None):
            found.extend(parts.values() if isinstance(parts, dict) else parts)
    return found


# ------------------------------------------------------------------------------------------------ read, clone and write


def _read(layer: Any) -> Layer:
    """The layer's state as live references, valid until the env moves on."""
    if reason := _refusal(layer):
        raise ForkError(f"this env cannot be forked exactly: {reason}", reason)
    rule, values = rule_of(type(layer)), vars(layer)
    state = Layer(space_rngs=[space._np_random for space in _spaces(layer)])
    if rule.names is None:
        state.attributes = {name: value for name, value in values.items() if name not in rule.own}
    elif rule.names:
        state.attributes = {name: values[name] for name in rule.names if name in values}
    state.native = rule.family.read(layer)
    if not isinstance(layer, gym.Wrapper):
        state.rng = layer._np_random
    return state


def _clone(layer: Any, state: Layer, memo: dict[int, Any]) -> Layer:
    """A copy of `state`, just read from `layer`, that shares nothing with it that can change."""
    rng = copy.deepcopy(state.rng)
    if rng is not None:
        memo[id(state.rng)] = rng
    rule = rule_of(type(layer))
    made = Layer(native=rule.family.clone(state.native, memo), rng=rng)
    made.space_rngs = [copy.deepcopy(space_rng) for space_rng in state.space_rngs]
    for name, value in state.attributes.items():
        if type(value) not in ATOMS and (name not in _SHARED or rule.doubt):
            value = attribute(value, memo)
        if value is KEPT:
            made.kept.append(name)
        else:
            made.attributes[name] = value
    return made


def _write(layer: Any, state: Layer, memo: dict[int, Any]) -> None:
    """Gives the layer a copy of `state` of its own."""
    rule, values = rule_of(type(layer)), vars(layer)
    if state.native is not None:
        rule.family.write(layer, state.native, memo)
    if state.rng is not None:
        layer._np_random = memo[id(state.rng)] = copied_rng(state.rng, layer._np_random)
    if rule.names is None:
        for name in [name for name in values if name not in state.attributes and name not in rule.own]:
            if name not in state.kept:
                del values[name]
    for name, value in state.attributes.items():
        if type(value) not in ATOMS and (name not in _SHARED or rule.doubt):
            value = attribute(value, memo)
            if value is KEPT:
                continue
        values[name] = value
    for space, rng in zip(_spaces(layer), state.space_rngs, strict=True):
        if rng is not None and rng is not space._np_random:
            space._np_random = copied_rng(rng, space._np_random)


def _lasting(layer: Any) -> dict[str, Any]:
    """Copies of what lasts, as plain data: running statistics are objects, kept as the dict of their attributes."""
    values = {name: vars(layer)[name] for name in rule_of(type(layer)).lasting}
    return copied({name: vars(value) if hasattr(value, "__dict__") else value for name, value in values.items()}, {})


def _put_lasting(layer: Any, lasting: dict[str, Any]) -> None:
    """Gives the layer a copy of what `_lasting` gave; statistics keep their objects."""
    for name, value in copied(lasting, {}).items():
        now = vars(layer)[name]
        if hasattr(now, "__dict__"):
            vars(now).update(value)
        else:
            vars(layer)[name] = value
