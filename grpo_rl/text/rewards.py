"""Reward functions with the signature that TRL gave them, and what happens when one fails.

    def correct(prompts, completions, answer, **columns) -> list[float | None]: ...

A function is called by keyword with `prompts`, `completions`, `completion_ids`, `prompt_ids`, `prompt_texts` (what the
model read, chat template included) and each column of the dataset, all lists of N; it gets those that it names, or all
if it takes **kwargs. Where a prompt is a list of messages, so is its completion. None means "no opinion". The lists are
its own: it may change them. An `async def` function is awaited, on one event loop that lives as long as the program.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from grpo_rl.errors import ConfigError, warn
from grpo_rl.text.tasks import Prompt

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]


def overlong(max_length: int, cache: int) -> RewardFunction:
    """A reward function that punishes long completions softly (DAPO, arXiv 2503.14476, equation 13).

    0 up to max_length − cache tokens, from there falling in a straight line to −1 at `max_length`, and −1 beyond. With
    `max_length` = max_new_tokens a completion that was cut gets −1, and one that came near is told before it is. It is
    one more function of `PromptEnv`, with a weight; `mask_truncated` would leave cut completions out instead.

    Args:
        max_length: L_max, in tokens of the completion, its EOS included.
        cache: L_cache, the tokens before `max_length` over which the punishment grows; 1 … max_length.

    Raises:
        ConfigError: Another `cache`.
    """
    if not 1 <= cache <= max_length:
        raise ConfigError(f"overlong: expected 1 ≤ cache ≤ max_length={max_length} tokens, got cache={cache}")

    def overlong(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [max(-1.0, min(0.0, (max_length - cache - len(ids)) / cache)) for ids in completion_ids]

    return overlong


class Rewards:
    """Reward functions with weights; one that fails costs its own opinion, not the step.

    A call that raises, or gives the wrong number of values, is made again row by row; a row that fails, or whose value
    is no finite number, counts as None there, with a warning that names it. A function that has never worked raises
    instead: at its first call nothing is lost yet.

    Args:
        functions: One, or several; see the module.
        weights: One number for each; None: 1 each.

    Attributes:
        names: Of the functions (K).
        weights: (K,) float64.
        failures: (K,) int64, the rows that each has failed.

    Raises:
        ConfigError: No function, or another number of weights.
    """

    def __init__(
        self, functions: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None
    ) -> None:
        several = isinstance(functions, Sequence) and not isinstance(functions, str)
        self.functions = [functions] if callable(functions) else list(functions) if several else []
        if not self.functions or not all(map(callable, self.functions)):
            raise ConfigError(f"reward_funcs: expected one or more functions, got {functions!r:.200}")
        self.names = _names(self.functions)
        given = np.ones(len(self.functions)) if weights is None else np.asarray(weights)
        numbers = given.dtype.kind in "iuf" and given.shape == (len(self.functions),)
        if not numbers or not np.isfinite(given).all():
            raise ConfigError(
                f"reward_weights: expected {len(self.functions)} finite numbers, one for each of"
                f" {', '.join(self.names)}, got {weights!r}"
            )
        self.weights = given.astype(np.float64)
        self.failures = np.zeros(len(self.functions), np.int64)
        self._calls = np.zeros(len(self.functions), np.int64)  # failing ones
        self._worked = [False] * len(self.functions)

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """The opinions of K functions on N completions: (N, K) float64, NaN for None.

        Raises:
            ConfigError: A function that has not worked yet fails on every row.
        """
        arguments = _arguments(prompts, completions, completion_ids)
        values = [self._ask(k, arguments, prompts) for k in range(len(self.functions))]
        return np.stack(values, axis=1) if len(prompts) else np.zeros((0, len(self.functions)))

    def _ask(self, k: int, arguments: dict[str, list[Any]], prompts: Sequence[Prompt]) -> np.ndarray:
        n_rows, function = len(prompts), self.functions[k]
        problems: dict[int, str] = {}
        cause: BaseException | None = None
        try:
            answers = _call(function, arguments)
        except Exception as whole:  # whatever a user's function raises
            cause, answers = whole, []
            for i in range(n_rows):
                try:
                    answers += _call(function, {name: [column[i]] for name, column in arguments.items()})
                except Exception as error:
                    answers.append(None)
                    problems[i] = f"it raised {type(error).__name__}: {error}"
            if n_rows and not problems:
                self._say(k, f"reward function {self.names[k]} fails for {n_rows} rows together, not alone: {whole}")
        values = np.full(n_rows, np.nan)
        for i, answer in enumerate(answers):
            if answer is not None and i not in problems:
                number = _number(answer)
                if math.isfinite(number):
                    values[i] = number
                else:
                    problems[i] = f"it gave {answer!r:.80}, not a finite number or None"
        if problems:
            self._report(k, problems, prompts, cause, everything=all(i in problems for i in range(n_rows)))
        self._worked[k] |= any(i not in problems for i in range(n_rows))
        return values

    def _report(
        self, k: int, problems: dict[int, str], prompts: Sequence[Prompt], cause: Any, everything: bool
    ) -> None:
        first = min(problems)
        message = (
            f"reward function {self.names[k]}, row {prompts[first].row} of the dataset, prompt"
            f" {prompts[first].text[-60:]!r}: {problems[first]}"
        )
        if everything and not self._worked[k]:
            raise ConfigError(message) from cause
        self.failures[k] += len(problems)
        self._say(k, f"{message}. {len(problems)} of {len(prompts)} rows count as None here, and training goes on")

    def _say(self, k: int, message: str) -> None:
        """Warns the first, second, fourth, eighth … time."""
        self._calls[k] += 1
        if int(self._calls[k]).bit_count() == 1:
            warn(message)

    def weighted(self, values: np.ndarray) -> np.ndarray:
        """Σ weight · value over the functions that have an opinion: (N, K) → (N,), NaN where none has one."""
        total = np.nansum(values * self.weights, axis=1)
        return np.where(np.isnan(values).all(axis=1), np.nan, total)


def _arguments(
    prompts: Sequence[Prompt], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    """What reward functions are called with, each a list of N."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {
        "prompts": [prompt.source for prompt in prompts],
        "completions": [
            str(text) if isinstance(prompt.source, str) else [{"role": "assistant", "content": str(text)}]
            for prompt, text in zip(prompts, completions, strict=True)
        ],
        "completion_ids": [list(ids) for ids in completion_ids],
        "prompt_ids": [list(prompt.ids) for prompt in prompts],
        "prompt_texts": [prompt.text for prompt in prompts],
        **{name: [prompt.columns.get(name) for prompt in prompts] for name in names},
    }


