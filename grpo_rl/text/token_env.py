"""`TokenEnv`: a text task as a true Gymnasium env, one step = one token, that any agent of SB3 can step.

The fast path (`TextVecEnv` and the token sampler) samples whole completions with the model's cache. Here the same
conversations come token by token: same prompts, same ends, same rewards.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from grpo_rl.errors import ConfigError, ForkError, check_whole
from grpo_rl.text.conversation import Conversation
from grpo_rl.text.prompt_env import PromptEnv
from grpo_rl.text.tokenizing import Encoder, TokenText, checked_encoding, left_pad, pad_id

Obs = dict[str, NDArray[Any]]


class TokenEnv(gym.Env[Obs, np.int64]):
    """One step adds one token to the conversation; the reward comes with the last token of a completion.

    Observations are a Dict of `input_ids` (L,) int64, all that has been said, set flush right, and `attention_mask`
    (L,) int8, 1 where there is an id. Actions are Discrete(V), ids of tokens. A completion ends with an EOS, a stop
    string or `max_new_tokens`; then `info` has `completion` and `completion_ids`. In a conversation of several turns
    what the env says follows at once, and is observed but never an action.

    Args:
        env: A `PromptEnv`, or a Gymnasium env with text spaces.
        tokenizer: For an env that is no PromptEnv, as are `max_new_tokens` and `encoding` (see `PromptEnv`).
        max_new_tokens: Tokens of a completion at most; None: 64.
        max_length: L; None: the longest prompt and completion of a PromptEnv, else the tokenizer's limit.
        vocab_size: V, where the model embeds more ids than the tokenizer has; None: the tokenizer's.
        max_turns: Completions of a conversation at most.

    Raises:
        ConfigError: Arguments that the env brings itself, or a limit that is missing.
    """

    metadata = {"render_modes": []}  # noqa: RUF012, as Gymnasium declares it
    render_mode = None

    def __init__(
        self,
        env: gym.Env[str, str],
        tokenizer: Any = None,
        max_new_tokens: int | None = None,
        *,
        max_length: int | None = None,
        vocab_size: int | None = None,
        max_turns: int = 16,
        **encoding: Any,
    ) -> None:
        if not isinstance(env, gym.Env):
            raise ConfigError(f"TokenEnv: expected an env, got {env!r:.80}")
        for name, value in (("max_turns", max_turns), ("max_length", max_length), ("vocab_size", vocab_size)):
            check_whole(name, 1 if value is None else value)
        if isinstance(env, PromptEnv):
            if tokenizer is not None or max_new_tokens is not None or encoding:
                raise ConfigError("TokenEnv: a PromptEnv brings its tokenizer and limits; give them there")
            self.encoder, length = env.encoder, env.longest
        else:
            tokens = 64 if max_new_tokens is None else max_new_tokens
            self.encoder = Encoder(tokenizer, tokens, **({"context": max_length} | dict(checked_encoding(encoding))))
            env, length = Conversation(env, self.encoder, max_turns), self.encoder.context or 0
        self.max_length = length if max_length is None else max_length
        if not self.max_length:
            raise ConfigError("max_length: expected the tokens of a whole conversation; the tokenizer has no limit")
        known = 1 + max([*self.encoder.tokenizer.get_vocab().values(), *self.encoder.eos_ids])
        self.vocab_size = known if vocab_size is None else vocab_size
        if self.vocab_size < known:
            raise ConfigError(f"vocab_size: expected at least the tokenizer's {known}, got {vocab_size}")
        self.env = env
        turns = 1 if isinstance(env, PromptEnv) else max_turns
        self._max_episode_steps = turns * self.encoder.max_new_tokens  # Gymnasium's name: groups form by the episode
        self.observation_space: spaces.Space[Obs] = spaces.Dict(  # type: ignore[assignment]
            {
                "input_ids": spaces.Box(0, self.vocab_size - 1, (self.max_length,), np.int64),
                "attention_mask": spaces.Box(0, 1, (self.max_length,), np.int8),
            }
        )
        self.action_space = spaces.Discrete(self.vocab_size)
        self.ids: list[int] = []
        self.completion: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """The prompt.

        Raises:
            ConfigError: It has `max_length` tokens or more.
        """
        super().reset(seed=seed)
        shown, info = self.env.reset(seed=seed, options=options)
        assert isinstance(shown, TokenText)
        if len(shown.ids) >= self.max_length:
            raise ConfigError(
                f"max_length: expected more than the {len(shown.ids)} tokens of the prompt {str(shown)[:60]!r}, got"
                f" {self.max_length}"
            )
        self.ids, self.completion = list(shown.ids), []
        return self._observe(), info

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """Adds a token.

        Raises:
            ConfigError: It is none, or beyond the vocabulary.
            ResetNeeded: The conversation has not begun.
        """
        token = np.asarray(action)
        if token.shape != () or token.dtype.kind not in "iu" or not 0 <= token < self.vocab_size:
            raise ConfigError(f"action: expected the id of a token, 0 … {self.vocab_size - 1}, got {action!r:.80}")
        if not self.ids:
            raise gym.error.ResetNeeded("TokenEnv.step before reset")
        self.completion.append(int(token))
        self.ids.append(int(token))
        full = len(self.ids) == self.max_length
        over = self.encoder.ended(self.completion) or len(self.completion) == self.encoder.max_new_tokens
        if not (over or full):
            return self._observe(), 0.0, False, False, {}
        ids, text = self.completion, self.encoder.decode(self.completion)
        shown, reward, terminated, truncated, info = self.env.step(TokenText(text, ids))
        info = {**info, "completion": text, "completion_ids": ids}
        self.completion = []
        if not (terminated or truncated):
            self.ids = list(shown.ids) if isinstance(shown, TokenText) else self.ids
            truncated = len(self.ids) >= self.max_length
        return self._observe(), float(reward), bool(terminated), bool(truncated), info

    def get_snapshot(self) -> tuple[Any, ...]:
        """For exact forks in the middle of a completion; of a PromptEnv only.

        Raises:
            ForkError: Another env, which may hold anything.
        """
        if not isinstance(self.env, PromptEnv):
            raise ForkError(f"TokenEnv forks a PromptEnv only, not {self.env}", "no PromptEnv")
        return list(self.ids), list(self.completion), self.env.prompt, self.env.source.state()

    def set_snapshot(self, state: tuple[Any, ...]) -> None:
        """Continues from what `get_snapshot` gave."""
        assert isinstance(self.env, PromptEnv)
        self.ids, self.completion, self.env.prompt, source = state
        self.env.source.set_state(source)

    def _observe(self) -> Obs:
        ids, mask = left_pad([self.ids[-self.max_length :]], pad_id(self.encoder.tokenizer), self.max_length)
        return {"input_ids": ids[0], "attention_mask": mask[0].astype(np.int8)}
