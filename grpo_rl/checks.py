"""What GRPO refuses, before anything is built: each message says what was expected, what came and what to do."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch as th
from gymnasium import spaces

from grpo_rl import advantages as adv
from grpo_rl import objective
from grpo_rl.errors import BatchError, ConfigError, check_number, did_you_mean, warn
from grpo_rl.policies.control import ControlPolicy
from grpo_rl.policies.language import CausalLMPolicy
from grpo_rl.regression import refuse_images
from grpo_rl.text.vec_env import is_text
from grpo_rl.trust_region import Steered

if TYPE_CHECKING:
    from grpo_rl.grpo import GRPO

BASELINES = (*adv.BASELINES, "moving_average", "regression")
CREDITS = ("reward_to_go", "outcome")
HYBRID_ONLY = {"vf_coef": 0.5, "gae_lambda": 0.95, "clip_range_vf": None, "group_weight": None}
"""Arguments that only a value head reads, with their defaults."""
REGRESSION_READS = ("gae_lambda", "group_weight")
"""Those of them that baseline="regression" reads too."""


def check_arguments(model: GRPO) -> None:
    """Refuses what cannot work, before anything is built."""
    if not hasattr(model, "observation_space"):
        raise ConfigError("env=None: expected an id, an env or an SB3 VecEnv; without one there is GRPO.load only")
    if not isinstance(model.policy_kwargs, dict):
        raise ConfigError(f"policy_kwargs: expected a dict, got {model.policy_kwargs!r:.80}")
    if model.rollout_buffer_class is not None or model.rollout_buffer_kwargs:
        raise ConfigError("rollout_buffer_class is not offered: groups need grpo_rl.buffers.GroupBuffer; leave it None")
    for name in ("group_size", "batch_size", "n_epochs", "baseline_every", "reuse"):
        if name == "batch_size" and model.batch_size is None and is_text(model):
            continue
        if not _is_whole(getattr(model, name)):
            raise ConfigError(f"{name}={getattr(model, name)!r}: expected a whole number")
    for name in ("n_steps", "reference_every", "micro_batch_size"):
        if not _is_whole(getattr(model, name) or 0):
            raise ConfigError(f"{name}={getattr(model, name)!r}: expected a whole number, or None")
    if model.n_steps is not None and model.n_steps < 1:
        raise BatchError(f"n_steps={model.n_steps}: `n_steps * n_envs` must be greater than 1")
    if model.group_size < 1:
        raise ConfigError(f"group_size={model.group_size}: expected 2 or more (8 is usual), or 1 with value_head=True")
    if model.group_size == 1 and not model.bootstraps:
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
    if model.baseline == "regression":
        _check_regression(model)
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
        ("reuse", 1, np.inf),
        ("priority", 0, np.inf),
        ("priority_beta", 0, 1),
    ):
        value = getattr(model, name)
        if value is not None and not callable(value):
            check_number(name, value, low, high)
    for name, least in (("gamma", 0.0), ("ent_coef", -np.inf), ("vf_coef", -np.inf), ("max_grad_norm", 0.0)):
        check_number(name, getattr(model, name), least)
    if (model.fork_prob or 0) + (model.reset_prob or 0) > 1:
        raise ConfigError(f"fork_prob={model.fork_prob} and reset_prob={model.reset_prob} sum to more than 1")
    if not callable(model.clip_range) and not (_is_number(model.clip_range) and model.clip_range > 0):
        raise ConfigError(f"clip_range={model.clip_range!r}: expected a positive number, or a callable of the progress")
    if model.cold_start and not (model.value_head and model.group_size > 1):
        raise ConfigError(
            f"cold_start={model.cold_start} begins as PPO, which has a value function, and ends with groups:"
            " it needs value_head=True and group_size 2 or more"
        )
    if model.cold_start_ramp is not None and not model.cold_start:
        raise ConfigError(f"cold_start_ramp={model.cold_start_ramp} follows a cold start: give cold_start=… too")
    _check_reuse(model)
    if model.trust_region and model.target_kl == 0:
        raise ConfigError("target_kl=0: a trust region needs a KL above 0 to steer to; None means 0.01")
    if not isinstance(model.auxiliary_losses, dict | None):
        got = f"{model.auxiliary_losses!r:.80}"
        raise ConfigError(f"auxiliary_losses: expected a dict, name -> (function, weight), got {got}")
    for name, value in (model.auxiliary_losses or {}).items():
        if not (isinstance(value, tuple | list) and len(value) == 2 and callable(value[0])):
            raise ConfigError(f"auxiliary_losses[{name!r}]: expected (function(policy, batch), weight), got {value!r}")
        if not isinstance(value[1], th.Tensor):
            check_number(f"weight of auxiliary_losses[{name!r}]", value[1])
    if isinstance(model.clip_range_vf, int | float) and model.clip_range_vf <= 0:
        raise ConfigError("`clip_range_vf` must be positive, pass `None` to deactivate vf clipping")
    unread = [name for name, default in HYBRID_ONLY.items() if getattr(model, name) != default]
    if model.baseline == "regression":
        unread = [name for name in unread if name not in REGRESSION_READS]
    if unread and not model.value_head:
        warn(f"without a value head nothing reads {', '.join(unread)}: add value_head=True, or leave it out")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


@contextlib.contextmanager
def policy_arguments(policy: type, kwargs: dict[str, Any]) -> Iterator[None]:
    """Building a policy: what does not fit its constructor is a ConfigError that names it.

    Raises:
        ConfigError: A name that the policy does not know, with the nearest that it does; or a value of another type
            than SB3 expects, such as a text for a class.
    """
    try:
        yield
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in kwargs:
            named = {name for cls in policy.__mro__ for name in _parameters(cls)} - {"self", "args", "kwargs"}
            known = sorted(named - {"observation_space", "action_space", "lr_schedule"})
            raise ConfigError(
                f'policy_kwargs: {policy.__name__} has no "{unknown[1]}": {did_you_mean(unknown[1], known)}'
            ) from error
        if not kwargs:
            raise
        raise ConfigError(
            f"policy_kwargs={kwargs!r:.200} build no {policy.__name__}: {type(error).__name__}: {error}"
        ) from error


def _parameters(cls: type) -> list[str]:
    own = cls is not object and "__init__" in vars(cls)
    return [*inspect.signature(vars(cls)["__init__"]).parameters] if own else []


def check_auxiliary(name: str, value: Any, rows: int) -> th.Tensor:
    """What an auxiliary loss gave, (M,) or scalar; ConfigError for anything else, which would be spread over rows."""
    if not isinstance(value, th.Tensor) or tuple(value.shape) not in ((), (rows,)):
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, th.Tensor) else f"{value!r:.80}"
        raise ConfigError(
            f"auxiliary_losses[{name!r}]: expected a tensor of one loss per row, ({rows},), or a scalar, got {got}"
        )
    return value


def _check_reuse(model: GRPO) -> None:
    """What old rollouts, and rows drawn by priority, go with."""
    if model.priority_beta != 1.0 and not model.priority:
        warn(f"priority_beta={model.priority_beta!r} corrects for draws by priority: nothing reads it at priority=0")
    if model.reuse == 1 and not model.priority:
        return
    asked = f"reuse={model.reuse}" if model.reuse > 1 else f"priority={model.priority}"
    if is_text(model):
        raise ConfigError(f"{asked} is for control, and this env is one of texts: n_epochs reads completions again")
    if model.loss_type != "clipped":
        raise ConfigError(
            f'{asked} clips about the policy before the update, which loss_type="{model.loss_type}" does not: "clipped"'
        )
    if model.reuse > 1 and model.baseline == "moving_average":
        raise ConfigError(
            f'{asked} judges old rollouts anew, and baseline="moving_average" has averaged them already: take'
            ' "leave_one_out", or value_head=True'
        )


def _check_regression(model: GRPO) -> None:
    """What a value function fitted in closed form goes with."""
    if is_text(model):
        raise ConfigError('baseline="regression" is for control, and this env is one of texts: "leave_one_out"')
    if model.value_head:
        raise ConfigError(
            'baseline="regression" stands in the place of a value network: leave value_head=False, or the baseline out'
        )
    needs = {"baseline_discount": 1.0, "baseline_every": 1, "credit": "reward_to_go"}
    for name, value in needs.items():
        if getattr(model, name) != value:
            raise ConfigError(
                f"{name}={getattr(model, name)!r} is about the returns of a group, and"
                f' baseline="regression" is fitted to λ-returns after each rollout: leave it at {value!r}'
            )
    if model.scale == "group":
        raise ConfigError(
            'advantage_scale="group" is a z-score within the group, and baseline="regression" compares with values of'
            ' states: "batch" or "none"'
        )
    refuse_images(model.observation_space)


def check_normalizers(model: GRPO) -> None:
    """Refuses to normalise what VecNormalize around the env has normalised already."""
    if model._vec_normalize_env is not None:
        if model.normalize_obs and model._vec_normalize_env.norm_obs:
            raise ConfigError("observations would be normalised twice: drop VecNormalize or normalize_obs=True")
        for what in ("obs", "reward") if model.reuse > 1 else ():
            if getattr(model._vec_normalize_env, f"norm_{what}"):
                raise ConfigError(
                    f"reuse={model.reuse}: VecNormalize normalised old rollouts by statistics that have moved since:"
                    f" give normalize_{what}=True instead, which keeps what came and normalises it anew"
                )
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
        needs |= {"use_sde": False, "sde_sample_freq": -1, "cold_start": 0, "cold_start_ramp": None}
        needs |= {"fork_prob": None, "reset_prob": None, "normalize_advantage": True}
        hints = {
            "grouping": "; PromptEnv(grouping=…) says who is compared with whom",
            "fork_prob": "; members start at their prompt (make_group_env of a TokenEnv forks within completions)",
            "normalize_advantage": '; write advantage_scale="none"',
        }
        for name, value in needs.items():
            if getattr(model, name) != value:
                got = f"{name}={getattr(model, name)!r}"
                raise ConfigError(f"{got} is for control, and this env is one of texts{hints.get(name, '')}")
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
    usual = max(min(model.n_steps // 32, 8), 4)
    if 1 < size < usual and not model.value_head and model.baseline != "moving_average":
        warn(
            f"group_size={size} is small for n_steps={model.n_steps} completions: the baseline is the mean of"
            f" {size - 1} other{'s' * (size > 2)}, which is noisy. Take {usual} or more (group_size ≈ batch / 32,"
            ' 8 is usual), or baseline="moving_average".'
        )
    if model.reference_mix < 1 and not (model.reference_every and model.kl_coef):
        raise ConfigError("reference_mix moves a reference policy: give kl_coef and reference_every too")
    if model.reference_every and model.kl_coef and model.policy.adapters:
        raise ConfigError("reference_every: under adapters the reference is the base model, which does not move")
