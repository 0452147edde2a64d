"""Defaults that depend on what is trained: PPO's for control, smaller steps for language models.

An argument that is left keeps its place as a `Left` number, which compares and prints as PPO's default, until GRPO
knows its policy. A number that is given is taken as it is, even if it equals PPO's.
"""

from typing import Any


class Left:
    """A default that nobody has replaced."""

    @property
    def plain(self) -> Any:
        """The number itself."""
        raise NotImplementedError


class LeftFloat(Left, float):
    """A float that is one."""

    @property
    def plain(self) -> float:
        return float(self)


class LeftInt(Left, int):
    """An int that is one."""

    @property
    def plain(self) -> int:
        return int(self)


LEARNING_RATE, GAMMA, MAX_GRAD_NORM, CLIP_RANGE = LeftFloat(3e-4), LeftFloat(0.99), LeftFloat(0.5), LeftFloat(0.2)
BATCH_SIZE, N_EPOCHS = LeftInt(64), LeftInt(10)

LANGUAGE = {"learning_rate": 1e-6, "gamma": 1.0, "n_epochs": 1, "max_grad_norm": 1.0, "batch_size": None}
"""What language models take instead: steps over the whole rollout (None); with LoRA a learning rate of 1e-5."""
LORA_LEARNING_RATE = 1e-5
GSPO_CLIP = (3e-4, 4e-4)
"""Usual ε and ε_high of "gspo", whose ratios are those of whole completions."""


def settled_scale(
    advantage_scale: str | None,
    normalize_advantage: bool,
    text: bool,
    loss_type: str | None,
    baseline: str,
    baseline_discount: float,
) -> str:
    """`advantage_scale`, or where it was left what SB3's name for it says; of texts what the loss and baseline take.

    That is "none" for the losses that are defined without a scale, and the group's z-score for a baseline that is the
    group's mean.
    """
    if advantage_scale is not None or not text:
        return advantage_scale or ("batch" if normalize_advantage else "none")
    if loss_type in ("dr_grpo", "rloo"):
        return "none"
    return "group" if baseline in ("leave_one_out", "mean") and baseline_discount == 1 else "batch"


def settled(name: str, value: Any, language: bool, lora: bool = False) -> Any:
    """`value`, or where it was left the plain default for what is trained."""
    if not isinstance(value, Left):
        return value
    if language and name == "learning_rate" and lora:
        return LORA_LEARNING_RATE
    if language and name in LANGUAGE:
        return LANGUAGE[name]
    return value.plain
