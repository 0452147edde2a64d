"""What the pickles in an agent's file may do without the user's word: make numbers, arrays, spaces and schedules, and
name the classes of policies, layers and optimizers. Exact names with exact arguments; everything else is code.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer

from grpo_rl.loading.pickles import Item, Step
from grpo_rl.schedules import Schedule


def permitted(step: Step) -> bool:
    """Whether a pickle may do this without the user's word."""
    name = f"{step.module}.{step.name}"
    if step.action == "imports":
        return name in _CALLS or name in _NAMES or _is_part(step.module, step.name)
    if step.action == "calls":
        fits = _CALLS.get(name)
        return fits(step.items) if fits else not step.items and _is_value(step.module, step.name)
    if name in _STATES:
        return step.made and len(step.items) == 1 and _STATES[name](step.items[0])
    return step.made


def _find(module: str, name: str) -> Any:
    """What the program has imported under that name; nothing is imported. `_GONE` if its module lacks the name."""
    if module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    for i, part in enumerate(name.split(".")):
        if i and not isinstance(found, type):
            return None
        members = vars(found)
        if part not in members:
            return None if "__getattr__" in members else _GONE
        found = members[part]
    return found


_GONE = object()
_OURS = ("grpo_rl", "stable_baselines3", "gymnasium")


def _is_part(module: str, name: str) -> bool:
    """Whether this is a class that agents are made of, and that the program has imported; torch's: layers, optimizers.

    A name that our own or SB3's modules lack is harmless: SB3 warns of the entry and goes on.
    """
    found = _find(module, name)
    if found is _GONE:
        return module.split(".")[0] in _OURS and "." not in name
    if not isinstance(found, type):
        return False
    if module.split(".")[0] == "torch":
        return module.startswith(("torch.nn.modules.", "torch.optim."))
    if issubclass(found, np.generic):
        return module == "numpy"
    if issubclass(found, BaseBuffer):
        return module.startswith("stable_baselines3.")
    return issubclass(found, th.nn.Module) or _is_value(module, name)


def _is_value(module: str, name: str) -> bool:
    """Whether a class without constructor arguments may be made: its state follows as plain data."""
    found = _find(module, name)
    if found is _GONE:
        return _is_part(module, name)
    return isinstance(found, type) and issubclass(found, spaces.Space | Schedule)


def _literals(*types: Any) -> Callable[[tuple[Item, ...]], bool]:
    """Whether the arguments are so many literals of these types."""

    def fits(items: tuple[Item, ...]) -> bool:
        return len(items) == len(types) and all(
            item.kind == "plain" and isinstance(item.value, kind) for item, kind in zip(items, types, strict=True)
        )

    return fits


def _is(item: Item, *names: str) -> bool:
    """Whether the item is one of these globals, or was made by one."""
    return item.name is not None and ".".join(item.name) in names


def _dtype(items: tuple[Item, ...]) -> bool:
    return _literals(str, bool, bool)(items) and re.fullmatch(r"[biufc]\d{1,2}", items[0].value) is not None


def _dtype_state(state: Item) -> bool:
    """A number's: the flags of other dtypes are taken on trust by NumPy, and may make objects of any bytes."""
    return state.literals() in [(3, order, None, None, None, -1, -1, 0) for order in "<>=|"]


def _array_state(state: Item) -> bool:
    if state.kind != "tuple" or len(state.value) != 5:
        return False
    _, shape, dtype, _, content = state.value
    return _shape(shape) and _is_dtype(dtype) and content.kind == "plain" and isinstance(content.value, bytes)


def _shape(item: Item) -> bool:
    numbers = item.literals()
    return numbers is not None and len(numbers) <= 64 and all(type(number) is int and number >= 0 for number in numbers)


def _is_dtype(item: Item) -> bool:
    return item.kind == "result" and _is(item, "numpy.dtype")


def _reconstruct(items: tuple[Item, ...]) -> bool:
    return len(items) == 3 and _is(items[0], "numpy.ndarray") and items[1].literals() == (0,)


def _frombuffer(items: tuple[Item, ...]) -> bool:
    if len(items) != 4:
        return False
    content, dtype, shape, order = items
    return _literals(bytes | bytearray, str)((content, order)) and _is_dtype(dtype) and _shape(shape)


def _scalar(items: tuple[Item, ...]) -> bool:
    return len(items) == 2 and _is_dtype(items[0]) and _literals(bytes)(items[1:])


_BIT_GENERATORS = ("numpy.random._pcg64.PCG64", "numpy.random._pcg64.PCG64DXSM", "numpy.random._sfc64.SFC64")
_MAKE_BITS = "numpy.random._pickle.__bit_generator_ctor"
_SEEDS = "numpy.random.bit_generator.SeedSequence"


def _bit_generator(items: tuple[Item, ...]) -> bool:
    known = [name.rpartition(".")[2] for name in _BIT_GENERATORS]
    return len(items) == 1 and (_is(items[0], *_BIT_GENERATORS) or items[0].value in known)


def _generator(items: tuple[Item, ...]) -> bool:
    first, rest = items[:1], items[1:]
    made = _bit_generator(first) or (len(first) == 1 and first[0].kind == "result" and _is(first[0], _MAKE_BITS))
    return made and len(rest) <= 1 and all(item.kind == "global" and _is(item, _MAKE_BITS) for item in rest)


def _seed_sequence(items: tuple[Item, ...]) -> bool:
    return len(items) == 3 and _is(items[0], _SEEDS) and _literals(int)(items[1:2])


def _nothing(items: tuple[Item, ...]) -> bool:
    return not items


def _queue(items: tuple[Item, ...]) -> bool:
    return len(items) <= 2 and all(item.kind != "global" for item in items)


_SB3 = "stable_baselines3.common.utils"
# What may be called, and with which arguments; besides `_is_value`.
_CALLS: dict[str, Callable[[tuple[Item, ...]], bool]] = {
    "collections.OrderedDict": _nothing,
    "collections.deque": _queue,
    "numpy.dtype": _dtype,
    "numpy.random._pickle.__generator_ctor": _generator,
    _MAKE_BITS: _bit_generator,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _seed_sequence,
    f"{_SB3}.FloatSchedule": _nothing,
    f"{_SB3}.ConstantSchedule": _nothing,
    f"{_SB3}.LinearSchedule": _nothing,
    "rl_zoo3.utils.SimpleLinearSchedule": _nothing,
    "torch.device": lambda items: _literals(str)(items) or _literals(str, int)(items),
} | {
    f"{core}.{name}": fits
    for core in ("numpy.core", "numpy._core")
    for name, fits in {
        "multiarray._reconstruct": _reconstruct,
        "multiarray.scalar": _scalar,
        "numeric._frombuffer": _frombuffer,
    }.items()
}
# What may be named, but not called; besides `_is_part`.
_NAMES = {"numpy.ndarray", _SEEDS, *_BIT_GENERATORS} | {
    f"builtins.{name}" for name in "bool bytes complex dict float frozenset int list object set slice str tuple".split()
}
# What takes a state of one form only; what else was made may take any.
_STATES: dict[str, Callable[[Item], bool]] = {
    "numpy.dtype": _dtype_state,
    **{name: _array_state for name in _CALLS if name.startswith(("numpy.core", "numpy._core"))},
}
