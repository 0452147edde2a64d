"""The state of MuJoCo simulations: all of mjData, and the values of mjModel that a wrapper may have randomised."""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from grpo_rl.errors import ForkError
from grpo_rl.forks.mjdata import MjArrays, read_mjdata, write_mjdata

_views: weakref.WeakKeyDictionary[Any, list[np.ndarray]] = weakref.WeakKeyDictionary()


def read(model: Any, data: Any) -> tuple[Any, bytes, tuple[Any, ...]]:
    """mjData itself, the float64 values of mjModel as bytes, and its options."""
    return data, *_model_values(model)


def clone(state: tuple[Any, bytes, tuple[Any, ...]]) -> tuple[Any, bytes, tuple[Any, ...]]:
    """`state` with an mjData of its own."""
    return copy.copy(state[0]), *state[1:]


def write(model: Any, data: Any, state: tuple[Any, bytes, tuple[Any, ...]]) -> None:
    """Copies mjData into the env's own, without an allocation, and the model's values if they differ.

    Raises:
        ForkError: The state is that of another model.
    """
    import mujoco  # type: ignore[import-untyped]

    source, model_values, model_options = state
    values, options = _model_values(model)
    if len(values) != len(model_values):
        raise ForkError("expected two envs of one MuJoCo model, got two models: build both alike")
    if options != model_options:
        for name, value in zip(_options()[0], model_options, strict=True):
            setattr(model.opt, name, value)
    if values != model_values:  # bytes, so that NaN equals NaN
        views = _model_views(model)
        parts = np.split(np.frombuffer(model_values), np.cumsum([view.size for view in views])[:-1])
        for view, part in zip(views, parts, strict=True):
            view[:] = part
    if isinstance(source, MjArrays):
        write_mjdata(data, source)
    elif not hasattr(mujoco, "mj_copyData"):  # not in Python before MuJoCo 3.5
        write_mjdata(data, read_mjdata(source))
    else:
        mujoco.mj_copyData(data, model, source)


def _model_values(model: Any) -> tuple[bytes, tuple[Any, ...]]:
    return np.concatenate(_model_views(model)).tobytes(), _options()[1](model.opt)


def _model_views(model: Any) -> list[np.ndarray]:
    """Flat views of the float64 arrays of an MjModel and its options: masses, sizes, friction, gains, gravity, …

    Those of meshes and their bounding volumes are left out: a kitchen has 14 MB of them, which nothing changes.
    """
    if model not in _views:
        named = [(owner, name) for owner in (model, model.opt) for name in dir(owner)]
        arrays = [getattr(owner, name) for owner, name in named if not name.startswith(("_", "bvh_", "mesh_"))]
        arrays = [array for array in arrays if isinstance(array, np.ndarray) and array.size]
        _views[model] = [array.reshape(-1) for array in arrays if array.dtype == np.float64]
    return _views[model]


@functools.lru_cache(maxsize=1)
def _options() -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The fields of mjOption that are numbers (time step, solver, tolerances, flags, …), and their getter."""
    import mujoco

    option = mujoco.MjOption()
    names = tuple(name for name in dir(option) if isinstance(getattr(option, name), int | float))
    return names, operator.attrgetter(*names)
