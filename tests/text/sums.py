"""A task of small sums with two reward functions, for the tests of text."""

from tokenizers_of_all_kinds import chars

from grpo_rl.text import PromptEnv

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]


def correct(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def tokens(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def make(**settings):
    return PromptEnv(ROWS, [correct, tokens], chars(), 4, **{"reward_weights": [1.0, -0.1], "seed": 0, **settings})
