"""Who is compared with whom, when not the completions of one prompt: by length, by ability, by a column.

A strategy sees a rollout's conversations and gives each a group. Those that keep statistics refresh them every so many
rollouts, and members are regrouped as training goes on. A member whose group it is alone has no advantage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from grpo_rl.errors import ConfigError, did_you_mean
from grpo_rl.text.tasks import Prompt

CLIP = 2.0
"""Ability z-scores are clipped to ± this, so that one outlier does not push all others into one group."""


@dataclass(frozen=True)
class Members:
    """N conversations that have been scored.

    Attributes:
        prompts: Of each, N.
        prompt_of: (N,) int64, which prompt of the rollout: equal for the G completions of one, and only for them.
        lengths: (N,) int64, tokens of the completions.
        rewards: (N,) float64, weighted; NaN where no function had an opinion.
    """

    prompts: Sequence[Prompt]
    prompt_of: np.ndarray
    lengths: np.ndarray
    rewards: np.ndarray


class Grouping(Protocol):
    """A strategy: `groups(members)` gives (N,) int64; `state` is what it has learnt, for a run's checkpoint."""

    def groups(self, members: Members) -> np.ndarray: ...
    def state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class ByPrompt:
    """The completions of one prompt: the GRPO of the papers. Prompts that come twice are two groups."""

    def __str__(self) -> str:
        return "prompt"

    def groups(self, members: Members) -> np.ndarray:
        return members.prompt_of

    def state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass


class ByColumn:
    """Rows with one value in a column of the dataset: a user's id, an item's category, the turn of a dialogue.

    Args:
        column: Its name.
    """

    def __init__(self, column: str) -> None:
        self.column = column

    def __str__(self) -> str:
        return f"column {self.column}"

    def groups(self, members: Members) -> np.ndarray:
        """(N,) int64, by the value in the column.

        Raises:
            ConfigError: A row has no such column, or none that can be compared.
        """
        numbers: dict[Any, int] = {}
        return np.array([numbers.setdefault(_key(p, self.column), len(numbers)) for p in members.prompts], np.int64)

    def state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass


