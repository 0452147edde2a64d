"""Write six letters backwards: a toy that a base model knows by greedy decoding and mostly fails when it samples."""

import functools
from typing import Any

import numpy as np

from grpo_rl.text import PromptEnv, base_model, char_tokenizer, is_held_out

LETTERS = "abcdefghijklmnopqrstu"
STEPS, NOISE = 300, 0.18  # about 30 % of sampled answers are right


@functools.cache
def tokenizer() -> Any:
    """One token a character."""
    return char_tokenizer(LETTERS + ">")


def examples(rng: np.random.Generator, n: int, held_out: bool = False, length: int = 6) -> list[tuple[str, str]]:
    """n pairs such as ("abcdef>", "fedcba"), none of them held out, or all."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < n:
        word = "".join(rng.choice(list(LETTERS), length))
        if is_held_out(word) == held_out:
            pairs.append((word + ">", word[::-1]))
    return pairs


def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the right word, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def base() -> Any:
    """The model to start from; made at first use in about 25 s, then cached. It has seen no held-out word."""
    return base_model(tokenizer(), examples, STEPS, noise=NOISE)


class Reversal(PromptEnv):
    """Prompts and a reward of 1 for the right answer. One word in eight is held out.

    Args:
        rows: Words, drawn with `data_seed`.
        held_out: Draw from the held-out words instead, to evaluate.
        data_seed: Of the words.
        settings: For `PromptEnv`, such as `grouping` or `max_new_tokens`.
    """

    def __init__(self, rows: int = 2000, held_out: bool = False, data_seed: int = 0, **settings: Any) -> None:
        pairs = examples(np.random.default_rng(data_seed), rows, held_out)
        data = [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]
        super().__init__(data, correct, tokenizer(), **{"max_new_tokens": 8, **settings})
