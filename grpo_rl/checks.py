"""What GRPO refuses, before anything is built: each message says what was expected, what came and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np
from gymnasium import spaces

from grpo_rl import advantages as adv
from grpo_rl import objective
from grpo_rl.errors import BatchError, ConfigError, did_you_mean, warn
from grpo_rl.policies.control import ControlPolicy
from grpo_rl.policies.language import CausalLMPolicy
from grpo_rl.text.vec_env import is_text
from grpo_rl.trust_region import Steered

if TYPE_CHECKING:
    from grpo_rl.grpo import GRPO

BASELINES = (*adv.BASELINES, "moving_average")
CREDITS = ("reward_to_go", "outcome")
HYBRID_ONLY = {"vf_coef": 0.5, "gae_lambda": 0.95, "clip_range_vf": None, "group_weight": None}
"""Arguments that only a value head reads, with their defaults."""


def check_arguments(model: GRPO) -> None:
    """Refuses what cannot work, before anything is built."""
    if model.rollout_buffer_class is not None or model.rollout_buffer_kwargs:
        raise ConfigError("rollout_buffer_class is not offered: groups need grpo_rl.buffers.GroupBuffer; leave it None")
    for name in ("group_size", "batch_size", "n_epochs", "baseline_every"):
        if name == "batch_size" and model.batch_size is None and is_text(model):
            continue
        if isinstance(getattr(model, name), bool) or not isinstance(getattr(model, name), int | np.integer):
            raise ConfigError(f"{name}={getattr(model, name)!r}: expected a whole number")
    if model.n_steps is not None and model.n_steps < 1:
        raise BatchError(f"n_steps={model.n_steps}: `n_steps * n_envs` must be greater than 1")
    if model.group_size < 1:
        raise ConfigError(f"group_size={model.group_size}: expected 2 or more (8 is usual), or 1 with value_head=True")
    if model.group_size == 1 and not model.value_head:
        raise ConfigError(
            f"group_size={model.group_size}: a group of one has nobody to be compared with."
            " Use 2 or more (8 is usual), or value_head=True for plain PPO."
        )
    _check_modality(model)
    if not issubclass(model.policy_class, ControlPolicy | CausalLMPolicy) and not (
        model.value_head and not model.normalize_obs
    ):
        raise ConfigError(
            f"{model.policy_class.__name__} is an SB3 policy with a critic of its own. Subclass grpo_rl.MlpPolicy,"
            " CnnPolicy or MultiInputPolicy instead, or use it with value_head=True and normalize_obs=False."
        )
    choices = {
        "baseline": BASELINES,
        "credit": CREDITS,
        "advantage_scale": (None, *adv.SCALES),
        "compression": (None, *adv.COMPRESSIONS),
        "trust_region": (None, *get_args(Steered)),
        "loss_type": tuple(objective.LOSSES),
        "kl_estimator": tuple(objective.KL_LOSSES),
        "tied_groups": ("keep", "mask", "drop", "refill"),
    }
    for name, valid in choices.items():
        if getattr(model, name) not in valid:
            raise ConfigError(f"{name}={getattr(model, name)!r}: {did_you_mean(getattr(model, name), map(str, valid))}")
    if model.scale == "group" and (model.baseline in ("weighted", "moving_average") or model.baseline_discount != 1):
        raise ConfigError(
            'advantage_scale="group" is a z-score about the group mean: it goes with baseline "leave_one_out" or'
            f' "mean" and baseline_discount 1, not with "{model.baseline}" and {model.baseline_discount}'
        )
    for name, low, high in (
        ("gamma", 0, 1),
        ("gae_lambda", 0, 1),
        ("baseline_discount", 0, 1),
        ("age_discount", 0, 1),
        ("fork_prob", 0, 1),
        ("reset_prob", 0, 1),
        ("group_weight", 0, 1),
        ("kl_coef", 0, np.inf),
        ("target_kl", 0, np.inf),
        ("cold_start", 0, np.inf),
        ("cold_start_ramp", 1, np.inf),
        ("batch_size", 1, np.inf),
        ("n_epochs", 1, np.inf),
        ("baseline_every", 1, np.inf),
        ("reference_every", 1, np.inf),
        ("reference_mix", 0, 1),
        ("entropy_quantile", 0, 1),
        ("micro_batch_size", 1, np.inf),
        ("clip_range_high", 0, np.inf),
        ("clip_delta", 1, np.inf),
    ):
        value = getattr(model, name)
        if value is not None and not callable(value) and not low <= value <= high:
            raise ConfigError(f"{name}={value} is outside [{low}, {high}]")
    if (model.fork_prob or 0) + (model.reset_prob or 0) > 1:
        raise ConfigError(f"fork_prob={model.fork_prob} and reset_prob={model.reset_prob} sum to more than 1")
    if isinstance(model.clip_range, int | float) and model.clip_range <= 0:
        raise ConfigError(f"clip_range={model.clip_range}: expected a positive number, or a callable of the progress")
    if model.cold_start and not (model.value_head and model.group_size > 1):
        raise ConfigError(
            f"cold_start={model.cold_start} begins as PPO, which has a value function, and ends with groups:"
            " it needs value_head=True and group_size 2 or more"
        )
    if model.cold_start_ramp is not None and not model.cold_start:
        raise ConfigError(f"cold_start_ramp={model.cold_start_ramp} follows a cold start: give cold_start=… too")
    if model.trust_region and model.target_kl == 0:
        raise ConfigError("target_kl=0: a trust region needs a KL above 0 to steer to; None means 0.01")
    for name, value in (model.auxiliary_losses or {}).items():
        if not (isinstance(value, tuple | list) and len(value) == 2 and callable(value[0])):
            raise ConfigError(f"auxiliary_losses[{name!r}]: expected (function(policy, batch), weight), got {value!r}")
    if isinstance(model.clip_range_vf, int | float) and model.clip_range_vf <= 0:
        raise ConfigError("`clip_range_vf` must be positive, pass `None` to deactivate vf clipping")
    unread = [name for name, default in HYBRID_ONLY.items() if getattr(model, name) != default]
    if unread and not model.value_head:
        warn(f"without a value head nothing reads {', '.join(unread)}: add value_head=True, or leave it out")


def check_normalizers(model: GRPO) -> None:
    """Refuses to normalise what VecNormalize around the env has normalised already."""
    if model._vec_normalize_env is not None:
        if model.normalize_obs and model._vec_normalize_env.norm_obs:
            raise ConfigError("observations would be normalised twice: drop VecNormalize or normalize_obs=True")
        if model.normalize_reward and model._vec_normalize_env.norm_reward:
            raise ConfigError("rewards would be scaled twice: drop VecNormalize or normalize_reward=True")


def check_batch(model: GRPO) -> None:
    """SB3 PPO's checks of rollout and minibatch size, with its warnings."""
    rows = model.n_steps * model.n_envs
    if model.scale == "batch":
        if model.batch_size <= 1:
            raise BatchError("`batch_size` must be greater than 1, or its advantages have no spread to scale by")
        if rows <= 1:
            raise BatchError(
                "`n_steps * n_envs` must be greater than 1."
                f" Currently n_steps={model.n_steps} and n_envs={model.n_envs}"
            )
    if model.batch_size > rows:
        warn(
            f"batch_size={model.batch_size} is more than the `n_steps * n_envs = {rows}` steps of a rollout: every"
            " epoch is one mini-batch of all its rows. Lower batch_size, or raise n_steps."
            f" (n_steps={model.n_steps} and n_envs={model.n_envs})"
        )
    elif rows % model.batch_size:
        warn(
            f"You have specified a mini-batch size of {model.batch_size}, but a rollout has `n_steps * n_envs = {rows}`"
            f" steps: the rows of a truncated mini-batch of size {rows % model.batch_size} join the others. We"
            f" recommend a `batch_size` that is a factor. (n_steps={model.n_steps} and n_envs={model.n_envs})"
        )
    if rows < 32 * model.group_size and model.group_size > 1:
        warn(
            f"A rollout of {rows} steps is small for group_size={model.group_size}: a group baseline wants about"
            f" {32 * model.group_size} steps or more (group_size ≈ batch / 32). Raise n_steps or lower group_size."
        )


