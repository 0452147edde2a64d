"""State trees as JSON and arrays: what checkpoints are made of. Exact, and nothing in a file can run code.

JSON holds None, bool, int, str, float (its shortest form reads back to the same bits), lists and dicts as they are.
All else is an object with one key that starts with "$": {"$array": "3"} is the third array, {"$tuple": […]} a tuple.
Classes, functions, modules and spaces are written as names, and read only where the program that reads holds the
object of that name already: nothing is imported, and no class is made that is not listed here.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import logging
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch as th
from gymnasium.spaces import Space

from grpo_rl.errors import ConfigError, GRPOError
from grpo_rl.forks.copying import Place
from grpo_rl.forks.mjdata import MjArrays, read_mjdata
from grpo_rl.forks.snapshot import Layer, Snapshot
from grpo_rl.groups.forker import Root
from grpo_rl.groups.workers import HeldSnapshot
from grpo_rl.sampling.steps import ColumnRoot

RECORDS: dict[str, Any] = {cls.__name__: cls for cls in (Snapshot, Layer, Place, Root, ColumnRoot, MjArrays)}
"""Our own classes, by name."""
PLAIN = frozenset(
    [
        "gymnasium.wrappers.utils:RunningMeanStd",
        "gymnasium_robotics.envs.maze.maze_v4:Maze",
        "gymnasium_robotics.utils.mujoco_utils:MujocoModelNames",
        "minigrid.core.grid:Grid",
        *(f"minigrid.core.world_object:{name}" for name in "Goal Floor Lava Wall Door Key Ball Box".split()),
        "stable_baselines3.common.running_mean_std:RunningMeanStd",
    ]
)
"""Classes without code of their own at construction or destruction: an instance is its attributes."""
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_HANDLES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, logging.Logger, Space)
_LAYERS = "layers of "
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_KINDS = "biufcSUmM"


class NoCodec(GRPOError, TypeError):
    """An object that cannot be written: the message says where it is and of which type."""


def encode(tree: Any) -> tuple[str, dict[str, np.ndarray]]:
    """A state tree as JSON text and arrays by name; equal arrays are kept once.

    Raises:
        NoCodec: It holds an object of another kind.
    """
    writer = _Writer()
    try:
        node = writer.node(tree, "")
    except RecursionError:
        raise NoCodec("the state goes in a circle, or is nested too deep") from None
    return json.dumps(node, separators=(",", ":")), writer.arrays


def decode(text: str, arrays: Mapping[str, np.ndarray], live: Any = None) -> Any:
    """The tree that `encode` wrote, arrays copied.

    Args:
        text: From `encode`.
        arrays: From `encode`.
        live: A tree of the program that reads, such as the state of its env: the classes, functions and modules in it
            may be named by `text`, no others.

    Raises:
        ConfigError: The text is no tree, or names what is not there.
    """
    try:
        return _Reader(arrays, {name: found for found in _handles(live) if (name := _name(found))}).value(
            json.loads(text)
        )
    except ConfigError as error:
        raise ConfigError(" ".join(str(error).split())) from None  # one line, whatever name it quotes
    except Exception as error:  # NumPy alone has a dozen kinds for a dtype or a shape that is none
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(f"not a state that grpo_rl has written ({what})") from None


class _Writer:
    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def node(self, value: Any, path: str) -> Any:
        """What JSON holds for `value`; `path` says where it is, for errors."""
        kind = type(value)
        if kind in (type(None), bool, int, str, float):
            return value
        if kind is list:
            return [self.node(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if kind in (dict, OrderedDict):
            if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
                return {key: self.node(item, f"{path}.{key}") for key, item in value.items()}
            return {"$dict": self._items(value, path)}
        return self._tagged(value, kind, path)

    def _tagged(self, value: Any, kind: type, path: str) -> dict[str, Any]:
        if kind.__name__ in RECORDS and RECORDS[kind.__name__] is kind:
            fields = {name: self.node(item, self._place(value, name, path)) for name, item in _record(value)}
            return {"$record": kind.__name__, "fields": fields}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: [self.node(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if kind is deque:
            return {"$deque": [self.node(item, f"{path}[{i}]") for i, item in enumerate(value)], "most": value.maxlen}
        if kind is np.ndarray:
            return {"$array": self._array(value, path), **_layout(value)}
        if isinstance(value, np.generic):
            if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
                return {"$number": value.item(), "type": value.dtype.str}
            return {"$scalar": self._array(np.asarray(value), path), **_layout(np.asarray(value))}
        if isinstance(value, th.Tensor):
            plain = value.detach().cpu()
            bits = plain.view(th.int16) if plain.dtype == th.bfloat16 else plain
            name = self._array(bits.numpy(), path)
            return {"$tensor": name, "shape": list(plain.shape), "bfloat16": bits is not plain}
        if kind in (bytes, bytearray):
            return {"$bytes": self._array(np.frombuffer(value, np.uint8), path)}
        if kind is np.random.Generator and type(value.bit_generator).__name__ in _GENERATORS:
            return {"$rng": self.node(value.bit_generator.state, f"{path}.state")}
        if kind is np.random.RandomState and value is not np.random.mtrand._rand:  # not NumPy's global one
            return {"$random_state": self.node(value.get_state(legacy=False), f"{path}.state")}
        if kind is random.Random:
            return {"$random": self.node(value.getstate(), path)}
        if kind is th.Generator:
            state = self._array(value.get_state().numpy(), path)
            return {"$torch_rng": state, "device": str(value.device)}
        if kind is HeldSnapshot:
            return self.node(value.fetch(), path)
        if kind.__module__.startswith("mujoco.") and kind.__name__ == "MjData":
            return self.node(read_mjdata(value), path)
        return self._object(value, kind, path)

    def _object(self, value: Any, kind: type, path: str) -> dict[str, Any]:
        if isinstance(value, enum.Enum):
            return {"$enum": _name(kind), "member": value.name}
        if isinstance(value, Space):
            rngs = [part._np_random for part in _parts(value)]
            if any(rng is not None for rng in rngs):
                return {"$space": _name(value), "rngs": self.node(rngs, f"{path}.np_random")}
        if isinstance(value, _HANDLES) and _name(value):
            return {"$handle": _name(value)}
        if _is_data(kind):
            return {"$data": _name(kind), "fields": self._items(dict(_record(value)), path)}
        if _name(kind) in PLAIN:
            return {"$plain": _name(kind), "attributes": self._items(vars(value), path)}
        raise NoCodec(f"{path.lstrip('.') or 'the state'} is a {kind.__module__}.{kind.__qualname__}")

    @staticmethod
    def _place(value: Any, name: str, path: str) -> str:
        """Where a field of a record is, in the words of who wrote the env: MyEnv.attribute."""
        if isinstance(value, Snapshot) and name == "layers":
            return _LAYERS + "<".join(kind.__name__ for kind in value.kinds)
        if isinstance(value, Layer) and path.startswith(_LAYERS):
            names, _, index = path.removeprefix(_LAYERS).rpartition("[")
            owner = names.split("<")[int(index.rstrip("]"))]
            return {"attributes": owner, "native": f"the snapshot of {owner}"}.get(name, f"{owner}.{name}")
        return f"{path}.{name}"

    def _items(self, mapping: Mapping[Any, Any], path: str) -> list[Any]:
        return [[self.node(key, path), self.node(item, f"{path}[{key!r}]")] for key, item in mapping.items()]

    def _array(self, array: np.ndarray, path: str) -> str:
        if array.dtype.kind not in _KINDS:
            raise NoCodec(f"{path.lstrip('.')} is an array of {array.dtype}")
        flat = np.ascontiguousarray(array.T if _is_fortran(array) else array)
        data = flat.tobytes()
        key = (array.dtype.str, array.shape, hashlib.blake2b(data, digest_size=16).digest())
        if key not in self._known:
            self._known[key] = str(len(self.arrays))
            self.arrays[self._known[key]] = np.frombuffer(data, np.uint8) if _as_bytes(array.dtype) else flat
        return self._known[key]


class _Reader:
    def __init__(self, arrays: Mapping[str, np.ndarray], handles: Mapping[str, Any]) -> None:
        self.arrays, self.handles = arrays, handles
        self.modules = {name.partition(":")[0] for name, value in handles.items() if isinstance(value, type)}
        self.tags: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
            "$dict": lambda items, _: self._pairs(items),
            "$tuple": lambda items, _: tuple(map(self.value, items)),
            "$set": lambda items, _: set(map(self.value, items)),
            "$frozenset": lambda items, _: frozenset(map(self.value, items)),
            "$deque": lambda items, node: deque(map(self.value, items), node["most"]),
            "$record": self._record,
            "$array": self._array,
            "$scalar": lambda name, node: self._array(name, node)[()],
            "$number": lambda number, node: _dtype(node, "biuf").type(number),
            "$tensor": self._tensor,
            "$bytes": lambda name, _: self.arrays[name].tobytes(),
            "$rng": self._rng,
            "$random_state": self._random_state,
            "$random": self._random,
            "$torch_rng": self._torch_rng,
            "$space": self._space,
            "$enum": self._enum,
            "$handle": lambda name, _: self._handle(name),
            "$data": self._data,
            "$plain": self._plain,
        }

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.value(item) for key, item in node.items()}
        if tag not in self.tags:
            raise ConfigError(f"not a state that this version of grpo_rl reads: {tag[:40]!r} is unknown")
        return self.tags[tag](node[tag], node)

    def _pairs(self, items: list[Any]) -> dict[Any, Any]:
        return {self.value(key): self.value(item) for key, item in items}

    def _record(self, name: str, node: dict[str, Any]) -> Any:
        return RECORDS[name](**self.value(node["fields"]))

    def _array(self, name: str, node: dict[str, Any]) -> np.ndarray:
        dtype, stored = _dtype(node, _KINDS), self.arrays[name]
        shape = tuple(node["shape"])[:: -1 if node.get("fortran") else 1]
        if _as_bytes(dtype):
            stored = np.frombuffer(stored.tobytes(), dtype)
        if stored.dtype != dtype:
            raise ConfigError(f"not a state that grpo_rl has written: array {name} is of {stored.dtype}, not {dtype}")
        found = stored.reshape(shape).copy()
        return found.T if node.get("fortran") else found

    def _tensor(self, name: str, node: dict[str, Any]) -> th.Tensor:
        found = th.from_numpy(self.arrays[name].copy()).reshape(node["shape"])
        return found.view(th.bfloat16) if node["bfloat16"] else found

    def _rng(self, content: Any, _: dict[str, Any]) -> np.random.Generator:
        return np.random.Generator(self._bit_generator(self.value(content)))

    def _random_state(self, content: Any, _: dict[str, Any]) -> np.random.RandomState:
        """NumPy's former generator: a bit generator, and the second of a pair of normal numbers."""
        state = self.value(content)
        generator = np.random.RandomState(self._bit_generator(state))
        generator.set_state(state)
        return generator

    @staticmethod
    def _bit_generator(state: dict[str, Any]) -> Any:
        if state["bit_generator"] not in _GENERATORS:
            raise ConfigError(f"not a state that grpo_rl has written: generator {state['bit_generator']!r}")
        if not (0 <= state["state"].get("pos", 0) <= 624 and 0 <= state.get("buffer_pos", 0) <= 4):
            raise ConfigError("not a state that grpo_rl has written: NumPy would read beyond a generator's numbers")
        generator = getattr(np.random, state["bit_generator"])(0)
        generator.state = state
        return generator

    def _random(self, content: Any, _: dict[str, Any]) -> random.Random:
        generator = random.Random(0)
        generator.setstate(self.value(content))
        return generator

    def _torch_rng(self, name: str, node: dict[str, Any]) -> th.Generator:
        generator = th.Generator(th.device(str(node["device"])))
        generator.set_state(th.from_numpy(self.arrays[name].copy()))
        return generator

    def _space(self, name: str, node: dict[str, Any]) -> Space:
        """A copy of the env's own space of that name, with its generators as they were."""
        found = self._handle(name)
        rngs = self.value(node["rngs"])
        if not isinstance(found, Space) or not all(isinstance(rng, np.random.Generator | None) for rng in rngs):
            raise ConfigError(f"not a state that grpo_rl has written: {str(name)[:80]} with other generators")
        made = copy.deepcopy(found)
        for part, rng in zip(_parts(made), rngs, strict=True):
            part._np_random = rng
        return made

    def _enum(self, name: str, node: dict[str, Any]) -> Any:
        cls = self.handles.get(name) or _loaded(name)
        if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
            return self._handle(name)
        return cls[node["member"]]

    def _handle(self, name: str) -> Any:
        if name not in self.handles:
            raise ConfigError(
                f"it names {str(name)[:80]}, which is not part of the environment here: build it as it was"
            )
        return self.handles[name]

    def _data(self, name: str, node: dict[str, Any]) -> Any:
        """Made of its fields, without its constructor; the class is one of the env's, or stands beside one of them."""
        cls = self.handles.get(name) or (_loaded(name) if name.partition(":")[0] in self.modules else None)
        if not (isinstance(cls, type) and _is_data(cls)):
            return self._handle(name)
        fields = self._pairs(node["fields"])
        if issubclass(cls, tuple):
            return tuple.__new__(cls, [fields[item] for item in cls._fields])  # type: ignore[attr-defined]
        made: Any = object.__new__(cls)
        for key, value in fields.items():
            object.__setattr__(made, key, value)
        return made

    def _plain(self, name: str, node: dict[str, Any]) -> Any:
        cls = _loaded(name) if name in PLAIN else None
        if not isinstance(cls, type):
            raise ConfigError(
                f"it names {str(name)[:80]}, which is not part of the environment here: build it as it was"
            )
        made: Any = object.__new__(cls)
        vars(made).update(self._pairs(node["attributes"]))
        return made


