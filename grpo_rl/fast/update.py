"""A step on one minibatch: the gradient of a model's loss, clipped, given to the optimizer. By torch, or by numpy.

numpy runs what torch would (`program.trace`), so the loss is written once, and every option, network and activation
goes the same way. What it gives is compared with torch's autograd on the first minibatch of each update of the policy;
where it differs, that update is torch's. Which way is taken depends on counts, never on a clock: runs repeat.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th

from grpo_rl.buffers import GroupBuffer
from grpo_rl.fast.acting import is_plain
from grpo_rl.fast.flat import FlatParameters
from grpo_rl.fast.program import Untraceable, trace, untouched
from grpo_rl.replay import Replay
from grpo_rl.types import Batch

TRACING_COST = 300
"""Minibatches by torch that take as long as tracing: the loss is traced after as many, with settings that stay."""
FEWEST_ROWS = 4
"""A minibatch of fewer does not show what depends on its rows."""
TOLERANCE = 1e-4
"""Largest difference from torch: of the gradient, relative to its norm; of the loss, relative or absolute."""


class TorchUpdate:
    """One update of the policy, some passes over minibatches, by torch, on any device."""

    def __init__(self, model: Any, clip_range: float) -> None:
        self.model = model
        self.clip_range = clip_range
        self.parameters = list(model.policy.parameters())

    def minibatches(self) -> Iterator[Any]:
        """One pass over the rows, in a new order."""
        return self.model.rows.get(self.model.batch_size)

    def differentiate(self, minibatch: Any) -> dict[str, th.Tensor]:
        """Terms of the loss by name; its gradient is kept."""
        self.model.policy.optimizer.zero_grad()
        return self.model.differentiate(minibatch, self.clip_range)

    def clip(self) -> dict[str, th.Tensor]:
        """Clips the gradient; gives the norm that it had, for the log."""
        precision = self.model._precision
        precision.unscale(self.model.policy.optimizer)
        return precision.verdict(th.nn.utils.clip_grad_norm_(self.parameters, self.model.max_grad_norm))

    def step(self) -> None:
        """Moves the parameters."""
        self.model._precision.step(self.model.policy.optimizer)


class Program(NamedTuple):
    """The loss and its gradient: `run(*columns of a minibatch, clip_range)` -> terms by `names`, then gradients."""

    run: Callable[..., list[Any]]
    names: list[str]


class Programs:
    """What numpy needs of a model, kept from one update to the next.

    `own_loss`: `loss` and `differentiate` are the library's. A user's may do more than reckon, and are left to torch.
    """

    def __init__(self, model: Any, own_loss: bool) -> None:
        self.model = model
        self.own_loss = own_loss
        self.programs: dict[str, Program | None] = {}
        self.flat: FlatParameters | None = None
        self.memory: list[int] = []
        self._lay_out()

    def _lay_out(self) -> bool:
        """Makes the parameters one vector, unless they are; False where they cannot be."""
        policy = self.model.policy
        if not (is_plain(policy) and FlatParameters.possible(policy)):
            return False
        if self.flat is None or not self.flat.holds(policy):
            self.flat = FlatParameters(policy)
        return True

    def update(self, clip_range: float) -> TorchUpdate:
        """One update: by numpy, where that goes."""
        model = self.model
        own_loss = self.own_loss and not {"loss", "differentiate"} & vars(model).keys()
        if not (own_loss and type(model.rows) in (GroupBuffer, Replay) and self._lay_out()):
            return TorchUpdate(model, clip_range)
        assert self.flat is not None
        self.flat.begin()
        memory = [tensor.data_ptr() for tensor in (*model.policy.parameters(), *model.policy.buffers())]
        if memory != self.memory:  # programs read the parameters and buffers where they were
            self.programs.clear()
            self.memory = memory
        return NumpyUpdate(model, clip_range, self.programs, self.flat)


class NumpyUpdate(TorchUpdate):
    """By numpy, once the loss is worth a program, and as long as that is right."""

    def __init__(
        self, model: Any, clip_range: float, programs: dict[str, Program | None], flat: FlatParameters
    ) -> None:
        super().__init__(model, clip_range)
        self.programs, self.flat = programs, flat
        self.settings = _settings(model)
        if model.minibatches_seen[0] != self.settings:
            model.minibatches_seen = [self.settings, 0]
        self.agrees: bool | None = None  # whether numpy gave what torch gives; None: not compared yet
        self.columns = _arrays(model.rows.batch())
        self.clip_value = np.array(clip_range)
        self.gradients: list[np.ndarray] | None = None

    def minibatches(self) -> Iterator[np.ndarray]:
        yield from self.model.rows.shuffled(self.model.batch_size)

    def differentiate(self, minibatch: np.ndarray) -> dict[str, th.Tensor]:
        program = self._program(minibatch)
        if program is None:
            self.gradients = None
            return super().differentiate(self.model.rows.batch(minibatch))
        terms, self.gradients = self._run(program, minibatch)
        return dict(zip(program.names, th.from_numpy(terms).unbind(), strict=True))

    def clip(self) -> dict[str, th.Tensor]:
        if self.gradients is None:
            return super().clip()
        return {"grad_norm": self.flat.clip(self.gradients, self.model.max_grad_norm)}

    def step(self) -> None:
        if self.gradients is None:
            super().step()
        else:
            self.flat.step()

    def _run(self, program: Program, index: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Terms of the loss, and the gradient by parameters."""
        weight = self.model.rows.weights(index)
        columns = [weight if column is None else column.take(index, axis=0) for column in self.columns]
        with np.errstate(all="ignore"):  # torch does not warn either; what is not finite is noticed after the update
            values = program.run(*columns, self.clip_value)
        terms = len(program.names)
        return np.array(values[:terms], np.float32), values[terms:]

    def _program(self, index: np.ndarray) -> Program | None:
        """The program, if there is one and it is right."""
        if self.agrees is None:
            self.model.minibatches_seen[1] += 1
            if self.model.minibatches_seen[1] <= TRACING_COST or len(index) < FEWEST_ROWS:
                return None
            self.agrees = self._compare(index)
        return self.programs[self.settings] if self.agrees else None

    def _compare(self, index: np.ndarray) -> bool:
        """Makes the program where there is none. Whether it does what torch does with this minibatch."""
        with untouched(self.model.policy):
            if self.settings in self.programs:
                return self._is_right(index)
            batch, fewer = (self.model.rows.batch(rows) for rows in (index, index[:-1]))
            self.programs[self.settings] = _trace_loss(self.model, batch, fewer, self.clip_range, self.parameters)
            return self._is_right(index) and self._is_right(index[:-1])

    def _is_right(self, index: np.ndarray) -> bool:
        program, state = self.programs[self.settings], th.get_rng_state()
        if program is None:
            return False
        loss, terms = self.model.loss(self.model.rows.batch(index), self.clip_range)
        expected = _gradient(loss, self.parameters)
        after = th.get_rng_state()
        th.set_rng_state(state)
        found, gradient = self._run(program, index)
        same_noise = th.equal(th.get_rng_state(), after)
        th.set_rng_state(state)
        values = [float(terms[name]) for name in program.names]
        close = np.allclose(found, values, rtol=TOLERANCE, atol=TOLERANCE)
        difference = _norm([a - b.numpy() for a, b in zip(gradient, expected, strict=True)])
        return same_noise and close and difference <= TOLERANCE * _norm([part.numpy() for part in expected])