class ByLength:
    """Completions of like length, whatever their prompts: bands between percentiles of the lengths seen lately.

    Args:
        bands: How many; each holds an equal share of those lengths, but for ties.
        every: The percentiles are taken anew every so many rollouts.
        memory: Lengths that count as lately.
    """

    def __init__(self, bands: int = 4, every: int = 1, memory: int = 4096) -> None:
        _at_least(bands=(bands, 2), every=(every, 1), memory=(memory, 2))
        self.bands, self.every = bands, every
        self._lengths: deque[int] = deque(maxlen=memory)
        self._calls = 0
        self.edges = np.zeros(0)

    def __str__(self) -> str:
        return f"length, {self.bands} bands"

    def groups(self, members: Members) -> np.ndarray:
        """(N,) int64 in 0 … bands-1: how many of `edges`, the percentiles, a length is above."""
        self._lengths.extend(int(length) for length in members.lengths)
        if self._calls % self.every == 0:
            shares = np.arange(1, self.bands) / self.bands
            self.edges = np.quantile(np.array(self._lengths), shares)
        self._calls += 1
        return np.searchsorted(self.edges, members.lengths, side="left").astype(np.int64)

    def state(self) -> dict[str, Any]:
        return {"lengths": list(self._lengths), "calls": self._calls, "edges": self.edges.tolist()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._lengths.clear()
        self._lengths.extend(state["lengths"])
        self._calls, self.edges = state["calls"], np.array(state["edges"])


class ByAbility:
    """Members of like ability: those whose prompts (or users) have been rewarded alike so far.

    The score of a key is a moving average of its rewards; z = (score − mean) / std over all keys, clipped to ±2, and
    cut into bands of equal width. A key that is new has z = 0.

    Args:
        column: Whose ability: the value in this column; None: that in each row of the dataset.
        bands: How many, over z = -2 … 2.
        every: Scores become bands anew every so many rollouts.
        decay: Share of the old average when a new reward comes in, 0 … 1.
    """

    def __init__(self, column: str | None = None, bands: int = 4, every: int = 1, decay: float = 0.9) -> None:
        _at_least(bands=(bands, 2), every=(every, 1))
        if not 0 <= decay < 1:
            raise ConfigError(f"decay: expected 0 … 1 (excluded), got {decay}")
        self.column, self.bands, self.every, self.decay = column, bands, every, decay
        self.scores: dict[Any, float] = {}
        self.z: dict[Any, float] = {}
        self._calls = 0

    def __str__(self) -> str:
        return f"ability{f' of {self.column}' if self.column else ''}, {self.bands} bands"

    def groups(self, members: Members) -> np.ndarray:
        """(N,) int64 in 0 … bands-1, by what was known before this rollout; its rewards count from the next on."""
        keys = [p.row if self.column is None else _key(p, self.column) for p in members.prompts]
        if self._calls % self.every == 0:
            self.z = dict(zip(self.scores, z_scores(list(self.scores.values())).tolist(), strict=True))
        self._calls += 1
        z = np.array([self.z.get(key, 0.0) for key in keys])
        for key in dict.fromkeys(keys):
            rewards = members.rewards[[k == key for k in keys]]
            if not np.isnan(rewards).all():
                mean = float(np.nanmean(rewards))
                self.scores[key] = self.decay * self.scores.get(key, mean) + (1 - self.decay) * mean
        bands = np.floor((z + CLIP) / (2 * CLIP) * self.bands)
        return np.clip(bands, 0, self.bands - 1).astype(np.int64)

    def state(self) -> dict[str, Any]:
        return {"scores": dict(self.scores), "z": dict(self.z), "calls": self._calls}

    def set_state(self, state: dict[str, Any]) -> None:
        self.scores, self.z, self._calls = dict(state["scores"]), dict(state["z"]), state["calls"]


def z_scores(scores: Sequence[float]) -> np.ndarray:
    """(scores − mean) / population std, clipped to ±2; zeros where all are equal."""
    values = np.asarray(scores, np.float64)
    if values.size == 0 or np.ptp(values) <= 1e-12 * max(1.0, np.abs(values).max()):
        return np.zeros(values.shape)
    return np.clip((values - values.mean()) / values.std(), -CLIP, CLIP)


NAMES = ("prompt", "length", "ability", "column:NAME")


def parse_grouping(grouping: str | Grouping) -> Grouping:
    """A strategy from "prompt", "length", "ability" or "column:user_id" (its name after the colon), or itself.

    Raises:
        ConfigError: Anything else.
    """
    if isinstance(grouping, str):
        name, _, column = grouping.partition(":")
        if name == "column" and column:
            return ByColumn(column)
        if grouping in ("prompt", "length", "ability"):
            return {"prompt": ByPrompt, "length": ByLength, "ability": ByAbility}[grouping]()
    elif callable(getattr(grouping, "groups", None)):
        return grouping
    raise ConfigError(f"grouping={grouping!r} is unknown: {did_you_mean(str(grouping), NAMES)}")


def _key(prompt: Prompt, column: str) -> Any:
    if column not in prompt.columns:
        has = ", ".join(map(str, prompt.columns)) or "no columns beside the prompt"
        raise ConfigError(f'grouping: row {prompt.row} has no column "{column}"; it has {has}')
    try:
        hash(prompt.columns[column])
    except TypeError:
        raise ConfigError(
            f"grouping: row {prompt.row}, column {column!r}: expected a number or a text to group by, got"
            f" {prompt.columns[column]!r:.80}"
        ) from None
    return prompt.columns[column]


def _at_least(**numbers: tuple[int, int]) -> None:
    for name, (value, least) in numbers.items():
        if value < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")
