"""What is trained in which float type, and that a saved model comes back as it was: adapters, what is frozen, kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch as th
from tiny_models import language_model, tiny, tokenizer

from grpo_rl import GRPO
from grpo_rl.errors import ConfigError
from grpo_rl.text.prompt_env import PromptEnv

HALF = th.bfloat16


def dense(**settings: Any) -> Any:
    """Longer completions pay, so that each group has a gradient."""

    def long(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [len(ids) + 0.1 * ids[0] for ids in completion_ids]

    return PromptEnv(["ab>", "cd>", "ba>", "dc>"], [long], tokenizer(), **({"max_new_tokens": 6} | settings))


def moved(model: Any, tokens: int) -> float:
    """The share of weights that training changes."""
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(tokens)
    after = model.policy.state_dict()
    return sum(int((before[k] != after[k]).sum()) for k in before) / sum(v.numel() for v in before.values())


def under_adapters(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **({"r": 2} | settings)))


def test_a_bf16_checkpoint_is_trained_in_fp32(tmp_path: Path) -> None:
    """A step of 1e-6 is below half of bf16's spacing at most weights: without fp32 weights 0.1 % of them would move."""
    tiny().bfloat16().save_pretrained(tmp_path)
    model = language_model(dense(), model=str(tmp_path), learning_rate=1e-6)
    assert {p.dtype for p in model.policy.parameters()} == {th.float32} and model.policy.autocast == HALF
    assert moved(model, 300) > 0.5


@pytest.mark.parametrize(("dtype", "kept"), [(None, th.float32), ("fp32", th.float32), ("bf16", HALF)])
def test_dtype_says_what_the_weights_are(dtype: str | None, kept: th.dtype) -> None:
    """Of a module in bf16; asked for bf16 weights, it says what is lost."""
    kwargs = {} if dtype is None else {"dtype": dtype}
    if dtype == "bf16":
        with pytest.warns(UserWarning, match="16-bit weights are trained"):
            model = language_model(model=tiny().bfloat16(), policy_kwargs=kwargs)
    else:
        model = language_model(model=tiny().bfloat16(), policy_kwargs=kwargs)
    assert {p.dtype for p in model.policy.parameters()} == {kept}
    assert model.policy.autocast == (HALF if dtype is None else None)


def test_an_fp16_model_is_trained_and_computed_in_fp32() -> None:
    model = language_model(model=tiny().half())
    assert {p.dtype for p in model.policy.parameters()} == {th.float32} and model.policy.autocast is None


def test_the_frozen_base_of_adapters_stays_in_bf16() -> None:
    pytest.importorskip("peft")
    model = language_model(dense(), model=tiny().bfloat16(), policy_kwargs={"lora": 2}).learn(40)
    assert {p.dtype for p in model.policy.parameters() if not p.requires_grad} == {HALF}
    assert {p.dtype for p in model.policy.parameters() if p.requires_grad} == {th.float32}


@pytest.mark.parametrize(
    "kwargs", [{"dtype": "fp16"}, {"autocast": "fp32"}, {"dtype": "half"}, {"autocast": 16}], ids=str
)
def test_other_types_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        language_model(policy_kwargs=kwargs)


def partly_frozen() -> Any:
    model = tiny()
    model.model.layers[0].requires_grad_(False)
    return model


MODELS: dict[str, Any] = {
    "adapters of one's own": lambda: under_adapters(tiny(), target_modules=["q_proj", "up_proj"]),
    "adapters on bf16": lambda: under_adapters(tiny().bfloat16()),
    "adapters that begin elsewhere": lambda: under_adapters(tiny(), init_lora_weights="gaussian", use_dora=True),
    "partly frozen": partly_frozen,
    "partly frozen in bf16": lambda: partly_frozen().bfloat16(),
    "bf16": lambda: tiny().bfloat16(),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    """Weights and types bit for bit, what is trained, and the next update."""
    model = language_model(dense(), model=MODELS[kind]()).learn(30)
    model.save(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", env=dense(), device="cpu")
    ours, theirs = (list(one.policy.named_parameters()) for one in (model, loaded))
    assert [(n, p.dtype, p.requires_grad) for n, p in ours] == [(n, p.dtype, p.requires_grad) for n, p in theirs]
    assert all(th.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert loaded.policy.autocast == model.policy.autocast and loaded.policy.adapters == model.policy.adapters
    ids = th.arange(3, 9).unsqueeze(0)
    with th.no_grad(), model.policy.backbone._precision():
        assert th.equal(model.policy.backbone.lm(input_ids=ids).logits, loaded.policy.backbone.lm(input_ids=ids).logits)
    before = [p.clone() for _, p in theirs]
    loaded.learn(30)
    for (name, now), old in zip(loaded.policy.named_parameters(), before, strict=True):
        assert now.requires_grad or th.equal(now, old), name


def test_prompts_of_peft_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match=r"PROMPT_TUNING.*expected adapters inside the model, such as LoRA"):
        language_model(model=peft.get_peft_model(tiny(), config))
