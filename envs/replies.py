"""A counter where people order: an agent replies to who asks, in good words, and not in those that it has just used.

    prompt    "ben cake : sure cake for ben . ann tea :"        completion    "here is tea ann"

Many replies are right. Three programs judge one: `quality`, whether it serves who asked with what was asked for;
`fluency`, how likely its words follow each other in well-formed replies; `diversity`, how many of its words the reply
before did not have. The base model, made here, says wrong words, and likes to say again what it has just said.
"""

import functools
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np

from grpo_rl.text import PromptEnv, base_model

NAMES = "ann ben cleo dan eva finn gina hugo ida jack kim lena".split()
THINGS = "tea cake soup rice fish milk bread salad juice pasta".split()
FORMS = (
    "sure {thing} for {name}",
    "here is {thing} {name}",
    "{name} gets {thing} now",
    "yes {name} have {thing}",
    "one {thing} to {name}",
    "{thing} comes soon {name}",
)
REPLIES = [form.format(name=name, thing=thing) for form in FORMS for name in NAMES for thing in THINGS]
WORDS = sorted({word for text in REPLIES for word in text.split()})
STEPS, NOISE, BATCH = 450, 0.15, 64
REPEATS = 0.7  # how often the base's teacher takes the form of the reply before
WEIGHTS = (0.5, 0.25, 0.25)


@functools.cache
def tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", ":", ".", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def draw(rng: np.random.Generator) -> dict[str, str]:
    """A row: a prompt, the name and the thing to serve, the reply before, and a right answer in the teacher's habit."""
    (name, other), (thing, former) = rng.choice(NAMES, 2, replace=False), rng.choice(THINGS, 2, replace=False)
    first = str(rng.choice(FORMS))
    form = first if rng.random() < REPEATS else str(rng.choice(FORMS))
    before = first.format(name=other, thing=former)
    columns = {"name": str(name), "thing": str(thing), "before": before}
    return {
        "prompt": f"{other} {former} : {before} . {name} {thing} :",
        "answer": form.format(**columns),
        **columns,
    }


def examples(rng: np.random.Generator, n: int) -> list[tuple[str, str]]:
    """n pairs of a prompt and an answer, some of whose words are others."""
    pairs = []
    for row in (draw(rng) for _ in range(n)):
        words = [str(rng.choice(WORDS)) if rng.random() < NOISE else word for word in row["answer"].split()]
        pairs.append((row["prompt"], " ".join(words)))
    return pairs


def quality(completions: list[str], name: list[str], thing: list[str], **columns: Any) -> list[float]:
    """A half for who asked, a half for what was asked for; 0 where another name or thing is in the reply, too."""
    served = set(NAMES) | set(THINGS)
    found = [set(text.split()) & served for text in completions]
    return [len(said) / 2 if said <= {a, b} else 0.0 for said, a, b in zip(found, name, thing, strict=True)]


def fluency(completions: list[str], **columns: Any) -> list[float]:
    """Mean log-likelihood of a reply's words and its end: 0 as words drawn evenly or less, 1 as well-formed replies."""
    lowest, usual = -math.log(len(WORDS) + 1), _usual()
    return [min(max((likelihood(text) - lowest) / (usual - lowest), 0.0), 1.0) for text in completions]


def diversity(completions: list[str], before: list[str], **columns: Any) -> list[float]:
    """Share of a reply's words that are neither repeated in it nor in the reply before; 0 for a reply of no words."""
    pairs = zip([text.split() for text in completions], [set(text.split()) for text in before], strict=True)
    return [len(set(words) - old) / len(words) if words else 0.0 for words, old in pairs]


REWARDS = (quality, fluency, diversity)


def distinct(texts: list[str], n: int = 2) -> float:
    """Distinct-n (Li et al. 2016, arXiv 1510.03055): different n-grams of words, over all of them, in all texts."""
    words = [text.split() for text in texts]
    grams = [tuple(said[i : i + n]) for said in words for i in range(len(said) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def likelihood(text: str) -> float:
    """Mean log-likelihood of a reply's words and its end, by the pairs of words in `REPLIES` and one more each."""
    pairs, firsts = _counts()
    steps = list(itertools.pairwise(["^", *text.split(), "$"]))
    return sum(math.log((pairs[step] + 1) / (firsts[step[0]] + len(WORDS) + 1)) for step in steps) / len(steps)


@functools.cache
def _counts() -> tuple[Counter[tuple[str, str]], Counter[str]]:
    pairs = [pair for text in REPLIES for pair in itertools.pairwise(["^", *text.split(), "$"])]
    return Counter(pairs), Counter(first for first, _ in pairs)


@functools.cache
def _usual() -> float:
    return sum(map(likelihood, REPLIES)) / len(REPLIES)


def base() -> Any:
    """The model to start from; made at first use in about a minute, then cached."""
    return base_model(tokenizer(), examples, STEPS, noise=0.0, batch_size=BATCH)


class Replies(PromptEnv):
    """Prompts and three rewards, each from 0 to 1, added with `WEIGHTS`.

    Args:
        rows: Prompts, drawn with `data_seed`; another seed gives others.
        data_seed: Of the prompts.
        settings: For `PromptEnv`, such as `reward_weights` or `max_new_tokens`.
    """

    def __init__(self, rows: int = 2000, data_seed: int = 0, **settings: Any) -> None:
        rng = np.random.default_rng(data_seed)
        ours: dict[str, Any] = {"max_new_tokens": 8, "reward_weights": list(WEIGHTS)}
        super().__init__([draw(rng) for _ in range(rows)], list(REWARDS), tokenizer(), **(ours | settings))
