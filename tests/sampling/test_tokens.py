"""The token sampler: whole groups of one prompt, conversations, refills, and steps that are tokens."""

from __future__ import annotations

import re
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from tiny_models import agreement, language_model, reversal_env, rewarded, sampled, tiny, tokenizer

from grpo_rl.errors import ConfigError
from grpo_rl.sampling.tokens import completion_metrics, repetition
from grpo_rl.text.prompt_env import PromptEnv
from grpo_rl.text.spaces import Unicode
from grpo_rl.text.turns import TurnVecEnv


def test_a_rollout_is_whole_groups_of_one_prompt() -> None:
    model = language_model(n_steps=12, group_size=4)
    rollout = sampled(model)
    assert len(rollout.tokens) == 12 and len(rollout.prompts) == 3
    assert rollout.prompt_of.tolist() == [n // 4 for n in range(12)]
    assert len(set(rollout.group[0])) == 3
    assert (rollout.group[0] == rollout.group[0][rollout.prompt_of * 4]).all()


def test_equal_prompts_stay_separate_groups() -> None:
    model = language_model(reversal_env(n_prompts=1), n_steps=12)
    rollout = sampled(model)
    assert len({tuple(prompt) for prompt in rollout.prompts}) == 1
    assert len(set(rollout.group[0])) == 3
    before = set(rollout.group[0])
    assert not before & set(sampled(model).group[0]), "nor do groups of two rollouts mix"


class Steps(BaseCallback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def _on_step(self) -> bool:
        self.seen.append((self.num_timesteps, dict(self.locals)))
        return True


def test_env_steps_are_sampled_tokens() -> None:
    steps = Steps()
    model = language_model().learn(150, callback=steps)
    tokens = [sum(map(len, seen["completion_ids"])) for _, seen in steps.seen]
    assert [count for count, _ in steps.seen] == np.cumsum(tokens).tolist()
    assert model.num_timesteps == sum(tokens) and sum(tokens[:-1]) < 150 <= sum(tokens)
    infos = steps.seen[0][1]["infos"]
    assert [info["episode"]["l"] for info in infos] == [len(ids) for ids in steps.seen[0][1]["completion_ids"]]
    assert np.mean([info["r"] for info in model.ep_info_buffer]) == pytest.approx(
        np.mean([r for _, seen in steps.seen for r in seen["rewards"]][-100:])
    )


def test_a_callback_can_stop_it() -> None:
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return False

    model = language_model()
    before = th.nn.utils.parameters_to_vector(model.policy.parameters()).clone()
    model.learn(10_000, callback=Stop())
    assert th.equal(before, th.nn.utils.parameters_to_vector(model.policy.parameters()))
    assert 0 < model.num_timesteps < 200


def test_one_seed_gives_one_rollout() -> None:
    first, second, other = (sampled(language_model(seed=seed)).tokens for seed in (3, 3, 4))
    assert first == second != other


# --- conversations ----------------------------------------------------------------------------------------------------
class Echo(gym.Env[str, str]):
    """Asks three times; each reply tells how long the answer was, and the reward is 1 for each answer."""

    observation_space = action_space = Unicode()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turn = 0
        return "abc"[int(self.np_random.integers(3))] + ">", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "uv>", 1.0, self.turn == 3, False, {}


def talk_env(**settings: Any) -> TurnVecEnv:
    return TurnVecEnv(Echo, tokenizer(), max_new_tokens=4, max_turns=5, seed=0, **settings)


def test_what_the_env_says_is_read_but_not_trained() -> None:
    model = language_model(talk_env(), n_steps=8)
    rollout = sampled(model)
    reply = tokenizer()("uv>", add_special_tokens=False)["input_ids"]
    for ids, own, n in zip(rollout.tokens, rollout.trained, rollout.lengths, strict=True):
        assert sum(own) == n and len(own) == len(ids)
        said = [t for t, mine in zip(ids, own, strict=True) if not mine]
        assert said == reply * 2, "two replies between three answers"
    assert rollout.rewards.sum(axis=0).tolist() == [3.0] * 8
    assert rollout.max_length == 4 * 5
    assert model.num_timesteps == rollout.lengths.sum()


def test_log_probabilities_of_later_turns_see_all_that_was_said() -> None:
    """Ids survive a turn of the env: the ratio is 1 for every token of a conversation."""
    model = language_model(talk_env(), n_steps=8, policy_kwargs={"temperature": 0.6, "top_k": 9})
    sampled(model)
    (batch,) = model.rollout_buffer.get()
    log_prob = model.policy.evaluate_actions(batch.observations, batch.actions)[1]
    th.testing.assert_close(log_prob, batch.old_log_prob, rtol=0, atol=2e-5)


class Paying(gym.Env[str, str]):
    """Two turns; pays in the first for an answer that begins with a … l, and goes on only then; in the second twice."""

    observation_space = action_space = Unicode()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turn = 0
        return "ab>", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        pay = float("a" <= action[:1] <= "l")
        return "uv>", self.turn * pay, self.turn == 2 or not pay, False, {}


def test_credit_goes_to_turns_beside_members_that_are_as_far() -> None:
    """Turn 0 is worth all that a member earns, turn 1 what it earns there, less the mean of those that have one.

    Rewards are 1 and 2, so that a member with both turns has earned 1 or 3 in all, and 0 or 2 in the second.
    """
    env = TurnVecEnv(Paying, tokenizer(), max_new_tokens=4, max_turns=2, seed=0)
    model = language_model(env, group_size=16, n_steps=16, advantage_scale="none", baseline="mean")
    rollout = sampled(model)
    second = np.array([n for n in range(16) if rollout.turn[rollout.lengths[n] - 1, n] == 1])
    assert 3 < len(second) < 16
    earned = rollout.outcome.copy()
    np.testing.assert_array_equal(rollout.rewards.sum(axis=0), earned)
    assert set(earned[second].tolist()) == {1.0, 3.0} and not np.delete(earned, second).any()
    for n in range(16):
        turn, own = rollout.turn[: rollout.lengths[n], n], rollout.advantages[: rollout.lengths[n], n].numpy()
        np.testing.assert_allclose(own[turn == 0], earned[n] - earned.mean(), atol=1e-6)
        np.testing.assert_allclose(own[turn == 1], earned[n] - earned[second].mean(), atol=1e-6)


def test_credit_of_the_outcome_is_the_same_in_all_turns() -> None:
    env = TurnVecEnv(Paying, tokenizer(), max_new_tokens=4, max_turns=2, seed=0)
    model = language_model(env, group_size=16, n_steps=16, advantage_scale="none", baseline="mean", credit="outcome")
    rollout = sampled(model)
    expected = (rollout.outcome - rollout.outcome.mean()) * rollout.mask
    np.testing.assert_allclose(rollout.advantages.numpy(), expected, atol=1e-6)


def test_of_one_turn_there_is_one_credit() -> None:
    """Both kinds give the same advantages for completions of a prompt."""
    both = [sampled(language_model(credit=credit)).advantages for credit in ("reward_to_go", "outcome")]
    th.testing.assert_close(both[0], both[1], rtol=0, atol=0)


def test_the_weighted_baseline_weighs_by_tokens() -> None:
    """OPO: lengths 1 … 6 and rewards in order; the baseline is Σ length · reward / Σ length of the group."""
    model = language_model(rewarded(0.0, 1.0, 2.0, 5.0), n_steps=4, baseline="weighted", advantage_scale="none")
    rollout = sampled(model)
    assert len(set(rollout.lengths.tolist())) > 1
    mean = (rollout.lengths * rollout.outcome).sum() / rollout.lengths.sum()
    np.testing.assert_allclose(rollout.advantages[0].numpy(), rollout.outcome - mean, atol=1e-5)


# --- groups that tie --------------------------------------------------------------------------------------------------
def test_refill_takes_other_groups_in_place_of_tied_ones() -> None:
    """Groups of 2 with rewards (0, 1), (1, 1), (1, 0), (2, 2) …: half of them tie and are sampled anew."""
    env = rewarded(0.0, 1.0, 1.0, 1.0)
    rollout = sampled(language_model(env, group_size=2, n_steps=8, tied_groups="refill"))
    assert len(rollout.tokens) == 8 and not rollout.tied().any()
    assert len(rollout.prompts) == 4 and rollout.prompt_of.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_refill_gives_up_after_a_while() -> None:
    model = language_model(rewarded(1.0), group_size=2, n_steps=4, tied_groups="refill")
    with pytest.warns(UserWarning, match="0 of 2 groups are left"):
        rollout = sampled(model)
    assert len(rollout.tokens) == 4 and rollout.tied().all(), "then the last ones stay"


def test_metrics_by_hand() -> None:
    """Rewards (0, 1 | 2, 2): mean 1.25, one of two groups ties."""
    model = language_model(rewarded(0.0, 1.0, 2.0, 2.0), group_size=2, n_steps=4)
    rollout = sampled(model)
    figures = completion_metrics(rollout, ("in_order",))
    assert figures["reward"] == 1.25 == figures["rewards/in_order/mean"]
    assert figures["reward_std"] == pytest.approx(np.std([0, 1, 2, 2], ddof=1))
    assert figures["frac_reward_zero_std"] == 0.5
    assert figures["completions/mean_length"] == rollout.lengths.mean()
    assert figures["completions/min_length"] == min(map(len, rollout.tokens)) > 0
    assert figures["completions/max_length"] == max(map(len, rollout.tokens))
    assert figures["completions/clipped_ratio"] == rollout.truncated.mean()
    assert figures["entropy"] > 0


def test_repetition_by_hand() -> None:
    """1 2 1 2 1 2: of four 3-grams two are new. 5 5 5 5: two, one of them new. 1 2 3 4: none repeats."""
    assert repetition([1, 2, 1, 2, 1, 2]) == 0.5
    assert repetition([5, 5, 5, 5]) == 0.5
    assert repetition([1, 2, 3, 4]) == repetition([1, 2]) == repetition([]) == 0


@pytest.mark.parametrize(
    ("loop", "ends", "expected"),
    [(50.0, True, {"repetition"}), (0.0, False, {"cut_completions"}), (0.0, True, set())],
    ids=["one letter for ever", "no end", "healthy"],
)
def test_the_monitor_names_loops_and_cut_completions(loop: float, ends: bool, expected: set[str]) -> None:
    """A loop is never ended, which follows from it and is not said as well."""
    from grpo_rl import HealthMonitor

    model, tok = tiny(tie_word_embeddings=False), tokenizer()
    model.lm_head.bias = th.nn.Parameter(th.zeros(26))
    with th.no_grad():
        model.lm_head.bias[5] = loop
    if not ends:
        tok.eos_token = None
    env = PromptEnv(["abc>", "cde>"], [agreement], tok, max_new_tokens=12)
    monitor = HealthMonitor(say=lambda line: None)
    language_model(env, model, learning_rate=1e-6).learn(3500, callback=monitor)
    found = {finding.name for finding in monitor.findings}
    assert found & {"repetition", "cut_completions"} == expected
    assert not any("normalize_reward" in cure for finding in monitor.findings for cure in finding.cures)


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "a group of one"),
        ({"n_steps": 10}, "n_steps=10 completions are no whole groups of group_size=4: take 8 or 12"),
        ({"n_steps": 3}, "take 4 completions"),
        ({"loss_type": "cispo"}, "clip_range_high"),
        ({"loss_type": "dapoo"}, 'did you mean "dapo"'),
        ({"tied_groups": "skip"}, "valid: keep, mask, drop, refill"),
        ({"normalize_reward": True}, "normalize_reward=True is for control"),
        ({"grouping": "fork"}, "who is compared with whom"),
        ({"fork_prob": 0.5}, "fork_prob=0.5 is for control, and this env is one of texts; members start at their"),
        ({"reset_prob": 0.0}, "reset_prob=0.0 is for control"),
        ({"sde_sample_freq": 4}, "sde_sample_freq=4 is for control"),
        ({"cold_start_ramp": 100}, "cold_start_ramp=100 is for control"),
        ({"normalize_advantage": False}, 'normalize_advantage=False is for control.*write advantage_scale="none"'),
        ({"baseline": "moving_average", "advantage_scale": "group"}, "a z-score about the group mean"),
        ({"reference_mix": 0.5}, "give kl_coef and reference_every"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        language_model(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 2}, "group_size=2 is small for n_steps=16 completions: .* 1 other, .* Take 4 or more"),
        ({"group_size": 3, "n_steps": 12}, "2 others"),
        ({"group_size": 4, "n_steps": 160}, "Take 5 or more"),
        ({"group_size": 4, "n_steps": 512}, "Take 8 or more"),
        ({}, ""),
        ({"group_size": 8, "n_steps": 1024}, ""),
        ({"group_size": 2, "baseline": "moving_average"}, ""),
        ({"group_size": 1, "value_head": True}, ""),
    ],
    ids=str,
)
def test_a_small_group_is_warned_about(settings: dict[str, Any], said: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        language_model(**settings)
    small = [str(w.message) for w in caught if "is small for" in str(w.message)]
    assert len(small) == bool(said) and all(re.search(said, line) for line in small)


def test_a_prompt_longer_than_the_context_is_named() -> None:
    """The model has 128 positions: 130 letters, row 1 of the data, do not fit."""
    with pytest.raises(ConfigError, match=r"row 1\b.*128"):
        language_model(rewarded(0.0, prompts=["ab>", "a" * 130 + ">"]))


def test_text_needs_a_language_model_and_a_loss_over_completions_needs_text() -> None:
    from grpo_rl import GRPO

    with pytest.raises(ConfigError, match='needs policy "CausalLMPolicy"'):
        GRPO("MlpPolicy", reversal_env(), device="cpu")
    with pytest.raises(ConfigError, match='loss_type="gspo" is over whole completions'):
        GRPO("MlpPolicy", "CartPole-v1", loss_type="gspo", device="cpu")
    with pytest.raises(ConfigError, match="micro_batch_size=2 is for completions"):
        GRPO("MlpPolicy", "CartPole-v1", micro_batch_size=2, device="cpu")
    assert tiny().config.vocab_size == 26
