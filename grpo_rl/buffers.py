"""The rollout buffer: steps as they were sampled, each with the group that it belongs to.

Axes (T, N, ...) as in SB3. T is not fixed: a rollout of whole episodes is as long as they are. Observations stay raw.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from grpo_rl.types import Batch, Obs, TensorObs

Packed = tuple[TensorObs, dict[str, th.Tensor | None]]


class Rows:
    """Rows that an update draws minibatches from: `_pack` has all of them as columns."""

    device: th.device | str

    @property
    def size(self) -> int:
        """How many rows there are."""
        raise NotImplementedError

    def _pack(self) -> Packed:
        """All rows: observations (M, ...) and the other columns (M, ...) by their names in `Batch`; made once."""
        raise NotImplementedError

    def weights(self, index: np.ndarray | None = None) -> np.ndarray:
        """The shares (m,) float32 of the rows `index` in a minibatch's loss; None: all rows."""
        count = self.size if index is None else len(index)
        return np.full(count, 1 / count, np.float32)

    def get(self, batch_size: int | None = None) -> Iterator[Batch]:
        """All valid rows once, in a new random order, `batch_size` at a time (None: all at once).

        A remainder is spread over the minibatches, where SB3 makes a last one of it: a few rows, scaled by their own
        spread, would get a whole step. Each row of a minibatch of m rows weighs 1/m. Shuffled by numpy's global
        generator, as SB3's buffer is.
        """
        for index in self.shuffled(batch_size):
            yield self.batch(index)

    def shuffled(self, batch_size: int | None = None) -> list[np.ndarray]:
        """The rows of the minibatches of `get`."""
        return np.array_split(np.random.permutation(self.size), max(self.size // (batch_size or self.size), 1))

    def batch(self, index: np.ndarray | None = None) -> Batch:
        """The valid rows `index`, in that order; all of them when None."""
        obs, columns = self._pack()
        chosen = slice(None) if index is None else th.as_tensor(index, device=self.device)
        rows = {name: None if column is None else column[chosen] for name, column in columns.items()}
        batch_obs = {key: o[chosen] for key, o in obs.items()} if isinstance(obs, dict) else obs[chosen]
        weight = th.as_tensor(self.weights(index), device=self.device)
        return Batch(observations=batch_obs, weight=weight, **rows)  # type: ignore[arg-type]

    def parts(self, batch: Batch, size: int | None) -> Iterator[Batch]:
        """The parts of a minibatch whose gradients are added up before a step: of steps it is one."""
        yield batch


class GroupBuffer(Rows):
    """Steps of one rollout, sampled by one policy.

    Filled by a sampler with `add` and `end`, closed by `finish`; then the arrays below exist, `advantages` (and
    `returns`, `old_values`, `ref_log_prob` where wanted) are set by the algorithm, and `get` packs rows in minibatches.
    `behaviour_ratio` (T, N) is set once the rollout is an old one, see `Batch`.

    Attributes:
        observations: (T, N, ...) raw, in the space's dtype; a dict of such arrays for Dict spaces.
        actions: (T, N, ...) as sampled, before clipping. rewards, log_probs: (T, N) float32. values: the same, or None.
        group: (T, N) int64, the root that the step's segment started from. age: (T, N) int64, steps since that root.
        mask: (T, N) bool, False for frozen columns and dropped segments.
        ends: (T, N) bool, the segment ends after this step; True where `mask` is False, so that none begins there.
        alive: (T, N) bool, it ended without termination.
        discounted: (T, N) float64, the running discounted return of the column's episode (for reward scaling).
    """

    observations: Obs
    actions: np.ndarray
    rewards: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray | None
    group: np.ndarray
    age: np.ndarray
    mask: np.ndarray
    ends: np.ndarray
    alive: np.ndarray
    discounted: np.ndarray

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, device: th.device | str) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._steps: list[dict[str, Any]] = []
        self._packed: Packed | None = None
        self.tail_obs: list[tuple[int, int, Any]] = []
        self.advantages: th.Tensor | None = None
        self.returns: th.Tensor | None = None
        self.old_values: th.Tensor | None = None
        self.ref_log_prob: th.Tensor | None = None
        self.behaviour_ratio: th.Tensor | None = None

    def __len__(self) -> int:
        """T, the vector steps held."""
        return len(self._steps)

    def add(self, **step: Any) -> None:
        """One vector step: observations, actions, rewards, log_probs, values (or None), group, age, mask, discounted.

        Arrays (N, ...) are kept, not copied: hand over arrays that nobody writes to afterwards.
        """
        columns = len(step["rewards"])
        self._steps.append({**step, "ends": np.zeros(columns, bool), "alive": np.zeros(columns, bool)})

    def end(self, column: int, terminated: bool, next_obs: Any) -> None:
        """The segment in `column` ends after the last step; `next_obs` is what it would have gone on from."""
        step = self._steps[-1]
        if not step["mask"][column]:
            return
        step["ends"][column] = True
        step["alive"][column] = not terminated
        if not terminated:
            self.tail_obs.append((len(self._steps) - 1, column, next_obs))

    def drop(self, column: int, first: int) -> None:
        """Leaves steps `first`… of `column` out of training: the group closed before this segment ended."""
        for step in self._steps[first:]:
            step["mask"][column] = False

    def finish(self) -> None:
        """Stacks the steps into arrays (T, N, ...)."""
        for name in ("actions", "rewards", "log_probs", "group", "age", "mask", "ends", "alive", "discounted"):
            setattr(self, name, np.stack([step[name] for step in self._steps]))
        self.ends |= ~self.mask
        first = self._steps[0]
        self.values = np.stack([step["values"] for step in self._steps]) if first["values"] is not None else None
        obs = first["observations"]
        if isinstance(obs, dict):
            self.observations = {key: np.stack([step["observations"][key] for step in self._steps]) for key in obs}
        else:
            self.observations = np.stack([step["observations"] for step in self._steps])
        self.tail_obs = [(t, n, obs) for t, n, obs in self.tail_obs if self.mask[t, n]]

    def tensor(self, array: np.ndarray) -> th.Tensor:
        """`array` on the buffer's device; floats as float32."""
        tensor = th.as_tensor(array, device=self.device)
        return tensor.float() if tensor.is_floating_point() else tensor

    def rows(self) -> tuple[TensorObs, th.Tensor]:
        """Observations (M, ...) and actions (M, ...) of all valid steps."""
        if isinstance(self.observations, dict):
            obs: TensorObs = {key: self.tensor(array[self.mask]) for key, array in self.observations.items()}
        else:
            obs = self.tensor(self.observations[self.mask])
        return obs, self.tensor(self.actions[self.mask])

    @property
    def size(self) -> int:
        return int(self.mask.sum())

    def _pack(self) -> Packed:
        assert self.advantages is not None, "advantages are set before minibatches are drawn"
        if self._packed is None:
            self._packed = self._tensors()
        return self._packed

    def _tensors(self) -> Packed:
        """The valid steps as tensors of rows (M, ...)."""
        obs, actions = self.rows()
        if isinstance(self.action_space, spaces.Discrete):
            actions = actions.long()
        valid = self.tensor(self.mask)

        def packed(tensor: th.Tensor | None) -> th.Tensor | None:
            return None if tensor is None else tensor[valid]

        return obs, {
            "actions": actions,
            "old_log_prob": packed(self.tensor(self.log_probs)),
            "advantages": packed(self.advantages),
            "returns": packed(self.returns),
            "old_values": packed(self.old_values),
            "ref_log_prob": self.ref_log_prob,
            "behaviour_ratio": packed(self.behaviour_ratio),
        }
