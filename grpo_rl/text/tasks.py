"""Tasks: rows of prompts from any source, in an order that can be resumed."""

from __future__ import annotations

import copy
import functools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.errors import ConfigError, check_seed, warn
from grpo_rl.text.tokenizing import Encoder, Messages, is_messages

RESERVED = ("prompts", "completions", "completion_ids", "prompt_ids", "prompt_texts")
CHECKED_ROWS = 2_000
"""Rows whose prompts are encoded when a task is made, to find what is wrong before the training does."""


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, encoded.

    Attributes:
        ids: What the model reads.
        text: What `ids` say, chat template and system prompt included.
        source: As the dataset has it, a text or messages.
        row: Where it is in the dataset.
        columns: The rest of the row.
    """

    ids: tuple[int, ...]
    text: str
    source: str | Messages
    row: int
    columns: Mapping[str, Any]


def is_held_out(key: Any, one_in: int = 8) -> bool:
    """Whether a task is kept out of training: one in so many are, by a checksum of what makes them the same task.

    The same key gives the same answer everywhere and always, however a dataset is drawn, so that training, evaluation
    and the making of a base model agree without a list. Give what the answer depends on, in a fixed order:
    `is_held_out(sorted([a, b]))` for the sum of a and b.

    Args:
        key: Numbers, texts, or lists or tuples of these, whose `repr` is the same everywhere.
        one_in: 2 or more.
    """
    return zlib.crc32(repr(key).encode()) % one_in == 0


class Rows:
    """A dataset as pairs (prompt, columns).

    Args:
        source: A list of prompts (texts, or lists of messages) or of rows (dicts with the prompt in `prompt_column`),
            the path of a JSONL file of such rows, a Hugging Face `datasets.Dataset`, a pandas DataFrame, a dataset of
            reasoning-gym, or another finite iterable.
        prompt_column: Name of the column that holds the prompt.

    Attributes:
        reward: For reasoning-gym its own verifier as a reward function, else None.

    Raises:
        ConfigError: No rows, or one that is not a row; the message names it.
    """

    def __init__(self, source: Any, prompt_column: str = "prompt") -> None:
        self.reward: Callable[..., list[float]] | None = None
        self.prompt_column = prompt_column
        self.name = type(source).__name__
        if isinstance(source, (str, Path)):
            self.name = str(source)
            self._rows: Any = _read_jsonl(Path(source))
        elif hasattr(source, "score_answer"):
            self._rows, self.prompt_column = source, "question"
            self.reward = functools.partial(_score_answer, source.score_answer)
        elif hasattr(source, "to_dict") and hasattr(source, "columns"):
            self._rows = source.to_dict("records")
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Mapping):
            self._rows = source
        elif isinstance(source, Iterable) and not isinstance(source, Mapping):
            if hasattr(source, "column_names"):
                raise ConfigError(
                    "prompts: a streamed dataset has no rows to draw from; take some: list(dataset.take(10_000))"
                )
            self._rows = list(source)
        elif isinstance(source, Mapping) and hasattr(source, "column_names"):
            names = ", ".join(map(str, source))
            raise ConfigError(
                f'prompts: a {self.name} of {names}: give one of them, such as dataset["{next(iter(source))}"]'
            )
        else:
            raise ConfigError(
                "prompts: expected a list of texts or rows, the path of a JSONL file, a datasets.Dataset or a dataset"
                f" of reasoning-gym, got {source!r:.200}"
            )
        if len(self._rows) == 0:
            raise ConfigError(f"prompts: {self.name} has no rows; expected at least one prompt")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        """The prompt and the other columns of row `index`.

        Raises:
            ConfigError: It has no prompt, or none that is a text or messages, or a column named as what is handed over.
        """
        row = self._rows[index]
        columns: dict[str, Any] = {}
        prompt = row
        if isinstance(row, Mapping):
            columns = dict(row)
            if self.prompt_column not in columns:
                raise ConfigError(
                    f'prompts, row {index}: no column "{self.prompt_column}"; it has {", ".join(map(str, columns))}:'
                    " name the one with the prompt by prompt_column=…"
                )
            prompt = columns.pop(self.prompt_column)
            if self.reward is not None:
                columns["question"] = prompt
        if taken := sorted(columns.keys() & set(RESERVED)):
            raise ConfigError(
                f"prompts, row {index}: column {taken[0]!r} has the name of what reward functions get anyway; rename it"
            )
        if not (isinstance(prompt, str) or is_messages(prompt)):
            raise ConfigError(
                f"prompts, row {index}: expected a text, or messages such as"
                f' [{{"role": "user", "content": "…"}}], got {prompt!r:.200}'
            )
        return prompt, columns

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        return (self[i] for i in range(len(self)))


class PromptSource:
    """Rows as encoded prompts, in random order: a new permutation each time all have been drawn.

    Args:
        rows: The dataset.
        encoder: Makes ids.
        seed: Of the order; None: from the system.

    Attributes:
        longest: Tokens of the longest prompt, of the first 2,000.

    Raises:
        ConfigError: Names the row among the first 2,000 whose prompt cannot be used.
    """

    def __init__(self, rows: Rows, encoder: Encoder, seed: int | None = None) -> None:
        self.rows, self.encoder = rows, encoder
        self.seed(seed)
        self.longest = self.check()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Prompt:
        """The prompt of a row.

        Raises:
            ConfigError: There is no such row, it cannot be encoded, or leaves no room for a completion.
        """
        if isinstance(row, bool) or not isinstance(row, int | np.integer) or not 0 <= row < len(self.rows):
            raise ConfigError(f"prompts: there is no row {row!r:.80}; expected 0 … {len(self.rows) - 1}")
        source, columns = self.rows[row]
        try:
            text, ids = self.encoder.prompt(source)
        except ConfigError as error:
            raise ConfigError(f"prompts, row {row}: {error}") from error.__cause__
        self.encoder.check_length(len(ids), f"prompts, row {row}")
        return Prompt(ids, text, source, row, columns)

    def check(self) -> int:
        """Tokens of the longest prompt. Once the encoder knows a model's limits, look again.

        Raises:
            ConfigError: As the constructor.
        """
        sources = [self.rows[row][0] for row in range(min(len(self.rows), CHECKED_ROWS))]
        self.encoder.hear(sources)
        try:
            lengths = self.encoder.lengths(sources)
        except ConfigError:  # of a row that is to be named
            lengths = [len(self[row].ids) for row in range(len(sources))]
        for row, length in enumerate(lengths):
            if length == 0 or self.encoder.overflow(length):
                _ = self[row]  # says what is wrong
        return max(lengths)

    def seed(self, seed: int | None) -> None:
        """Starts the order anew."""
        check_seed(seed)
        self._rng = np.random.default_rng(seed)
        self._order: list[int] = []

    def draw(self) -> Prompt:
        """The next prompt. A row beyond those that were checked at first is passed over, with a warning, if unusable.

        Raises:
            ConfigError: No row is usable.
        """
        problem: ConfigError | None = None
        for _ in range(len(self.rows)):
            self._order = self._order or self._rng.permutation(len(self.rows)).tolist()
            row = self._order.pop()
            try:
                return self[row]
            except ConfigError as error:
                problem = error
                warn(f"{error}. It is passed over")
        raise ConfigError(f"no row of {self.rows.name} can be used; the last: {problem}") from problem

    def state(self) -> dict[str, Any]:
        """Where the order is, for a run's checkpoint."""
        return {"rng": copy.deepcopy(self._rng), "order": list(self._order)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._rng, self._order = copy.deepcopy(state["rng"]), list(state["order"])


def _read_jsonl(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: cannot read {path} as JSONL: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigError(f"prompts: {path}, line {number} is no JSON: {error}") from None
    return rows


def _score_answer(
    verifier: Callable[..., float], completions: list[Any], question: list[str], answer: list[Any], metadata: list[Any]
) -> list[float]:
    """reasoning-gym's verifier on the texts of completions."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    entries = zip(texts, question, answer, metadata, strict=True)
    return [float(verifier(text.strip(), {"question": q, "answer": a, "metadata": m})) for text, q, a, m in entries]
