"""The adaptive trust region: what a measured KL does to the step size or the clip range.

As PPO's adaptive KL (Schulman et al. 2017, section 4: compare with a band about the target, then multiply or divide),
applied to a factor on the learning rate, as rsl_rl does, or on the clip range. Where we differ: rsl_rl moves after each
minibatch by that minibatch's KL; here it is once an iteration, by the KL(π_old‖π) of the whole rollout.
"""

from typing import Literal

Steered = Literal["learning_rate", "clip_range"]

FACTOR = 1.5
"""One move multiplies or divides the scale by this."""
BAND = 2.0
"""No move while the KL lies within target / BAND … target · BAND."""
LIMITS: dict[str, tuple[float, float]] = {"learning_rate": (0.01, 10.0), "clip_range": (0.25, 2.0)}
"""Where the scale stays, by what it scales."""
TARGET_KL = 0.01
"""The target where none is given."""


def next_scale(scale: float, kl: float, target: float, steered: Steered) -> float:
    """The factor on what is steered, after an iteration that moved the policy by `kl`.

    A step that went too far (kl > 2 · target) divides it by 1.5, one that went nowhere near (kl < target / 2)
    multiplies it by 1.5; within `LIMITS`.

    Args:
        scale: the factor until now, 1 at the start.
        kl: measured KL(π_old‖π) of the iteration in nats, ≥ 0 up to noise.
        target: the KL to keep to, > 0.
        steered: what the factor is on.
    """
    if kl > BAND * target:
        scale /= FACTOR
    elif kl < target / BAND:
        scale *= FACTOR
    low, high = LIMITS[steered]
    return min(max(scale, low), high)