def _check_modality(model: GRPO) -> None:
    """What goes with text, and what with steps."""
    language, text = issubclass(model.policy_class, CausalLMPolicy), is_text(model)
    if text and not language:
        raise ConfigError(f'an env of texts needs policy "CausalLMPolicy", got {model.policy_class.__name__}')
    if model.loss_type == "cispo" and model.clip_range_high is None:
        raise ConfigError(
            'loss_type="cispo" bounds the ratio by clip_range_high: give it (5.0 is usual); clip_range is no stand-in'
        )
    if text:
        needs = {"normalize_obs": False, "normalize_reward": False, "grouping": "auto", "group_kind": "auto"}
        needs |= {"use_sde": False, "cold_start": 0}
        for name, value in needs.items():
            if getattr(model, name) != value:
                hint = "; PromptEnv(grouping=…) says who is compared with whom" if name == "grouping" else ""
                raise ConfigError(f"{name}={getattr(model, name)!r} is for control, and this env is one of texts{hint}")
        return
    shown = model.observation_space
    if language and not (isinstance(shown, spaces.Dict) and {"input_ids", "attention_mask"} <= shown.spaces.keys()):
        raise ConfigError(
            'policy "CausalLMPolicy" needs an env of texts (grpo_rl.text.PromptEnv) or a TokenEnv, got observations'
            f" {shown!s:.80}"
        )
    if objective.LOSSES[model.loss_type].needs_segments if model.loss_type in objective.LOSSES else False:
        raise ConfigError(f'loss_type="{model.loss_type}" is over whole completions, and this env has steps: "clipped"')
    only_text = {"tied_groups": "keep", "mask_truncated": False, "entropy_quantile": 0.0, "micro_batch_size": None}
    for name, value in only_text.items():
        if getattr(model, name) != value:
            raise ConfigError(
                f"{name}={getattr(model, name)!r} is for completions, and this env has steps: leave it out"
            )


def check_completions(model: GRPO) -> None:
    """Rollout and minibatch of a language model: whole groups, and at least one of them."""
    size = model.group_size
    if model.n_steps % size:
        below = model.n_steps // size * size
        near = f"{below} or {below + size}" if below else str(size)
        raise BatchError(
            f"n_steps={model.n_steps} completions are no whole groups of group_size={size}: take {near} completions"
        )
    if model.batch_size is not None and model.batch_size > model.n_steps:
        warn(f"batch_size={model.batch_size} is more than the n_steps={model.n_steps} completions of a rollout")
    if model.reference_mix < 1 and not (model.reference_every and model.kl_coef):
        raise ConfigError("reference_mix moves a reference policy: give kl_coef and reference_every too")
    if model.reference_every and model.kl_coef and model.policy.adapters:
        raise ConfigError("reference_every: under adapters the reference is the base model, which does not move")
