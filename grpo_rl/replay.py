"""Rollouts that train again: the last few of them as one source of minibatches, drawn evenly or by priority.

μ is the policy that took a step, π_k the policy before this update, π the one that the update moves. q = π_k/μ corrects
an old step (GePPO, Queeney et al. 2021, arXiv 2111.00072): the loss clips π/μ about it, advantages are its V-trace
(`advantages.gae`), and means over rows weigh by it. All of it is made anew before each update; what is kept of a
rollout is what was observed.
"""

import copy
from typing import Any

import numpy as np
import torch as th

from grpo_rl.buffers import GroupBuffer, Packed, Rows
from grpo_rl.errors import ConfigError
from grpo_rl.types import TensorObs

PRIORITY_FLOOR = 0.1
"""What is added to each |A|, as a part of their mean: each row may be drawn, and none weighs without bound."""
LOG_RATIO_LIMIT = 20.0
"""Largest |log q|: beyond it a step says nothing any more, and its exponential would not be finite."""

_KEPT = ("actions", "rewards", "log_probs", "group", "age", "mask", "ends", "alive")


def probabilities(advantages: np.ndarray, alpha: float) -> np.ndarray:
    """How likely each row is drawn: p^α/Σp^α with p = |A| + 0.1·mean|A| (Schaul et al. 2016, arXiv 1511.05952).

    (M,) in, (M,) float64 out. α = 0 is even, and so are rows that all have advantage 0.
    """
    size = np.abs(advantages.astype(np.float64))
    floor = PRIORITY_FLOOR * size.mean()
    weight = (size + floor) ** alpha if floor > 0 else np.ones_like(size)
    return weight / weight.sum()


def importance_weights(chances: np.ndarray, beta: float) -> np.ndarray:
    """(1/(M·P))^β over its largest, of rows drawn with the chances P (M,): (M,) float32, at most 1.

    With β = 1 a weighted sum over drawn rows is, on average, the even sum over all rows, times one constant.
    """
    weight = (1 / (len(chances) * chances)) ** beta
    return (weight / weight.max()).astype(np.float32)


def effective_size(ratio: th.Tensor) -> th.Tensor:
    """(Σq)²/(M·Σq²) of q (M,): what weighted rows are worth, as a share of even ones (Kish 1965). Scalar, 1 at most."""
    return ratio.sum().square() / (len(ratio) * ratio.square().sum())


