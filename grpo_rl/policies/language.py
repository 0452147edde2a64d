"""`CausalLMPolicy`: a causal language model as an SB3 policy. Text in, text out; a token is an action.

`transformers` is imported when a policy is built.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from grpo_rl.errors import ConfigError, check_number, check_whole
from grpo_rl.logprobs import candidate_logits
from grpo_rl.policies.causal_lm import CausalLM
from grpo_rl.policies.models import Model, base_model, make_model, portable_model, widen
from grpo_rl.policies.saving import save_model
from grpo_rl.text.generation import Generation, generate, positions
from grpo_rl.text.portable import encoder_of, portable_encoder
from grpo_rl.text.tokenizing import Encoder, TokenText, prompts_of

PRECISIONS = {"bf16": th.bfloat16, "fp16": th.float16, "fp32": th.float32}


class CausalLMPolicy(BasePolicy):
    """A policy around any causal language model of `transformers`.

    Args:
        observation_space, action_space: text; or those of a `TokenEnv`, whose agent chooses token by token.
        lr_schedule: the optimiser starts with its value at 1.
        use_sde: not offered.
        model: a path or hub id, a module (also PEFT's; it is trained itself, no copy), a function that makes one, or a
            configuration.
        tokenizer: of transformers. None: the env's.
        temperature, top_k, top_p: of the distribution that is sampled, trained and compared: one and the same.
        value_head: a linear value function on the model's last hidden state. critic: "separate" gives the value
            function a body of its own, a copy of the model's.
        lora: rank, or arguments of `peft.LoraConfig`; None: all of the model's parameters are trained.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        autocast: "bf16" or "fp16": the forward passes run in it; log-probabilities stay fp32. None: "bf16" where the
            trained parameters came as that and `dtype` is left, else as the model is.
        dtype: "fp32" or "bf16": what all parameters are turned into; trained in bf16, small steps are lost. None:
            those that are trained become fp32, frozen ones (under adapters) stay as they are.
        share_prefix: a prompt is read once for all of its rows in the update, too, where that pays.
        chunk: rows whose logits are held at once; None: about 8 MiB of them.
        rows_at_once: rows that are sampled together.
        encoder: how texts become ids. None: the env's, or made from `tokenizer`.
        vocabulary: digest of the vocabulary that the model has been trained with, `Encoder.vocabulary`; files of agents
            hold it. None: that of the first tokenizer that comes.
        optimizer_class, optimizer_kwargs: AdamW without weight decay.

    Raises:
        ConfigError: `model` is none, the tokenizer has ids beyond it, nothing in it is trainable, a number is out of
            range, or there are no such adapters.
    """

    backbone: CausalLM

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Callable[[float], float],
        use_sde: bool = False,
        *,
        model: Model | None = None,
        tokenizer: Any = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        value_head: bool = False,
        critic: str | None = None,
        lora: int | dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        autocast: str | None = None,
        dtype: str | None = None,
        share_prefix: bool = True,
        chunk: int | None = None,
        rows_at_once: int = 256,
        encoder: Encoder | dict[str, Any] | None = None,
        vocabulary: str | None = None,
        optimizer_class: type[th.optim.Optimizer] = th.optim.AdamW,
        optimizer_kwargs: dict[str, Any] | None = None,
    ) -> None:
        _check(model, use_sde, temperature, top_k, top_p, critic, value_head, autocast, dtype, rows_at_once, chunk)
        assert model is not None
        super().__init__(
            observation_space,
            action_space,
            optimizer_class=optimizer_class,
            optimizer_kwargs={"weight_decay": 0.0} if optimizer_kwargs is None else optimizer_kwargs,
        )
        self.has_value = value_head
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.rows_at_once = rows_at_once
        self._arguments = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "value_head": value_head,
            "critic": critic,
            "lora": lora,
            "gradient_checkpointing": gradient_checkpointing,
            "autocast": autocast,
            "dtype": dtype,
            "share_prefix": share_prefix,
            "chunk": chunk,
            "rows_at_once": rows_at_once,
        }
        loaded, computed_in = make_model(model, lora, None if dtype is None else PRECISIONS[dtype])
        if autocast is None and computed_in is not None:
            autocast = self._arguments["autocast"] = "bf16"
        self.backbone = CausalLM(
            loaded,
            temperature,
            top_k,
            top_p,
            None if autocast is None else PRECISIONS[autocast],
            gradient_checkpointing,
            share_prefix,
            chunk,
        )
        self.vocabulary = vocabulary
        self.encoder = encoder_of(encoder, tokenizer)
        if self.encoder is not None:
            self.fit(self.encoder)
        self.value_net = self.critic = None
        if value_head:
            self.critic = self.backbone.copy_of_body().requires_grad_(True) if critic == "separate" else None
            if self.critic is not None and dtype is None:
                widen(self.critic)
            self.value_net = nn.Linear(self.backbone.width, 1)
            nn.init.zeros_(self.value_net.weight)
            nn.init.zeros_(self.value_net.bias)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not any(parameter.requires_grad for parameter in self.backbone.parameters()):
            raise ConfigError(
                "model: no trainable parameter, all have requires_grad=False (a frozen adapter?). Unfreeze some, or ask"
                " for adapters with policy_kwargs={'lora': 8}"
            )
        self.optimizer = optimizer_class(trained, lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]

    # --- what GRPO asks -----------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> bool:
        """Whether the model lies under PEFT's adapters, so that it is its own reference."""
        return base_model(self.backbone.model) is not self.backbone.model

    def compute_in(self, dtype: th.dtype | None) -> None:
        """The forward passes run in `dtype` by autocast from now on; None: as `autocast` says."""
        if dtype is not None:
            self.backbone.autocast = dtype

    @property
    def autocast(self) -> th.dtype | None:
        """What the forward passes run in; None: as the model is."""
        return self.backbone.autocast

    def fit(self, encoder: Encoder) -> None:
        """From now on texts become ids as `encoder` says, which takes the model's limits.

        Raises:
            ConfigError: It has ids that the model does not embed, or others than those that this policy has been
                trained with.
        """
        encoder.fit_model(self.backbone.vocab_size, self.backbone.context, self.backbone.eos_ids)
        if self.vocabulary not in (None, encoder.vocabulary):
            raise ConfigError(
                "the tokenizer gives other ids to its tokens than the one that this policy was trained with, so that"
                " the model would read and write other texts: give the env that tokenizer (policy.encoder.tokenizer)."
                " Where the change is meant, set policy.vocabulary = None first, and the env by set_env then"
            )
        self.encoder, self.vocabulary = encoder, encoder.vocabulary

    def frozen_copy(self) -> CausalLMPolicy:
        """A copy for reference: no optimiser, no gradient, no value function."""
        optimizer, self.optimizer = self.optimizer, None  # type: ignore[assignment]
        try:
            frozen = copy.deepcopy(self)
        finally:
            self.optimizer = optimizer
        frozen.value_net = frozen.critic = None
        frozen.has_value = False
        frozen.set_training_mode(False)
        return frozen.requires_grad_(False)

    def sample(
        self, prompts: Sequence[Sequence[int]], rows_per_prompt: int, max_new_tokens: int, seeds: np.ndarray | None
    ) -> Generation:
        """Completions of `prompts`, see `generate`; `seeds` None takes the most likely tokens."""
        assert self.encoder is not None
        return generate(
            self.backbone,
            prompts,
            rows_per_prompt,
            max_new_tokens,
            seeds=seeds,
            eos_ids=self.encoder.eos_ids,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=self.encoder.stop.found if self.encoder.stop.strings else None,
            rows_at_once=self.rows_at_once,
            device=self.backbone.device,
        )

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Values (M, 1) or None, log-probabilities and entropies (M,) of tokens (M,), fp32.

        `obs` are rows of a `TokenBuffer` (see `CausalLM.trained_states`), or observations of a `TokenEnv`.
        """
        states = self._states(self.backbone, obs)
        log_prob, entropy = self.backbone.log_probs(states, actions.long().flatten())
        return self._values(states, obs), log_prob, entropy

    def predict_values(self, obs: Any) -> Tensor:
        """Values (M, 1), fp32. Raises AttributeError when the policy was built without a value head."""
        if self.value_net is None:
            raise AttributeError("This policy is critic-free: it has no value function. Build it with value_head=True.")
        values = self._values(None if self.critic is not None else self._states(self.backbone, obs), obs)
        assert values is not None
        return values

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor | None, Tensor]:
        """Next tokens (N,), values (N, 1) or None and log-probabilities (N,) for observations of a `TokenEnv`."""
        states = self._states(self.backbone, obs)
        logits = candidate_logits(self.backbone.logits(states).float() / self.temperature, self.top_k, self.top_p)
        distribution = th.distributions.Categorical(logits=logits)
        token = logits.argmax(dim=-1) if deterministic else distribution.sample()
        return token, self._values(states, obs), distribution.log_prob(token)

    def _states(self, backbone: Any, obs: Any) -> Tensor:
        if "tokens" in obs:
            return backbone.trained_states(obs)
        ids, mask = obs["input_ids"].long(), obs["attention_mask"].bool()
        return backbone.hidden(ids, mask, positions(mask))[:, -1]

    def _values(self, states: Tensor | None, obs: Any) -> Tensor | None:
        if self.value_net is None:
            return None
        if self.critic is not None:
            states = self._states(_WithBody(self.backbone, self.critic), obs)
        assert states is not None
        return self.value_net(states.to(self.value_net.weight.dtype)).float()

    # --- text ---------------------------------------------------------------------------------------------------------

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """The completion of a prompt: a str for one, a list for a list (or array) of them; `state` passes through.

        A prompt is a text or a list of messages, and becomes ids as in training: through the chat template where that
        was on chats, a text as the user's message, with the system prompt. Observations of a `TokenEnv` get its
        actions, as in SB3. `deterministic` takes the most likely tokens; sampling is seeded by numpy's generator.

        Raises:
            ConfigError: No prompts, one that leaves no room for a completion, no tokenizer, or a text in the middle of
                an episode, which is not the whole conversation.
        """
        if isinstance(observation, Mapping) and "role" not in observation:
            return super().predict(observation, state, episode_start, deterministic)  # type: ignore[arg-type]
        if self.encoder is None:
            raise ConfigError("predict needs a tokenizer: policy_kwargs={'tokenizer': …}, or an env, which has one")
        sources, single = prompts_of(observation)
        going_on = [] if episode_start is None else (~np.asarray(episode_start, bool)).tolist()
        if any(now and not isinstance(text, TokenText) for text, now in zip(sources, going_on, strict=False)):
            raise ConfigError(
                "predict: this env shows what was said last, and the model needs all of the conversation. Evaluate on"
                " TurnVecEnv(lambda: YourEnv(), tokenizer), which shows that"
            )
        self.set_training_mode(False)
        seeds = None if deterministic else np.random.randint(2**62, size=len(sources))
        prompts = [self.encoder.ids_of(source) for source in sources]
        for row, ids in enumerate(prompts):
            self.encoder.check_length(len(ids), f"predict, text {row}")
        if not prompts:
            return [], state
        said = self.sample(prompts, 1, self.encoder.max_new_tokens, seeds).ids
        texts = [self.encoder.decode(ids) for ids in said]
        return (texts[0] if single else texts), state

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        return self(observation, deterministic)[0]

    # --- files --------------------------------------------------------------------------------------------------------

    def save_pretrained(self, path: str | Path, merge: bool = False) -> None:
        """Writes the model and the tokenizer as transformers loads them; the value function is left out.

        Args:
            path: A folder, made if needed.
            merge: Of a model under adapters, a whole model with them merged into its weights, which transformers loads
                alone. Otherwise PEFT's adapters are written, and loading them needs the model that they lie on, too.
        """
        save_model(self.backbone.model, path, merge)
        if self.encoder is not None and hasattr(self.encoder.tokenizer, "save_pretrained"):
            self.encoder.tokenizer.save_pretrained(path)

    def portable(self) -> dict[str, Any]:
        """Arguments that build such a policy anywhere, without its weights: plain data, which a file can hold."""
        encoder = None if self.encoder is None else portable_encoder(self.encoder)
        model = portable_model(self.backbone.model)
        return self._arguments | {"model": model, "encoder": encoder, "vocabulary": self.vocabulary}

    def _get_constructor_parameters(self) -> dict[str, Any]:
        spaces = {"observation_space": self.observation_space, "action_space": self.action_space}
        return {**spaces, **self.portable(), "lr_schedule": _zero}


class _WithBody:
    """A `CausalLM` whose forward passes go through another body."""

    def __init__(self, backbone: CausalLM, body: nn.Module) -> None:
        self._backbone, self.body = backbone, body

    def __getattr__(self, name: str) -> Any:
        member = getattr(type(self._backbone), name, None)
        return member.__get__(self) if callable(member) else getattr(self._backbone, name)


class BaseUnderAdapters(nn.Module):
    """The reference policy of a model under adapters: the model without them. It has no parameters of its own."""

    def __init__(self, policy: CausalLMPolicy) -> None:
        super().__init__()
        self._policy = (policy,)  # not a submodule: its parameters are the policy's

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """As the policy's, without the adapters."""
        with self._policy[0].backbone.adapters_off():
            return self._policy[0].evaluate_actions(obs, actions)

    def set_training_mode(self, mode: bool) -> None:
        pass


def _zero(progress: float) -> float:
    return 0.0


def _check(
    model: Any,
    use_sde: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    critic: str | None,
    value_head: bool,
    autocast: str | None,
    dtype: str | None,
    rows_at_once: int,
    chunk: int | None,
) -> None:
    if model is None:
        raise ConfigError("CausalLMPolicy: give policy_kwargs={'model': a path, a hub id or a module}")
    if use_sde:
        raise ConfigError("use_sde=True explores with continuous actions; a language model samples tokens")
    check_number("temperature", temperature)
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature={temperature}: expected above 0; predict(…, deterministic=True) is greedy")
    check_whole("top_k", top_k, 0)
    check_number("top_p", top_p)
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p}: expected above 0 and up to 1, which keeps all tokens")
    check_whole("rows_at_once", rows_at_once)
    check_whole("chunk", 1 if chunk is None else chunk)
    if critic not in (None, "separate"):
        raise ConfigError(f'critic={critic!r}: expected "separate", or None for a head on the model itself')
    if critic is not None and not value_head:
        raise ConfigError(f'critic="{critic}" is a value function: it goes with value_head=True')
    for name, value, valid in (("autocast", autocast, ("bf16", "fp16")), ("dtype", dtype, ("fp32", "bf16"))):
        if value is not None and value not in valid:
            raise ConfigError(f"{name}={value!r:.80}: expected one of {', '.join(valid)}; None leaves it to the model")
