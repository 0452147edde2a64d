"""The health of a training run: `health_metrics` measures a rollout, `Diagnosis` judges the rows of a log in order.

The callback `HealthMonitor` and `grpo-rl doctor runs/x` share both, so that they say the same. What is healthy, why a
figure leaves its range and what to change then is in grpo_rl/health.py.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch as th
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import safe_mean

from grpo_rl import advantages as adv
from grpo_rl.buffers import GroupBuffer
from grpo_rl.errors import ConfigError, check_whole
from grpo_rl.health import (
    CRITIC_FREE,
    FINDINGS,
    IDLE_ONCE_SOLVED,
    OPTIONS,
    Metric,
    Range,
    Row,
    Settings,
    cures_of,
    is_lost,
    shown_range,
    with_ranges,
)
from grpo_rl.token_buffer import TokenBuffer

PATIENCE = 3
"""Rollouts in a row out of range that make a finding, and in range that end it."""
MEMORY = 10
"""Rollouts after a finding's end in which it still explains what comes out of range."""


class HealthWarning(UserWarning):
    """Something in training is off: one line with the figure, the likely cause and the argument to change."""


# --- measuring --------------------------------------------------------------------------------------------------------
def health_metrics(rollout: GroupBuffer, gamma: float, scale: str = "batch", unit: float = 1.0) -> dict[str, float]:
    """Figures of a finished rollout whose advantages are set.

    Members are compared as the critic-free advantage does it, by the rewards alone: reward-to-go at the same age of the
    same group; of completions at the same turn, whatever their lengths. reward_gap is
    mean(best − mean)/sqrt(mean((R − mean)²)) over the steps that have a sibling: 1.52 for eight normally distributed
    members, 2.65 where one of eight gets everything, near 0 where a few groups have all of the spread.

    Args:
        rollout: T steps of N columns.
        gamma: discount of the reward-to-go.
        scale: "batch": the advantages are judged as a z-score over the rollout, as minibatches see them; else as is.
        unit: rewards are divided by it, as `normalize_reward` does before they reach the returns.

    Returns:
        advantage_mean, advantage_std, reward_scale, magnitude, group_size and, where any step has a sibling,
        reward_gap and tied_groups.
    """
    assert rollout.advantages is not None, "advantages are set before a rollout is judged"
    mask = rollout.tensor(rollout.mask)
    rewards, ends, alive = (rollout.tensor(array) for array in (rollout.rewards / unit, rollout.ends, rollout.alive))
    tails = alive * adv.alive_tail(rewards, mask, gamma)
    returns_to_go = adv.reward_to_go(rewards, ends, tails, gamma)
    returns = returns_to_go.cpu().numpy()[rollout.mask].astype(np.float64)
    figures = _advantages(rollout.advantages, mask, scale)
    if isinstance(rollout, TokenBuffer):
        earned, _, group, turn, there = (x.cpu().numpy() for x in rollout.outcomes(returns_to_go, by_turn=True))
        figures |= _comparison(earned[there].astype(np.float64), group[there], turn[there])
    else:
        figures |= _comparison(returns, rollout.group[rollout.mask], rollout.age[rollout.mask])
    figures["reward_scale"] = float(np.abs(rollout.rewards[rollout.mask]).max(initial=0.0)) / unit
    largest = max(
        float(np.abs(array).max(initial=0.0))
        for array in (returns, rollout.log_probs[rollout.mask], rollout.advantages.cpu().numpy()[rollout.mask])
    )
    figures["magnitude"] = math.log10(max(largest, figures["reward_scale"], 1.0))
    return figures


def _advantages(advantages: th.Tensor, mask: th.Tensor, scale: str) -> dict[str, float]:
    if scale == "batch":
        advantages = adv.masked_standardize(advantages, mask)
    return {
        "advantage_mean": adv.masked_mean(advantages, mask).item(),
        "advantage_std": adv.masked_std(advantages, mask).item(),
    }


def _comparison(returns: NDArray[np.float64], group: NDArray[np.int64], age: NDArray[np.int64]) -> dict[str, float]:
    """How members of a group differ at one age, from rows (M,)."""
    if not len(returns):
        return {}
    group = np.unique(group, return_inverse=True)[1]
    _, cell, count = np.unique(group * (age.max() + 1) + age, return_inverse=True, return_counts=True)
    figures = {"group_size": float(count[cell].mean())}
    compared = count[cell] > 1
    if not compared.any():
        return figures
    best, worst = np.full(len(count), -np.inf), np.full(len(count), np.inf)
    np.maximum.at(best, cell, returns)
    np.minimum.at(worst, cell, returns)
    mean = np.bincount(cell, returns) / count
    tied = (best - worst)[cell] <= 1e-6 * np.abs(returns).max()
    spread = float(np.sqrt(np.square((returns - mean[cell])[compared]).mean()))
    gap = float((best - mean)[cell][compared].mean())
    differing = len(np.unique(group[compared & ~tied]))
    figures["tied_groups"] = 1 - differing / len(np.unique(group[compared]))
    figures["reward_gap"] = gap / spread if differing else 0.0
    return figures


