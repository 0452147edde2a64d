"""GRPO with Monte-Carlo values: the value of a state is the mean return of the members that were sent out from it.

A root sends out G branches, a vine (TRPO, arXiv 1502.05477, section 5.2), and their mean return is its value without a
critic (VinePPO, arXiv 2410.01679). Further on, the value V_t is that of the members alive at the same age, which is the
state's own at the root only. The advantage is GAE (arXiv 1506.02438) with these values,

    A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ V_{t+1} − V_t,

so `gae_lambda=1` is GRPO with the baseline "mean", and a smaller one trusts the values more. Only the advantage is
ours; all the rest is `GRPO`'s. `baseline`, `credit` and `compression` are not read.
"""

import torch as th

from grpo_rl import GRPO
from grpo_rl import advantages as adv
from grpo_rl.buffers import GroupBuffer


class VineGRPO(GRPO):
    """GRPO whose group advantage is GAE over the group's own values."""

    def group_advantages(self, rollout: GroupBuffer, returns: th.Tensor, ends: th.Tensor) -> th.Tensor:
        """Advantages (T, N) float32 from returns (T, N) of a finished rollout, whose segments end at `ends` (T, N)."""
        group, age, mask = (rollout.tensor(array) for array in (rollout.group, rollout.age, rollout.mask))
        values = adv.group_baseline(returns, group, age, mask, "mean")
        # R_t = r_t + γ R_{t+1} makes δ_t the difference of two surprises R − V; beyond an end there is none.
        surprise = th.where(mask, returns - values, 0)
        deltas = surprise - self.gamma * th.where(ends, 0, surprise.roll(-1, dims=0))
        return adv.reward_to_go(deltas, ends, th.zeros_like(deltas), self.gamma * self.gae_lambda)
