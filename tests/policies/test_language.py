"""`CausalLMPolicy`: what SB3 and users see of a language model."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.logger import configure
from tiny_models import ALPHABET, language_model, reversal_env, tiny, tokenizer

from grpo_rl import GRPO
from grpo_rl.checkpoint import load_checkpoint, save_checkpoint
from grpo_rl.errors import ConfigError, NonFiniteError
from grpo_rl.policies.language import CausalLMPolicy
from grpo_rl.text.spaces import Unicode
from grpo_rl.text.tokenizing import Encoder, char_tokenizer

PROMPTS = [[3, 4, 5], [7]]


def policy(model: Any = None, **settings: Any) -> CausalLMPolicy:
    settings = {"encoder": Encoder(tokenizer(), 6)} | settings
    return CausalLMPolicy(Unicode(), Unicode(), lambda _: 1e-3, model=tiny() if model is None else model, **settings)


def rows(tokens: int = 4) -> tuple[dict[str, th.Tensor], th.Tensor]:
    """Two completions of each of two prompts; of the second's the first token is an env's."""
    th.manual_seed(1)
    ids = th.randint(2, 26, (4, tokens))
    trained = th.ones(4, tokens, dtype=th.bool)
    trained[1, 0] = trained[3, -1] = False
    prompts, mask = th.tensor([[3, 4, 5], [0, 0, 7]]), th.tensor([[1, 1, 1], [0, 0, 1]]).bool()
    obs = {"prompts": prompts, "prompt_mask": mask, "prompt_of": th.arange(4) // 2, "tokens": ids, "trained": trained}
    return obs, ids[trained]


def test_importing_grpo_rl_imports_no_transformers() -> None:
    code = "import grpo_rl.grpo, sys; assert not {'transformers', 'peft', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_evaluate_actions_gives_the_chosen_tokens_only() -> None:
    """14 of 16 tokens were chosen by the policy; each log-probability is the whole row's, read in one piece."""
    mine, (obs, actions) = policy(), rows()
    values, log_prob, entropy = mine.evaluate_actions(obs, actions)
    assert values is None and log_prob.shape == entropy.shape == (14,)
    expected = []
    for n in range(4):
        prompt = PROMPTS[n // 2]
        ids = th.tensor([prompt + obs["tokens"][n].tolist()])
        log_p = mine.backbone.lm(input_ids=ids).logits[0].log_softmax(-1)
        for t in range(4):
            if obs["trained"][n, t]:
                expected.append(log_p[len(prompt) + t - 1, ids[0, len(prompt) + t]])
    th.testing.assert_close(log_prob, th.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("critic", [None, "separate"])
def test_value_head(critic: str | None) -> None:
    """Values begin at 0; a separate critic leaves the model without a gradient of the value loss, a shared one not."""
    mine, (obs, actions) = policy(value_head=True, critic=critic), rows()
    values = mine.evaluate_actions(obs, actions)[0]
    assert values is not None and values.shape == (14, 1) and (values == 0).all()
    th.testing.assert_close(mine.predict_values(obs), values)
    with th.no_grad():
        mine.value_net.weight.normal_()
    values = mine.evaluate_actions(obs, actions)[0]
    th.testing.assert_close(mine.predict_values(obs), values, rtol=1e-4, atol=1e-5)
    values.square().sum().backward()
    touched = any(p.grad is not None and p.grad.abs().sum() > 0 for p in mine.backbone.parameters())
    assert touched == (critic is None)


def test_without_a_value_head_there_is_no_value() -> None:
    mine = policy()
    assert mine.value_net is None and not any("value" in name for name, _ in mine.named_parameters())
    with pytest.raises(AttributeError, match="value_head=True"):
        mine.predict_values(rows()[0])


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        mine, (obs, actions) = policy(gradient_checkpointing=checkpointing), rows()
        mine.set_training_mode(True)
        layer = mine.backbone.body.layers[0]
        assert layer.training == checkpointing and not layer.self_attn.training
        mine.evaluate_actions(obs, actions)[1].sum().backward()
        gradients.append(th.cat([p.grad.flatten() for p in mine.parameters() if p.grad is not None]))
        mine.set_training_mode(False)
        assert not layer.training
    th.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_bf16_autocast_keeps_log_probabilities_in_fp32() -> None:
    mine, (obs, actions) = policy(), rows()
    exact = mine.evaluate_actions(obs, actions)[1]
    half = policy(autocast="bf16")
    log_prob = half.evaluate_actions(obs, actions)[1]
    assert log_prob.dtype == th.float32
    difference = (log_prob - exact).abs().max()
    assert 0 < difference < 0.5
    assert all(p.dtype == th.float32 for p in half.parameters())


def test_lora_trains_the_adapters_only_and_is_its_own_reference() -> None:
    pytest.importorskip("peft")
    from grpo_rl.policies.language import BaseUnderAdapters

    mine, (obs, actions) = policy(lora=2), rows()
    assert mine.adapters
    trained = [name for name, p in mine.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    reference = BaseUnderAdapters(mine)
    assert not list(reference.parameters())
    base = policy().evaluate_actions(obs, actions)[1]
    with th.no_grad():
        for name, p in mine.named_parameters():
            if "lora_B" in name:
                p.normal_()
    assert (mine.evaluate_actions(obs, actions)[1] - base).abs().max() > 0.1
    th.testing.assert_close(reference.evaluate_actions(obs, actions)[1], base)


def test_a_frozen_copy_is_apart() -> None:
    mine, (obs, actions) = policy(value_head=True), rows()
    frozen = mine.frozen_copy()
    before = frozen.evaluate_actions(obs, actions)[1]
    assert not any(p.requires_grad for p in frozen.parameters()) and frozen.value_net is None
    with th.no_grad():
        next(mine.backbone.parameters()).add_(1)
    th.testing.assert_close(frozen.evaluate_actions(obs, actions)[1], before, rtol=0, atol=0)


# --- text in, text out ------------------------------------------------------------------------------------------------
def test_predict_gives_a_text_for_a_text_and_a_list_for_a_list() -> None:
    mine = policy()
    said, state = mine.predict("abc>", deterministic=True)
    assert isinstance(said, str) and state is None
    both, _ = mine.predict(["abc>", "b>"], deterministic=True)
    assert isinstance(both, list) and both[0] == said
    assert mine.predict(np.array(["abc>"], object), deterministic=True)[0] == [said]
    assert mine.predict([], deterministic=True)[0] == []
    np.random.seed(0)
    first = mine.predict(["abc>"] * 8)[0]
    np.random.seed(0)
    assert mine.predict(["abc>"] * 8)[0] == first and len(set(first)) > 1


@pytest.mark.parametrize("wrong", [None, 3, [3], ["abc>", None], np.array([1, 2]), b"abc>"])
def test_predict_wants_texts(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="predict: expected a text or a list of texts"):
        policy().predict(wrong)


def test_predict_names_the_text_that_is_too_long() -> None:
    mine = policy()
    mine.encoder.context = 8
    with pytest.raises(ConfigError, match="predict, text 1: the prompt has 30 tokens"):
        mine.predict(["a>", "a" * 30])


def test_weights_that_are_not_finite_are_said() -> None:
    mine = policy()
    with th.no_grad():
        for p in mine.parameters():
            p.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="the model's logits are not finite"):
        mine.predict("abc>")
    broken = mine.backbone.lm
    with pytest.raises(ConfigError, match="model: its logits are not finite"):
        policy(model=broken)


def test_an_env_of_numbers_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'"CausalLMPolicy" needs an env of texts .* or a TokenEnv, got observations Box'
    ):
        GRPO("CausalLMPolicy", "CartPole-v1", policy_kwargs={"model": tiny(), "tokenizer": tokenizer()})


def test_save_pretrained_loads_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mine = policy()
    mine.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, a), b in zip(mine.backbone.model.state_dict().items(), loaded.state_dict().values(), strict=True):
        th.testing.assert_close(a, b, rtol=0, atol=0, msg=name)
    assert AutoTokenizer.from_pretrained(tmp_path)("abc>")["input_ids"] == tokenizer()("abc>")["input_ids"]
    again = policy(str(tmp_path))  # a path is a model, too
    assert again.predict("abc>", deterministic=True) == mine.predict("abc>", deterministic=True)