def _trace_loss(
    model: Any, batch: Batch, fewer: Batch, clip_range: float, parameters: list[th.nn.Parameter]
) -> Program | None:
    """The program for minibatches like these, or None where torch has to do it."""
    names: list[str] = []

    def loss_and_gradient(*tensors: th.Tensor) -> list[th.Tensor]:
        *columns, clip = tensors
        loss, terms = model.loss(_like(batch, iter(columns)), clip)
        names[:] = terms
        return [*terms.values(), *_gradient(loss, parameters)]

    clip = th.tensor(clip_range, dtype=th.float64)
    inputs = [[*(column for column in _leaves(each) if column is not None), clip] for each in (batch, fewer)]
    try:
        return Program(trace(loss_and_gradient, *inputs), names)
    except Untraceable:
        return None


def _gradient(loss: th.Tensor, parameters: list[th.nn.Parameter]) -> list[th.Tensor]:
    found = th.autograd.grad(loss, parameters, allow_unused=True)
    return [th.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _norm(parts: list[np.ndarray]) -> float:
    return math.sqrt(sum(float(np.square(part).sum()) for part in parts))


_SETTINGS = ("scale", "ent_coef", "vf_coef", "kl_coef", "loss_type", "clip_range_high", "clip_delta", "kl_estimator")


def _settings(model: Any) -> str:
    """The numbers that the loss reads beside its arguments: a program holds them as they were when it was traced."""
    clip_vf = model.clip_range_vf and model.clip_range_vf(model._current_progress_remaining)
    auxiliary = [(name, weight) for name, (_, weight) in (model.auxiliary_losses or {}).items()]
    return repr((*(getattr(model, name) for name in _SETTINGS), clip_vf, auxiliary))


# --- batches as lists of columns --------------------------------------------------------------------------------------
def _leaves(batch: Batch) -> list[th.Tensor | None]:
    """The columns of a batch; those of Dict observations in the order of their keys. None where there is none."""
    obs = batch.observations
    return [*([obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]), *batch[1:]]


def _like(batch: Batch, columns: Iterator[th.Tensor]) -> Batch:
    """A batch of other columns, in the order of `_leaves` without the missing ones."""
    obs = batch.observations
    first = {key: next(columns) for key in sorted(obs)} if isinstance(obs, dict) else next(columns)
    rest: Any = [None if column is None else next(columns) for column in batch[1:]]
    return Batch(first, *rest)


def _arrays(batch: Batch) -> list[np.ndarray | None]:
    """The columns that there are, as arrays on the same memory; None in the place of the weights."""
    return [None if column is batch.weight else column.numpy() for column in _leaves(batch) if column is not None]
