"""`TextVecEnv`: what SB3, GRPO and the token sampler see of text environments, single turn and multi-turn alike.

Two views on the same task. SB3's: `num_envs` columns that are reset and stepped with texts, as evaluations do. The
sampler's: `start` opens P·G conversations, `reply` hands over completions turn by turn, `score` gives the rewards.
Conversations n = 0 … N-1 lie side by side: the G of prompt p are p·G … p·G + G-1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices

from grpo_rl.errors import ConfigError, check_whole
from grpo_rl.text.grouping import Grouping, Members, parse_grouping
from grpo_rl.text.prompt_env import PromptEnv
from grpo_rl.text.tasks import Prompt
from grpo_rl.text.tokenizing import Encoder


@dataclass(frozen=True)
class Reply:
    """What an env answers to a completion.

    Attributes:
        ids: What it says, for the model to read and not to be trained on; chat template included.
        text: The same as text; None when the conversation is over.
        reward: Of this turn, where rewards come by the turn; 0 for `PromptEnv`, whose `score` knows.
        done: The conversation is over.
    """

    ids: tuple[int, ...]
    text: str | None
    reward: float
    done: bool


def is_text(env: Any) -> bool:
    """Whether an env, or a VecEnv, takes texts as actions."""
    return isinstance(getattr(env, "action_space", None), gym.spaces.Text)


class TextVecEnv(VecEnv):
    """Text environments side by side; see the module. `PromptVecEnv` and `turns.TurnVecEnv` are its two kinds.

    Args:
        envs: Of SB3's view, one a column; their observations are `TokenText`s.
        encoder: Tokenizer, ends of a completion and limits.
        grouping: Who is compared with whom.

    Attributes:
        prompts: P prompts of the last `start`.
        group_size: G of the last `start`.
        max_turns: Completions of a conversation at most.
        reward_names: K names. reward_weights: (K,) float64.
    """

    prompts: list[Prompt]
    group_size: int
    max_turns: int
    reward_names: tuple[str, ...]
    reward_weights: np.ndarray

    def __init__(self, envs: Sequence[gym.Env], encoder: Encoder, grouping: str | Grouping = "prompt") -> None:
        self.envs = [env if is_wrapped(env, Monitor) else Monitor(env) for env in envs]
        self.encoder, self.grouping = encoder, parse_grouping(grouping)
        self.prompts, self.group_size = [], 0
        self.actions: Sequence[str] = []
        super().__init__(len(self.envs), self.envs[0].observation_space, self.envs[0].action_space)

    @staticmethod
    def of(env: Any) -> TextVecEnv:
        """`env` as GRPO takes it: a TextVecEnv as it is, a PromptEnv made into one.

        Raises:
            ConfigError: Another text env, of which there must be several, or wrappers that would not be stepped.
        """
        if isinstance(env, TextVecEnv):
            return env
        inner = env
        while isinstance(inner, (Monitor, OrderEnforcing, PassiveEnvChecker)):
            inner = inner.env
        if isinstance(inner, PromptEnv):
            return PromptVecEnv(inner)
        if isinstance(getattr(env, "unwrapped", None), PromptEnv):
            raise ConfigError(
                f"{env}: whole completions do not pass through wrappers of a PromptEnv; put what {type(inner).__name__}"
                " does into a reward function or into the dataset"
            )
        if isinstance(env, VecEnv):
            raise ConfigError(
                f"{type(env).__name__}: whole completions do not pass through SB3's VecEnvs and their wrappers. Give"
                " the PromptEnv or the TurnVecEnv itself: episodes are monitored already, rewards are scaled by"
                " reward_weights and advantage_scale, and texts have nothing to normalise or to stack"
            )
        raise ConfigError(
            f"{env}: a group needs several of it; give TurnVecEnv(lambda: YourEnv(), tokenizer, max_new_tokens=…)"
        )

    # --- the sampler's view -------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @property
    def max_new_tokens(self) -> int:
        """Tokens of a completion at most, of each turn's."""
        return self.encoder.max_new_tokens

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        return self.encoder.eos_ids

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a completion; `encoder.stop.found(ids)` looks for them."""
        return self.encoder.stop.strings

    @property
    def n_conversations(self) -> int:
        """N = P·G of the last `start`."""
        return len(self.prompts) * self.group_size

    def check_model(self, vocab_size: int, context: int | None = None, eos_ids: Iterable[int] = ()) -> None:
        """Takes a model's limits and EOS ids, and looks whether tokenizer and prompts fit them.

        Args:
            vocab_size: Rows of the model's embedding.
            context: Tokens that it can take in all; None: no limit.
            eos_ids: Of its generation config.

        Raises:
            ConfigError: The tokenizer is another model's, or a prompt is too long; the message names the row.
        """
        self.encoder.fit_model(vocab_size, context, eos_ids)

    @abstractmethod
    def start(self, n_groups: int, group_size: int) -> list[Prompt]:
        """Opens P·G new conversations on P prompts, and gives these."""

    @abstractmethod
    def reply(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Reply]:
        """What the env answers to the newest completions of some conversations.

        Args:
            rows: Which conversations, 0 … N-1.
            completions: The new ids of each, EOS included where it was sampled.
        """

    @abstractmethod
    def score(self) -> np.ndarray:
        """The rewards of all conversations, once they are over: (N, K) float64, NaN for "no opinion"."""

    @abstractmethod
    def column(self) -> gym.Env:
        """One env of the same task, as SB3's view has them: to evaluate on, one episode at a time."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a resumed run needs between two rollouts."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from what `state` gave."""

    def group_ids(self, rewards: np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Who is compared with whom, by the env's grouping.

        Args:
            rewards: (N, K) from `score`.
            lengths: (N,) tokens of the completions.

        Returns:
            (N,) int64, equal for the members of a group.
        """
        prompt_of = np.arange(self.n_conversations) // self.group_size
        each = [self.prompts[p] for p in prompt_of]
        members = Members(each, prompt_of, np.asarray(lengths, np.int64), self.weighted(rewards))
        return self.grouping.groups(members)

    def weighted(self, rewards: np.ndarray) -> np.ndarray:
        """Σ weight · reward over the K that are there: (N, K) → (N,), NaN where none is."""
        total = np.nansum(rewards * self.reward_weights, axis=1)
        return np.where(np.isnan(rewards).all(axis=1), np.nan, total)

    # --- SB3's view ---------------------------------------------------------------------------------------------------

    def reset(self) -> np.ndarray:
        """Texts (num_envs,), an array of str objects."""
        shown = []
        for i, env in enumerate(self.envs):
            text, self.reset_infos[i] = env.reset(seed=self._seeds[i])
            shown.append(text)
        self._reset_seeds()
        return _texts(shown)

    def step_async(self, actions: Sequence[str]) -> None:  # type: ignore[override]
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Texts, rewards and dones (num_envs,), and infos; a column that is done is reset."""
        shown, infos = [], []
        rewards, dones = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, bool)
        for i, env in enumerate(self.envs):
            text, reward, terminated, truncated, info = env.step(self.actions[i])
            rewards[i], dones[i] = float(reward), terminated or truncated
            info = {**info, "TimeLimit.truncated": truncated and not terminated}
            if dones[i]:
                info["terminal_observation"] = text
                text, self.reset_infos[i] = env.reset()
            shown.append(text)
            infos.append(info)
        return _texts(shown), rewards, dones, infos

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [env.get_wrapper_attr(attr_name) for env in self._some(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        for env in self._some(indices):
            env.set_wrapper_attr(attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        return [env.get_wrapper_attr(method_name)(*args, **kwargs) for env in self._some(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        return [is_wrapped(env, wrapper_class) for env in self._some(indices)]

    def get_images(self) -> list[np.ndarray | None]:
        return [None] * self.num_envs

    def _some(self, indices: VecEnvIndices) -> list[gym.Env]:
        return [self.envs[i] for i in self._get_indices(indices)]


class PromptVecEnv(TextVecEnv):
    """A `PromptEnv`, many completions at a time: reward functions see all of a rollout in one call.

    Args:
        env: The task.
        n_envs: Columns of SB3's view.
    """

    max_turns = 1

    def __init__(self, env: PromptEnv, n_envs: int = 1) -> None:
        if not isinstance(env, PromptEnv):
            raise ConfigError(f"PromptVecEnv: expected a PromptEnv, got {env!r:.80}; TurnVecEnv holds other text envs")
        check_whole("n_envs", n_envs)
        super().__init__([env.column() for _ in range(n_envs)], env.encoder, env.grouping)
        self.task = env
        self.reward_names, self.reward_weights = env.rewards.names, env.rewards.weights
        self._completions: list[tuple[int, ...] | None] = []

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Starts the order of the prompts anew, and seeds SB3's columns."""
        self.task.source.seed(seed)
        return super().seed(seed)

    def check_model(self, vocab_size: int, context: int | None = None, eos_ids: Iterable[int] = ()) -> None:
        super().check_model(vocab_size, context, eos_ids)
        self.task.source.check()

    def start(self, n_groups: int, group_size: int) -> list[Prompt]:
        self.prompts, self.group_size = [self.task.source.draw() for _ in range(n_groups)], group_size
        self._completions = [None] * self.n_conversations
        return self.prompts

    def reply(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> list[Reply]:
        for row, ids in zip(rows, completions, strict=True):
            self._completions[row] = tuple(int(i) for i in ids)
        return [Reply((), None, 0.0, True)] * len(rows)

    def score(self) -> np.ndarray:
        ids = [found for found in self._completions if found is not None]
        if len(ids) < self.n_conversations:
            raise ConfigError(
                f"score: {self.n_conversations - len(ids)} of {self.n_conversations} are not complete yet"
            )
        each = [self.prompts[n // self.group_size] for n in range(self.n_conversations)]
        return self.task.rewards(each, [self.encoder.decode(found) for found in ids], ids)

    def column(self) -> gym.Env:
        return self.task.column()

    def state(self) -> dict[str, Any]:
        return {"prompts": self.task.source.state(), "grouping": self.grouping.state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.task.source.set_state(state["prompts"])
        self.grouping.set_state(state["grouping"])


def _texts(shown: Sequence[str]) -> np.ndarray:
    array = np.empty(len(shown), object)
    array[:] = shown
    return array
