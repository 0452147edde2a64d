"""Sampling completions: each prompt is read once for all of its rows, and finished rows leave the batch.

`transformers.generate` repeats a prompt before reading it, so that a group of G pays for it G times (transformers
#27449). Here the cache is repeated after it. A row has a random stream of its own: what it samples depends on its seed
and its prompt, not on the rows beside it, their order or when they end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch as th
from torch import Tensor

from grpo_rl.errors import NonFiniteError
from grpo_rl.logprobs import candidate_logits, entropy_of
from grpo_rl.text.tokenizing import left_pad

DROP_PART = 8
"""Finished rows leave once they are one in so many: each time the whole cache is copied."""
Stop = Callable[[list[int]], bool]
"""The ids of a completion so far → whether it ends here."""


class LanguageModel(Protocol):
    """What generation needs of a policy's model."""

    def next_logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """fp32 logits (B, V) after the last of `ids` (B, L), and the cache; `mask` (B, past + L) is None if all 1."""


@dataclass
class Generation:
    """Completions of N rows.

    Attributes:
        ids: the tokens sampled for each row, the EOS included.
        log_probs: fp32, of each token under the distribution that it was sampled from.
        entropies: fp32, of that distribution.
        finished: (N,) bool, False for a row that was cut at its limit of tokens.
    """

    ids: list[list[int]]
    log_probs: list[np.ndarray]
    entropies: list[np.ndarray]
    finished: np.ndarray


