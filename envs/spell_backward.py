"""A task of reasoning-gym (`pip install reasoning-gym`): English words of five letters backwards, in its own words.

    prompt      "Spell this word backward (example: sun -> nus): Patsy"        completion      "ystaP"

The dataset brings the prompts and the verifier that rewards, a fifth for each letter in its place; the base model,
made here from the same generator, has learnt it by half.
"""

import functools
import string
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from grpo_rl.errors import ConfigError
from grpo_rl.text import PromptEnv, base_model, char_tokenizer, is_held_out

LENGTH = 5
STEPS, NOISE = 400, 0.25
ASKED = "Spell this word backward (example: sun -> nus): "


@functools.cache
def tokenizer() -> Any:
    """One token a letter, and one for the words that all prompts begin with."""
    made = char_tokenizer(string.ascii_letters)
    made.add_tokens([ASKED])
    return made


def dataset(seed: int, size: int) -> Any:
    """reasoning-gym's spell_backward of words of five letters.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "the recipe spell_backward needs reasoning-gym, which is not installed: pip install 'grpo_rl[reasoning]'"
        ) from error
    settings = {"min_word_len": LENGTH, "max_word_len": LENGTH}
    return reasoning_gym.create_dataset("spell_backward", seed=seed, size=size, **settings)


def word(question: str) -> str:
    """What is to be spelled, in lower case: Patsy and patsy are one puzzle."""
    return question.removeprefix(ASKED).lower()


@functools.cache
def questions(seed: int, held_out: bool, size: int = 10_000) -> tuple[dict[str, Any], ...]:
    """Rows of the dataset of `seed`, none of them held out, or all; words of plain letters only."""
    data = dataset(seed, size)
    rows = (data[i] for i in range(size))
    plain = (row for row in rows if set(word(row["question"])) <= set(string.ascii_lowercase))
    return tuple(row for row in plain if is_held_out(word(row["question"])) == held_out)


def examples(rng: np.random.Generator, n: int) -> list[tuple[str, str]]:
    """n pairs of a question and its answer, none of them held out."""
    rows = questions(0, held_out=False)
    return [(rows[i]["question"], rows[i]["answer"]) for i in rng.integers(len(rows), size=n)]


def base() -> Any:
    """The model to start from; made at first use in about a minute, then cached. It has seen no held-out word."""
    return base_model(tokenizer(), examples, STEPS, noise=NOISE)


class Questions(list[dict[str, Any]]):
    """Rows of a dataset of reasoning-gym, with its verifier: `PromptEnv` takes them as it takes the dataset."""

    def __init__(self, rows: Iterable[dict[str, Any]], score_answer: Callable[..., float]) -> None:
        super().__init__(rows)
        self.score_answer = score_answer


class SpellBackward(PromptEnv):
    """Questions, and the reward that reasoning-gym gives: 1 for the right word. One word in eight is held out.

    Args:
        rows: Questions at most, from the dataset of `data_seed`.
        held_out: Take the held-out ones instead, to evaluate.
        data_seed: Of the dataset.
        settings: For `PromptEnv`.
    """

    def __init__(self, rows: int = 2000, held_out: bool = False, data_seed: int = 0, **settings: Any) -> None:
        data = Questions(questions(data_seed, held_out)[:rows], dataset(data_seed, 1).score_answer)
        super().__init__(data, tokenizer=tokenizer(), **{"max_new_tokens": 8, **settings})
