"""The numbers game: make a number from three others, each used once, with + - and *.

    prompt      "3 5 2=17 "        completion      "3*5+2"

There are often several right answers, and the reward reads the expression instead of comparing texts. The base model,
made here, knows how an expression looks and is seldom right.
"""

import ast
import functools
from collections import Counter
from typing import Any

import numpy as np

from grpo_rl.text import PromptEnv, base_model, char_tokenizer, is_held_out

STEPS = 450
OPERATORS = {"+": 1, "-": 1, "*": 2}


@functools.cache
def tokenizer() -> Any:
    """One token a character."""
    return char_tokenizer("0123456789+-* =")


def value(expression: str) -> int | None:
    """What an expression of numbers and + - * comes to; None if it is none.

    >>> value("3*5+2"), value("3*"), value("2**9")
    (17, None, None)
    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=number) if type(number) is int:
            return number
        case ast.BinOp(left, ast.Add(), right):
            return _value(left) + _value(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left) - _value(right)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left) * _value(right)
    raise ValueError("neither a number nor + - *")


def examples(rng: np.random.Generator, n: int, held_out: bool = False) -> list[tuple[str, str]]:
    """n pairs of a prompt and one right answer, with targets that are not negative; none held out, or all.

    A puzzle is its numbers in any order and its target.
    """
    pairs: list[tuple[str, str]] = []
    while len(pairs) < n:
        numbers, (first, second) = rng.integers(1, 10, 3), rng.choice(list(OPERATORS), 2)
        a, b, c = rng.permutation(numbers)
        answer = f"{a}{first}{b}{second}{c}"
        target = value(answer)
        if target is not None and target >= 0 and is_held_out([*sorted(numbers.tolist()), target]) == held_out:
            pairs.append((f"{' '.join(map(str, numbers))}={target} ", answer))
    return pairs


def reached(completions: list[str], numbers: list[list[int]], target: list[int], **columns: Any) -> list[float]:
    """1 for an expression of exactly these numbers that comes to the target, else 0."""
    rows = zip(completions, numbers, target, strict=True)
    return [float(_uses(text, given) and value(text) == wanted) for text, given, wanted in rows]


def well_formed(completions: list[str], numbers: list[list[int]], **columns: Any) -> list[float]:
    """1 for an expression of exactly these numbers, whatever it comes to."""
    return [
        float(_uses(text, given) and value(text) is not None) for text, given in zip(completions, numbers, strict=True)
    ]


def _uses(text: str, numbers: list[int]) -> bool:
    for operator in OPERATORS:
        text = text.replace(operator, " ")
    return Counter(text.split()) == Counter(map(str, numbers))


def base() -> Any:
    """The model to start from; made at first use in about 45 s, then cached. It has seen no held-out puzzle."""
    return base_model(tokenizer(), examples, STEPS, noise=0.0)


class Countdown(PromptEnv):
    """Prompts, a reward of 1 for reaching the target, and one of 0.1 for an expression of the right numbers.

    One puzzle in eight is held out.

    Args:
        rows: Puzzles, drawn with `data_seed`.
        held_out: Draw from the held-out puzzles instead, to evaluate.
        data_seed: Of the puzzles.
        settings: For `PromptEnv`, such as `grouping` or `max_new_tokens`.
    """

    def __init__(self, rows: int = 2000, held_out: bool = False, data_seed: int = 0, **settings: Any) -> None:
        data = []
        for prompt, answer in examples(np.random.default_rng(data_seed), rows, held_out):
            numbers, target = prompt.split("=")
            given = [int(number) for number in numbers.split()]
            data.append({"prompt": prompt, "numbers": given, "target": int(target), "example": answer})
        ours: dict[str, Any] = {"max_new_tokens": 8, "reward_weights": [1.0, 0.1]}
        super().__init__(data, [reached, well_formed], tokenizer(), **(ours | settings))
