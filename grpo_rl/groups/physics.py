"""N MjData of one model stepped on some threads, and their fields as arrays over the batch: two ways, one interface.

`NativePhysics` is MuJoCo's own batch (`mujoco.batch`, since MuJoCo 4), whose threads never wait for Python's lock.
`ThreadPhysics` calls `mj_step` from Python's threads: for older MuJoCo, and for Ant and both Humanoids, which read what
only `mj_rnePostConstraint` computes after a step, and the batch cannot call that. Both are bit-equal to a loop of
`mj_step`. `mujoco.rollout` would not be: it does not give back the warm start of the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from grpo_rl.groups.threads import Threads

Fields = Any
"""Fields of mjData by name, each (n, *shape) float64: `fields.qpos` is (n, nq)."""


def make_physics(
    model: Any, datas: list[Any], frame_skip: int, names: Sequence[str], rne: bool, n_threads: int
) -> ThreadPhysics | NativePhysics:
    """The faster of the two that can do it.

    Args:
        model: MjModel.
        datas: N MjData of that model.
        frame_skip: Calls of `mj_step` for one step.
        names: Fields of type float64 to read.
        rne: Whether `mj_rnePostConstraint` runs after a step.
        n_threads: Threads, the caller's among them.
    """
    if not rne:
        try:
            return NativePhysics(model, datas, frame_skip, names, n_threads)
        except ImportError:
            pass
    return ThreadPhysics(model, datas, frame_skip, names, rne, n_threads)


class ThreadPhysics:
    """`mj_step` of each MjData on Python's threads, which let go of the lock there; see `make_physics`."""

    def __init__(
        self, model: Any, datas: list[Any], frame_skip: int, names: Sequence[str], rne: bool, n_threads: int
    ) -> None:
        self._model, self._datas, self._frame_skip, self._rne = model, datas, frame_skip, rne
        self._controls = [data.ctrl for data in datas]
        self._threads = Threads(n_threads)
        self._names = tuple(names)
        self._gathers: dict[tuple[str, ...], _Gather] = {}

    def step(self, columns: list[int], actions: np.ndarray) -> None:
        """Steps the MjData of `columns` with their rows of `actions` (N, A)."""
        import mujoco  # type: ignore[import-untyped]

        model, datas, controls, frame_skip = self._model, self._datas, self._controls, self._frame_skip
        mj_step, after = mujoco.mj_step, mujoco.mj_rnePostConstraint if self._rne else None

        def advance(column: int) -> None:
            controls[column][:] = actions[column]
            mj_step(model, datas[column], frame_skip)
            if after is not None:
                after(model, datas[column])

        self._threads.run(advance, columns)

    def read(self, columns: list[int], names: tuple[str, ...] | None = None) -> Fields:
        """Copies of the fields of `columns`, all or those of `names`."""
        names = names or self._names
        if names not in self._gathers:
            self._gathers[names] = _Gather(self._datas, names)
        return self._gathers[names](columns)

    def settle(self, columns: Sequence[int]) -> None:
        """Brings each MjData up to date: it always is."""

    def adopt(self, columns: Sequence[int]) -> None:
        """Goes on from what others have written to these MjData."""

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()


class _Gather:
    """Copies fields of many MjData into arrays over the batch, with one call of NumPy."""

    def __init__(self, datas: Sequence[Any], names: Sequence[str]) -> None:
        self._rows = [[getattr(data, name).reshape(-1) for name in names] for data in datas]  # views, not copies
        self._all = [part for row in self._rows for part in row]
        ends = np.cumsum([part.size for part in self._rows[0]]).tolist()
        shapes = [getattr(datas[0], name).shape for name in names]
        self._slices = list(zip(names, [0, *ends[:-1]], ends, shapes, strict=True))

    def __call__(self, columns: list[int]) -> Fields:
        n = len(columns)
        whole = n == len(self._rows)
        parts = self._all if whole else [part for column in columns for part in self._rows[column]]
        rows = np.concatenate(parts).reshape(n, -1)
        return SimpleNamespace(**{name: rows[:, a:b].reshape(n, *shape) for name, a, b, shape in self._slices})


class NativePhysics:
    """MuJoCo's own batch; see `make_physics`. A step leaves the MjData behind, `settle` brings them up to date.

    What is computed from the state (positions of bodies, forces) reads as it was after a column's last step, whatever
    was adopted since.

    Raises:
        ImportError: MuJoCo is older than 4.
    """

    def __init__(self, model: Any, datas: list[Any], frame_skip: int, names: Sequence[str], n_threads: int) -> None:
        import mujoco
        from mujoco.batch import Batch  # type: ignore[import-untyped]

        self._model, self._datas, self._frame_skip = model, datas, frame_skip
        self._state_kind = mujoco.mjtState.mjSTATE_INTEGRATION
        self._batch = Batch(model, len(datas), n_threads, persistent=True)
        self._fields = {name: self._batch.bind(name) for name in names}
        self._controls = self._batch.bind("ctrl")
        self._current = np.ones(len(datas), dtype=bool)  # columns whose MjData is up to date
        self.adopt(range(len(datas)))

    def step(self, columns: list[int], actions: np.ndarray) -> None:
        """Steps the simulations of `columns` with their rows of `actions` (N, A)."""
        if len(columns) == len(self._datas):
            self._controls[:] = actions
            self._batch.step(None, self._frame_skip)
            self._current[:] = False
        else:
            self._controls[columns] = actions[columns]
            self._batch.step(np.array(columns, dtype=np.int32), self._frame_skip)
            self._current[columns] = False

    def read(self, columns: list[int], names: tuple[str, ...] | None = None) -> Fields:
        """Copies of the fields of `columns`, all or those of `names`."""
        fields = {name: self._fields[name] for name in names} if names else self._fields
        if len(columns) == len(self._datas):
            return SimpleNamespace(**{name: values.copy() for name, values in fields.items()})
        return SimpleNamespace(**{name: values[columns] for name, values in fields.items()})

    def settle(self, columns: Sequence[int]) -> None:
        """Brings the MjData of `columns` up to date, all of each."""
        for column in columns:
            if not self._current[column]:
                self._batch.get_data(column, self._datas[column])
                self._current[column] = True

    def adopt(self, columns: Sequence[int]) -> None:
        """Goes on from what others have written to these MjData."""
        import mujoco

        for column in columns:
            mujoco.mj_getState(self._model, self._datas[column], self._batch.state[column], self._state_kind)
            self._current[column] = True

    def close(self) -> None:
        """The batch ends its threads by itself."""
