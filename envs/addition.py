"""Add two numbers of two digits: a task that the base model has learnt by half, so that there is something to find."""

import functools
from typing import Any

import numpy as np

from grpo_rl.text import PromptEnv, base_model, char_tokenizer, is_held_out

STEPS = 800


@functools.cache
def tokenizer() -> Any:
    """One token a character."""
    return char_tokenizer("0123456789+=")


def examples(rng: np.random.Generator, n: int, held_out: bool = False) -> list[tuple[str, str]]:
    """n pairs such as ("12+30=", "42"), none of them held out, or all; a+b and b+a go together."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < n:
        a, b = rng.integers(10, 100, 2).tolist()
        if is_held_out(sorted([a, b])) == held_out:
            pairs.append((f"{a}+{b}=", str(a + b)))
    return pairs


def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the right sum, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def base() -> Any:
    """The model to start from; made at first use in about a minute, then cached. It has seen no held-out sum."""
    return base_model(tokenizer(), examples, STEPS, noise=0.0)


class Addition(PromptEnv):
    """Prompts and a reward of 1 for the right answer. One pair of numbers in eight is held out.

    Args:
        rows: How many, drawn with `data_seed`.
        held_out: Draw from the held-out sums instead, to evaluate.
        data_seed: Of the sums.
        settings: For `PromptEnv`.
    """

    def __init__(self, rows: int = 2000, held_out: bool = False, data_seed: int = 0, **settings: Any) -> None:
        pairs = examples(np.random.default_rng(data_seed), rows, held_out)
        data = [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]
        super().__init__(data, correct, tokenizer(), **{"max_new_tokens": 5, **settings})
