"""`TurnVecEnv`: conversations with any Gymnasium env that talks, many at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.errors import ConfigError, warn
from grpo_rl.text.conversation import Conversation
from grpo_rl.text.grouping import Grouping
from grpo_rl.text.tasks import Prompt
from grpo_rl.text.tokenizing import Encoder, TokenText
from grpo_rl.text.vec_env import Reply, TextVecEnv


class TurnVecEnv(TextVecEnv):
    """Any Gymnasium env with text spaces: completions and answers take turns until it ends.

    Members of a group are resets with one seed, which must give one first text. A reset's info becomes the prompt's
    columns, for groupings. An env that raises loses its conversation and is built anew; its reward counts as None.

    Args:
        make: Builds a new env at each call; or a Gymnasium id.
        tokenizer: The model's.
        max_new_tokens: Tokens of each completion at most.
        n_envs: Columns of SB3's view.
        max_turns: Completions of a conversation at most; then it is truncated.
        grouping: As for `PromptEnv`.
        seed: Of the conversations' starts.
        encoding: `system_prompt`, `chat`, `stop_strings` … as for `PromptEnv`.

    Raises:
        ConfigError: An env without text spaces.
    """

    reward_names = ("env",)
    reward_weights = np.ones(1)

    def __init__(
        self,
        make: Callable[[], gym.Env] | str,
        tokenizer: Any,
        max_new_tokens: int = 64,
        *,
        n_envs: int = 1,
        max_turns: int = 16,
        grouping: str | Grouping = "prompt",
        seed: int | None = None,
        **encoding: Any,
    ) -> None:
        self._make: Callable[[], gym.Env] = make if callable(make) else lambda: gym.make(make)
        self.max_turns = max_turns
        encoder = Encoder(tokenizer, max_new_tokens, **encoding)
        self.encoder = encoder
        super().__init__([self.column() for _ in range(n_envs)], encoder, grouping)
        self._rng = np.random.default_rng(seed)
        self._talks: list[Conversation] = []
        self._rewards = np.zeros(0)
        self._worked, self._failures, self._started = False, 0, 0

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds the starts of conversations, and SB3's columns."""
        self._rng = np.random.default_rng(seed)
        return super().seed(seed)

    def start(self, n_groups: int, group_size: int) -> list[Prompt]:
        self.group_size, n = group_size, n_groups * group_size
        while len(self._talks) < n:
            self._talks.append(self.column())
        self._rewards, self.prompts = np.zeros(n), []
        for group in range(n_groups):
            seed = int(self._rng.integers(2**31))
            first, *others = self._talks[group * group_size : (group + 1) * group_size]
            shown, info = first.reset(seed=seed)
            assert isinstance(shown, TokenText)
            for talk in others:
                other, _ = talk.reset(seed=seed)
                if other != shown:
                    raise ConfigError(
                        f"{first.env}: members of a group must start alike, but reset(seed={seed}) gave"
                        f" {str(shown)[:60]!r} and {str(other)[:60]!r}; draw what is random from self.np_random"
                    )
            self.prompts.append(Prompt(shown.ids, str(shown), str(shown), self._started + group, dict(info)))
        self._started += n_groups
        return self.prompts

    def reply(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Reply]:
        return [self._turn(int(row), tuple(int(i) for i in ids)) for row, ids in zip(rows, completions, strict=True)]

    def _turn(self, row: int, ids: tuple[int, ...]) -> Reply:
        talk = self._talks[row]
        try:
            shown, reward, terminated, truncated, _ = talk.step(TokenText(self.encoder.decode(ids), ids))
            if not np.isfinite(float(reward)):
                raise ConfigError(f"it gave the reward {reward}")
        except Exception as error:  # whatever a user's env raises
            return self._lose(row, error)
        self._worked = True
        self._rewards[row] += float(reward)
        done = terminated or truncated
        return Reply(talk.said, None if done else str(shown), float(reward), done)

    def _lose(self, row: int, error: Exception) -> Reply:
        message = f"{self._talks[row].env}, conversation {row}, turn {self._talks[row].turn}: {error!r}"
        if not self._worked:
            raise ConfigError(message) from error
        self._failures += 1
        if self._failures.bit_count() == 1:  # the first, second, fourth, eighth … time
            warn(f"{message}. Its reward counts as None, and training goes on")
        self._rewards[row] = np.nan
        self._talks[row].close()
        self._talks[row] = self.column()
        return Reply((), None, 0.0, True)

    def score(self) -> np.ndarray:
        return self._rewards[:, None].copy()

    def close(self) -> None:
        super().close()
        for talk in self._talks:
            talk.close()

    def column(self) -> Conversation:
        return Conversation(self._make(), self.encoder, self.max_turns)

    def state(self) -> dict[str, Any]:
        return {"rng": copy.deepcopy(self._rng), "started": self._started, "grouping": self.grouping.state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._rng, self._started = copy.deepcopy(state["rng"]), state["started"]
        self.grouping.set_state(state["grouping"])
