"""A value function in closed form: ridge regression on random features. No network, and nothing that gradients train.

V(s) = φ(x)·w with φ = [1, x, x², tanh(xW + b)], x the observation, normalised and clipped to ±5. W and b are drawn once
(random features, Rahimi & Recht 2007); w is solved anew before each rollout is judged, from the λ-returns of earlier
rollouts alone: a baseline must not have seen the returns that it is compared with.
"""

from collections.abc import Mapping
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_flattened_obs_dim, preprocess_obs
from torch import Tensor, nn

from grpo_rl.errors import ConfigError
from grpo_rl.normalize import RunningNorm
from grpo_rl.types import TensorObs

FEATURES = 256
"""Random features beside [1, x, x²]."""
ROLLOUTS = 4
"""How many of the last rollouts are fitted."""
PENALTY = 0.01
"""Of the squared weights, per row."""
CLIP = 5.0
"""Largest absolute normalised observation."""
SPREAD = 0.7
"""Standard deviation of xW for x of unit variance."""


def features(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """φ = [1, x, x², tanh(xW + b)]: (M, 1 + 2D + F) of x (M, D), W (D, F) and b (F,)."""
    return th.cat([th.ones_like(x[:, :1]), x, x.square(), (x @ weights + biases).tanh()], dim=1)


def ridge(phi: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """The w that minimises Σ(y − φ·w)² + penalty·M·|w₁…|², solved in float64.

    The first column is of ones, and its weight w₀ is free: y + c has the predictions of y, plus c.

    Args:
        phi: (M, P) rows of features, in any order.
        targets: (M,) y.
        penalty: above 0, so that there is one solution for any rows.

    Returns:
        (P,) float64.
    """
    phi, targets = phi.double(), targets.double()
    gram = phi.T @ phi
    gram.diagonal()[1:] += penalty * len(phi)
    return th.linalg.solve(gram, phi.T @ targets)


class RidgeValue(nn.Module):
    """The regression, with the rows that it is fitted on: all of it buffers, so that saved models go on from there.

    Observations are kept as they came, since the normaliser moves: a fit sees all of them through its present state.

    Args:
        space: of vectors (Box, flattened), discrete ones (one-hot), or a Dict of these.

    Raises:
        ConfigError: an observation is an image.
    """

    weights: Tensor
    biases: Tensor
    observations: Tensor
    targets: Tensor
    rows: Tensor

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        refuse_images(space)
        self.space = space
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
        size = sum(get_flattened_obs_dim(part) for part in parts)
        self.norm = RunningNorm((size,), clip=CLIP)
        self.register_buffer("weights", th.randn(size, FEATURES) * (SPREAD / max(size, 1) ** 0.5))
        self.register_buffer("biases", th.randn(FEATURES))
        self.register_buffer("observations", th.zeros(0, size))  # (R, D) of the last rollouts
        self.register_buffer("targets", th.zeros(0))  # (R,)
        self.register_buffer("rows", th.zeros(0, dtype=th.int64))  # of each rollout, the oldest first
        self._solution: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Nothing was kept yet."""
        return len(self.rows) == 0

    def flatten(self, obs: TensorObs) -> Tensor:
        """Observations (M, ...) of the space as vectors (M, D) float32."""
        ready: Any = preprocess_obs(obs, self.space, normalize_images=False)
        parts = [ready[key] for key in self.space] if isinstance(self.space, spaces.Dict) else [ready]
        return th.cat([part.float().flatten(1) for part in parts], dim=1)

    @th.no_grad()
    def keep(self, obs: TensorObs, targets: Tensor) -> None:
        """Takes a rollout's observations (M, ...) and λ-returns (M,), drops the oldest, moves the normaliser."""
        flat = self.flatten(obs)
        old = int(self.rows[: max(len(self.rows) + 1 - ROLLOUTS, 0)].sum())
        self.observations = th.cat([self.observations[old:], flat])
        self.targets = th.cat([self.targets[old:], targets.float()])
        self.rows = th.cat([self.rows, self.rows.new_tensor([len(flat)])])[-ROLLOUTS:]
        self.norm.update(flat)
        self._solution = None

    @th.no_grad()
    def forward(self, obs: TensorObs) -> Tensor:
        """Values (M,) float32 of observations (M, ...), by the fit to all that is kept."""
        if self._solution is None:
            self._solution = ridge(self._features(self.observations), self.targets, PENALTY)
        return (self._features(self.flatten(obs)).double() @ self._solution).float()

    def _features(self, flat: Tensor) -> Tensor:
        return features(self.norm(flat), self.weights, self.biases)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        names = ("observations", "targets", "rows")
        given = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        lengths = {name: len(value) for name, value in given.items()}
        if given.keys() == set(names):
            lengths["rows"] = int(given["rows"].sum())
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"the regression's rows do not go together: {lengths}. The file is damaged")
        for name, value in given.items():  # as many rows as were kept then
            here = getattr(self, name)
            setattr(self, name, here.new_empty((len(value), *here.shape[1:])))
        self._solution = None
        super()._load_from_state_dict(state_dict, prefix, *args)


def refuse_images(space: spaces.Space) -> None:
    """Raises ConfigError where a regression on raw numbers makes no sense."""
    for name, part in space.spaces.items() if isinstance(space, spaces.Dict) else [("", space)]:
        if isinstance(part, spaces.Box) and len(part.shape) >= 3:
            which = f'observation "{name}"' if name else "observation"
            raise ConfigError(
                f'baseline="regression" is fitted on vectors, and the {which} is an image {part.shape}:'
                ' take value_head=True, or another baseline such as "leave_one_out"'
            )
