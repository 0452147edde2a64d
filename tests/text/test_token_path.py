"""The two granularities are one: stepping a `TokenEnv` gives what the fast path gives, and GRPO trains on it too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th
from tiny_models import agreement, language_model, sampled, tiny
from tiny_models import tokenizer as tiny_tokenizer

from grpo_rl import GRPO
from grpo_rl.text.prompt_env import PromptEnv
from grpo_rl.text.token_env import TokenEnv
from grpo_rl.text.tokenizing import char_tokenizer
from grpo_rl.text.toy import tiny_llama

KWARGS: dict[str, Any] = {"temperature": 0.6, "top_k": 12, "top_p": 0.9}


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen"])
def test_stepping_token_by_token_gives_the_log_probabilities_of_the_fast_path(family: str) -> None:
    tokenizer = char_tokenizer("abcdefghijklmnopqrstuv>")
    tasks = [PromptEnv([prompt], [agreement], tokenizer, max_new_tokens=6) for prompt in ("abc>", "d>")]
    for task in tasks:
        model = language_model(task, tiny(family), KWARGS, n_steps=4)
        rollout = sampled(model)
        env = TokenEnv(PromptEnv([rollout_prompt(task)], [agreement], tokenizer, max_new_tokens=6), max_length=16)
        for n, ids in enumerate(rollout.tokens):
            obs, _ = env.reset()
            for t, token in enumerate(ids):
                batch = {key: th.as_tensor(value).unsqueeze(0) for key, value in obs.items()}
                log_prob = model.policy.evaluate_actions(batch, th.tensor([token]))[1]
                assert log_prob.item() == pytest.approx(rollout.log_probs[t, n], abs=2e-5)
                obs, reward, terminated, truncated, _ = env.step(token)
            assert terminated or truncated
            assert reward == pytest.approx(rollout.rewards[:, n].sum())


def rollout_prompt(task: PromptEnv) -> str:
    return str(task.reset()[0])


def test_grpo_trains_on_single_tokens_as_on_any_env() -> None:
    """The control path, groups by resets with one seed: it learns to echo a letter."""
    tokenizer = char_tokenizer("ab>")
    task = PromptEnv(["a>", "b>"], [agreement], tokenizer, max_new_tokens=2, seed=0)
    model = GRPO(
        "CausalLMPolicy",
        TokenEnv(task),
        policy_kwargs={"model": tiny_llama(tokenizer, hidden=32, layers=1)},
        learning_rate=1e-2,
        n_steps=64,
        batch_size=64,
        group_size=8,
        seed=0,
        device="cpu",
    )
    assert (model.n_epochs, model.gamma, model.batch_size, model.loss_type) == (1, 1.0, 64, "clipped")
    model.learn(4000)
    assert np.mean([episode["r"] for episode in model.ep_info_buffer]) > 0.8
    action, _ = model.predict(TokenEnv(task).reset()[0], deterministic=True)
    assert np.asarray(action).shape == ()


def variety(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


@pytest.mark.parametrize("settings", [{}, {"advantage_scale": "batch"}, {"normalize_advantage": True}], ids=str)
@pytest.mark.parametrize("group_size", [1, 4])
def test_advantages_of_ppo_are_scaled_over_the_tokens_of_the_rollout(group_size: int, settings: dict[str, Any]) -> None:
    """As SB3's PPO does it by minibatch: mean 0, standard deviation 1, whatever the value head thinks at first."""
    env = PromptEnv(["abc>", "d>"], [variety], tiny_tokenizer(), max_new_tokens=4)
    rollout = sampled(language_model(env, value_head=True, group_size=group_size, group_weight=0.0, **settings))
    counted = rollout.advantages[rollout.tensor(rollout.mask)]
    assert counted.mean().item() == pytest.approx(0, abs=1e-5)
    assert counted.std().item() == pytest.approx(1, abs=1e-5)


def test_without_a_scale_advantages_of_ppo_are_returns_less_values() -> None:
    rollout = sampled(language_model(value_head=True, group_size=1, advantage_scale="none"))
    mask = rollout.tensor(rollout.mask)
    th.testing.assert_close(rollout.advantages[mask], (rollout.returns - rollout.old_values)[mask])


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, "group"),
        ({"baseline": "mean"}, "group"),
        ({"baseline": "moving_average"}, "batch"),
        ({"baseline": "weighted"}, "batch"),
        ({"baseline_discount": 0.9}, "batch"),
        ({"baseline": "moving_average", "loss_type": "dr_grpo"}, "none"),
        ({"baseline": "moving_average", "advantage_scale": "none"}, "none"),
    ],
    ids=str,
)
def test_the_scale_follows_the_loss_and_the_baseline(settings: dict[str, Any], scale: str) -> None:
    assert language_model(**settings).scale == scale


def test_gamma_discounts_by_tokens_to_the_reward_at_the_end() -> None:
    """γ = 1/2 and a reward of 1 for all: L tokens earn 2^(1 − L), less the mean of what the others earn."""
    env = PromptEnv(["abc>"], lambda completions, **columns: [1.0] * len(completions), tiny_tokenizer(), 6)
    rollout = sampled(language_model(env, gamma=0.5, advantage_scale="none", n_steps=4))
    assert len(set(rollout.lengths.tolist())) > 1
    earned = 0.5 ** (rollout.lengths - 1)
    for n, advantage in enumerate(rollout.advantages.T):
        expected = earned[n] - np.delete(earned, n).mean()
        counted = advantage[rollout.mask[:, n]].numpy()
        np.testing.assert_allclose(counted, np.full(rollout.lengths[n], expected), rtol=1e-5)


def test_a_moving_average_of_returns_scaled_over_the_rollout() -> None:
    """The first average is the rollout's own, so advantages are its z-scores, and tokens have their completion's."""
    rollout = sampled(language_model(baseline="moving_average", advantage_scale="batch"))
    totals = rollout.rewards.sum(0)
    expected = (totals - totals.mean()) / totals.std(ddof=1)
    for n, advantage in enumerate(rollout.advantages.T):
        th.testing.assert_close(
            advantage[rollout.mask[:, n]], th.full((int(rollout.mask[:, n].sum()),), float(expected[n]))
        )
