"""Copies of attribute values: deep where a value can change, by reference where it cannot, and never of an env."""

from __future__ import annotations

import copy
import copyreg
import enum
import io
import logging
import types
from collections import deque
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.errors import ForkError

ATOMS = frozenset({int, float, bool, str, bytes, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_})
_SAME = (
    np.generic,
    enum.Enum,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    logging.Logger,
    io.IOBase,
)
# Packages whose objects belong to one env: windows, locks, files, and simulators, which have a family of their own.
_HANDLES = frozenset(
    "mujoco ale_py Box2D pygame glfw OpenGL imageio _thread threading _io multiprocessing socket".split()
)
_CONTAINERS = frozenset({tuple, list, dict, set, deque})
_RENDERING = "gymnasium.envs.mujoco.mujoco_rendering"
_MISSING = object()


class Kept(enum.Enum):
    """Stands for a value that cannot be copied, so each env keeps its own."""

    KEPT = enum.auto()


KEPT = Kept.KEPT


@dataclass(frozen=True)
class Place:
    """Stands in a snapshot for a reference to a layer of the env itself, by its position."""

    index: int


def into_snapshot(layers: list[Any]) -> dict[int, Any]:
    """The memo with which `copied` takes values out of an env: references to its layers become `Place`s."""
    return {id(layer): Place(index) for index, layer in enumerate(layers)}


def out_of_snapshot(layers: list[Any]) -> dict[int, Any]:
    """The memo with which `copied` puts values into an env: `Place`s become references to its layers."""
    return {-1 - index: layer for index, layer in enumerate(layers)}


def attribute(value: Any, memo: dict[int, Any]) -> Any:
    """As `copied`, for an attribute of an env or a wrapper: KEPT for what each of them must keep for itself."""
    kind = type(value)
    if kind is np.ndarray:
        if value.base is not None and _views_a_simulator(value):
            return KEPT
    elif kind not in _CONTAINERS:
        if kind.__module__.partition(".")[0] in _HANDLES or kind.__module__ == _RENDERING:
            return memo.get(id(value), KEPT)
        if kind is types.FunctionType and value.__closure__:
            return KEPT
    try:
        return copied(value, memo)
    except (TypeError, NotImplementedError, AttributeError, RecursionError):
        return KEPT


def _views_a_simulator(value: Any) -> bool:
    """Whether an array shows the memory of a simulator, as FrankaKitchen's `init_qpos` that of `data.qpos`."""
    while type(value) is np.ndarray:
        value = value.base
    return type(value).__name__ == "PyCapsule"


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy that shares what cannot change, and handles; `memo` keeps one object one object, as in deepcopy.

    Raises:
        ForkError: An env inside a container: envs are copied only as layers.
        TypeError: Something that cannot be copied, as a lock.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    made = memo.get(id(value), _MISSING)
    if made is not _MISSING:
        return made
    if kind is np.ndarray and not value.dtype.hasobject:
        made = value.copy()
    elif kind is tuple:
        made = value if ATOMS.issuperset(map(type, value)) else tuple([copied(item, memo) for item in value])
    elif kind is list:
        if ATOMS.issuperset(map(type, value)):
            made = value.copy()
        else:
            made = memo[id(value)] = []
            made.extend([copied(item, memo) for item in value])
    elif kind is dict:
        made = memo[id(value)] = {}
        made.update({key: copied(item, memo) for key, item in value.items()})
    elif kind is deque:
        made = deque([copied(item, memo) for item in value], value.maxlen)
    elif kind is Place:
        return memo.get(-1 - value.index, value)
    elif isinstance(value, _SAME):
        return value
    elif kind is types.MethodType:
        made = types.MethodType(value.__func__, copied(value.__self__, memo))
    elif isinstance(value, gym.Env):
        raise ForkError(
            f"{kind.__name__} is an env kept inside another one, which cannot be copied: "
            "give it get_snapshot() and set_snapshot(state), or use grouping='seed'"
        )
    elif kind.__module__.startswith("mujoco"):
        return value if kind.__name__ == "MjModel" else copy.copy(value)
    elif _plain(kind):
        return _copied_object(value, memo)
    else:
        return copy.deepcopy(value, memo)
    memo[id(value)] = made
    return made


def _plain(kind: type) -> bool:
    """Whether instances are made of their attributes alone: an ordinary Python class without rules for copying."""
    return (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and getattr(kind, "__getstate__", None) is object.__getstate__
        and not hasattr(kind, "__deepcopy__")
        and all(base.__flags__ & (1 << 9) or base is object for base in kind.__mro__)  # no base made in C
    )


def _copied_object(value: Any, memo: dict[int, Any]) -> Any:
    made = memo[id(value)] = object.__new__(type(value))
    for name, item in getattr(value, "__dict__", {}).items():
        made.__dict__[name] = copied(item, memo)
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        if hasattr(value, name):
            object.__setattr__(made, name, copied(getattr(value, name), memo))
    return made


def copied_rng(source: Any, target: Any) -> Any:
    """`target` in the state of the generator `source`; a new one if target cannot take it or is shared with source."""
    if target is None or target is source or type(target.bit_generator) is not type(source.bit_generator):
        return copy.deepcopy(source)
    target.bit_generator.state = source.bit_generator.state
    return target
