"""Sampling completions: groups of one prompt in, a rollout of tokens in the buffer out.

`TokenSampler` asks a text env for prompts, lets the policy answer each of them G times, hands the answers back and, in
a conversation, goes on with what the env replies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from grpo_rl.errors import warn
from grpo_rl.text.generation import Generation
from grpo_rl.token_buffer import TokenBuffer, tied_members

REFILLS = 4
"""How often a rollout asks for new groups in place of tied ones before it goes on with fewer."""


@dataclass
class _Conversation:
    """A completion as it grows: what follows the prompt, which of it the policy chose, and what each turn was given."""

    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    entropies: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    truncated: bool = False

    def say(self, said: Generation, row: int) -> None:
        self.tokens += said.ids[row]
        self.trained += [True] * len(said.ids[row])
        self.log_probs.append(said.log_probs[row])
        self.entropies.append(said.entropies[row])
        self.truncated = not bool(said.finished[row])

    def hear(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.trained += [False] * len(ids)


class _Prompted:
    """The plan of groups that share a prompt: a rollout begins with new prompts, nothing is left open."""

    resets = True


class TokenSampler:
    """Samples rollouts for `model` from `env`, a `TextVecEnv`.

    Attributes:
        group_share: not read: every completion is one of a group.
        forks, fork_depths: none. counted: tokens sampled in the rollout.
        dropped_groups: tied groups of the rollout that others have taken the place of.
    """

    def __init__(self, model: Any, env: Any, group_size: int) -> None:
        self.model, self.env, self.group_size = model, env, group_size
        self.plan = _Prompted()
        self.group_share = 1.0
        self.forks, self.counted, self.dropped_groups = 0, 0, 0
        self.fork_depths: list[int] = []
        self._next_group = 0

    def sample(self, callback: BaseCallback, buffer: TokenBuffer, n_steps: int) -> bool:
        """Fills `buffer` with `n_steps` completions. Returns False if the callback stopped it."""
        self.counted = self.dropped_groups = 0
        buffer.reset()
        callback.on_rollout_start()
        wanted, kept = n_steps // self.group_size, _Rows()
        refill = self.model.tied_groups == "refill"
        for _ in range(1 + REFILLS * refill):
            rows = self._start(wanted - len(kept.prompts))
            if not self._report(callback, buffer, rows):
                return False
            kept.extend(self._untied(rows) if refill else rows)
            if len(kept.prompts) == wanted:
                break
        else:
            warn(
                f"{len(kept.prompts)} of {wanted} groups are left, the others tied {1 + REFILLS} times: these prompts"
                " are too easy or too hard for the model as it is"
            )
            if not kept.prompts:
                kept.extend(rows)
        buffer.max_length = self.env.max_new_tokens * self.env.max_turns
        kept.fill(buffer)
        if self.model.policy.has_value:
            predict = self.model.policy.predict_values
            values = buffer.per_token(lambda obs, actions: predict(obs), self.model.micro_batch_size)
            buffer.values = values.cpu().numpy()
        callback.update_locals({"self": self.model, "rollout_buffer": buffer, "env": self.env})
        return True

    def _start(self, n_groups: int) -> _Rows:
        """`n_groups` groups, each sampled to the end and scored."""
        policy, size = self.model.policy, self.group_size
        prompts = self.env.start(n_groups, size)
        talks = [_Conversation() for _ in range(n_groups * size)]
        asked: list[Sequence[int]] = [prompt.ids for prompt in prompts]
        live, members = np.arange(len(talks)), size
        while len(live):
            seeds = np.random.randint(2**62, size=len(live))
            said = policy.sample(asked, members, self.env.max_new_tokens, seeds)
            for i, row in enumerate(live.tolist()):
                talks[row].say(said, i)
            going = []
            for row, reply in zip(live.tolist(), self.env.reply(live, said.ids), strict=True):
                talks[row].rewards.append(reply.reward)
                if not reply.done:
                    talks[row].hear(reply.ids)
                    going.append(row)
            live, members = np.array(going, int), 1
            asked = [[*prompts[row // size].ids, *talks[row].tokens] for row in going]
        matrix = np.asarray(self.env.score(), np.float64)
        lengths = np.array([sum(talk.trained) for talk in talks])
        self.counted += int(lengths.sum())
        self.model.num_timesteps += int(lengths.sum())
        group = np.asarray(self.env.group_ids(matrix, lengths), np.int64)
        group = np.unique(group, return_inverse=True)[1] + self._next_group
        self._next_group = int(group.max(initial=-1)) + 1
        rewards = np.asarray(self.env.weighted(matrix), np.float64)
        return _Rows(list(prompts), np.arange(len(talks)) // size, talks, group, matrix, rewards)

    def _report(self, callback: BaseCallback, buffer: TokenBuffer, rows: _Rows) -> bool:
        """Tells SB3's callbacks and its log of finished episodes about the completions."""
        seconds = time.time() - self.model.start_time / 1e9 if self.model.start_time else 0.0
        infos = [
            {"episode": {"r": float(reward), "l": int(sum(talk.trained)), "t": seconds}} if np.isfinite(reward) else {}
            for reward, talk in zip(rows.rewards, rows.talks, strict=True)
        ]
        callback.update_locals(
            {
                "self": self.model,
                "env": self.env,
                "callback": callback,
                "rollout_buffer": buffer,
                "rewards": rows.rewards,
                "dones": np.ones(len(infos), bool),
                "infos": infos,
                "prompts": rows.prompts,
                "completion_ids": [talk.tokens for talk in rows.talks],
            }
        )
        goes_on = bool(callback.on_step())
        if goes_on:
            self.model._update_info_buffer(infos, np.ones(len(infos), bool))
        return goes_on

    def _untied(self, rows: _Rows) -> _Rows:
        """Only the prompts with a group that does not tie."""
        tied = tied_members(rows.group, rows.rewards, np.isfinite(rows.rewards))
        good = np.unique(rows.prompt_of[~tied])
        self.dropped_groups += len(rows.prompts) - len(good)
        chosen = np.flatnonzero(np.isin(rows.prompt_of, good))
        return _Rows(
            [rows.prompts[p] for p in good],
            np.searchsorted(good, rows.prompt_of[chosen]),
            [rows.talks[n] for n in chosen],
            rows.group[chosen],
            rows.matrix[chosen],
            rows.rewards[chosen],
        )

    # --- between rollouts ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the next rollout depends on beside the model: the env's place in its data."""
        return {"next_group": self._next_group, "env": self.env.state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._next_group = state["next_group"]
        self.env.set_state(state["env"])


@dataclass
class _Rows:
    """Finished completions (N,) of P prompts."""

    prompts: list[Any] = field(default_factory=list)
    prompt_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    talks: list[_Conversation] = field(default_factory=list)
    group: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    matrix: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def extend(self, more: _Rows) -> None:
        self.prompt_of = np.concatenate([self.prompt_of, more.prompt_of + len(self.prompts)])
        self.prompts = self.prompts + more.prompts
        self.talks = self.talks + more.talks
        self.group = np.concatenate([self.group, more.group])
        self.matrix = np.concatenate([self.matrix, more.matrix]) if len(self.matrix) else more.matrix
        self.rewards = np.concatenate([self.rewards, more.rewards])

    def fill(self, buffer: TokenBuffer) -> None:
        buffer.fill(
            [prompt.ids for prompt in self.prompts],
            self.prompt_of,  # type: ignore[arg-type]
            [talk.tokens for talk in self.talks],
            [talk.trained for talk in self.talks],
            [np.concatenate(talk.log_probs) for talk in self.talks],
            [np.concatenate(talk.entropies) for talk in self.talks],
            [talk.truncated for talk in self.talks],
            self.group,  # type: ignore[arg-type]
            self.rewards,
            self.matrix,
            [[len(said) for said in talk.log_probs] for talk in self.talks],
            [talk.rewards for talk in self.talks],
        )


def completion_metrics(buffer: TokenBuffer, reward_names: Sequence[str], dropped_groups: int = 0) -> dict[str, float]:
    """Figures of a rollout, named as TRL's where the meaning is the same."""
    outcome, scored, lengths = buffer.outcome, buffer.scored, buffer.lengths
    groups = np.unique(buffer.group[0], return_index=True)[1]
    tied, ended = buffer.tied(), ~buffer.truncated
    figures = {
        "reward": _mean(outcome[scored]),
        "reward_std": float(outcome[scored].std(ddof=1)) if scored.sum() > 1 else 0.0,
        "frac_reward_zero_std": _mean(tied[groups]),
        "entropy": _mean(buffer.entropies[buffer.mask]),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(lengths.min()) if len(lengths) else 0.0,
        "completions/max_length": float(lengths.max(initial=0)),
        "completions/clipped_ratio": _mean(buffer.truncated),
        "completions/unscored": _mean(~scored),
        "completions/mean_terminated_length": _mean(lengths[ended]),
        "completions/repetition": _mean([repetition(buffer.actions[: lengths[n], n]) for n in np.flatnonzero(lengths)]),
        "group/dropped": float(dropped_groups),
    }
    for k, name in enumerate(reward_names):
        column = buffer.reward_matrix[:, k]
        given = column[~np.isnan(column)]
        figures[f"rewards/{name}/mean"] = _mean(given)
        figures[f"rewards/{name}/std"] = float(given.std(ddof=1)) if len(given) > 1 else 0.0
    return figures


def repetition(ids: Sequence[int] | np.ndarray, n: int = 3) -> float:
    """Share of the n-grams of a completion that have been in it before; 0 for one shorter than n."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