class Replay(Rows):
    """The last `reuse` rollouts.

    Before an update: `take` the newest, judge the old ones that it gives back, then `close`.

    Args:
        reuse: M, rollouts that an update draws from, the newest included.
        priority: α of `probabilities`; 0 draws each row once in a pass.
    """

    def __init__(self, reuse: int, priority: float = 0.0) -> None:
        self.reuse = reuse
        self.priority = priority
        self.rollouts: list[GroupBuffer] = []  # the oldest first

    def take(self, newest: GroupBuffer) -> list[GroupBuffer]:
        """Makes `newest` the last rollout, forgets what is too old, and gives the old ones that are left."""
        if self.rollouts and self.rollouts[-1].rewards is newest.rewards:  # it was taken before
            self.rollouts.pop()
        kept = copy.copy(newest)  # a sampler fills `newest` again, with new arrays
        kept._steps, kept._packed = [], None
        self.rollouts = [*self.rollouts, kept][-self.reuse :]
        self.device = newest.device
        return self.rollouts[:-1]

    def close(self, beta: float = 1.0) -> dict[str, float]:
        """Puts the rows of all rollouts together. `beta`: of `importance_weights`. Gives what is to be logged."""
        parts = [rollout._pack() for rollout in self.rollouts]
        self._rows = _joined([obs for obs, _ in parts]), _joined_columns([columns for _, columns in parts])
        advantages, ratio = self._rows[1]["advantages"], self._rows[1]["behaviour_ratio"]
        assert advantages is not None and ratio is not None
        self.chances = probabilities(advantages.cpu().numpy(), self.priority)
        self.importance = importance_weights(self.chances, beta)
        ends = np.cumsum([rollout.size for rollout in self.rollouts])[:-1]
        shares = [float(part.sum()) for part in np.split(self.chances, ends)][::-1]
        shares += [0.0] * (self.reuse - len(shares))
        return {
            "reuse/effective_size": effective_size(ratio).item(),
            "reuse/ratio_mean": ratio.mean().item(),
            "reuse/ratio_max": ratio.max().item(),
            **{f"reuse/share_of_age_{age}": share for age, share in enumerate(shares)},
        }

    @property
    def size(self) -> int:
        return len(self.chances)

    def _pack(self) -> Packed:
        return self._rows

    def weights(self, index: np.ndarray | None = None) -> np.ndarray:
        even = super().weights(index)
        if not self.priority:
            return even
        return even * (self.importance if index is None else self.importance[index])

    def shuffled(self, batch_size: int | None = None) -> list[np.ndarray]:
        """The rows of the minibatches of a pass; by priority, as many rows are drawn, each as often as it comes."""
        if not self.priority:
            return super().shuffled(batch_size)
        drawn = np.random.choice(self.size, self.size, p=self.chances)
        return np.array_split(drawn, max(self.size // (batch_size or self.size), 1))

    # --- as a state tree ----------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        """What the next update needs of the rollouts so far: what was observed, and how likely the actions were."""
        old = self.rollouts[max(len(self.rollouts) + 1 - self.reuse, 0) :]
        names = (*_KEPT, "observations", "tail_obs")
        return [{name: copy.copy(getattr(rollout, name)) for name in names} for rollout in old]

    def set_state(self, state: list[dict[str, Any]], like: GroupBuffer) -> None:
        """Takes the rollouts of `state` in the place of its own; `like` is an empty buffer for the same env.

        Raises:
            ConfigError: `state` is none of a memory like this one.
        """
        rollouts = []
        for kept in state:
            rollout = type(like)(like.observation_space, like.action_space, like.device)
            vars(rollout).update({name: kept[name] for name in (*_KEPT, "observations", "tail_obs")}, values=None)
            shapes = {name: np.shape(getattr(rollout, name))[:2] for name in _KEPT}
            if len(set(shapes.values())) > 1:
                raise ConfigError(f"the arrays of an old rollout do not go together: {shapes}")
            rollouts.append(rollout)
        self.rollouts = rollouts


def judge(rollout: GroupBuffer, values: th.Tensor | None, log_prob: th.Tensor) -> None:
    """Sets q, and the values if there are any, of an old rollout's rows (M,) under the policy of now."""
    mask = rollout.tensor(rollout.mask)
    old = rollout.tensor(rollout.log_probs)[mask]
    ratio = (log_prob - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    rollout.behaviour_ratio = th.ones(mask.shape, device=ratio.device).masked_scatter_(mask, ratio)
    if values is not None:
        whole = th.zeros(mask.shape, device=ratio.device).masked_scatter_(mask, values.flatten().float())
        rollout.values = whole.cpu().numpy()
    rollout._packed = None


def _joined(parts: list[Any]) -> TensorObs:
    """Observations of all rollouts, one after another."""
    if isinstance(parts[0], dict):
        return {key: th.cat([part[key] for part in parts]) for key in parts[0]}
    return th.cat(parts)


def _joined_columns(parts: list[dict[str, th.Tensor | None]]) -> dict[str, th.Tensor | None]:
    """The columns of all rollouts, one after another; q is 1 in the newest."""
    for part in parts:
        if part["behaviour_ratio"] is None:
            part["behaviour_ratio"] = th.ones_like(part["old_log_prob"])  # type: ignore[arg-type]
    return {
        name: None if column is None else th.cat([part[name] for part in parts])  # type: ignore[misc]
        for name, column in parts[0].items()
    }
