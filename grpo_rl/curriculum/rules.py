"""What a difficulty follows: a number, a schedule over env steps, or the success rate; and how far it has got."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from grpo_rl.errors import ConfigError
from grpo_rl.schedules import ConstantSchedule, LinearSchedule, Schedule, parse_schedule

WINDOW = 100
"""Episodes over which a schedule's success rate is logged."""

Outcome = tuple[float, bool | None]
"""The difficulty of a finished episode, and whether it succeeded; None where the env does not say."""


@dataclass(frozen=True)
class AdaptiveDifficulty:
    """A difficulty that follows success: a step towards `end` above one rate, a step back below another.

    The rate is that of the last `window` episodes at the current difficulty; until there are so many, nothing moves.
    Episodes that a fork began in the middle do not count: they say less about the way from the start.

    Args:
        start: The first difficulty, and the lowest.
        end: The last. It may be the smaller number, where small is hard.
        step: How far one move goes; None: a tenth of the way from `start` to `end`.
        raise_above: A success rate above this, 0 … 1, makes it harder.
        lower_below: One below this makes it easier.
        window: Episodes that a rate is taken over.
        success: function(info, episode_return) → bool, at the last step of an episode. None: `info["is_success"]`.
        success_return: Instead of `success`: an episode succeeds with a return of at least this.

    Raises:
        ConfigError: A number is out of its range, or both `success` and `success_return` are given.
    """

    start: float
    end: float
    step: float | None = None
    raise_above: float = 0.8
    lower_below: float = 0.4
    window: int = WINDOW
    success: Callable[[dict[str, Any], float], bool] | None = None
    success_return: float | None = None

    def __post_init__(self) -> None:
        LinearSchedule(self.start, self.end)  # both are finite numbers
        if self.start == self.end:
            raise ConfigError(f"start and end are both {self.start}: give two difficulties, or one number instead")
        if self.step is None:
            object.__setattr__(self, "step", abs(self.end - self.start) / 10)
        if not self.step > 0:  # type: ignore[operator]
            raise ConfigError(f"step must be above 0 (the way from start to end has the sign), got {self.step!r}")
        if not 0 <= self.lower_below < self.raise_above <= 1:
            raise ConfigError(
                f"expected 0 ≤ lower_below < raise_above ≤ 1, got {self.lower_below!r} and {self.raise_above!r}"
            )
        if self.window < 1 or int(self.window) != self.window:
            raise ConfigError(f"window must be a whole number of episodes, 1 or more, got {self.window!r}")
        if self.success is not None and self.success_return is not None:
            raise ConfigError("give success or success_return, not both")

    def moved(self, difficulty: float, success_rate: float) -> float:
        """The difficulty after `difficulty`, given the success rate there, 0 … 1."""
        direction = (success_rate > self.raise_above) - (success_rate < self.lower_below)
        towards = self.end if direction > 0 else self.start
        if direction == 0 or abs(towards - difficulty) <= self.step:  # type: ignore[operator]
            return towards if direction else difficulty
        return difficulty + (self.step if towards > difficulty else -self.step)  # type: ignore[operator]

    def succeeded(self, info: dict[str, Any], episode_return: float) -> bool | None:
        """Whether an episode succeeded that ended with this info and return; None if that is not said."""
        if self.success is not None:
            return bool(self.success(info, episode_return))
        return _said(info) if self.success_return is None else episode_return >= self.success_return


Rule = Schedule | AdaptiveDifficulty


def parse_difficulty(x: Any) -> Rule:
    """A rule from what users write.

    Args:
        x: A number; an `AdaptiveDifficulty`; a schedule over env steps; or, as in YAML, a dict: {start, end, steps},
            {points, steps}, or {adaptive: {start, end, …}} with the arguments of `AdaptiveDifficulty`.

    Raises:
        ConfigError: Anything else; a schedule over progress in particular, which an env does not know.
    """
    if isinstance(x, AdaptiveDifficulty):
        return x
    if isinstance(x, Mapping) and "adaptive" in x:
        if others := sorted(x.keys() - {"adaptive"}):
            raise ConfigError(
                f"difficulty: give either adaptive or a schedule, got {', '.join(others)} beside adaptive"
            )
        try:
            return AdaptiveDifficulty(**x["adaptive"])
        except TypeError as error:
            names = ", ".join(item.name for item in fields(AdaptiveDifficulty))
            raise ConfigError(f"adaptive takes {names}; got {x['adaptive']!r}: {error}") from None
    rule = parse_schedule(x)
    if not isinstance(rule, Schedule):
        raise ConfigError(f"difficulty: expected a number, a schedule or AdaptiveDifficulty, got {x!r}")
    if not isinstance(rule, ConstantSchedule) and rule.steps is None:
        raise ConfigError(
            f"difficulty: {rule} runs over training progress, which an environment does not know: give it steps=…, "
            "the number of env steps after which it has reached its end"
        )
    return rule


def full_difficulty(difficulty: Any) -> float:
    """The last difficulty of what `parse_difficulty` takes: where training leads, and where an agent is evaluated."""
    rule = parse_difficulty(difficulty)
    return rule.end if isinstance(rule, AdaptiveDifficulty) else rule.value_at(1.0)


class Course:
    """A rule and how far it has got.

    Attributes:
        difficulty: The current one.
        successes: Of the last episodes, for `AdaptiveDifficulty` of those at this difficulty.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        adaptive = isinstance(rule, AdaptiveDifficulty)
        self.difficulty = float(rule.start if isinstance(rule, AdaptiveDifficulty) else rule.at(0))
        self.successes: deque[bool] = deque(maxlen=int(rule.window) if adaptive else WINDOW)  # type: ignore[union-attr]

    @property
    def success_rate(self) -> float | None:
        """Share of `successes`, 0 … 1; None without any."""
        return sum(self.successes) / len(self.successes) if self.successes else None

    def succeeded(self, info: dict[str, Any], episode_return: float) -> bool | None:
        """Whether an episode succeeded that ended with this info and return; None if that is not said."""
        return self.rule.succeeded(info, episode_return) if isinstance(self.rule, AdaptiveDifficulty) else _said(info)

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Takes note of finished episodes, in their order."""
        for difficulty, success in outcomes:
            if isinstance(self.rule, AdaptiveDifficulty):
                if success is None:
                    raise ConfigError(
                        'AdaptiveDifficulty needs to know which episodes succeed: the env\'s info has no "is_success" '
                        "at the end of an episode. Give it success=function(info, episode_return), or success_return=…"
                    )
                if difficulty != self.difficulty:
                    continue
            if success is not None:
                self.successes.append(success)

    def advance(self, steps: int) -> float:
        """Moves on to where the rule is after `steps` env steps and what was observed; gives the difficulty."""
        if isinstance(self.rule, Schedule):
            self.difficulty = float(self.rule.at(steps))
        elif len(self.successes) == self.successes.maxlen:
            moved = self.rule.moved(self.difficulty, self.success_rate)  # type: ignore[arg-type]
            if moved != self.difficulty:
                self.difficulty = moved
                self.successes.clear()
        return self.difficulty

    def state(self) -> dict[str, Any]:
        """All that changes, for JSON."""
        return {"difficulty": self.difficulty, "successes": list(self.successes)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.difficulty = float(state["difficulty"])
        self.successes.clear()
        self.successes.extend(state["successes"])


def _said(info: Mapping[str, Any]) -> bool | None:
    return bool(info["is_success"]) if "is_success" in info else None