def positions(mask: Tensor) -> Tensor:
    """Position ids (N, L): the number of real tokens before each; 0 in the padding."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


@th.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    rows_per_prompt: int,
    max_new_tokens: int,
    *,
    seeds: Sequence[int] | np.ndarray | None = None,
    eos_ids: Sequence[int] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Stop | None = None,
    rows_at_once: int = 256,
    device: Any = "cpu",
) -> Generation:
    """Samples `rows_per_prompt` completions of each prompt; row n belongs to prompt n // rows_per_prompt.

    Args:
        model: See `LanguageModel`.
        prompts: P non-empty lists of token ids.
        rows_per_prompt: G; N = P·G.
        max_new_tokens: a row ends there, unfinished.
        seeds: (N,) of the rows' random streams. None: the most likely token is taken instead of a sample.
        eos_ids: any of them ends a row, and is its last token.
        temperature, top_k, top_p: See `token_logprobs`.
        stop: ends a row when it says so, after the token that made it true.
        rows_at_once: rows in a batch, rounded up to whole prompts. Prompts of like length are batched together.

    Returns:
        The rows in the order of `prompts`.
    """
    total = len(prompts) * rows_per_prompt
    out = Generation(
        [[]] * total, [np.zeros(0, np.float32)] * total, [np.zeros(0, np.float32)] * total, np.zeros(total, bool)
    )
    eos = th.as_tensor(sorted(set(eos_ids)), dtype=th.long, device=device)
    by_length = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
    per_batch = max(-(-rows_at_once // rows_per_prompt), 1)
    for first in range(0, len(prompts), per_batch):
        chosen = by_length[first : first + per_batch]
        rows = [p * rows_per_prompt + member for p in chosen for member in range(rows_per_prompt)]
        batch = _Batch(len(rows), max_new_tokens, eos, stop, device)
        batch.draw = _Draw(
            temperature, top_k, top_p, None if seeds is None else [int(seeds[n]) for n in rows], max_new_tokens, device
        )
        batch.run(model, [prompts[p] for p in chosen], rows_per_prompt)
        batch.store(out, rows)
    return out


def inverse_cdf(p: Tensor, uniform: Tensor, block: int = 256) -> Tensor:
    """The tokens (B,) at which the running sum of probabilities p (B, V) passes uniform · Σ p, uniform (B,) in [0, 1).

    A row draws with one number, not with one a candidate. The sum runs over blocks, then within one, in fp64: the
    vocabulary is read once. A token of probability 0 is never drawn.
    """
    spare = -p.shape[-1] % block
    blocks = th.nn.functional.pad(p, (0, spare)).unflatten(-1, (-1, block))
    below = blocks.sum(dim=-1, dtype=th.float64).cumsum(dim=-1)
    point = uniform.double().unsqueeze(-1) * below[:, -1:]
    chosen = th.searchsorted(below, point, right=True).clamp(max=below.shape[-1] - 1)
    point = point - th.nn.functional.pad(below, (1, 0)).gather(-1, chosen)
    inside = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, block)).squeeze(1)
    within = th.searchsorted(inside.cumsum(dim=-1, dtype=th.float64), point, right=True)
    last = block - 1 - (inside > 0).flip(-1).int().argmax(dim=-1, keepdim=True)  # rounding must not pass its end
    return (chosen * block + th.minimum(within, last)).squeeze(-1)


class _Draw:
    """One token for each row, from the row's own stream of uniform numbers."""

    def __init__(
        self, temperature: float, top_k: int, top_p: float, seeds: list[int] | None, steps: int, device: Any
    ) -> None:
        self.settings = temperature, top_k, top_p
        self.uniform = None
        if seeds is not None:
            streams = np.stack([np.random.default_rng(seed).random(steps) for seed in seeds])
            self.uniform = th.as_tensor(streams, device=device)

    def __call__(self, logits: Tensor, rows: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, their log-probabilities and the entropies (B,) for logits (B, V) of `rows` (B,)."""
        temperature, top_k, top_p = self.settings
        logits = logits if temperature == 1 else logits / temperature
        log_p = candidate_logits(logits, top_k, top_p).log_softmax(dim=-1)
        uniform = self.uniform
        if log_p.isnan().any():
            raise NonFiniteError(
                "the model's logits are not finite: its weights are damaged, or an update was too large. Go back to an"
                " earlier save or checkpoint, with a lower learning_rate or max_grad_norm."
            )
        token = log_p.argmax(dim=-1) if uniform is None else inverse_cdf(log_p.exp(), uniform[rows, step])
        return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1), entropy_of(log_p)


class _Batch:
    """Rows that are sampled together; `live` are those still in the model's batch."""

    draw: _Draw

    def __init__(self, rows: int, steps: int, eos: Tensor, stop: Stop | None, device: Any) -> None:
        self.steps, self.eos, self.stop, self.device = steps, eos, stop, device
        self.tokens = th.zeros(rows, steps, dtype=th.long, device=device)
        self.log_probs, self.entropies = th.zeros(2, rows, steps, device=device).unbind()
        self.lengths = th.zeros(rows, dtype=th.long, device=device)
        self.finished = th.zeros(rows, dtype=th.bool, device=device)

    def run(self, model: LanguageModel, prompts: list[Sequence[int]], rows_per_prompt: int) -> None:
        ids, mask = (th.as_tensor(array, device=self.device) for array in left_pad(prompts, int(prompts[0][0])))
        logits, cache = model.next_logits(ids, None if mask.all() else mask, positions(mask), None)
        live = th.arange(len(self.tokens), device=self.device)
        prompt = live // rows_per_prompt
        if rows_per_prompt > 1:
            cache.batch_select_indices(prompt)
        logits, position, width = logits[prompt], mask.sum(dim=-1)[prompt].unsqueeze(-1), ids.shape[1]
        seen = None if mask.all() else th.nn.functional.pad(mask[prompt], (0, self.steps), value=True)
        going = th.ones_like(live, dtype=th.bool)  # of the lines of the model's batch: their rows have not ended
        for step in range(self.steps):
            token, log_prob, entropy = self.draw(logits, live, step)
            rows = live[going]
            self.tokens[rows, step], self.log_probs[rows, step] = token[going], log_prob[going]
            self.entropies[rows, step], self.lengths[rows] = entropy[going], step + 1
            going[going.clone()] = ~self._ended(rows, token[going], step)
            left = going.nonzero().squeeze(-1)
            if step + 1 == self.steps or not len(left):
                break
            if (len(live) - len(left)) * DROP_PART >= len(live):
                live, token, position, going = live[left], token[left], position[left], going[left]
                seen = None if seen is None else seen[left]
                cache.batch_select_indices(left)
            so_far = None if seen is None else seen[:, : width + step + 1]
            logits, cache = model.next_logits(token.unsqueeze(-1), so_far, position, cache)
            position = position + 1

    def _ended(self, live: Tensor, token: Tensor, step: int) -> Tensor:
        ended = th.isin(token, self.eos)
        if self.stop is not None:
            for i, row in enumerate(live.tolist()):
                if not ended[i] and self.stop(self.tokens[row, : step + 1].tolist()):
                    ended[i] = True
        self.finished[live] = ended
        return ended

    def store(self, out: Generation, rows: list[int]) -> None:
        """Writes the rows of this batch where they belong."""
        tokens, log_probs, entropies = self.tokens.cpu(), self.log_probs.cpu().numpy(), self.entropies.cpu().numpy()
        out.finished[rows] = self.finished.cpu().numpy()
        for i, (n, length) in enumerate(zip(rows, self.lengths.tolist(), strict=True)):
            out.ids[n] = tokens[i, :length].tolist()
            out.log_probs[n] = log_probs[i, :length].copy()
            out.entropies[n] = entropies[i, :length].copy()
