"""The rollout buffer of completions: ragged token sequences, each with its group, packed for the update row by row.

Axes (T, N) as everywhere: a column is a completion, a step one token that the policy chose. What an env says in between
is kept as context and is no step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch as th

from grpo_rl.buffers import GroupBuffer
from grpo_rl.objective import Aggregation, row_weights
from grpo_rl.types import Batch


class TokenBuffer(GroupBuffer):
    """Completions of one rollout, sampled by one policy; a conversation's turns are one column.

    Attributes, beside those of `GroupBuffer` (rewards: a turn's at its last token; age: the token's number; alive:
    False, what a cut completion was given is all there is):
        prompts: P lists of ids; prompt_of: (N,) int64, whose prompt a completion answers.
        tokens: N lists of ids that follow the prompt, an env's own words included.
        trained: N lists of bool, which of them the policy chose: from lengths, never from ids.
        entropies: (T, N) float32, of the distribution that each token was sampled from.
        turn: (T, N) int64, in which of its turns a token was chosen, from 0; the last one's number where mask is False.
        outcome: (N,) float32, all that a conversation was given; 0 if not scored.
        lengths: (N,) int64, tokens chosen. truncated: (N,) bool, cut at the limit of tokens.
        reward_matrix: (N, K) float64, NaN where a reward function gave None. scored: (N,) bool, one of K gave a number.
        kept: (N,) bool, False for completions left out of the update. silent: (N,) bool, those with weight 0 in it.
        aggregation, max_length: of the loss, see `objective.row_weights`.
    """

    prompts: list[list[int]]
    prompt_of: np.ndarray
    tokens: list[list[int]]
    trained: list[list[bool]]
    entropies: np.ndarray
    turn: np.ndarray
    outcome: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    reward_matrix: np.ndarray
    scored: np.ndarray
    kept: np.ndarray
    silent: np.ndarray
    aggregation: Aggregation = "rollout_mean"
    max_length: int = 1

    def __len__(self) -> int:
        return len(self.mask) if hasattr(self, "mask") else 0

    def fill(
        self,
        prompts: Sequence[Sequence[int]],
        prompt_of: Sequence[int],
        tokens: list[list[int]],
        trained: list[list[bool]],
        log_probs: Sequence[np.ndarray],
        entropies: Sequence[np.ndarray],
        truncated: Sequence[bool],
        group: Sequence[int],
        rewards: np.ndarray,
        reward_matrix: np.ndarray,
        turns: Sequence[Sequence[int]],
        turn_rewards: Sequence[Sequence[float]],
    ) -> None:
        """Takes N completions: lists over them, and `rewards` (N,) float, NaN for one that no function has scored.

        `turns` has the tokens chosen in each turn, `turn_rewards` what the env gave after it; what `rewards` has beyond
        their sum came at the end.
        """
        self.prompts, self.prompt_of = [list(ids) for ids in prompts], np.asarray(prompt_of, np.int64)
        self.tokens, self.trained = tokens, trained
        self.lengths = np.array([len(lp) for lp in log_probs], np.int64)
        self.truncated = np.asarray(truncated, bool)
        self.reward_matrix = reward_matrix
        self.scored = np.isfinite(rewards)
        steps, columns = int(self.lengths.max(initial=1)), len(tokens)
        self.age = np.repeat(np.arange(steps)[:, None], columns, axis=1)
        self.mask = self.age < self.lengths
        self.ends = self.age >= self.lengths - 1
        self.alive = np.zeros((steps, columns), bool)
        self.discounted = np.zeros((steps, columns))
        self.group = np.repeat(np.asarray(group, np.int64)[None], steps, axis=0)
        self.outcome = np.where(self.scored, rewards, 0.0).astype(np.float32)
        self.rewards, self.turn = np.zeros((steps, columns), np.float32), np.zeros((steps, columns), np.int64)
        for n, (tokens_of, given) in enumerate(zip(turns, turn_rewards, strict=True)):
            ends = np.cumsum(tokens_of)
            self.turn[:, n] = np.minimum(np.searchsorted(ends, self.age[:, n], side="right"), len(ends) - 1)
            if self.scored[n] and self.lengths[n]:
                earlier = np.asarray(given[:-1], np.float64)
                self.rewards[ends[:-1] - 1, n] = earlier
                self.rewards[ends[-1] - 1, n] = rewards[n] - earlier.sum()
        self.log_probs, self.entropies = self._columns(log_probs), self._columns(entropies)
        self.actions = np.zeros((steps, columns), np.int64)
        for n, (ids, chosen) in enumerate(zip(tokens, trained, strict=True)):
            self.actions[: self.lengths[n], n] = np.asarray(ids, np.int64)[np.asarray(chosen, bool)]
        self.values = None
        self.kept, self.silent = np.ones(columns, bool), np.zeros(columns, bool)

    def _columns(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        out = np.zeros(self.mask.shape, np.float32)
        for n, row in enumerate(rows):
            out[: len(row), n] = row
        return out

    # --- comparing completions ----------------------------------------------------------------------------------------

    def outcomes(
        self, returns: th.Tensor, by_turn: bool
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor, th.Tensor, th.Tensor]:
        """One number for each completion, or for each turn of a conversation, to be compared with those of its group.

        By turn a member is compared with those that are as far, by what each earns from there on: what came before, and
        those that are through, tell nothing of what it says there.

        Args:
            returns: (T, N) reward-to-go.
            by_turn: Compare by turn; else by the whole.

        Returns:
            Returns, lengths (tokens from there on), group, age (the turn) and mask (U, N), U turns or 1. The mask is
            False for turns that there were not, and if not scored.
        """
        columns = np.arange(len(self.lengths))
        rows = [np.zeros(len(columns), np.int64)]
        there = [self.lengths > 0]
        for turn in range(1, int(self.turn.max(initial=0)) + 1 if by_turn else 1):
            there.append(((self.turn == turn) & self.mask).any(axis=0))
            rows.append((self.turn >= turn).argmax(axis=0))
        first, age = np.stack(rows), np.repeat(np.arange(len(rows))[:, None], len(columns), axis=1)
        return (
            returns.gather(0, self.tensor(first)),
            self.tensor(self.lengths - first),
            self.tensor(np.repeat(self.group[:1], len(rows), axis=0)),
            self.tensor(age),
            self.tensor(np.stack(there) & self.scored),
        )

    def spread(self, outcomes: th.Tensor) -> th.Tensor:
        """(U, N) → (T, N): what a completion, or a turn, is worth, at each of its tokens."""
        turn = self.tensor(self.turn).clamp(max=len(outcomes) - 1)
        return outcomes.gather(0, turn) * self.tensor(self.mask)

    def choose(self, tied_groups: str, mask_truncated: bool, entropy_quantile: float) -> None:
        """Which completions the update uses, and at which tokens.

        Args:
            tied_groups: "keep" them (advantage 0, with a KL and an entropy), "mask" them (weight 0, counted in the
                denominators) or "drop" them. mask_truncated: completions that were cut are left out.
            entropy_quantile: tokens sampled from distributions below this quantile of entropy get advantage 0.
        """
        tied = self.tied()
        if tied_groups == "mask":
            self.silent = tied
        if tied_groups == "drop":
            self.kept &= ~tied
        if mask_truncated:
            self.kept &= ~self.truncated
        if entropy_quantile > 0 and self.advantages is not None:
            least = np.quantile(self.entropies[self.mask], entropy_quantile)
            self.advantages = th.where(self.tensor(self.entropies >= least), self.advantages, 0.0)

    def tied(self) -> np.ndarray:
        """(N,) bool: all scored members of the completion's group got the same reward."""
        return tied_members(self.group[0], self.outcome, self.scored)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def rows(self, columns: np.ndarray | None = None) -> tuple[dict[str, th.Tensor], th.Tensor]:
        """What `CausalLM.trained_states` reads, for R completions (None: all), and the tokens chosen in them (M,)."""
        columns = np.arange(len(self.tokens)) if columns is None else columns
        used, prompt_of = np.unique(self.prompt_of[columns], return_inverse=True)
        prompts = [self.prompts[p] for p in used]
        longest, length = max(map(len, prompts)), max(len(self.tokens[n]) for n in columns)
        arrays = {
            "prompts": np.zeros((len(prompts), longest), np.int64),
            "prompt_mask": np.zeros((len(prompts), longest), bool),
            "prompt_of": prompt_of.reshape(-1),
            "tokens": np.zeros((len(columns), length), np.int64),
            "trained": np.zeros((len(columns), length), bool),
        }
        for i, prompt in enumerate(prompts):
            arrays["prompts"][i, longest - len(prompt) :] = prompt
            arrays["prompt_mask"][i, longest - len(prompt) :] = True
        for i, n in enumerate(columns):
            arrays["tokens"][i, : len(self.tokens[n])] = self.tokens[n]
            arrays["trained"][i, : len(self.trained[n])] = self.trained[n]
        return {name: self.tensor(array) for name, array in arrays.items()}, self.tensor(
            self._take(self.actions, columns)
        )

    def _take(self, array: Any, columns: np.ndarray) -> Any:
        """(T, N) → the tokens (M,) of `columns`, one completion after another."""
        return array[:, columns].T[self.mask[:, columns].T]

    def get(self, batch_size: int | None = None) -> Iterator[Batch]:
        """The kept completions once, in a new random order, `batch_size` of them at a time (None: all at once).

        A remainder is spread over the minibatches. Within one, completions of a prompt stand together.
        """
        assert self.advantages is not None, "advantages are set before minibatches are drawn"
        kept = np.flatnonzero(self.kept & (self.lengths > 0))
        minibatches = max(len(kept) // (batch_size or max(len(kept), 1)), 1)
        tokens = int(self.lengths[kept].sum())
        for columns in np.array_split(np.random.permutation(kept), minibatches):
            if len(columns):
                yield self._batch(columns[np.argsort(self.prompt_of[columns], kind="stable")], tokens, minibatches)

    def _batch(self, columns: np.ndarray, rollout_tokens: int, minibatches: int) -> Batch:
        obs, actions = self.rows(columns)
        lengths = self.tensor(self.lengths[columns])
        weight = row_weights(self.aggregation, lengths, rollout_tokens, minibatches, self.max_length)
        weight = th.where(self.tensor(self.silent[columns]), 0.0, weight)
        segment = th.repeat_interleave(th.arange(len(columns), device=lengths.device), lengths)

        def packed(tensor: Any) -> th.Tensor | None:
            return None if tensor is None else self._take(tensor, columns)

        return Batch(
            observations=obs,
            actions=actions,
            old_log_prob=self.tensor(self._take(self.log_probs, columns)),
            advantages=packed(self.advantages),  # type: ignore[arg-type]
            weight=weight[segment],
            returns=packed(self.returns),
            old_values=packed(self.old_values),
            ref_log_prob=packed(self.ref_log_prob),
            segment=segment,
            even=(~self.tensor(self.silent[columns])).float()[segment] / max(len(segment), 1),
        )

    def parts(self, batch: Batch, size: int | None) -> Iterator[Batch]:
        """The micro-batches of a minibatch, `size` completions at a time: their losses add up to the minibatch's."""
        obs: Any = batch.observations
        rows = len(obs["tokens"])
        if size is None or size >= rows:
            yield batch
            return
        assert batch.segment is not None
        for first in range(0, rows, size):
            last = min(first + size, rows)
            low, high = th.searchsorted(batch.segment, th.tensor([first, last], device=batch.segment.device)).tolist()
            columns = {
                name: None if column is None else column[low:high]
                for name, column in batch._asdict().items()
                if name != "observations"
            }
            columns["segment"] = columns["segment"] - first  # type: ignore[operator]
            yield Batch(observations=_some(obs, first, last), **columns)  # type: ignore[arg-type]

    @th.no_grad()
    def per_token(self, function: Callable[[Any, th.Tensor], th.Tensor], size: int | None) -> th.Tensor:
        """(T, N) float32 of function(rows, tokens) → (M,), called for `size` completions at a time."""
        out = th.zeros(self.mask.shape, device=self.device)
        size = size or len(self.tokens)
        for first in range(0, len(self.tokens), size):
            columns = np.arange(first, min(first + size, len(self.tokens)))
            columns = columns[self.lengths[columns] > 0]
            if len(columns):
                mask, values = self.tensor(self.mask[:, columns].T), function(*self.rows(columns)).float().flatten()
                part = th.zeros(mask.shape, device=self.device).masked_scatter(mask, values)
                out[:, th.as_tensor(columns, device=self.device)] = part.T
        return out


def tied_members(group: np.ndarray, rewards: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """(N,) bool: the scored members of a row's group (N,) all have the same reward, or there is at most one of them."""
    index = np.unique(group, return_inverse=True)[1]
    highest, lowest = np.full(len(group), -np.inf), np.full(len(group), np.inf)
    np.maximum.at(highest, index[scored], rewards[scored])
    np.minimum.at(lowest, index[scored], rewards[scored])
    return (highest <= lowest)[index]


def _some(obs: dict[str, th.Tensor], first: int, last: int) -> dict[str, th.Tensor]:
    """Rows first … last − 1 of packed completions, with their prompts, cut to the longest of them."""
    used, prompt_of = th.unique(obs["prompt_of"][first:last], return_inverse=True)
    tokens, trained = obs["tokens"][first:last], obs["trained"][first:last]
    length = int(trained.any(dim=0).nonzero().max()) + 1  # what follows the last trained token predicts nothing
    mask = obs["prompt_mask"][used]
    start = int(mask.any(dim=0).nonzero().min())
    return {
        "prompts": obs["prompts"][used, start:],
        "prompt_mask": mask[:, start:],
        "prompt_of": prompt_of,
        "tokens": tokens[:, :length],
        "trained": trained[:, :length],
    }
