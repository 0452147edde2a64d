"""The library's errors: one root, `GRPOError`, and for each error a parent from the standard library; and `warn`.

A message says what was expected, what came and what to do. Every error survives pickling: env workers raise them too.
"""

import difflib
import math
import numbers
import pickle
import sys
import warnings
from collections.abc import Iterable
from typing import Any


class GRPOError(Exception):
    """Root of every error that this library raises on purpose."""


class ConfigError(GRPOError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class BatchError(ConfigError, AssertionError):
    """A rollout or a minibatch of one row: SB3 users know it as an AssertionError."""


class SpaceError(ConfigError, NotImplementedError):
    """A space that cannot be batched: SB3 users know it as a NotImplementedError."""


class VecEnvError(ConfigError, AttributeError):
    """One env where several side by side are wanted: Python knows it as an attribute that is missing."""


class ForkError(GRPOError, RuntimeError):
    """An env that cannot be forked exactly.

    Args:
        message: The whole message for a person.
        reason: Why, in a few words for a log line or a report; the message when left out.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class WorkerError(GRPOError, RuntimeError):
    """A worker process that died, or was asked after its end, or raised an error that could not be sent as it was."""


class UntrustedError(GRPOError, pickle.UnpicklingError):
    """A file that would execute code when it is loaded.

    Args:
        message: The whole message for a person.
        executes: Entry of the file → what it would do, in words.
    """

    def __init__(self, message: str, executes: dict[str, list[str]] | None = None) -> None:
        super().__init__(message)
        self.executes = executes or {}


class NonFiniteError(GRPOError, FloatingPointError):
    """NaN or infinity in an observation, a reward or a loss.

    Args:
        message: What was found and what to do.
        column: Which env, 0 … N-1; put in front of the message when known, as `step` is.
        step: Env steps so far.
    """

    def __init__(self, message: str, column: int | None = None, step: int | None = None) -> None:
        known = [f"{name} {index}" for name, index in (("env", column), ("step", step)) if index is not None]
        super().__init__(f"{', '.join(known)}: {message}" if known else message)
        self.column = column
        self.step = step


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises ConfigError where an argument is no whole number from `least` on; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{name}={value!r:.80}: expected a whole number, {least} or more")


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises ConfigError where an argument is no number in [low, high]: NaN, True and False are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name}={value!r:.80}: expected a number")
    if not low <= float(value) <= high:
        raise ConfigError(f"{name}={value} is outside [{low:g}, {high:g}]")


def check_seed(seed: Any) -> None:
    """Raises ConfigError where a seed is neither None nor a whole number from 0 on."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0):
        raise ConfigError(f"seed={seed!r:.80}: expected a whole number, 0 or more, or None for another each time")


_LIBRARY = ("grpo_rl", "stable_baselines3", "contextlib")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn` that shows the user's line: the innermost one that is neither in this library nor in SB3."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARY:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The end of an error message about an unknown name: its nearest valid name, if any, and all valid names.

    >>> did_you_mean("weigthed", ["mean", "weighted"])
    'did you mean "weighted"? valid: mean, weighted'
    """
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, n=1)
    return (f'did you mean "{near[0]}"? ' if near else "") + f"valid: {', '.join(names)}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """As `did_you_mean`, where valid names are many: the four nearest, else the first eight.

    >>> nearest("Hoper-v5", ["CartPole-v1", "Hopper-v5"])
    'nearest: Hopper-v5'
    """
    names = sorted(valid)
    near = difflib.get_close_matches(name[:100], names, 4, 0.5)
    return f"nearest: {', '.join(near)}" if near else f"valid: {', '.join(names[:8])}{', …' * (len(names) > 8)}"