def test_adapters_are_merged_into_a_whole_model_that_transformers_loads(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    mine = policy(lora=2)
    with th.no_grad():
        for name, parameter in mine.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    mine.save_pretrained(tmp_path, merge=True)
    ids = th.tensor([[3, 4, 5, 6]])
    ours, theirs = mine.backbone.lm(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    th.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    with mine.backbone.adapters_off():
        assert not th.allclose(mine.backbone.lm(ids).logits, ours, atol=1e-2)
    assert all(th.equal(value, before[name]) for name, value in mine.state_dict().items()), "a copy was merged"


def test_adapters_of_a_module_are_said_to_need_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with pytest.warns(UserWarning, match=r"adapters only, .*save_pretrained\(path, merge=True\)"):
        policy(lora=2).save_pretrained(tmp_path)
    peft.PeftModel.from_pretrained(tiny(), tmp_path)  # as the warning advises
    with pytest.raises(ConfigError, match="expected the path of a folder, got None"):
        policy().save_pretrained(None)  # type: ignore[arg-type]


def other_tokenizer() -> Any:
    """As many tokens, with other ids."""
    return char_tokenizer(ALPHABET[::-1])


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model, words = language_model(), "the tokenizer gives other ids to its tokens"
    model.save(tmp_path / "agent")
    other = reversal_env()
    other.encoder = Encoder(other_tokenizer(), 4)
    with pytest.raises(ConfigError, match=words):
        GRPO.load(tmp_path / "agent", env=other, device="cpu")
    loaded = GRPO.load(tmp_path / "agent", device="cpu")
    with pytest.raises(ConfigError, match=words):
        loaded.set_env(other)
    loaded.policy.vocabulary = None  # meant, as the message says
    loaded.set_env(other)
    assert loaded.policy.vocabulary == other.encoder.vocabulary
    save_checkpoint(model, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="the checkpoint's vocabulary of the tokenizer is"):
        load_checkpoint(language_model(other), tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="another vocabulary than the env's tokenizer"):
        language_model(policy_kwargs={"tokenizer": other_tokenizer()})
    language_model(policy_kwargs={"tokenizer": tokenizer()})


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"lora": "8"}, "lora='8': expected a whole number, 1 or more"),
        ({"lora": True}, "lora=True: expected a whole number"),
        ({"lora": {"rank": 8}}, 'peft.LoraConfig has no "rank"'),
        ({"lora": {"r": 8, "target_modules": ["nope"]}}, "lora=.*nope.*not found"),
        ({"temprature": 1.0}, 'CausalLMPolicy has no "temprature": did you mean "temperature"'),
        ({"temperature": "1"}, "temperature='1': expected a number"),
        ({"top_p": None}, "top_p=None: expected a number"),
        ({"top_k": 2.5}, "top_k=2.5: expected a whole number"),
        ({"rows_at_once": 0}, "rows_at_once=0: expected a whole number, 1 or more"),
        ({"chunk": "x"}, "chunk='x': expected a whole number"),
        ({"model": {"model_type": "nope"}}, "transformers makes no causal language model of it"),
        ({"tokenizer": "gpt2"}, "expected one of transformers, got 'gpt2'"),
        ({"optimizer_class": "adam"}, "build no CausalLMPolicy: TypeError"),
    ],
    ids=str,
)
def test_arguments_of_the_policy_that_cannot_work_are_said(kwargs: dict[str, Any], words: str) -> None:
    if "lora" in kwargs:
        pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=words):
        language_model(policy_kwargs=kwargs)


