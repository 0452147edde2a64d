"""Small base models that are made where they are used: no weights can be downloaded everywhere, and none need be.

`base_model` teaches a two-layer Llama a task by examples, some of whose characters are wrong, and stops early. What
comes out knows the task by half: greedy answers are often right, sampled ones seldom. That is what GRPO starts from.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th
from safetensors.torch import load_model, save_model

from grpo_rl.errors import ConfigError
from grpo_rl.text.tokenizing import eos_ids

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Examples = Callable[[np.random.Generator, int], Sequence[tuple[str, str]]]
"""(random generator, n) -> n pairs (prompt, right answer)."""
TOLD_APART = 64
"""Examples by which the cache tells tasks apart."""
QUIET = 10.0
"""Seconds between two lines about progress, where there is no terminal for a bar."""


def cache_dir() -> Path:
    """Where finished base models are kept: $GRPO_RL_CACHE, else grpo_rl/ in the user's cache folder."""
    if found := os.environ.get("GRPO_RL_CACHE"):
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_rl"


def tiny_llama(
    tokenizer: Any, hidden: int = 128, layers: int = 2, positions: int = 256, seed: int = 0
) -> LlamaForCausalLM:
    """A random Llama for a tokenizer, with tied embeddings: 331,520 parameters at 25 tokens.

    The global random generator is left as it was.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with th.random.fork_rng(devices=[]):
        th.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def base_model(
    tokenizer: Any,
    examples: Examples,
    steps: int = 300,
    *,
    noise: float = 0.2,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    seed: int = 0,
    cache: Path | None = None,
) -> LlamaForCausalLM:
    """A tiny Llama that has learnt a task by half, from the cache if it was made before.

    Making one takes a minute or so: stderr says so, with a bar on a terminal and a line every ten seconds elsewhere.

    Args:
        tokenizer: With an EOS token, which ends answers.
        examples: Draws the task's pairs.
        steps: Of supervised training (AdamW, constant rate), on `batch_size` examples each.
        noise: Chance of each character of an answer to be another one.
        learning_rate: Of AdamW. seed: Of weights, examples and noise.
        cache: A folder; None: `cache_dir()`.

    Raises:
        ConfigError: The tokenizer has no EOS token.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if not eos_ids(tokenizer):
        raise ConfigError("base_model: the tokenizer needs an EOS token, to learn where answers end")
    sample = examples(np.random.default_rng(seed), TOLD_APART)
    settings = (sorted(tokenizer.get_vocab()), sample, steps, noise, batch_size, learning_rate, seed)
    folder = (cache or cache_dir()) / f"base-{zlib.crc32(repr(settings).encode()):08x}"
    if not (folder / "model.safetensors").is_file():
        print(f"making a base model, once: {steps} steps of supervised training, kept in {folder}", file=sys.stderr)
        model, rng = tiny_llama(tokenizer, seed=seed), np.random.default_rng(seed)
        teach(model, tokenizer, lambda: garble(examples(rng, batch_size), rng, noise), steps, learning_rate)
        _keep(model, folder)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    load_model(model, folder / "model.safetensors")
    return model


def teach(
    model: LlamaForCausalLM,
    tokenizer: Any,
    batch: Callable[[], Sequence[tuple[str, str]]],
    steps: int,
    learning_rate: float,
) -> None:
    """`steps` steps of supervised training, each on the pairs that `batch()` gives."""
    optimizer = th.optim.AdamW(model.parameters(), lr=learning_rate)
    model.train()
    for _ in _shown(steps):
        loss = _loss(model, tokenizer, batch())
        optimizer.zero_grad()
        loss.backward()
        th.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _shown(steps: int) -> Iterator[int]:
    """range(steps), with what is done of it on stderr."""
    if sys.stderr.isatty():
        from tqdm import tqdm  # type: ignore[import-untyped]

        yield from tqdm(range(steps), desc="base model", unit="step", leave=False)
        return
    said = time.monotonic()
    for step in range(steps):
        if time.monotonic() - said >= QUIET:
            said = time.monotonic()
            print(f"base model: {step / steps:.0%} of {steps} steps", file=sys.stderr)
        yield step


def _loss(model: LlamaForCausalLM, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> th.Tensor:
    """Mean cross entropy of the answers and their EOS; prompts are read, not learnt."""
    rows = []
    for prompt, answer in pairs:
        read, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        rows.append((read, [*said, tokenizer.eos_token_id]))
    length = max(len(read) + len(said) for read, said in rows)
    ids, labels = th.zeros(len(rows), length, dtype=th.long), th.full((len(rows), length), -100)
    for i, (read, said) in enumerate(rows):
        end = len(read) + len(said)
        ids[i, :end] = th.tensor([*read, *said])
        labels[i, len(read) : end] = th.tensor(said)
    logits = model(input_ids=ids).logits  # causal, so that padding on the right is seen by nobody
    return th.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def garble(pairs: Sequence[tuple[str, str]], rng: np.random.Generator, noise: float) -> list[tuple[str, str]]:
    """`pairs` with each character of an answer replaced, at the chance `noise`, by one that any answer here has."""
    alphabet = sorted({c for _, answer in pairs for c in answer})
    return [(p, "".join(str(rng.choice(alphabet)) if rng.random() < noise else c for c in a)) for p, a in pairs]


def _keep(model: LlamaForCausalLM, folder: Path) -> None:
    """Saves whole or not at all: two processes may make the same model at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    model.config.save_pretrained(made)
    save_model(model, str(made / "model.safetensors"))
    try:
        made.rename(folder)
    except OSError:  # another one was faster
        shutil.rmtree(made)
