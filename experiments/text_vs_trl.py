"""What text-vs-trl measures beside its runs: completions per CPU second, generation by prompt and group, peak memory.

Both sides take turns in one process with one thread, and CPU time is counted, so that other work on the machine weighs
on both alike. Memory is measured in a process of its own for each number. `python experiments/text_vs_trl.py` has no
use but for that.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, CallbackList

from grpo_rl import GRPO
from grpo_rl.lab.build import build_agent, build_env
from grpo_rl.lab.records import Run, Table
from grpo_rl.lab.study import load_study
from grpo_rl.recipes import load_object
from grpo_rl.text import PromptEnv, char_tokenizer

HERE = Path(__file__).parent
ROUNDS, ROLLOUTS = 5, 4
ROWS, NEW_TOKENS, VOCABULARY = 32, 64, 4096
PROMPTS, GROUPS = (16, 256, 1024), (4, 16)
VOCABULARIES = (256, 32_000, 151_936)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def speed() -> Table:
    """Completions sampled, scored and trained on, per CPU second, with the settings of the study's runs."""
    study, found = load_study(HERE / "text-vs-trl.yaml"), {"grpo": [], "trl": []}  # type: ignore[var-annotated]
    for _ in range(ROUNDS):
        for name, rates in found.items():
            recipe = study.recipe(Run("reversal", name, 0))
            agent, clock = build_agent(recipe, build_env(recipe)), _Clock()
            agent.learn(ROLLOUTS * recipe.optimization["n_steps"] * 8, clock)  # 8: a completion's limit of tokens
            rates.append((len(clock.at) - 1) * recipe.optimization["n_steps"] / (clock.at[-1] - clock.at[0]))
    ours, theirs = found["grpo"], found["trl"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Table(
        "Completions per CPU second",
        ["", "grpo_rl", "TRL", "grpo_rl / TRL"],
        [
            ["median", median(ours), median(theirs), median(ratios)],
            ["lowest", min(ours), min(theirs), min(ratios)],
            ["highest", max(ours), max(theirs), max(ratios)],
        ],
        f"Reversal: 256 completions a rollout, two passes of the update over them. {ROUNDS} rounds by turns; a round is"
        f" the time from the end of an agent's first sampling to that of its last, at least {ROLLOUTS} later.",
    )


class _Clock(BaseCallback):
    """CPU seconds at the end of each rollout's sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def _on_step(self) -> bool:
        self.at.append(time.process_time())
        return True


def generation() -> Table:
    """Tokens sampled per CPU second, by length of prompts, size of groups and lengths of completions."""
    rows: list[list[Any]] = []
    cells = [(prompt, size, False) for prompt in PROMPTS for size in GROUPS]
    for prompt, size, mixed in [*cells, *((PROMPTS[1], size, True) for size in GROUPS)]:
        ours, theirs = _generators(prompt, size, mixed)
        ours(), theirs()  # warm
        rates = [(_rate(ours), _rate(theirs)) for _ in range(ROUNDS)]
        middle = [median(side) for side in zip(*rates, strict=True)]
        rows.append([prompt, size, "mixed" if mixed else NEW_TOKENS, *middle, median(a / b for a, b in rates)])
    return Table(
        "Generation",
        ["prompt tokens", "group size", "completion tokens", "grpo_rl, tokens / CPU s", "TRL, tokens / CPU s", "ratio"],
        rows,
        f"A random Llama (two layers of 128, vocabulary {VOCABULARY:,}) samples {ROWS} completions; TRL's side is the"
        f" trainer's own call of `transformers.generate`. Mixed: a token ends its row with a chance of 1/16, so that"
        f" lengths run from 1 to {NEW_TOKENS}. Medians of {ROUNDS} rounds by turns.",
    )


def _generators(prompt: int, size: int, mixed: bool) -> tuple[Callable[[], int], Callable[[], int]]:
    """Two functions that sample `ROWS` completions and return the tokens in them: ours, and TRL's."""
    agent = _agent(VOCABULARY, ROWS, size, prompt, NEW_TOKENS, range(100, 100 + VOCABULARY // 16) if mixed else ())
    trainer = agent.trainer(1, CallbackList([]), tempfile.mkdtemp())
    ids = [list(found.ids) for found in agent.env.start(ROWS // size, size)]
    seeds = np.arange(ROWS)

    def ours() -> int:
        return sum(map(len, agent.policy.sample(ids, size, NEW_TOKENS, seeds).ids))

    def theirs() -> int:
        repeated = [row for row in ids for _ in range(size)]
        return sum(map(len, trainer._generate_single_turn(repeated, None, {}, size)[0]))

    return ours, theirs


def _rate(sample: Callable[[], int]) -> float:
    began = time.process_time()
    return sample() / (time.process_time() - began)


def memory() -> Table:
    """Peak memory over the built agent, by vocabulary."""
    rows: list[list[Any]] = []
    for vocabulary in VOCABULARIES:
        ours, theirs = (
            float(subprocess.check_output([sys.executable, __file__, kind, str(vocabulary)]))
            for kind in ("grpo", "trl")
        )
        rows.append([vocabulary, ours, theirs, ours / theirs])
    return Table(
        "Peak memory over the loaded model",
        ["vocabulary", "grpo_rl, MiB", "TRL, MiB", "grpo_rl / TRL"],
        rows,
        "Two rollouts of 32 completions of 32 tokens with their updates, on a random Llama (two layers of 128): the"
        " peak of resident memory, minus what the process held with model, agent and trainer built. Gradients and"
        " Adam's moments of all parameters are in it on both sides.",
    )


def peak(kind: str, vocabulary: int) -> float:
    """MiB that two rollouts with their updates add at most to a process in which the agent is built. Linux only."""
    cls = GRPO if kind == "grpo" else load_object(f"{HERE / 'trl_peer.py'}:TRL")
    agent = _agent(vocabulary, 32, 16, 16, 32, cls=cls)

    class Reset(BaseCallback):
        def _on_training_start(self) -> None:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self.before = _resident("VmRSS")

        def _on_step(self) -> bool:
            return True

    agent.learn(32 * 32 + 1, reset := Reset())
    return _resident("VmHWM") - reset.before


def _resident(name: str) -> float:
    """MiB of this process, by the name that /proc/self/status has for it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def _agent(
    vocabulary: int, rows: int, size: int, prompt: int, new_tokens: int, more_ends: Any = (), cls: Any = None
) -> Any:
    """An agent on a random Llama and random prompts; a letter is a token, most of the vocabulary is no text."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    tokenizer = char_tokenizer(LETTERS)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *more_ends]
    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list(LETTERS), prompt)) for _ in range(rows)]

    def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(ids[0] % 2 == 0) for ids in completion_ids]

    env = PromptEnv(prompts, even, tokenizer, new_tokens)
    cls = cls or load_object(f"{HERE / 'trl_peer.py'}:TRL")
    return cls(
        "CausalLMPolicy", env, group_size=size, n_steps=rows, policy_kwargs={"model": model}, device="cpu", seed=0
    )


if __name__ == "__main__":
    print(peak(sys.argv[1], int(sys.argv[2])))