@pytest.mark.parametrize("settings", [{}, {"value_head": True}, {"kl_coef": 0.1}], ids=str)
def test_an_agent_survives_its_zip(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Text settings, weights and tokenizer: it predicts without an env, and trains on with one."""
    from grpo_rl import GRPO

    model = language_model(policy_kwargs={"temperature": 0.7}, **settings).learn(64)
    model.save(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", device="cpu")
    for (name, a), b in zip(model.policy.state_dict().items(), loaded.policy.state_dict().values(), strict=True):
        th.testing.assert_close(a, b, rtol=0, atol=0, msg=name)
    assert loaded.policy.temperature == 0.7
    assert loaded.predict("abc>", deterministic=True) == model.predict("abc>", deterministic=True)
    GRPO.load(tmp_path / "agent", env=reversal_env(), device="cpu").learn(64)


def test_a_file_that_names_a_model_to_be_fetched_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `save` writes is a configuration; a name, which would be looked up on a hub, was put there by somebody."""
    from grpo_rl import GRPO
    from grpo_rl.errors import UntrustedError

    model = language_model()
    honest = CausalLMPolicy.portable
    monkeypatch.setattr(CausalLMPolicy, "portable", lambda self: honest(self) | {"model": "somebody/something"})
    model.save(tmp_path / "agent")
    with pytest.raises(UntrustedError, match="names a model to be fetched, 'somebody/something'"):
        GRPO.load(tmp_path / "agent", device="cpu")


def test_a_policy_alone_survives_its_file(tmp_path: Path) -> None:
    mine = policy(temperature=0.5)
    mine.save(str(tmp_path / "policy.pt"))
    loaded = CausalLMPolicy.load(str(tmp_path / "policy.pt"))
    assert loaded.temperature == 0.5
    assert loaded.predict("abc>", deterministic=True) == mine.predict("abc>", deterministic=True)


def test_another_env_takes_the_place_of_the_first() -> None:
    """Its tokenizer, limits and rewards count from then on."""
    model = language_model()
    model.learn(64)
    model.set_env(reversal_env(max_new_tokens=9))
    model.learn(64)
    assert model.rollout_buffer.max_length == 9 and model.policy.encoder.max_new_tokens == 9


@pytest.mark.parametrize(
    "kwargs",
    [{"autocast": "bf16"}, {"autocast": "bf16", "gradient_checkpointing": True}, {"dtype": "bf16"}, {"chunk": 3}],
    ids=str,
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_precisions_and_checkpointing_train(family: str, kwargs: dict[str, Any]) -> None:
    """Half precision samples by cache and trains in one pass: near the same, and KL 0 within its rounding."""
    model = language_model(model=tiny(family), policy_kwargs=kwargs, kl_coef=0.1, learning_rate=1e-4)
    before = th.nn.utils.parameters_to_vector(model.policy.parameters()).clone()
    model.set_logger(configure(None, []))
    model.learn(150)
    log = model.logger.name_to_value
    after = th.nn.utils.parameters_to_vector(model.policy.parameters())
    assert after.isfinite().all() and not th.equal(after, before)
    assert after.dtype == (th.bfloat16 if "dtype" in kwargs else th.float32)
    assert abs(log["train/approx_kl"]) < 0.05 and np.isfinite(log["train/grad_norm"])


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "give policy_kwargs"),
        ({"model": th.nn.Linear(2, 2)}, "expected a causal language model"),
        ({"model": 3}, "expected a causal language model"),
        ({"temperature": 0}, "temperature=0: expected above 0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"critic": "separate"}, "goes with value_head=True"),
        ({"critic": "own", "value_head": True}, 'expected "separate"'),
        ({"autocast": "int8"}, "expected one of bf16"),
        ({"use_sde": True}, "continuous actions"),
        ({"model": tiny().requires_grad_(False)}, "no trainable parameter"),
        ({"model": tiny(vocabulary=20)}, "the tokenizer does not match the model"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    model = settings.pop("model", "tiny")
    with pytest.raises(ConfigError, match=message):
        CausalLMPolicy(
            Unicode(),
            Unicode(),
            lambda _: 1e-3,
            **({"model": tiny() if isinstance(model, str) else model, "encoder": Encoder(tokenizer(), 6)} | settings),
        )


def test_predict_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        policy(encoder=None).predict("abc>")


# --- chats and evaluation ---------------------------------------------------------------------------------------------
CHAT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}>"


def test_predict_reads_prompts_as_training_did(tmp_path: Path) -> None:
    """Trained on messages, a text goes through the template as the user's, system prompt included; also once loaded."""
    from grpo_rl.text import PromptEnv

    chat = [{"role": "user", "content": "ab"}]
    settings: dict[str, Any] = {"max_new_tokens": 4, "system_prompt": "cd", "chat_template": CHAT}
    env = PromptEnv(
        [chat] * 4, lambda completions, **columns: [float(len(c)) for c in completions], tokenizer(), **settings
    )
    model = language_model(env).learn(30)
    model.save(tmp_path / "agent")
    for mine in (model, GRPO.load(tmp_path / "agent", device="cpu")):
        read: list[str] = []
        honest = mine.policy.sample

        def sample(prompts: Any, *more: Any, read: list[str] = read, honest: Any = honest) -> Any:
            read += [tokenizer().decode(ids) for ids in prompts]
            return honest(prompts, *more)

        mine.policy.sample = sample
        alone = mine.predict("ab", deterministic=True)[0]
        assert isinstance(alone, str) and mine.predict(chat, deterministic=True)[0] == alone
        assert mine.predict([chat, "ab"], deterministic=True)[0] == [alone, alone]
        assert read == [env.source[0].text] * 4 == ["scduab>"] * 4
    with pytest.raises(ConfigError, match="expected a text or a list of texts, or messages"):
        model.predict({"role": "user", "content": "ab"})


def test_sb3_evaluates_on_a_prompt_env() -> None:
    """As it is, under a Monitor, or many columns at a time: one and the same score."""
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    from grpo_rl.text import PromptVecEnv

    model = language_model(reversal_env(n_prompts=1))
    scores = [
        evaluate_policy(model, env, n_eval_episodes=4, warn=False)
        for env in (reversal_env(1), Monitor(reversal_env(1)), PromptVecEnv(reversal_env(1), n_envs=2))
    ]
    assert scores[0] == scores[1] == scores[2]
    callback = EvalCallback(Monitor(reversal_env(1)), eval_freq=1, n_eval_episodes=2, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is another kind of VecEnv than in training
        model.learn(64, callback=callback)
    assert np.isfinite(callback.last_mean_reward)


def test_a_conversation_is_not_evaluated_by_its_last_text() -> None:
    """SB3 would show the model what was said last only."""
    from stable_baselines3.common.evaluation import evaluate_policy

    class Talk(gym.Env[str, str]):
        observation_space = action_space = Unicode()

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            self.turn = 0
            return "ab>", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.turn += 1
            return "ba>", 1.0, self.turn == 2, False, {}

    with pytest.raises(ConfigError, match=r"needs all of the conversation\. Evaluate on TurnVecEnv"):
        evaluate_policy(language_model(), Talk(), n_eval_episodes=1, warn=False)