# --- judging ----------------------------------------------------------------------------------------------------------
@dataclass
class Finding:
    """One episode of trouble.

    Attributes:
        name: in FINDINGS. metric, value: what was measured when it was found, in its range `warns`.
        since, until: env steps of the first and the last rollout out of range. over: it has ended.
        message: one line with the cure. cures: what to write, such as "ent_coef=0.01".
    """

    name: str
    metric: str
    value: float
    warns: Range
    since: int
    until: int
    cures: list[str]
    message: str
    over: bool = False


@dataclass
class _Course:
    """Where one finding stands."""

    out: int = 0
    calm: int = 0
    since: int = 0
    cause: str = ""  # the finding that this one follows from, and is left out for
    ended: int | None = None
    finding: Finding | None = None


@dataclass
class Diagnosis:
    """Judges the rows of a log, in order.

    Args:
        settings: arguments of the agent; only those that it has are proposed as cures, and none that is set already.
        ranges: name of a metric → (low, high) in place of its `warns`; None leaves a side open.
        patience: rollouts in a row.

    Attributes:
        findings: all so far. values: of each row, by the metric's name. steps: env steps at each row.
    """

    settings: Settings = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        self.metrics = with_ranges(self.ranges)
        check_whole("patience", self.patience)
        self.findings: list[Finding] = []
        self.values: list[dict[str, float]] = []
        self.steps: list[int] = []
        self._courses = {name: _Course() for name in FINDINGS}
        self._first: dict[str, float] = {}
        self._returns: list[float] = []
        self._of_completions = False  # whose mean over the rollout is logged, where episodes have one of the last 100
        self._spread = 0.0
        self._updates: float | None = None

    @property
    def active(self) -> list[Finding]:
        """What is wrong now."""
        return [finding for finding in self.findings if not finding.over]

    def add(self, row: Row) -> tuple[list[Finding], list[Finding]]:
        """Judges one row of the log; gives the findings that begin with it and those that it ends."""
        values = self._read(row)
        self.values.append(values)
        begun, ended = [], []
        for name, course in self._courses.items():
            judged = [m for m in self.metrics if name in (m.below, m.above) and m.name in values]
            if not judged or (name in CRITIC_FREE and self._taught_otherwise(name, row)):
                continue
            out = [m for m in judged if m.side(values[m.name]) == name]
            if out and not (name in IDLE_ONCE_SOLVED and self._risen()):
                finding = self._out(name, course, out, values, row)
                begun += [finding] if finding else []
            else:
                ended += self._in(course)
        return begun, ended

    def _read(self, row: Row) -> dict[str, float]:
        """The row's metrics by name, with those that relate to the run's start."""
        self.steps.append(int(row.get("time/total_timesteps", self.steps[-1] if self.steps else 0)))
        fresh = row.get("train/n_updates") != self._updates or "train/n_updates" not in row
        self._updates = row.get("train/n_updates", self._updates)
        row = {key: value for key, value in row.items() if fresh or not key.startswith("train/")}
        self._of_completions |= "reward" in row
        if math.isfinite(mean := row.get("reward" if self._of_completions else "rollout/ep_rew_mean", math.nan)):
            self._returns.append(mean)
        values = {m.name: row[m.key] for m in self.metrics if m.key in row}
        if math.isnan(values.get("explained_variance", 0.0)):
            del values["explained_variance"]  # returns that are all equal have no variance to explain
        if "train/entropy_loss" in row:
            values["entropy"] = -row["train/entropy_loss"]
        noise = row.get("train/std", values.get("entropy", 0.0) if "train/entropy_loss" in row else 0.0)
        if "train/std" in row or "train/entropy_loss" in row:
            start = self._first.setdefault("noise", noise)
            if start > 0:
                values["entropy_left"] = noise / start
        self._spread = max(self._spread, values.get("advantage_std", 0.0))
        if (bonus := values.get("ent_coef", 0.0)) > 0 and "entropy" in values and self._spread > 0:
            gained = values["entropy"] - self._first.setdefault("entropy", values["entropy"])
            values["bonus_gain"] = bonus * gained / self._spread
        if (scale := values.get("reward_scale", 0.0)) > 0:
            values["reward_growth"] = scale / self._first.setdefault("reward_scale", scale)
        return values

    def _taught_otherwise(self, name: str, row: Row) -> bool:
        hybrid = self.settings.get("value_head", "train/value_loss" in row)
        return bool(hybrid or self.settings.get("baseline") == "regression") or (
            name == "small_groups" and self.settings.get("baseline") == "moving_average"
        )

    def _risen(self) -> bool:
        """The mean return has risen since the start, by more than half of all that it has moved."""
        returns = self._returns
        return bool(returns) and returns[-1] - returns[0] > 0.5 * (max(returns) - min(returns))

    def _out(
        self, name: str, course: _Course, out: list[Metric], values: Mapping[str, float], row: Row
    ) -> Finding | None:
        course.since = course.since if course.out else self.steps[-1]
        course.out, course.calm = course.out + 1, 0
        if course.finding is not None:
            course.finding.until = self.steps[-1]
        at_once = [m for m in out if not values[m.name] <= m.at_once]
        ripe = at_once or [m for m in out if course.out >= self.patience * m.slow]
        if not ripe or course.finding is not None or course.cause:
            return None
        course.cause = next(filter(self._explains, FINDINGS[name].explained_by), "")
        if course.cause or self._may_yet_be_explained(name):
            return None
        metric, value = ripe[0], values[ripe[0].name]
        cures = cures_of(name, self.settings, row)
        words = ", or ".join([*cures[:3], *([FINDINGS[name].also] if FINDINGS[name].also else [])])
        message = (
            f"{name}: {metric.name} is {value:.3g} at {self.steps[-1]:,} steps"
            f" ({shown_range(metric.warns)} is healthy): {FINDINGS[name].meaning}."
            f"{' Start again: this policy is lost.' if is_lost(row) else ''} Try {words or 'another seed'}"
        )
        course.finding = Finding(name, metric.name, value, metric.warns, course.since, self.steps[-1], cures, message)
        self.findings.append(course.finding)
        return course.finding

    def _in(self, course: _Course) -> list[Finding]:
        course.out, course.calm = 0, course.calm + 1
        finding = course.finding
        if course.calm < self.patience:
            return []
        course.cause = ""
        if finding is None or any(self._follows(other, finding.name) for other in FINDINGS):
            return []
        course.finding, course.ended, finding.over = None, len(self.values), True
        return [finding]

    def _explains(self, cause: str) -> bool:
        course = self._courses[cause]
        recent = course.ended is not None and len(self.values) - course.ended <= MEMORY
        return course.finding is not None or recent

    def _follows(self, name: str, cause: str) -> bool:
        """What `cause` has brought about is still there, though the cause itself is back in range."""
        course = self._courses[name]
        brewing = course.out > 0 and course.finding is None and cause in FINDINGS[name].explained_by
        return course.cause == cause or brewing

    def _may_yet_be_explained(self, name: str) -> bool:
        """A cause is out of range too, but not for long enough yet."""
        names = list(FINDINGS)
        return any(
            self._courses[cause].out and names.index(cause) < names.index(name) for cause in FINDINGS[name].explained_by
        )


