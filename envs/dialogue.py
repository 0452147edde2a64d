"""A dialogue of several turns: guess the number that the other one has in mind.

    env "0-7?"    agent "4"    env ">" (mine is higher)    agent "6"    env "="

What the env says is read by the model and never trained on. Any Gymnasium env with text spaces will do; this one shows
what it takes: `Unicode` spaces, and all that is random drawn from `self.np_random`, so that the members of a group,
which are reset with one seed, have the same number to guess.
"""

import functools
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.text import TurnVecEnv, Unicode, base_model, char_tokenizer

HIGHEST = 7
STEPS, NOISE = 150, 0.3  # a base that reads the hints by half: sampled guesses return 0.35, halving 0.59
OPENING = f"0-{HIGHEST}?"


@functools.cache
def tokenizer() -> Any:
    """One token a character."""
    return char_tokenizer("01234567-?<>=")


class Dialogue(gym.Env[str, str]):
    """The env's side: says "<" or ">" until the number is guessed, and "?" to what is no number.

    The guess in turn t = 1 … `max_turns` is worth 1 - (t - 1) / max_turns; no guess, nothing.

    Args:
        max_turns: Guesses. Four are enough for 0 … 7, for who halves the range each time.
    """

    metadata = {"render_modes": []}  # noqa: RUF012, as Gymnasium declares it

    def __init__(self, max_turns: int = 4) -> None:
        self.max_turns = max_turns
        self.observation_space, self.action_space = Unicode(), Unicode()
        self.number, self.turn = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number, self.turn = int(self.np_random.integers(HIGHEST + 1)), 0
        return OPENING, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        said = answer(action, self.number)
        reward = 1 - self.turn / self.max_turns if said == "=" else 0.0
        self.turn += 1
        return said, reward, said == "=" or self.turn == self.max_turns, False, {"is_success": said == "="}


def answer(guess: str, number: int) -> str:
    """What the env says to a guess."""
    if not (guess.isascii() and guess.isdigit()):
        return "?"
    return "=" if int(guess) == number else ">" if int(guess) < number else "<"


def examples(rng: np.random.Generator, n: int) -> list[tuple[str, str]]:
    """n pairs of a dialogue so far and a guess that it leaves possible: well informed, but not clever."""
    pairs = []
    for _ in range(n):
        text, low, high, number = OPENING, 0, HIGHEST, int(rng.integers(HIGHEST + 1))
        for _ in range(int(rng.integers(4))):
            guess = int(rng.integers(low, high + 1))
            if guess == number:
                break
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
            text += f"{guess}<eos>{answer(str(guess), number)}"
        pairs.append((text, str(rng.integers(low, high + 1))))
    return pairs


def base() -> Any:
    """The model to start from; made at first use in about 20 s, then cached."""
    return base_model(tokenizer(), examples, STEPS, noise=NOISE)


def make(max_turns: int = 4, **settings: Any) -> TurnVecEnv:
    """The dialogue as GRPO takes it; `settings` are those of `TurnVecEnv`."""
    return TurnVecEnv(
        lambda: Dialogue(max_turns), tokenizer(), **{"max_new_tokens": 2, "max_turns": max_turns, **settings}
    )
