"""Schedules as values: callable, comparable, pickled by their numbers, never by code (lambdas break across Pythons).

A schedule runs over training progress (`steps=None`; call it with SB3's `progress_remaining`, 1 → 0) or over env steps
(`steps=1e6`; ask `.at(num_timesteps)`). Asking the wrong way is an error, not a guess.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass
from numbers import Real
from typing import Any, ClassVar, Self

from grpo_rl.errors import ConfigError, did_you_mean


class Schedule:
    """What schedules share: a value by fraction of the way, from 0 (start) to 1 (end); see the subclasses."""

    steps: float | None
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def value_at(self, fraction: float) -> float:
        """Value at a fraction of the way, 0 … 1."""
        raise NotImplementedError

    def __call__(self, progress_remaining: float) -> float:
        """Value at SB3's `progress_remaining`, from 1 (start of training) to 0.

        Raises:
            ConfigError: The schedule runs over env steps.
        """
        if self.steps is not None:
            raise ConfigError(
                f"{self} runs over env steps: ask .at(num_timesteps), or leave out steps to follow progress."
            )
        return self.value_at(1 - progress_remaining)

    def at(self, num_timesteps: float) -> float:
        """Value after `num_timesteps` env steps; constant beyond `steps`.

        Raises:
            ConfigError: The schedule runs over training progress.
        """
        if self.steps is None:
            raise ConfigError(f"{self} runs over progress: call it with progress_remaining, or give it steps=…")
        return self.value_at(min(num_timesteps / self.steps, 1.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and None, for YAML or JSON; `parse_schedule` and `from_dict` read it back."""
        return {name: getattr(self, name) for name in self._names()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """The schedule that `to_dict` described.

        Raises:
            ConfigError: A key is unknown or missing.
        """
        names = cls._names()
        for name in settings:
            if name not in names:
                raise ConfigError(f'unknown key "{name}" for {cls.__name__}: {did_you_mean(name, names)}')
        try:
            return cls(**settings)
        except TypeError:
            raise ConfigError(f"{cls.__name__} takes {', '.join(names)}; got {dict(settings)}.") from None

    @classmethod
    def _names(cls) -> list[str]:
        return list(cls.__dataclass_fields__)  # every subclass is a dataclass


@dataclass(frozen=True)
class ConstantSchedule(Schedule):
    """One value, over progress and over env steps alike."""

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _finite("value", self.value))

    def value_at(self, fraction: float) -> float:
        return self.value

    def __call__(self, progress_remaining: float) -> float:
        return self.value

    def at(self, num_timesteps: float) -> float:
        return self.value


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """A straight line from `start` to `end`, over training progress, or over `steps` env steps and then constant."""

    start: float
    end: float
    steps: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", _finite("start", self.start))
        object.__setattr__(self, "end", _finite("end", self.end))
        object.__setattr__(self, "steps", _positive(self.steps))

    def value_at(self, fraction: float) -> float:
        return self.start + fraction * (self.end - self.start)


@dataclass(frozen=True)
class PiecewiseSchedule(Schedule):
    """Straight lines through `points`, pairs (fraction of the way, value) with rising fractions in 0 … 1.

    Constant before the first and after the last. The way is training progress, or `steps` env steps.
    """

    points: Sequence[tuple[float, float]]
    steps: float | None = None

    def __post_init__(self) -> None:
        try:
            points = tuple((_finite("fraction", x), _finite("value", y)) for x, y in self.points)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"points must be pairs (fraction, value), got {self.points!r}: {error}") from error
        xs = [x for x, _ in points]
        if not points or xs != sorted(set(xs)) or not 0 <= xs[0] <= xs[-1] <= 1:
            raise ConfigError(f"fractions of points must rise within 0 … 1, got {xs}; for env steps, add steps=…")
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "steps", _positive(self.steps))

    def value_at(self, fraction: float) -> float:
        x0, y0 = self.points[0]
        for x1, y1 in self.points:
            if fraction < x1:
                return y0 if x1 == x0 else y0 + (fraction - x0) / (x1 - x0) * (y1 - y0)
            x0, y0 = x1, y1
        return y0

    def to_dict(self) -> dict[str, Any]:
        return {"points": [list(point) for point in self.points], "steps": self.steps}


def parse_schedule(x: Any) -> Schedule | Callable[[float], float]:
    """A schedule from what users write.

    Args:
        x: A number (constant); a schedule or any callable (itself); a string that holds a number (YAML reads 3e-4 so);
            "lin_3e-4" (linear from there to 0, as in RL Zoo); or a dict with "start" and "end", "value", or "points",
            and with "steps" to run over env steps: what `to_dict` gives.

    Raises:
        ConfigError: Anything else.
    """
    if callable(x):
        return x
    if isinstance(x, Real) and not isinstance(x, bool):
        return ConstantSchedule(float(x))
    if isinstance(x, Mapping):
        kind = PiecewiseSchedule if "points" in x else ConstantSchedule if "value" in x else LinearSchedule
        return kind.from_dict(x)
    if isinstance(x, str):
        linear = x.startswith("lin_")
        try:
            value = float(x.removeprefix("lin_"))
        except ValueError:
            pass
        else:
            return LinearSchedule(value, 0.0) if linear else ConstantSchedule(value)
    raise ConfigError(
        f'not a schedule: {x!r}. Give a number, "lin_3e-4", {{"start": …, "end": …}} (and "steps": over env steps), '
        '{"points": [[0, …], [1, …]]}, a schedule of grpo_rl.schedules, or a callable of progress_remaining.'
    )


def _finite(name: str, x: float) -> float:
    if isinstance(x, bool) or not isinstance(x, Real) or not math.isfinite(x):
        raise ConfigError(f"{name} must be a finite number, got {x!r}.")
    return float(x)


def _positive(steps: float | None) -> float | None:
    if steps is None:
        return None
    if _finite("steps", steps) <= 0:
        raise ConfigError(f"steps must be a positive number of env steps, or None to follow progress; got {steps!r}.")
    return float(steps)