def diagnose(
    rows: Iterable[Row],
    settings: Settings | None = None,
    ranges: Mapping[str, Range] | None = None,
    patience: int = PATIENCE,
) -> list[Finding]:
    """The findings of a whole log, rows in order, as `Diagnosis` judges them one by one."""
    diagnosis = Diagnosis(settings or {}, ranges or {}, patience)
    for row in rows:
        diagnosis.add(row)
    return diagnosis.findings


# --- watching ---------------------------------------------------------------------------------------------------------
class HealthMonitor(BaseCallback):
    """Logs `health/…` every rollout and warns once when trouble begins, once more if it comes back.

    A warning is a `HealthWarning`, one line with the argument to change. With GRPO everything is measured; with another
    on-policy algorithm of SB3, whatever does not need groups. Training itself is not touched.

    Args:
        ranges: name of a metric → (low, high) to warn outside of, None for an open side; the others keep theirs.
        patience: rollouts in a row that make a finding, and that end it.
        say: takes the lines in place of `warnings.warn`.
        history: rows of this run's log from before it was interrupted; they are judged in silence.
        verbose: 1 also says when trouble is over.

    Attributes:
        diagnosis: the `Diagnosis`; `findings` are its findings so far.

    Raises:
        ConfigError: a metric that does not exist, or (at `learn`) an off-policy algorithm.
    """

    def __init__(
        self,
        ranges: Mapping[str, Range] | None = None,
        patience: int = PATIENCE,
        say: Callable[[str], None] | None = None,
        history: Iterable[Row] = (),
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        if not (say is None or callable(say)):
            raise ConfigError(f"say={say!r:.80}: expected a function that takes a line, such as print")
        if not isinstance(history, Iterable) or isinstance(history, str):
            raise ConfigError(f"history={history!r:.80}: expected rows of a log, dicts of numbers")
        self.diagnosis = Diagnosis({}, ranges or {}, patience)
        self.say = say
        self._history = list(history)

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, those that are over too."""
        return self.diagnosis.findings

    def _init_callback(self) -> None:
        if not hasattr(self.model, "rollout_buffer"):
            raise ConfigError(f"HealthMonitor reads rollouts, which {type(self.model).__name__} has none of")
        self.diagnosis.settings = settings_of(self.model)
        while self._history:
            self.diagnosis.add(self._history.pop(0))

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        row = self._logged("train/", "completions/", "reward")
        row |= {f"health/{name}": value for name, value in self._measure().items()}
        row["rollout/ep_rew_mean"] = float(safe_mean([episode["r"] for episode in self.model.ep_info_buffer or []]))
        self._judge(row)
        values = self.diagnosis.values[-1]
        names = ("entropy", "entropy_left", "bonus_gain", "reward_growth")
        row |= {f"health/{name}": values[name] for name in names if name in values}
        for key, value in row.items():
            if key.startswith("health/"):
                self.logger.record(key, value)
        self.logger.record("health/findings", len(self.diagnosis.active))

    def _on_training_end(self) -> None:
        if row := self._logged("train/"):
            self._judge(row)

    def _logged(self, *prefixes: str) -> dict[str, float]:
        logged = self.logger.name_to_value
        return {key: float(value) for key, value in logged.items() if key.startswith(prefixes) and _is_number(value)}

    def _measure(self) -> dict[str, float]:
        rollout: Any = self.model.rollout_buffer  # type: ignore[attr-defined]
        figures = {}
        if isinstance(rollout, GroupBuffer):
            model: Any = self.model
            unit = float(model.reward_scale.unit()) if model.normalize_reward else 1.0
            figures = health_metrics(rollout, model.gamma, model.scale, unit)
            if model.group_size == 1:
                figures = {name: value for name, value in figures.items() if name in UNGROUPED}
        else:
            advantages, scale = th.as_tensor(rollout.advantages), getattr(self.model, "normalize_advantage", False)
            figures = _advantages(advantages, th.ones_like(advantages, dtype=th.bool), "batch" if scale else "none")
            figures["reward_scale"] = float(np.abs(rollout.rewards).max())
        if isinstance(coefficient := getattr(self.model, "ent_coef", None), int | float):
            figures["ent_coef"] = float(coefficient)
        return figures

    def _judge(self, row: dict[str, float]) -> None:
        begun, ended = self.diagnosis.add(row | {"time/total_timesteps": float(self.num_timesteps)})
        for finding in begun:
            if self.say is not None:
                self.say(f"health: {finding.message}")
            else:
                warnings.warn(finding.message, HealthWarning, stacklevel=2)
        if self.verbose >= 1:
            for finding in ended:
                (self.say or print)(f"health: {finding.name} is over at {self.num_timesteps:,} steps")


UNGROUPED = ("advantage_mean", "advantage_std", "reward_scale", "magnitude")
"""What a rollout without groups is measured by."""


def settings_of(model: BaseAlgorithm) -> dict[str, Any]:
    """The arguments of an agent that cures are chosen by, as they are now; what it has not is left out."""
    settings = {name: getattr(model, name) for name in OPTIONS if hasattr(model, name)}
    for name in {"learning_rate", "clip_range"} & settings.keys():  # a constant may be wrapped in a schedule
        schedule = getattr(settings[name], "value_schedule", settings[name])
        settings[name] = getattr(schedule, "val", getattr(schedule, "value", schedule))
    if "advantage_scale" in settings:
        settings["advantage_scale"] = model.scale  # type: ignore[attr-defined]
    of_tokens = isinstance(getattr(model, "rollout_buffer", None), TokenBuffer)
    if of_tokens:
        settings.pop("normalize_reward", None)
    normalizer = model.get_vec_normalize_env()
    if normalizer is not None and normalizer.norm_reward and "normalize_reward" in settings:
        settings["normalize_reward"] = True
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
