"""What a run logs of its rollouts and updates, and the check that all of it is finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th
from stable_baselines3.common.utils import explained_variance

from grpo_rl import advantages as adv
from grpo_rl.buffers import GroupBuffer
from grpo_rl.errors import NonFiniteError
from grpo_rl.sampling.tokens import TokenSampler, completion_metrics
from grpo_rl.text.vec_env import is_text
from grpo_rl.token_buffer import TokenBuffer

if TYPE_CHECKING:
    from grpo_rl.grpo import GRPO


def together(parts: list[tuple[int, dict[str, th.Tensor]]]) -> dict[str, th.Tensor]:
    """The terms of a minibatch from those of its parts, each with its rows: means over rows, or sums."""
    if len(parts) == 1:
        return parts[0][1]
    total = sum(rows for rows, _ in parts)
    means = ("approx_kl", "clip_fraction", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    return {
        name: th.stack([terms[name] * (rows / total if name in means else 1) for rows, terms in parts]).sum()
        for name in parts[0][1]
    }


def check_update(model: GRPO, metrics: list[dict[str, th.Tensor]], before: dict[str, Any] | None) -> None:
    """Once something is not finite: puts the policy back to the state `before` and raises NonFiniteError.

    None: the policy is there still, as a gradient that is not finite takes no step.
    """
    numbers = [terms[name] for terms in metrics for name in ("loss", "grad_norm") if name in terms]
    numbers += [parameter.detach().sum() for parameter in model.policy.parameters()]
    if hasattr(model.policy, "log_std"):
        numbers.append(model.policy.log_std.detach().abs().exp().max())  # the standard deviation, or one over it
    if th.stack(numbers).isfinite().all():
        return
    if before is not None:
        model.policy.load_state_dict(before)
        model.policy.optimizer.state.clear()  # its averages are not finite either
    broken = sorted({name for terms in metrics for name, term in terms.items() if not term.isfinite()})
    cures = "" if is_text(model) else ", normalize_reward=True"
    raise NonFiniteError(
        f"the loss, its gradient, a parameter or the std is not finite at update {model._n_updates}"
        f" ({model.num_timesteps} env steps{', first seen in: ' * bool(broken)}{', '.join(broken)}). The policy was"
        " put back to where it was before this update. A lower"
        f" learning_rate{cures} or a lower max_grad_norm usually cures it."
    )


def log_groups(model: GRPO, rollout: GroupBuffer) -> None:
    """Records who was compared with whom in a rollout, and its advantages; counts its forks."""
    sampler, mask, advantages = model._sampler, rollout.tensor(rollout.mask), rollout.advantages
    assert sampler is not None and advantages is not None
    model._forks += sampler.forks
    model._fork_depths += sum(sampler.fork_depths)
    model.logger.record("group/forks", model._forks)
    model.logger.record("group/fork_depth", model._fork_depths / max(model._forks, 1))
    model.logger.record("group/groups", len(np.unique(rollout.group[rollout.mask])))
    if model._shared_rows is not None:
        model.logger.record("group/share", adv.masked_mean(model._shared_rows.float(), mask).item())
    model.logger.record("group/dropped_steps", sampler.counted - int(rollout.mask.sum()))
    if isinstance(rollout, TokenBuffer) and isinstance(sampler, TokenSampler):
        for name, value in completion_metrics(rollout, sampler.env.reward_names, sampler.dropped_groups).items():
            model.logger.record(name, value)
    model.logger.record("train/advantage_mean", adv.masked_mean(advantages, mask).item())
    model.logger.record("train/advantage_std", adv.masked_std(advantages, mask).item())


def log_update(model: GRPO, metrics: list[dict[str, th.Tensor]], clip_range: float) -> None:
    """Records the means of an update's terms, and the settings that it was made with."""
    names = dict.fromkeys(name for terms in metrics for name in terms)
    for name in names:
        model.logger.record(
            f"train/{name}", th.stack([terms[name] for terms in metrics if name in terms]).mean().item()
        )
    rollout = model.rollout_buffer
    predicted, target = rollout.old_values, rollout.returns
    if predicted is not None and target is not None:
        valid = rollout.mask
        explained = explained_variance(predicted.cpu().numpy()[valid], target.cpu().numpy()[valid])
        model.logger.record("train/explained_variance", explained)
    if hasattr(model.policy, "log_std"):
        model.logger.record("train/std", model.policy.log_std.exp().mean().item())
    if model.loss_scale:
        model.logger.record("train/loss_scale", model.loss_scale["scale"])
    model.logger.record("train/n_updates", model._n_updates, exclude="tensorboard")
    model.logger.record("train/clip_range", clip_range)
    if model.clip_range_vf is not None:
        model.logger.record("train/clip_range_vf", model.clip_range_vf(model._current_progress_remaining))  # type: ignore[operator]
