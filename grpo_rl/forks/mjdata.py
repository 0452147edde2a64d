"""mjData as plain arrays, for checkpoints: MuJoCo's own copy needs a live model, and its pickle is a blob of C memory.

Contacts and constraint rows live in an arena and are computed anew at each step: they stay behind. All the rest is
kept, positions of bodies included: Ant and Humanoid read those before they step.
"""

from typing import Any

import numpy as np

from grpo_rl.errors import ForkError

_SCALARS = ("time", "flg_energypos", "flg_energyvel", "flg_subtreevel", "flg_rnepost")  # flags: what is up to date


class MjArrays(dict[str, Any]):
    """Name → array or number of an MjData."""


def read_mjdata(data: Any) -> MjArrays:
    """Copies of what `data` holds, arena apart."""
    import mujoco  # type: ignore[import-untyped]

    empty = mujoco.MjData(data.model)
    found = MjArrays({name: getattr(data, name) for name in _SCALARS if hasattr(data, name)})
    for name in dir(empty):
        array = getattr(empty, name) if name[0] != "_" else None
        if isinstance(array, np.ndarray) and array.size and not array.flags.owndata:  # what it owns was in the arena
            found[name] = getattr(data, name).copy()
    return found


def write_mjdata(data: Any, arrays: MjArrays) -> None:
    """Puts `data` into the state of `arrays`.

    Raises:
        ForkError: They were taken from another model.
    """
    import mujoco

    mujoco.mj_resetData(data.model, data)
    for name, value in arrays.items():
        if name in _SCALARS and not isinstance(value, np.ndarray):
            setattr(data, name, value)
            continue
        target = getattr(data, name, None)
        if not isinstance(target, np.ndarray) or target.shape != value.shape or target.dtype != value.dtype:
            raise ForkError(f"mjData.{name} is not that of this model or of this version of MuJoCo: build both alike")
        target[...] = value
