"""Tiny random language models of three families, and what the tests of text share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_rl.text.tokenizing import char_tokenizer

ALPHABET = "abcdefghijklmnopqrstuv>"


def tiny(family: str = "llama", vocabulary: int = 26, seed: int = 0, dropout: float = 0.0, **more: Any) -> Any:
    """A random model with sharp logits: an untrained one is so uniform that mistakes would not show."""
    import transformers as tr

    sizes: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if family == "gpt2":
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
        sizes |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    else:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 128, "attention_dropout": dropout}
    config, model = {
        "gpt2": (tr.GPT2Config, tr.GPT2LMHeadModel),
        "llama": (tr.LlamaConfig, tr.LlamaForCausalLM),
        "qwen": (tr.Qwen2Config, tr.Qwen2ForCausalLM),
        "gemma": (tr.Gemma2Config, tr.Gemma2ForCausalLM),
    }[family]
    th.manual_seed(seed)
    made: Any = model(config(**(sizes | more)))
    with th.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return made


def tokenizer() -> Any:
    return char_tokenizer(ALPHABET)


def reversal_env(n_prompts: int = 64, length: int = 3, letters: str = "abcd", **settings: Any) -> Any:
    """Reverse `length` letters; the reward is the share of right characters, in the right places."""
    from grpo_rl.text.prompt_env import PromptEnv

    rng = np.random.default_rng(0)
    prompts = ["".join(rng.choice(list(letters), length)) + ">" for _ in range(n_prompts)]
    return PromptEnv(prompts, [agreement], tokenizer(), **({"max_new_tokens": length + 1} | settings))


def agreement(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Share of places where a completion is its prompt's word backwards."""
    scores = []
    for prompt, said in zip(prompts, completions, strict=True):
        word = prompt[:-1][::-1]
        scores.append(sum(a == b for a, b in zip(word, said, strict=False)) / max(len(word), len(said)))
    return scores


def language_model(
    env: Any = None, model: Any = None, policy_kwargs: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """A GRPO agent on a tiny model, quiet and on one core."""
    from grpo_rl import GRPO

    kwargs = {"model": tiny() if model is None else model} | (policy_kwargs or {})
    small = {"group_size": 4, "n_steps": 16, "learning_rate": 1e-3, "seed": 0, "device": "cpu"}
    return GRPO("CausalLMPolicy", reversal_env() if env is None else env, policy_kwargs=kwargs, **(small | settings))


def sampled(model: Any) -> Any:
    """The rollout that the next update would be made on; nothing is learnt."""
    if model._last_obs is None:
        model._setup_learn(10**6, None)
    callback = model._init_callback(None)
    callback.on_training_start({}, {})
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model.rollout_buffer


def rewarded(*scores: Any, prompts: Any = ("ab>", "cd>", "ba>", "dc>"), **settings: Any) -> Any:
    """An env whose reward function gives the scores in order, and begins anew after the last."""
    from grpo_rl.text.prompt_env import PromptEnv

    def in_order(prompts: list[str], **columns: Any) -> list[Any]:
        return [scores[i % len(scores)] for i in range(len(prompts))]

    return PromptEnv(list(prompts), [in_order], tokenizer(), **({"max_new_tokens": 6} | settings))


def gradient(model: Any) -> th.Tensor:
    """The gradient of the whole rollout's loss, in the micro-batches that the model asks for."""
    model.policy.zero_grad()
    for batch in model.rollout_buffer.get(model.batch_size):
        for part in model.rollout_buffer.parts(batch, model.micro_batch_size):
            model.loss(part, 0.2)[0].backward()
    return th.cat([p.grad.flatten() for p in model.policy.parameters() if p.grad is not None])


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, th.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out
