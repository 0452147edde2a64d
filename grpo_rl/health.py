"""What a health monitor knows: the figures with their ranges, what it means to leave one, and what to change.

Five ranges are rules of thumb published for GRPO on dialogue models (`usual`). Healthy runs of control tasks leave some
of them, so that warnings have ranges of their own (`warns`); docs/monitor.md has the measured figures behind them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_rl.errors import ConfigError, did_you_mean

Range = tuple[float | None, float | None]
Row = Mapping[str, float]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """One figure of the log and its ranges.

    Attributes:
        name: for `HealthMonitor(ranges={name: …})`. key: in the log. meaning: for a table.
        usual: the rule of thumb, or None.
        warns: below it (None: no bound) the finding `below` is made, above it `above`: names of FINDINGS.
        at_once: above it one rollout is enough. slow: the patience counts so many times.
    """

    name: str
    key: str
    meaning: str
    usual: Range | None = None
    warns: Range = (None, None)
    below: str = "out_of_range"
    above: str = "out_of_range"
    at_once: float = math.inf
    slow: int = 1

    def side(self, value: float) -> str:
        """The finding that `value` speaks for, or "" within the range. NaN is above it."""
        low, high = self.warns
        if high is not None and not value <= high:
            return self.above
        return self.below if low is not None and not value >= low else ""


def _metric(
    name: str,
    meaning: str,
    usual: Range | None = None,
    warns: Range = (None, None),
    finding: str = "",
    log: str = "health",
    **kwargs: Any,
) -> Metric:
    """A row of METRICS whose `finding` is made on the sides that `warns` bounds."""
    sides = {
        side: finding for side, bound in zip(("below", "above"), warns, strict=True) if finding and bound is not None
    }
    return Metric(name, f"{log}/{name}", meaning, usual, warns, **(sides | kwargs))


METRICS = (
    _metric("advantage_mean", "mean advantage, as it reaches the loss", (-0.1, 0.1), (-0.5, 0.5), "advantage_bias"),
    _metric(
        "advantage_std", "spread of the advantages, as they reach the loss", (0.3, 1.5), (0.05, 10), "advantage_scale"
    ),
    _metric(
        "reward_gap", "best member − mean of its group, by the spread in groups", (0.5, 2), (0.02, 4), "uneven_groups"
    ),
    _metric("ent_coef", "weight of the entropy bonus", (0.01, 0.1)),
    _metric("entropy", "entropy of the policy in the last update, nats"),
    _metric(
        "entropy_left",
        "entropy (continuous actions: std) now, by that of the first update",
        warns=(0.05, 10),
        below="collapsed_entropy",
        above="growing_noise",
    ),
    _metric(
        "bonus_gain",
        "ent_coef · (entropy − its start), by the largest spread of advantages so far",
        warns=(None, 0.25),
        finding="entropy_bonus",
    ),
    _metric(
        "grad_norm",
        "norm of the gradient before clipping",
        (0.1, 1),
        (None, 1000),
        "large_gradient",
        below="small_gradient",
        log="train",
    ),
    _metric(
        "approx_kl", "how far an update moved the policy", None, (None, 0.1), "large_steps", log="train", at_once=1.0
    ),
    _metric("clip_fraction", "share of ratios beyond the clip range", None, (None, 0.5), "large_steps", log="train"),
    _metric("tied_groups", "share of groups whose members all got the same", None, (None, 0.9), "tied_groups"),
    _metric("group_size", "members alive at a step's age, itself included", None, (2.5, None), "small_groups"),
    _metric("reward_scale", "largest |reward| of the rollout, as it reaches the returns"),
    _metric(
        "reward_growth",
        "reward_scale by that of the first rollout with a reward",
        None,
        (None, 100),
        "exploding_rewards",
    ),
    _metric("magnitude", "log10 of the largest figure in the rollout", None, (None, 7), "near_overflow"),
    _metric("loss", "loss of the last update", None, (-1e7, 1e7), "near_overflow", log="train", at_once=1e7),
    _metric(
        "explained_variance",
        "of the returns, by the value head",
        None,
        (-0.5, None),
        "value_function",
        log="train",
        slow=4,
    ),
    _metric(
        "repetition",
        "share of 3-grams that a completion repeats",
        warns=(None, 0.5),
        finding="repetition",
        log="completions",
    ),
    _metric(
        "clipped_ratio",
        "share of completions cut at the limit of tokens",
        warns=(None, 0.95),
        finding="cut_completions",
        log="completions",
        slow=4,
    ),
    _metric(
        "unscored",
        "share of completions that no reward function gave a number",
        warns=(None, 0.9),
        finding="unscored",
        log="completions",
    ),
    _metric("mean_length", "tokens of a completion", log="completions"),
)
CRITIC_FREE = ("tied_groups", "small_groups", "uneven_groups")
"""Findings about groups matter where nothing else teaches: without a value head."""
IDLE_ONCE_SOLVED = ("tied_groups", "uneven_groups", "advantage_scale", "small_gradient")
"""Findings that mean nothing once returns have risen: members that all reach the top tie as well."""


@dataclass(frozen=True)
class Cause:
    """What a finding means. `cures` are (option, value), the best first; `explained_by` are findings that entail it."""

    meaning: str
    cures: tuple[tuple[str, str], ...]
    explained_by: tuple[str, ...] = ()
    also: str = ""


UNTAUGHT = (
    "entropy_bonus",
    "large_steps",
    "collapsed_entropy",
    "growing_noise",
    "unscored",
    "repetition",
    "cut_completions",
)
"""Findings that leave the members of a group with equal returns."""
SHAKEN = ("exploding_rewards", *UNTAUGHT, "tied_groups")
FINDINGS: dict[str, Cause] = {  # causes before their consequences
    "exploding_rewards": Cause(
        "rewards keep growing: early steps stop counting, and values cannot follow",
        (("normalize_reward", "True"),),
        also="bound the reward in the environment",
    ),
    "entropy_bonus": Cause(
        "the entropy bonus pays more than the reward: what the policy gains is noise",
        (("ent_coef", "down"),),
    ),
    "large_steps": Cause(
        "updates leave the region where their samples mean something",
        (
            ("learning_rate", "/3"),
            ("trust_region", '"learning_rate"'),
            ("target_kl", "0.02"),
            ("clip_range", "schedule"),
            ("n_epochs", "/2"),
        ),
        ("exploding_rewards", "entropy_bonus", "collapsed_entropy"),
    ),
    "collapsed_entropy": Cause(
        "the policy has stopped exploring (expected only once the task is solved)",
        (("ent_coef", "up"), ("kl_coef", "0.01"), ("learning_rate", "/3")),
        ("large_steps", "repetition"),
    ),
    "growing_noise": Cause(
        "actions are ever more noise",
        (("ent_coef", "down"), ("learning_rate", "/3")),
        ("entropy_bonus", "large_steps"),
    ),
    "unscored": Cause(
        "next to no completion is given a reward: the functions answer None or NaN, or fail",
        (),
        also="reward functions that give numbers: None means no opinion",
    ),
    "repetition": Cause(
        "completions say the same again and again: the policy has found a loop that pays, or has broken down",
        (("kl_coef", "0.01"), ("ent_coef", "up"), ("learning_rate", "/3")),
        ("large_steps", "collapsed_entropy"),
        also="a reward that takes off for repeating",
    ),
    "cut_completions": Cause(
        "next to all completions are cut before their end, so that rewards see halves",
        (),
        ("repetition", "large_steps", "collapsed_entropy", "growing_noise", "entropy_bonus"),
        also="twice the max_new_tokens, or a reward for ending",
    ),
    "tied_groups": Cause(
        "members of a group get the same return, so that nothing is learned from it",
        (("ent_coef", "up"), ("baseline", '"moving_average"'), ("group_size", "*2")),
        UNTAUGHT,
        also="a denser reward",
    ),
    "small_groups": Cause(
        "the baseline is the mean of one or two others: mostly noise",
        (("group_size", "16"), ("baseline", '"moving_average"'), ("value_head", "True")),
    ),
    "uneven_groups": Cause(
        "a few members carry the whole update",
        (("compression", '"tanh"'), ("advantage_scale", '"group"')),
        (*SHAKEN, "small_groups"),
    ),
    "advantage_scale": Cause(
        "the scale of the advantages is not that of the clip range and the learning rate",
        (("advantage_scale", '"batch"'), ("normalize_reward", "True"), ("compression", '"tanh"')),
        (*SHAKEN, "uneven_groups"),
    ),
    "advantage_bias": Cause(
        "the baseline is off: all actions are pushed in one direction",
        (("baseline_discount", "1.0"), ("advantage_scale", '"batch"'), ("baseline", '"leave_one_out"')),
        (*SHAKEN, "advantage_scale"),
    ),
    "large_gradient": Cause(
        "clipping leaves next to nothing of the gradient, mostly the value loss's",
        (("normalize_reward", "True"), ("advantage_scale", '"batch"'), ("learning_rate", "/3")),
        SHAKEN,
    ),
    "small_gradient": Cause("next to nothing moves the policy", (("group_size", "*2"), ("ent_coef", "up")), SHAKEN),
    "near_overflow": Cause(
        "figures near the end of what float32 resolves; the next stop is NonFiniteError",
        (("normalize_reward", "True"), ("learning_rate", "/3")),
        (*SHAKEN, "large_gradient"),
    ),
    "value_function": Cause(
        "the value head is worse than a constant",
        (("normalize_reward", "True"), ("learning_rate", "/3")),
        (*SHAKEN, "large_gradient"),
    ),
    "out_of_range": Cause("outside the range that you gave", ()),
}
OPTIONS = sorted({option for cause in FINDINGS.values() for option, _ in cause.cures})
"""Arguments of an agent that cures are chosen by."""


def with_ranges(ranges: Mapping[str, Range]) -> tuple[Metric, ...]:
    """METRICS with other ranges to warn outside of.

    Raises:
        ConfigError: an unknown metric, or a range that is none.
    """
    names = [metric.name for metric in METRICS]
    if not isinstance(ranges, Mapping):
        raise ConfigError(f"ranges: expected a dict, metric -> (low, high), got {ranges!r:.80}")
    for name, bounds in ranges.items():
        if name not in names:
            raise ConfigError(f'ranges: no metric "{name}": {did_you_mean(name, names)}')
        low, high = bounds if isinstance(bounds, tuple | list) and len(bounds) == 2 else (math.nan, math.nan)
        numbers = [bound for bound in (low, high) if bound is not None]
        if not all(isinstance(bound, int | float) and not math.isnan(bound) for bound in numbers) or (
            len(numbers) == 2 and numbers[0] > numbers[1]
        ):
            raise ConfigError(f"ranges[{name!r}]: expected (low, high) with None for an open side, got {bounds!r}")
    return tuple(replace(m, warns=(*ranges[m.name],)) if m.name in ranges else m for m in METRICS)


def shown_range(bounds: Range | None) -> str:
    """A range for a person: "0.1 to 1", "up to 0.1", "2.5 or more", or "any"."""
    low, high = bounds or (None, None)
    if low is None:
        return "any" if high is None else f"up to {high:g}"
    return f"{low:g} or more" if high is None else f"{low:g} to {high:g}"


def cures_of(finding: str, settings: Settings, row: Row) -> list[str]:
    """What to write, such as "ent_coef=0.01": only arguments that the agent has, and none that is so already.

    Args:
        finding: of FINDINGS.
        settings: the agent's arguments; one that is missing is not offered by it.
        row: of the log, for the learning rate as it is now, and for how far its updates went.
    """
    found = []
    for option, value in FINDINGS[finding].cures:
        late = option == "trust_region" and is_lost(row)  # it steers a policy, and there is none left
        new = _new_value(option, value, settings, row) if option in settings and not late else None
        if new is not None:
            found.append(f"{option}={new}")
    return found


def is_lost(row: Row) -> bool:
    """Whether one update moved the policy so far that what it had learned is gone: a KL above 1, or none at all."""
    return not row.get("train/approx_kl", 0.0) <= 1


def _slower(learning_rate: float, row: Row) -> str:
    """A third of it, or less: the KL grows with the square of a step, so that lr·sqrt(0.1/KL) would give 0.1.

    Rounded down to one digit. A KL that is no number counts as 1,000.

    >>> _slower(0.3, {"train/approx_kl": 40.0}), _slower(0.003, {}), _slower(0.002, {})
    ('0.01', '0.001', '0.0006')
    """
    kl = row.get("train/approx_kl", 0.0)
    kl = kl if math.isfinite(kl) else 1000.0
    slower = learning_rate * min(1 / 3, math.sqrt(0.1 / max(kl, 1e-9)))
    if slower <= 0:
        return "0"
    power = math.floor(math.log10(slower) + 1e-9)
    return f"{math.floor(slower / 10**power + 1e-9) * 10**power:.1g}"


def _new_value(option: str, value: str, settings: Settings, row: Row) -> str | None:
    """The value to write for `option`, or None where it would change nothing or cannot be combined."""
    now = settings[option]
    if option == "learning_rate":
        now = row.get("train/learning_rate", now)
        return _slower(now, row) if isinstance(now, int | float) else None
    if option == "ent_coef":
        now = now if isinstance(now, int | float) else 0.0
        if value == "up":
            return "0.01" if now < 0.01 else f"{min(3 * now, 0.1):.2g}" if now < 0.1 else None
        return f"{min(now / 3, 0.01):.2g}" if now > 0 else None
    if value == "*2":
        return str(2 * int(now))
    if value == "/2":
        return str(int(now) // 2) if now > 1 else None
    if option == "group_size":
        return value if now < int(value) else None
    if option in ("trust_region", "kl_coef"):
        return value if not now else None
    if option == "target_kl":  # the trust region steers to one of its own
        return value if not now and "trust_region" not in settings else None
    if option == "clip_range":
        return f"LinearSchedule({now:g}, {now / 2:g})" if isinstance(now, int | float) else None
    grouped = value == '"group"' and (
        settings.get("baseline") in ("weighted", "moving_average") or settings.get("baseline_discount", 1) != 1
    )
    moving = value == '"moving_average"' and settings.get("advantage_scale") == "group"
    return None if grouped or moving or str(now) == value.strip('"') else value
