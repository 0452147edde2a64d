"""`TurnVecEnv`: conversations with any Gymnasium env that talks, many at a time."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.errors import ConfigError, check_seed, check_whole, warn
from grpo_rl.registry import make_rendered
from grpo_rl.text.conversation import Conversation
from grpo_rl.text.grouping import Grouping
from grpo_rl.text.tasks import Prompt
from grpo_rl.text.tokenizing import Encoder, TokenText, checked_encoding
from grpo_rl.text.vec_env import Reply, TextVecEnv

STARTS = 8
"""Seeds that a group is started with, one after the other, until one member's reset goes well."""


class TurnVecEnv(TextVecEnv):
    """Any Gymnasium env with text spaces: completions and answers take turns until it ends.

    Members of a group are resets with one seed, which must give one first text. A reset's info becomes the prompt's
    columns, for groupings. An env that raises, in `reset` or in `step`, loses its conversation and is built anew; its
    reward counts as None. A group that loses all of its members begins again with another seed.

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
        ConfigError: An env without text spaces, no such id, a number that is out of range; in use, an env that has
            never worked, or that no group can be started with.
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
        if not (callable(make) or isinstance(make, str)):
            raise ConfigError(
                f"TurnVecEnv: expected a class, a function that makes a new env, or an id, got {make!r:.80}: each"
                " conversation has an env of its own"
            )
        check_whole("n_envs", n_envs)
        check_whole("max_turns", max_turns)
        check_seed(seed)
        self._make: Callable[[], gym.Env] = functools.partial(make_rendered, make) if isinstance(make, str) else make
        self.max_turns = max_turns
        encoder = Encoder(tokenizer, max_new_tokens, **checked_encoding(encoding))
        self.encoder = encoder
        super().__init__([self.column() for _ in range(n_envs)], encoder, grouping)
        self._rng = np.random.default_rng(seed)
        self._talks: list[Conversation | None] = []  # None: to be built
        self._rewards = np.zeros(0)
        self._opened = self._worked = False  # whether a reset and a step have gone well yet
        self._failures = self._started = 0

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds the starts of conversations, and SB3's columns."""
        self._rng = np.random.default_rng(seed)
        return super().seed(seed)

    def start(self, n_groups: int, group_size: int) -> list[Prompt]:
        self.group_size, n = group_size, n_groups * group_size
        self._talks += [None] * (n - len(self._talks))
        self._rewards, self.prompts = np.zeros(n), []
        for group in range(n_groups):
            for _ in range(STARTS):
                problem = self._open(group, int(self._rng.integers(2**31)))
                if problem is None:
                    break
            else:
                raise ConfigError(
                    f"no conversation could be started, though {STARTS * group_size} were tried; the last: {problem!r}"
                ) from problem
        self._started += n_groups
        return self.prompts

    def _open(self, group: int, seed: int) -> Exception | None:
        """Resets the members of a group with one seed. The last error where none of them is left, else None."""
        begun: TokenText | None = None
        problem: Exception | None = None
        for row in range(group * self.group_size, (group + 1) * self.group_size):
            self._rewards[row] = 0.0
            try:
                talk = self._talks[row] = self._talks[row] or self.column()
                shown, info = talk.reset(seed=seed)
            except Exception as error:  # whatever a user's env raises
                self._lose(row, error, fatal=not self._opened)
                problem = error
                continue
            assert isinstance(shown, TokenText)
            self._opened = True
            if begun is None:
                begun = shown
                self.prompts.append(Prompt(shown.ids, str(shown), str(shown), self._started + group, dict(info)))
            elif shown != begun:
                raise ConfigError(
                    f"{talk.env}: members of a group must start alike, but reset(seed={seed}) gave"
                    f" {str(begun)[:60]!r} and {str(shown)[:60]!r}; draw what is random from self.np_random"
                )
        return problem if begun is None else None

    def reply(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Reply]:
        return [self._turn(int(row), tuple(int(i) for i in ids)) for row, ids in zip(rows, completions, strict=True)]

    def _turn(self, row: int, ids: tuple[int, ...]) -> Reply:
        talk = self._talks[row]
        if talk is None:  # it was lost in its reset
            return Reply((), None, 0.0, True)
        try:
            shown, reward, terminated, truncated, _ = talk.step(TokenText(self.encoder.decode(ids), ids))
            if not np.isfinite(float(reward)):
                raise ConfigError(f"it gave the reward {reward}")
        except Exception as error:  # whatever a user's env raises
            self._lose(row, error, fatal=not self._worked)
            return Reply((), None, 0.0, True)
        self._worked = True
        self._rewards[row] += float(reward)
        done = terminated or truncated
        return Reply(talk.said, None if done else str(shown), float(reward), done)

    def _lose(self, row: int, error: Exception, fatal: bool) -> None:
        """Gives up a conversation, whose env is built anew for the next one; `fatal` raises."""
        talk, self._talks[row] = self._talks[row], None
        where = "a new env" if talk is None else f"{talk.env}, conversation {row}, turn {talk.turn}"
        message = f"{where}: {error!r}"
        if fatal:
            raise ConfigError(message) from error
        self._failures += 1
        if self._failures.bit_count() == 1:  # the first, second, fourth, eighth … time
            warn(f"{message}. Its reward counts as None, and training goes on")
        self._rewards[row] = np.nan
        if talk is not None:
            with contextlib.suppress(Exception):  # it is broken already
                talk.close()

    def score(self) -> np.ndarray:
        return self._rewards[:, None].copy()

    def close(self) -> None:
        super().close()
        for talk in self._talks:
            if talk is not None:
                talk.close()

    def column(self) -> Conversation:
        return Conversation(self._make(), self.encoder, self.max_turns)

    def state(self) -> dict[str, Any]:
        return {"rng": copy.deepcopy(self._rng), "started": self._started, "grouping": self.grouping.state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._rng, self._started = copy.deepcopy(state["rng"]), state["started"]
        self.grouping.set_state(state["grouping"])
