"""The monitor on completions: each injected fault is called by its own name, and nothing else is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch as th
from tiny_models import agreement, language_model, rewarded, sampled, tiny, tokenizer

from grpo_rl import HealthMonitor
from grpo_rl.health import cures_of
from grpo_rl.monitor import Diagnosis, Finding, diagnose, health_metrics
from grpo_rl.text import PromptEnv


def abc(reward: Any = agreement, max_new_tokens: int = 5) -> PromptEnv:
    """Six orders of three letters."""
    prompts = ["abc>", "bca>", "cab>", "acb>", "bac>", "cba>"]
    return PromptEnv(prompts, reward, tokenizer(), max_new_tokens=max_new_tokens, seed=0)


def found(env: PromptEnv, steps: int, model: Any = None, **settings: Any) -> list[Finding]:
    monitor = HealthMonitor(say=lambda line: None)
    small = {"n_steps": 32, "learning_rate": 3e-3}
    language_model(env, model, **(small | settings)).learn(steps, callback=monitor)
    return monitor.findings


def names(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings]


def test_a_healthy_run_raises_none() -> None:
    assert names(found(abc(), 2500)) == []


def test_nothing_but_none_is_not_called_a_tie() -> None:
    (finding,) = found(abc(lambda completions, **columns: [None] * len(completions)), 1200)
    assert finding.name == "unscored" and finding.value == 1
    assert "None" in finding.message and "Try reward functions that give numbers" in finding.message


def endless() -> tuple[Any, Any]:
    """A model that never ends, and the reward of those that do."""
    model = tiny(tie_word_embeddings=False)
    model.lm_head.bias = th.nn.Parameter(th.zeros(26))
    with th.no_grad():
        model.lm_head.bias[tokenizer().eos_token_id] = -50.0

    def ended(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(ids[-1] == tokenizer().eos_token_id) for ids in completion_ids]

    return model, ended


def test_cut_completions_explain_why_all_groups_tie() -> None:
    model, ended = endless()
    (finding,) = found(abc(ended, max_new_tokens=2), 1200, model)
    assert finding.name == "cut_completions" and finding.cures == []
    assert finding.message.endswith("Try twice the max_new_tokens, or a reward for ending")


def test_a_policy_that_lives_on_its_entropy_bonus() -> None:
    (finding,) = found(abc(), 2000, ent_coef=1.0)
    assert (finding.name, finding.cures) == ("entropy_bonus", ["ent_coef=0.01"])


def test_a_bonus_below_zero_takes_the_entropy() -> None:
    assert names(found(abc(), 3500, ent_coef=-0.5)) == ["collapsed_entropy"]


def test_one_answer_that_pays_ends_the_search() -> None:
    def cab(completions: list[str], **columns: Any) -> list[float]:
        return [sum(a == b for a, b in zip(text, "cab", strict=False)) - 0.5 * (len(text) > 3) for text in completions]

    assert names(found(abc(cab), 9000, learning_rate=5e-3)) == ["collapsed_entropy"]


# --- the figures ------------------------------------------------------------------------------------------------------
def log(**columns: list[float]) -> list[dict[str, float]]:
    """Rows of a log, 100 steps and an update each; `__` stands for "/"."""
    count = len(next(iter(columns.values())))
    return [
        {"time/total_timesteps": 100.0 * (i + 1), "train/n_updates": i}
        | {name.replace("__", "/"): column[i] for name, column in columns.items()}
        for i in range(count)
    ]


def test_the_gain_by_the_bonus_by_hand() -> None:
    """0.5 nats more at 0.4 are 0.2 of a reward, by the largest spread so far, 2 (of the first row): 0.1."""
    rows = log(
        health__ent_coef=[0.4] * 3,
        train__entropy_loss=[-1.0, -1.5, -0.2],
        health__advantage_std=[2.0, 0.5, 1.0],
    )
    diagnosis = Diagnosis()
    for row in rows:
        diagnosis.add(row)
    assert [values["bonus_gain"] for values in diagnosis.values] == pytest.approx([0.0, 0.1, -0.16])
    for coefficient in (0.0, -0.5):
        diagnosis = Diagnosis()
        for row in rows:
            diagnosis.add(row | {"health/ent_coef": coefficient})
        assert not any("bonus_gain" in values for values in diagnosis.values)


def test_a_bonus_that_shakes_the_policy_explains_what_follows_from_it() -> None:
    """Large steps, ties and cut completions that begin with the bonus are not said beside it."""
    rows = log(
        health__ent_coef=[1.0] * 20,
        health__advantage_std=[1.0, 1.0, 0.9, *[0.0] * 17],
        health__tied_groups=[0.0, 0.0, *[1.0] * 18],
        train__entropy_loss=[-0.7, -0.85, *[-1.5] * 18],
        train__approx_kl=[0.05, 0.05, 0.12, 0.16, 0.12, *[0.02] * 15],
        completions__clipped_ratio=[0.0, 0.0, *[1.0] * 18],
    )
    assert names(diagnose(rows)) == ["entropy_bonus"]


def test_returns_of_texts_are_the_means_of_their_rollouts() -> None:
    """The last 100 completions rise, the means of rollouts do not: ties are no success."""
    rows = log(
        health__tied_groups=[0.0, 0.0, 1.0, 1.0, 1.0],
        reward=[0.5, 0.6, 0.4, 0.4, 0.4],
        rollout__ep_rew_mean=[0.1, 0.2, 0.5, 0.6, 0.6],
    )
    assert names(diagnose(rows)) == ["tied_groups"]
    for row in rows:
        del row["reward"]
    assert names(diagnose(rows)) == []


def test_the_last_row_of_a_log_has_no_rollout_and_does_not_count_as_returns() -> None:
    diagnosis = Diagnosis()
    for row in [*log(reward=[0.1, 0.2], rollout__ep_rew_mean=[0.0, 0.0]), {"rollout/ep_rew_mean": 0.9}]:
        diagnosis.add(row)
    assert diagnosis._returns == [0.1, 0.2]


@pytest.mark.parametrize(
    ("given", "ratio", "share", "cause"),
    [(0.0, 1.0, 0.0, "cut_completions"), (1.0, 0.2, 0.0, "unscored"), (0.0, 0.2, 0.9, "repetition")],
)
def test_what_explains_ties_is_said_in_their_place(given: float, ratio: float, share: float, cause: str) -> None:
    rows = log(
        health__tied_groups=[1.0] * 20,
        health__reward_gap=[0.0] * 20,
        health__advantage_std=[0.0] * 20,
        completions__clipped_ratio=[ratio] * 20,
        completions__unscored=[given] * 20,
        completions__repetition=[share] * 20,
        reward=[0.0] * 20,
    )
    assert names(diagnose(rows)) == [cause]


def test_a_coefficient_far_too_high_comes_down_to_the_usual() -> None:
    for now, first in ((1.0, "ent_coef=0.01"), (0.03, "ent_coef=0.01"), (0.015, "ent_coef=0.005")):
        assert cures_of("entropy_bonus", {"ent_coef": now}, {}) == [first]


def test_completions_are_compared_whole_whatever_their_lengths() -> None:
    """Four members of 1, 1, 1 and up to 6 tokens: at most ages one is alone, and yet the group has four."""
    env = rewarded(0.0, 0.0, 0.0, 1.0)
    rollout = sampled(language_model(env, n_steps=16))
    figures = health_metrics(rollout, gamma=1.0)
    assert len(set(rollout.lengths.tolist())) > 1
    assert figures["group_size"] == 4
    assert figures["tied_groups"] == 0
    # One of four has 1: best − mean 3/4, spread sqrt(1/4·3/4); the same for every group, so that is the gap.
    assert figures["reward_gap"] == pytest.approx(np.sqrt(3))


def test_completions_without_a_reward_are_not_compared() -> None:
    env = rewarded(None, None, 2.0, 2.0)
    rollout = sampled(language_model(env, n_steps=16))
    figures = health_metrics(rollout, gamma=1.0)
    assert (figures["group_size"], figures["tied_groups"]) == (2, 1)
