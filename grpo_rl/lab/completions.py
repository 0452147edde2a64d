"""What a language model says, for a person to read: completions.md in a run, and answers to lines that are typed."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from grpo_rl.errors import ConfigError

COMPLETIONS = "completions.md"
"""Of a run, in its folder."""
PROMPTS = 3
"""In each table, with the best and the worst of their completions."""
LONGEST = 300
"""Characters that a table shows of a text: the end of a prompt, the start of a completion."""


class CompletionTable(BaseCallback):
    """Adds a table of newly sampled completions every so many steps.

    Args:
        run: The run's folder.
        every: Steps from table to table.
    """

    def __init__(self, run: Path, every: int) -> None:
        super().__init__()
        self.path, self.every = run / COMPLETIONS, every
        self._next: int | None = None

    def _on_step(self) -> bool:
        steps = self.num_timesteps
        if self._next is None or steps >= self._next:
            self._next = (steps // self.every + 1) * self.every
            with self.path.open("a", encoding="utf-8") as file:
                file.write(table(self.locals, steps))
        return True


def table(said: dict[str, Any], steps: int) -> str:
    """A Markdown table of the best and the worst completion of a few prompts, from the sampler's locals.

    Args:
        said: `env`, `prompts` (P), `completion_ids` (N lists) and `rewards` (N,), NaN for those without one.
        steps: For the title.
    """
    encoder, rewards, ids = said["env"].encoder, np.asarray(said["rewards"]), said["completion_ids"]
    size = len(ids) // len(said["prompts"])
    lines = [f"## {steps:,} tokens\n", "| prompt | completion | reward |", "|---|---|---|"]
    for p, prompt in enumerate(said["prompts"][:PROMPTS]):
        members = np.arange(p * size, (p + 1) * size)
        ranked = members[np.argsort(-np.nan_to_num(rewards[members], nan=-np.inf), kind="stable")]
        for n in dict.fromkeys((ranked[0], ranked[-1])):
            text = encoder.tokenizer.decode(ids[n], skip_special_tokens=False)
            lines.append(f"| {_cell(prompt.text[-LONGEST:])} | {_cell(text[:LONGEST])} | {rewards[n]:.3g} |")
    return "\n".join(lines) + "\n\n"


def converse(agent: Any, lines: Iterable[str], say: Callable[[str], None]) -> None:
    """Answers each line, which is a prompt, with the most likely completion; until there are no more."""
    say("type a prompt; end with ctrl-D")
    for line in lines:
        try:
            say(agent.predict(line.rstrip("\n"), deterministic=True)[0])
        except ConfigError as error:  # one prompt that cannot be answered does not end it
            say(str(error))


def _cell(text: str) -> str:
    """`text` as code in one cell of a table, whatever is in it."""
    for old, new in (("\n", "⏎"), ("\r", ""), ("|", "\\|"), ("`", "ˋ")):
        text = text.replace(old, new)
    return f"`{text}`" if text.strip() else "(nothing)"
