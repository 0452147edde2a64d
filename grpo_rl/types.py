"""What flows from the samplers to the update. Axes: T steps, N columns (envs), M packed rows."""

from typing import NamedTuple

import numpy as np
import torch as th

Obs = np.ndarray | dict[str, np.ndarray]
"""Observations as SB3 hands them over: an array (N, ...) or a dict of such arrays."""

TensorObs = th.Tensor | dict[str, th.Tensor]


class Batch(NamedTuple):
    """A minibatch of packed rows, in the order in which the buffer shuffled them.

    `returns` and `old_values` are None without a value head, `ref_log_prob` without a reference policy.
    `weight` (M,) holds each row's share of the loss: 1/M for steps, an aggregation's for tokens (`objective.LOSSES`).
    `behaviour_ratio` (M,) is π_k/μ, how much likelier the action is for the policy before this update than it was for
    the one that took it; None where every row is that policy's own.

    A row is a step, or a token. Of tokens, `segment` (M,) says which completion each belongs to, 0 … in ascending
    order, and `even` (M,) is one over the tokens of the whole minibatch; both are None for steps.
    """

    observations: TensorObs
    actions: th.Tensor
    old_log_prob: th.Tensor
    advantages: th.Tensor
    weight: th.Tensor
    returns: th.Tensor | None
    old_values: th.Tensor | None
    ref_log_prob: th.Tensor | None
    segment: th.Tensor | None = None
    even: th.Tensor | None = None
    behaviour_ratio: th.Tensor | None = None
