"""A `transformers` causal language model as a policy uses it: hidden states of what is trained, logits of what is next.

The forward passes go through the model's body; logits are made where they are wanted only, in `token_logprobs`. Prompts
are left-padded with explicit positions, completions right-padded.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch as th
from torch import Tensor, nn

from grpo_rl.errors import ConfigError
from grpo_rl.logprobs import token_logprobs
from grpo_rl.policies.models import base_model
from grpo_rl.precision import autocast
from grpo_rl.text.generation import positions

SHARED_SAVING = 0.2
"""A group's prompt is read once in the update where that saves more than this share of its tokens."""


class CausalLM(nn.Module):
    """The model with its switches. It keeps dropout off: what is sampled and what is trained are one distribution.

    Args:
        model: a causal language model, or PEFT's around one.
        temperature, top_k, top_p: of the distribution, see `token_logprobs`.
        autocast: the float type of the forward passes; None: the model's own.
        gradient_checkpointing: keep no activations inside the layers, but compute them again in the backward pass.
        share_prefix: read a prompt once for all of its rows in the update, too, where that pays.
        chunk: rows whose logits are held at once; None: by the vocabulary.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        autocast: th.dtype | None = None,
        gradient_checkpointing: bool = False,
        share_prefix: bool = True,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self.autocast, self.chunk = autocast, chunk
        self.share_prefix, self.gradient_checkpointing = share_prefix, gradient_checkpointing
        lm = self.lm
        if gradient_checkpointing:
            if hasattr(lm, "activation_checkpointing_enable"):
                lm.activation_checkpointing_enable({"use_reentrant": False})
            else:  # transformers' former name for it
                lm.gradient_checkpointing_enable({"use_reentrant": False})
            if not lm.get_input_embeddings().weight.requires_grad:  # adapters: something must need a gradient
                lm.enable_input_require_grads()
        self._cache_name = "cache" if "cache" in inspect.signature(self.body.forward).parameters else "past_key_values"
        self.train(False)
        self._plain_head = self._probe_head()

    @property
    def lm(self) -> Any:
        return base_model(self.model)

    @property
    def body(self) -> Any:
        return getattr(self.lm, self.lm.base_model_prefix)

    @property
    def device(self) -> th.device:
        return self.lm.get_input_embeddings().weight.device

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        return self.lm.get_input_embeddings().weight.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.lm.get_input_embeddings().weight.shape[0]

    @property
    def context(self) -> int | None:
        """Tokens that the model can take in all; None: it does not say."""
        return getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text by the model's own configuration."""
        for config in (getattr(self.lm, "generation_config", None), self.lm.config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                ids = ids if isinstance(ids, list | tuple) else [ids]
                return tuple(int(i) for i in ids if 0 <= i < self.vocab_size)
        return ()

    def train(self, mode: bool = True) -> CausalLM:
        """Dropout stays off. Only layers that checkpoint their activations learn of the mode: they ask for it."""
        super().train(False)
        if mode and self.gradient_checkpointing:
            for module in self.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.training = True
        return self

    # --- forward passes -----------------------------------------------------------------------------------------------

    def hidden(self, ids: Tensor, mask: Tensor | None, position: Tensor, cache: Any = None) -> Tensor:
        """Hidden states (B, L, D) of `ids` (B, L) after what `cache` holds, which grows by them.

        `mask` (B, past + L) is None where all of it is 1, or where nothing real follows the 0s.
        """
        with self._precision():
            return self.body(
                input_ids=ids,
                attention_mask=None if mask is None else mask.long(),
                position_ids=position,
                use_cache=cache is not None,
                **({} if cache is None else {self._cache_name: cache}),
            ).last_hidden_state

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.lm.config)

    def next_logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """See `LanguageModel.next_logits`."""
        cache = self.new_cache() if cache is None else cache
        last = self.hidden(ids, mask, positions, cache)[:, -1]
        return self.logits(last).float(), cache

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) of hidden states (…, D)."""
        head = self.lm.get_output_embeddings()
        if self._plain_head:
            return nn.functional.linear(hidden.to(head.weight.dtype), head.weight, getattr(head, "bias", None))
        return self._own_logits(hidden)

    def log_probs(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (M,), fp32, of `targets` (M,) after hidden states (M, D)."""
        head = self.lm.get_output_embeddings()
        if self._plain_head:
            weight, bias = head.weight, getattr(head, "bias", None)
        else:
            hidden, weight, bias = self._own_logits(hidden), None, None
        return token_logprobs(hidden, weight, targets, bias=bias, chunk=self.chunk, **self.sampling)

    def trained_states(self, rows: dict[str, Tensor]) -> Tensor:
        """Hidden states (M, D) that predict the trained tokens, in the order of `rows["trained"]`.

        Args:
            rows: prompts (P, Lp) int64 left-padded with prompt_mask (P, Lp); prompt_of (R,) index into them; tokens
                (R, L) int64 right-padded: what follows the prompt; trained (R, L) bool, those that the policy chose.
        """
        prompts, seen, of, tokens = rows["prompts"], rows["prompt_mask"], rows["prompt_of"], rows["tokens"]
        before = tokens[:, :-1]  # the last token predicts nothing
        if self._shares(len(prompts), len(tokens), prompts.shape[1], before.shape[1]):
            cache = self.new_cache()
            padded = not bool(seen.all())
            first = self.hidden(prompts, seen if padded else None, positions(seen), cache)[:, -1:][of]
            states = first
            if before.shape[1]:
                cache.batch_select_indices(of)
                mask = th.cat([seen[of], th.ones_like(before, dtype=seen.dtype)], dim=1) if padded else None
                position = seen.sum(dim=1)[of].unsqueeze(1) + th.arange(before.shape[1], device=before.device)
                states = th.cat([first, self.hidden(before, mask, position, cache)], dim=1)
            return states[rows["trained"]]
        mask = th.cat([seen[of], th.ones_like(before, dtype=seen.dtype)], dim=1)
        ids = th.cat([prompts[of], before], dim=1)
        states = self.hidden(ids, None if seen.all() else mask, positions(mask))
        return states[:, prompts.shape[1] - 1 :][rows["trained"]]

    def _shares(self, prompts: int, rows: int, prompt_length: int, length: int) -> bool:
        if not self.share_prefix or (self.gradient_checkpointing and th.is_grad_enabled()):
            return False
        if any(
            getattr(layer, "is_sliding", False) or hasattr(layer, "conv_states") for layer in self.new_cache().layers
        ):
            return False
        return (rows - prompts) * prompt_length > SHARED_SAVING * rows * (prompt_length + length)

    @contextlib.contextmanager
    def adapters_off(self) -> Iterator[None]:
        """The base model under the adapters."""
        with self.model.disable_adapter():  # type: ignore[operator]
            yield

    def copy_of_body(self) -> nn.Module:
        return copy.deepcopy(self.body)

    def _precision(self) -> Any:
        return autocast(self.device, self.autocast)

    @th.no_grad()
    def _probe_head(self) -> bool:
        """Whether the head alone makes the logits: some models scale or cap them afterwards."""
        self._plain_head = True
        ids = th.arange(min(4, self.vocab_size), device=self.device).unsqueeze(0)
        with self._precision():
            theirs = self.lm(input_ids=ids).logits.float()
            if not theirs.isfinite().all():
                raise ConfigError("model: its logits are not finite, so its weights are damaged: load another file")
            ours = self.logits(self.body(input_ids=ids).last_hidden_state).float()
        return th.allclose(theirs, ours, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Logits by the model's own forward, whose body is made to return `hidden`."""
        body, name = self.body, self.lm.base_model_prefix
        hidden = hidden.to(self.lm.get_output_embeddings().weight.dtype)
        setattr(self.lm, name, _Given(hidden.unsqueeze(0) if hidden.dim() == 2 else hidden))
        try:
            logits = self.lm(input_ids=hidden.new_zeros(1, hidden.shape[-2], dtype=th.long)).logits
        finally:
            setattr(self.lm, name, body)
        return logits.reshape(*hidden.shape[:-1], -1)


class _Given(nn.Module):
    """Stands for a body that has been run already."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)
