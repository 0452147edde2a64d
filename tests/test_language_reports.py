"""What users of TRL, verl and OpenRLHF have reported, as tests: each names its reports (T = TRL)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.logger import configure
from tiny_models import Largest, gradient, language_model, reversal_env, rewarded, sampled, tiny, tokenizer

from grpo_rl import GRPO
from grpo_rl import advantages as adv
from grpo_rl.errors import ConfigError, NonFiniteError
from grpo_rl.text.prompt_env import PromptEnv

LOSSES = ["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "rloo", "sapo", "cispo"]


def logged(model: Any) -> dict[str, Any]:
    """The log of one update."""
    model.set_logger(configure(None, []))
    sampled(model)
    model.train()
    return model.logger.name_to_value


def test_t2703_the_loss_is_0_at_the_start_and_the_gradient_is_not() -> None:
    """In the first step on whole groups Σ A = 0: the loss says nothing of progress, the log has the reward."""
    log = logged(language_model(rewarded(0.0, 1.0, 0.5, 3.0), loss_type="grpo"))
    assert abs(log["train/policy_gradient_loss"]) < 1e-6
    assert log["train/grad_norm"] > 1e-2
    assert log["reward"] == 1.125


def test_t3857_groups_that_tie_leave_the_policy_where_it_is() -> None:
    """Each group has one reward, the batch has two: the gradient is exactly 0, and the log says why."""
    model = language_model(rewarded(*[1.0] * 4, *[0.0] * 4), n_steps=8)
    log = logged(model)
    assert log["frac_reward_zero_std"] == 1 and log["reward_std"] > 0
    assert log["train/grad_norm"] == 0


def test_nemo4161_equal_rewards_but_one_have_bounded_advantages() -> None:
    """Seven 0.35 and one other, fp32: a residue of the std must not be divided by."""
    for other in (0.35 + 1e-7, 0.36, 10.0):
        model = language_model(rewarded(*[0.35] * 7, other), group_size=8, n_steps=8)
        assert sampled(model).advantages.abs().max() < 3


def test_openrlhf1272_t7068_t6365_three_answers_to_a_tied_group() -> None:
    """Rewards (1, 1 | 0, 2) and a reference policy elsewhere: "keep" has a KL gradient from the tied group, "mask" and
    "drop" have none; "mask" counts its tokens in the denominator, "drop" does not."""
    gradients = {}
    for choice in ("keep", "mask", "drop"):
        model = language_model(rewarded(1.0, 1.0, 0.0, 2.0), group_size=2, n_steps=4, kl_coef=1.0, tied_groups=choice)
        with th.no_grad():
            for p in model.reference_policy.parameters():
                p.mul_(0.9)
        rollout = sampled(model)
        gradients[choice] = gradient(model)
        share = rollout.lengths[2:].sum() / rollout.lengths.sum()
    th.testing.assert_close(gradients["mask"], gradients["drop"] * share, rtol=1e-3, atol=1e-5)
    assert (gradients["keep"] - gradients["mask"]).norm() > 1e-2 * gradients["keep"].norm()


def test_t5775_a_reward_of_none_is_left_out() -> None:
    """(1, None, 2, 6): the mean is that of the three, 3; None has advantage 0; all figures are finite."""
    model = language_model(rewarded(1.0, None, 2.0, 6.0), n_steps=4, advantage_scale="none", baseline="mean")
    log = logged(model)
    rollout = model.rollout_buffer
    th.testing.assert_close(rollout.advantages[0], th.tensor([-2.0, 0.0, -1.0, 3.0]))
    assert log["reward"] == 3.0
    assert all(np.isfinite(v) for v in log.values() if isinstance(v, float))


def test_several_rewards_are_weighed_and_none_of_one_leaves_the_others() -> None:
    def first(prompts: list[str], **columns: Any) -> list[Any]:
        return [1.0, None, 0.0, 2.0]

    def second(prompts: list[str], **columns: Any) -> list[Any]:
        return [1.0, 1.0, 0.0, None]

    env = PromptEnv(["ab>"], [first, second], tokenizer(), max_new_tokens=4, reward_weights=[1.0, 10.0])
    model = language_model(env, n_steps=4, baseline="mean", advantage_scale="none")
    log = logged(model)
    rewards = th.tensor([11.0, 10.0, 0.0, 2.0])
    th.testing.assert_close(model.rollout_buffer.advantages[0], rewards - rewards.mean())
    assert log["rewards/first/mean"] == 1.0 and log["rewards/second/mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("eos", [(1,), (1, 3, 7), ()], ids=["one", "several", "none"])
@pytest.mark.parametrize("pad", ["own", "eos", "none"])
def test_t7039_t6357_verl3805_t3287_ends_and_padding(eos: tuple[int, ...], pad: str) -> None:
    """Several EOS ids, pad == eos, no EOS, no pad token: masks are lengths, the first EOS counts, all is finite."""
    tok = tokenizer()
    if not eos:
        tok.eos_token = None
    if pad == "none":
        tok.pad_token = None
    elif pad == "eos" and eos:
        tok.pad_token = tok.eos_token
    env = PromptEnv(
        ["ab>", "c>"], [lambda completion_ids, **columns: [float(len(ids) % 3) for ids in completion_ids]], tok,
        max_new_tokens=9, eos_token_ids=eos[1:],
    )  # fmt: skip
    log = logged(language_model(env))
    assert all(np.isfinite(v) for v in log.values() if isinstance(v, float))


def test_the_first_eos_is_trained_and_nothing_after_it() -> None:
    env = PromptEnv(
        ["ab>"], [lambda prompts, **c: list(map(float, range(len(prompts))))], tokenizer(), max_new_tokens=9
    )
    rollout = sampled(language_model(env, n_steps=32))
    ended = ~rollout.truncated
    assert ended.any()
    for n in np.flatnonzero(ended):
        assert rollout.tokens[n][-1] == tokenizer().eos_token_id and 1 not in rollout.tokens[n][:-1]
        assert rollout.mask[:, n].sum() == len(rollout.tokens[n])


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen"])
def test_t3029_swift8442_t3000_the_ratio_is_1_before_the_first_update(family: str) -> None:
    """At T = 0.6 with top-k and top-p, dropout 0.1 in the model, prompts of unlike lengths."""
    kwargs = {"temperature": 0.6, "top_k": 12, "top_p": 0.9}
    model = language_model(reversal_env(), tiny(family, dropout=0.1), kwargs)
    model.policy.set_training_mode(True)
    sampled(model)
    model.policy.set_training_mode(True)
    (batch,) = model.rollout_buffer.get()
    log_prob = model.policy.evaluate_actions(batch.observations, batch.actions)[1]
    th.testing.assert_close((log_prob - batch.old_log_prob).exp(), th.ones(len(log_prob)), rtol=0, atol=2e-5)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_t5619_verl7321_micro_batches_never_change_a_gradient(loss_type: str) -> None:
    """1, 2, 4 and uneven micro-batches of completions of unlike lengths, with a KL, an entropy bonus and values."""
    gradients = []
    for size in (None, 8, 4, 3, 1):
        model = language_model(
            reversal_env(max_new_tokens=9),
            tiny(),
            loss_type=loss_type,
            clip_range_high=5.0 if loss_type == "cispo" else None,
            micro_batch_size=size,
            kl_coef=0.1,
            ent_coef=0.01,
            value_head=True,
            group_weight=1.0,
        )
        with th.no_grad():
            for p in model.reference_policy.parameters():
                p.mul_(0.9)
        rollout = sampled(model)
        assert len(set(rollout.lengths)) > 2
        gradients.append(gradient(model))
    for other in gradients[1:]:
        th.testing.assert_close(gradients[0], other, rtol=1e-3, atol=1e-5)


def test_t2496_entropy_is_positive_and_of_the_tokens_chosen() -> None:
    log = logged(language_model())
    assert log["entropy"] > 0
    assert log["train/entropy_loss"] == pytest.approx(-log["entropy"], rel=1e-4)


def test_the_entropy_bonus_is_the_same_for_every_loss() -> None:
    """−c · mean token entropy: with tied groups nothing else moves, and every loss has one gradient."""
    gradients = []
    for loss_type in LOSSES:
        high = 5.0 if loss_type == "cispo" else None
        model = language_model(rewarded(1.0), loss_type=loss_type, clip_range_high=high, ent_coef=0.1)
        sampled(model)
        gradients.append(gradient(model))
    for other in gradients[1:]:
        th.testing.assert_close(gradients[0], other, rtol=1e-4, atol=1e-7)
    assert gradients[0].norm() > 0


def test_t3148_t5863_saved_and_gone_on_is_as_if_never_stopped(tmp_path: Path) -> None:
    from grpo_rl.checkpoint import load_checkpoint, save_checkpoint

    def agent() -> Any:
        return language_model(reversal_env(seed=0), tiny(), kl_coef=0.05, reference_every=2, n_epochs=2, batch_size=8)

    whole = agent().learn(400)
    first = agent().learn(200)
    save_checkpoint(first, tmp_path / "run")
    second = agent()
    load_checkpoint(second, tmp_path / "run")
    second.learn(400 - second.num_timesteps, reset_num_timesteps=False)
    assert second.num_timesteps == whole.num_timesteps
    for (name, a), b in zip(whole.policy.state_dict().items(), second.policy.state_dict().values(), strict=True):
        assert th.equal(a, b), name


def test_t6966_rewards_see_prompt_completion_and_ids() -> None:
    seen: dict[str, Any] = {}

    def look(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [0.0] * len(prompts)

    env = PromptEnv([{"prompt": "ab>", "answer": "ba"}], [look], tokenizer(), max_new_tokens=4)
    rollout = sampled(language_model(env, n_steps=4))
    assert seen["prompts"] == ["ab>"] * 4 and seen["answer"] == ["ba"] * 4
    assert [list(ids) for ids in seen["completion_ids"]] == rollout.tokens
    assert seen["completions"] == [tokenizer().decode(ids, skip_special_tokens=True) for ids in rollout.tokens]


def test_a_gradient_that_is_not_finite_takes_no_step() -> None:
    model = language_model(reversal_env())
    sampled(model)
    model.rollout_buffer.advantages[0, 0] = float("nan")
    model.set_logger(configure(None, []))
    before = th.nn.utils.parameters_to_vector(model.policy.parameters()).clone()
    with pytest.raises(NonFiniteError, match="not finite"):
        model.train()
    assert th.equal(before, th.nn.utils.parameters_to_vector(model.policy.parameters()))


def test_t3678_logits_never_dominate_memory() -> None:
    """16 completions of 20 tokens at 8192 ids: 2.6 million logits would be one tensor. The largest is the embedding's
    own gradient, 8192 × 32, for sampling, reference and update together."""
    env = PromptEnv(["ab>"], [lambda prompts, **c: [0.0, 1.0] * (len(prompts) // 2)], tokenizer(), max_new_tokens=20)
    model = language_model(env, tiny(vocabulary=8192), {"chunk": 16}, kl_coef=0.1, n_steps=16)
    model.set_logger(configure(None, []))
    with Largest() as largest:
        rollout = sampled(model)
        model.train()
    assert rollout.mask.sum() > 300
    assert largest.elements == 8192 * 32


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_the_trust_region_and_target_kl_see_the_whole_rollout(micro_batch_size: int | None) -> None:
    """KL(π_old‖π) over all tokens, in micro-batches as in one: above twice the target the scale falls by 1.5."""
    settings: dict[str, Any] = {"learning_rate": 1e-2, "micro_batch_size": micro_batch_size, "target_kl": 1e-5}
    model = language_model(reversal_env(), trust_region="learning_rate", **settings)
    log = logged(model)
    (batch,) = model.rollout_buffer.get()
    log_prob = model.policy.evaluate_actions(batch.observations, batch.actions)[1].detach()
    d = log_prob - batch.old_log_prob
    assert log["train/kl"] > 2e-5
    assert log["train/kl"] == pytest.approx((d.exp() - 1 - d).mean().item(), rel=1e-3)
    assert model.kl_scale == pytest.approx(1 / 1.5)
    stopped = language_model(reversal_env(), n_epochs=5, **settings)
    assert logged(stopped)["train/n_updates"] == 2, "the second epoch is where it shows"


# --- what goes with a reference policy --------------------------------------------------------------------------------
def test_the_reference_moves_by_its_mix() -> None:
    """mix 0.25: a quarter of the way to the policy at every second update."""
    model = language_model(kl_coef=0.1, reference_every=2, reference_mix=0.25)
    model.set_logger(configure(None, []))
    start = model.policy.state_dict()["backbone.model.lm_head.weight"].clone()
    for _ in range(2):
        sampled(model)
        model.train()
    now = model.policy.state_dict()["backbone.model.lm_head.weight"]
    assert not th.equal(now, start)
    reference = model.reference_policy.state_dict()["backbone.model.lm_head.weight"]
    th.testing.assert_close(reference, start + 0.25 * (now - start))


def test_adapters_learn_against_the_base_under_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = tiny()
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = language_model(reversal_env(), base, {"lora": 4}, kl_coef=0.1, learning_rate=1e-2)
    log = logged(model)
    assert log["train/reference_kl"] == pytest.approx(0, abs=1e-6)
    log = logged(model)
    assert log["train/reference_kl"] > 0
    kept = model.policy.backbone.lm.state_dict()
    for name, value in weights.items():
        assert th.equal(value, kept.get(name, kept.get(name.replace(".weight", ".base_layer.weight")))), name
    model.save(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", device="cpu")
    assert loaded.predict("abc>", deterministic=True) == model.predict("abc>", deterministic=True)
    with pytest.raises(ConfigError, match="the base model, which does not move"):
        language_model(reversal_env(), tiny(), {"lora": 4}, kl_coef=0.1, reference_every=2)


# --- defaults ---------------------------------------------------------------------------------------------------------
def test_defaults_are_the_policys() -> None:
    env = reversal_env()
    model = GRPO("CausalLMPolicy", env, policy_kwargs={"model": tiny()}, device="cpu")
    assert (model.learning_rate, model.gamma, model.n_epochs, model.max_grad_norm) == (1e-6, 1.0, 1, 1.0)
    assert (model.n_steps, model.batch_size, model.loss_type, model.scale) == (64, None, "dapo", "group")
    given = GRPO("CausalLMPolicy", env, 3e-4, gamma=0.99, policy_kwargs={"model": tiny()}, device="cpu")
    assert (given.learning_rate, given.gamma) == (3e-4, 0.99), "a number that is given is taken, even if it is PPO's"
    gspo = language_model(loss_type="gspo")
    assert (gspo.clip_range(1), gspo.clip_range_high) == (3e-4, 4e-4)
    assert language_model(loss_type="dr_grpo").scale == "none"
    control = GRPO("MlpPolicy", "CartPole-v1", device="cpu")
    assert (control.learning_rate, control.batch_size, control.loss_type) == (3e-4, 64, "clipped")
    assert type(control.learning_rate) is float and type(control.batch_size) is int


def test_the_advantage_of_a_completion_is_that_of_the_pure_function() -> None:
    model = language_model(rewarded(1.0, 2.0, 4.0, 9.0), n_steps=4)
    rollout = sampled(model)
    rewards = th.tensor([[1.0, 2.0, 4.0, 9.0]])
    z = (rewards - 4) / (rewards.std() + 1e-4)
    th.testing.assert_close(rollout.advantages, z * th.as_tensor(rollout.mask))
    assert adv.SCALES == ("none", "group", "batch")