def _dtype(node: dict[str, Any], kinds: str) -> np.dtype[Any]:
    dtype = np.dtype(str(node["type"]))
    if dtype.kind not in kinds or dtype.hasobject:
        raise ConfigError(f"not a state that grpo_rl has written: numbers of {dtype}")
    return dtype


def _loaded(name: str) -> Any:
    """The class module:Name, of a module that is loaded already."""
    module, _, qualified = str(name).partition(":")
    loaded = sys.modules.get(module)
    return None if loaded is None else vars(loaded).get(qualified)  # a getattr may import, from a lazy package


def _record(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    names = [item.name for item in fields(value)] if is_dataclass(value) else value._fields
    return [(name, getattr(value, name)) for name in names]


def _is_fortran(array: np.ndarray) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


def _as_bytes(dtype: np.dtype[Any]) -> bool:
    """Whether safetensors has no type for it."""
    return dtype.kind not in "biuf" or dtype.itemsize > 8 or not dtype.isnative


def _layout(array: np.ndarray) -> dict[str, Any]:
    layout = {"type": array.dtype.str, "shape": list(array.shape)}
    return layout | {"fortran": True} if _is_fortran(array) else layout


def _name(value: Any) -> str:
    """module:name of a class, function, module …; "" for what has none that tells it from others."""
    if isinstance(value, types.ModuleType):
        return f"{value.__name__}:"
    if isinstance(value, logging.Logger):
        return f"logging:{value.name}"
    if isinstance(value, Space):
        return f"{type(value).__name__}:{value}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    return "" if module is None or not name else f"{module}:{name}"


def _parts(space: Space) -> list[Any]:
    """A space and, of a composite one, its parts, each of which has a generator of its own."""
    found: list[Any] = [space]
    for part in found:  # grows while it is walked
        if parts := getattr(part, "spaces", None):
            found.extend(parts.values() if isinstance(parts, dict) else parts)
    return found


def _handles(tree: Any) -> Iterator[Any]:
    """Classes, functions, modules and spaces in a tree, the classes of its enum members and data included."""
    waiting, seen = [tree], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, enum.Enum):
            yield type(value)
        elif isinstance(value, _HANDLES):
            yield value
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            waiting += value
        elif is_dataclass(value):
            waiting += [item for _, item in _record(value)]
        elif _name(type(value)) in PLAIN:
            waiting += vars(value).values()
        if _is_data(type(value)):
            yield type(value)


def _is_data(cls: type) -> bool:
    """Whether instances are their fields: a NamedTuple or a dataclass."""
    return is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
