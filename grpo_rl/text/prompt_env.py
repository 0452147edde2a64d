"""`PromptEnv`: prompts of a dataset, one completion each, scored by reward functions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from grpo_rl.errors import ConfigError, VecEnvError
from grpo_rl.text.grouping import Grouping, parse_grouping
from grpo_rl.text.rewards import RewardFunction, Rewards
from grpo_rl.text.spaces import Unicode
from grpo_rl.text.tasks import Prompt, PromptSource, Rows
from grpo_rl.text.tokenizing import Encoder, TokenText


class PromptEnv(gym.Env[str, str]):
    """An episode is one prompt and one completion, scored by reward functions.

    `reset` shows a prompt of the dataset, `step` takes a completion and ends the episode. GRPO takes it as it is, and
    samples a group of completions for each prompt.

    Args:
        prompts: A list of texts, of messages or of rows with columns; the path of a JSONL file; a `datasets.Dataset`;
            or a dataset of reasoning-gym, which brings its own reward. See `Rows`.
        reward_funcs: One or more of `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, as TRL
            calls them. See `grpo_rl.text.rewards`.
        tokenizer: The model's, of transformers.
        max_new_tokens: Tokens of a completion at most.
        reward_weights: One number a function; None: 1 each.
        system_prompt: In front of each prompt.
        chat: Whether prompts go through the tokenizer's chat template; None: those that are lists of messages do.
        chat_template: Jinja source in place of the tokenizer's own. chat_template_kwargs: for it.
        stop_strings: Each ends a completion, and stays in it.
        eos_token_ids: Ids that end a completion beside the tokenizer's own EOS and the model's.
        context: Tokens that the model can take in all; None: the tokenizer's and the model's own limits.
        prompt_column: Where rows have their prompt.
        grouping: Who is compared with whom: "prompt", "length", "ability", "column:NAME", or a strategy of
            `grpo_rl.text.grouping`.
        seed: Of the order of the prompts.

    Raises:
        ConfigError: An empty dataset, a row that cannot be used (named), no reward function, no tokenizer.
    """

    metadata = {"render_modes": []}  # noqa: RUF012, as Gymnasium declares it
    render_mode = None

    def __init__(
        self,
        prompts: Any,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        tokenizer: Any = None,
        max_new_tokens: int = 64,
        *,
        reward_weights: Sequence[float] | None = None,
        system_prompt: str | None = None,
        chat: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop_strings: Sequence[str] = (),
        eos_token_ids: Sequence[int] = (),
        context: int | None = None,
        prompt_column: str = "prompt",
        grouping: str | Grouping = "prompt",
        seed: int | None = None,
    ) -> None:
        rows = Rows(prompts, prompt_column)
        functions = rows.reward if reward_funcs is None else reward_funcs
        if functions is None:
            raise ConfigError("reward_funcs: expected one or more functions; only reasoning-gym brings its own")
        self.rewards = Rewards(functions, reward_weights)
        self.encoder = Encoder(
            tokenizer,
            max_new_tokens,
            stop_strings,
            eos_token_ids,
            system_prompt,
            chat,
            chat_template,
            chat_template_kwargs or {},
            context,
        )
        self.source = PromptSource(rows, self.encoder, seed)
        self.grouping = parse_grouping(grouping)
        self.observation_space, self.action_space = Unicode(), Unicode()
        self.prompt: Prompt | None = None

    @property
    def num_envs(self) -> int:
        """What SB3's VecEnvs have, and their wrappers ask for first. Raises VecEnvError: this is one env."""
        raise VecEnvError(
            "PromptEnv is one env, and SB3's wrappers of VecEnvs (VecNormalize, VecMonitor …) do not take it. Give it"
            " to GRPO as it is: rewards are scaled by reward_weights and advantage_scale, and episodes are monitored"
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return self.source.longest + self.encoder.max_new_tokens

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The next prompt; with a seed, the order starts anew. `options={"row": i}` asks for a row of the dataset."""
        super().reset(seed=seed)
        if seed is not None:
            self.source.seed(int(self.np_random.integers(2**31)))
        if not isinstance(options, Mapping | None) or (options or {}).keys() - {"row"}:
            raise ConfigError(f'reset: expected options={{"row": i}}, got {options!r:.80}')
        row = (options or {}).get("row")
        self.prompt = self.source.draw() if row is None else self.source[row]
        return TokenText(self.prompt.text, self.prompt.ids), {"row": self.prompt.row}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The completion's weighted reward, 0 where no function has an opinion, with each in `info["rewards"]`."""
        if self.prompt is None:
            raise gym.error.ResetNeeded("PromptEnv.step before reset")
        ids = action.ids if isinstance(action, TokenText) else self.encoder.encode(action)
        values = self.rewards([self.prompt], [str(action)], [ids])
        total = float(np.nan_to_num(self.rewards.weighted(values)[0]))
        named = dict(zip(self.rewards.names, values[0].tolist(), strict=True))
        return TokenText("", ()), total, True, False, {"row": self.prompt.row, "rewards": named}

    def column(self, seed: int | None = None) -> PromptEnv:
        """Another env on the same rows, rewards and tokenizer, with an order of its own."""
        twin = copy.copy(self)
        twin.source = copy.copy(self.source)
        twin.source.seed(seed)
        return twin