def _call(function: RewardFunction, arguments: dict[str, list[Any]]) -> list[Any]:
    """The answers of a function, as many as there are rows."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in
        parameters = []  # type: ignore[assignment]
    everything = not parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}
    answers: Any = function(
        **{name: _fresh(column) for name, column in arguments.items() if everything or name in named}
    )
    if inspect.isawaitable(answers):
        answers = _awaited(answers)
    n_rows = len(arguments["prompts"])
    try:
        answers = list(answers)
    except TypeError:
        raise ConfigError(f"it gave {answers!r:.80}; expected a list of {n_rows} values, one a row") from None
    if len(answers) != n_rows:
        raise ConfigError(f"it gave {len(answers)} values for {n_rows} rows; expected one a row")
    return answers


def _fresh(value: Any) -> Any:
    """A copy of lists and dicts, and of those in them; all else is handed over as it is."""
    if type(value) is dict:
        return {name: _fresh(part) for name, part in value.items()}
    if type(value) is list:
        return [_fresh(part) if type(part) in (list, dict) else part for part in value]
    return value


def _awaited(answers: Awaitable[Any]) -> Any:
    """What an `async def` function gives: waits for it, in a notebook too, where this thread has a running loop."""

    async def wait() -> Any:
        return await answers

    future = asyncio.run_coroutine_threadsafe(wait(), _loop())
    try:
        return future.result()
    finally:
        future.cancel()  # where the waiting was broken off


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all: what a function has opened on it, such as connections, it finds again at its next call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


def _number(answer: Any) -> float:
    try:
        return math.nan if isinstance(answer, str) else float(answer)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _names(functions: Sequence[Any]) -> tuple[str, ...]:
    names: list[str] = []
    for function in functions:
        plain = function.func if isinstance(function, functools.partial) else function
        name = str(getattr(plain, "__name__", type(plain).__name__)).strip("_")
        names.append(name if name not in names else f"{name}_{len(names)}")
    return tuple(names)
