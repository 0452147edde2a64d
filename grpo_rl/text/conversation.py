"""`Conversation`: any Gymnasium env that talks, as a conversation in ids."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym

from grpo_rl.errors import ConfigError, check_whole
from grpo_rl.text.spaces import Unicode
from grpo_rl.text.tokenizing import Encoder, TokenText


class Conversation(gym.Wrapper[str, str, str, str]):
    """Any Gymnasium env with text spaces, one turn a step, that keeps the ids of all that has been said.

    Observations are `TokenText`s whose ids are the whole conversation, completions exactly as they were sampled. What
    the env says is tokenised once, and is not trained on. The conversation is truncated after `max_turns` turns, or
    when the next one might not fit into the model's context.

    Args:
        env: Its observation and action spaces are `gymnasium.spaces.Text`, such as `Unicode`.
        encoder: Tokenizer and limits.
        max_turns: Completions at most.

    Raises:
        ConfigError: Other spaces, or `max_turns` below 1.
    """

    def __init__(self, env: gym.Env, encoder: Encoder, max_turns: int = 16) -> None:
        if not isinstance(env, gym.Env):
            raise ConfigError(f"expected a gymnasium.Env, got {env!r:.80}")
        check_whole("max_turns", max_turns)
        super().__init__(env)
        for name, space in (("observation", env.observation_space), ("action", env.action_space)):
            if not isinstance(space, gym.spaces.Text):
                raise ConfigError(
                    f"{env}: expected a gymnasium.spaces.Text {name} space, such as grpo_rl.text.Unicode, got {space}"
                )
        self.observation_space, self.action_space = Unicode(), Unicode()
        self.encoder, self.max_turns = encoder, max_turns
        self.ids: list[int] = []
        self.said: tuple[int, ...] = ()  # by the env, at the last step
        self.turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        shown, info = self.env.reset(seed=seed, options=options)
        text, ids = self.encoder.prompt(str(shown))
        self.encoder.check_length(len(ids), f"{self.env}, first text {text[:60]!r}")
        self.ids, self.said, self.turn = list(ids), (), 0
        return TokenText(text, ids), info

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """One turn: a completion goes to the env as text, and stays here as ids."""
        ids = action.ids if isinstance(action, TokenText) else self.encoder.encode(action)
        shown, reward, terminated, truncated, info = self.env.step(TokenText(str(action), ids))
        self.ids += ids
        self.turn += 1
        self.said = ()
        if not (terminated or truncated):
            self.said = self.encoder.reply(str(shown), ids)
            truncated = self.turn >= self.max_turns or self.encoder.overflow(len(self.ids) + len(self.said))
        self.ids += self.said
        return TokenText(str(shown), self.ids), reward, bool(terminated), bool(truncated), info
