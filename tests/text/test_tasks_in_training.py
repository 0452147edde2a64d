"""Tasks at work: GRPO compares the groups that a strategy promises, and outlives tokenizers and rewards of any kind."""

import numpy as np
import pytest
import torch as th
from talking_envs import Echo
from tiny_models import tiny
from tokenizers_of_all_kinds import chars

from grpo_rl import GRPO
from grpo_rl.errors import ConfigError
from grpo_rl.text import ByLength, PromptEnv, TurnVecEnv

ROWS = [{"prompt": f"{a}{b}=", "user": "ann bob cy".split()[a % 3]} for a in range(4) for b in range(4)]


def tokens(completion_ids):
    return [float(len(set(ids))) for ids in completion_ids]


def agent(reward=tokens, tokenizer=None, **settings):
    tokenizer = tokenizer or chars()
    env = PromptEnv(ROWS, reward, tokenizer, 6, **{"eos_token_ids": range(3, 12), "seed": 0, **settings})
    policy = {"model": tiny(vocabulary=len(tokenizer))}
    return GRPO("CausalLMPolicy", env, group_size=4, n_steps=32, seed=0, policy_kwargs=policy, learning_rate=1e-3)


def finite(model):
    return all(th.isfinite(parameter).all() for parameter in model.policy.parameters())


def trained(grouping, rollouts=1):
    model = agent(grouping=grouping)
    for _ in range(rollouts):
        model.learn(1, reset_num_timesteps=False)
    return model


def column(model, name):
    """A column of the dataset, for each completion."""
    return np.array([ROWS[prompt.row][name] for prompt in model.env.prompts])[model.rollout_buffer.prompt_of]


def advantages(model):
    """One for each completion."""
    return model.rollout_buffer.advantages[0].cpu().numpy()


def test_by_column():
    model = trained("column:user")
    group, users = model.rollout_buffer.group[0], column(model, "user")
    for user in set(users):
        assert len(set(group[users == user])) == 1
    assert len(set(group)) == len(set(users))


def test_by_length():
    model = trained(ByLength(bands=3))
    group, lengths = model.rollout_buffer.group[0], model.rollout_buffer.lengths
    order = np.argsort(lengths, kind="stable")
    assert (np.diff(group[order]) >= 0).all(), "longer completions are in later bands"
    assert len(set(group)) > 1
    for length in set(lengths):
        assert len(set(group[lengths == length])) == 1


def test_members_are_regrouped_as_training_goes_on():
    model = trained("ability", rollouts=1)
    assert len(set(model.rollout_buffer.group[0])) == 1, "nobody is known yet"
    model.learn(1, reset_num_timesteps=False)
    model.learn(1, reset_num_timesteps=False)
    assert len(set(model.rollout_buffer.group[0])) > 1


@pytest.mark.parametrize("grouping", ["prompt", "column:user", "length", "ability"])
def test_every_group_compares_its_own_members(grouping):
    """Advantages of a group's members sum to 0, and who is alone has none."""
    model = trained(grouping, rollouts=2)
    group, advantage = model.rollout_buffer.group[0], advantages(model)
    for members in (group == g for g in set(group)):
        np.testing.assert_allclose(advantage[members].sum(), 0, atol=1e-4)
        if members.sum() == 1:
            assert advantage[members] == 0
    assert finite(model)


# --- rewards that fail ------------------------------------------------------------------------------------------------


def test_a_completion_without_an_opinion_is_left_out_of_its_group():
    """The first of each four has none: its advantage is 0. The others got 1, 2, 3: mean 2, sample std 1."""

    def some(completion_ids):
        return [None if n % 4 == 0 else float(n % 4) for n in range(len(completion_ids))]

    model = agent(some)
    model.learn(1)
    each = advantages(model).reshape(-1, 4)
    assert (each[:, 0] == 0).all()
    np.testing.assert_allclose(each[:, 1:], np.tile([-1.0, 0.0, 1.0], (8, 1)), atol=1e-3)


def test_a_reward_function_that_breaks_loses_neither_step_nor_run():
    calls = []

    def judge(completion_ids):
        calls.append(len(completion_ids))
        if len(calls) > 1:
            raise OSError("no answer")
        return tokens(completion_ids)

    model = agent(judge)
    model.learn(1)
    before = model.num_timesteps
    with pytest.warns(UserWarning, match="OSError: no answer.*32 of 32 rows count as None"):
        model.learn(1, reset_num_timesteps=False)
    assert model.num_timesteps > before and finite(model)
    assert not advantages(model).any()


def test_a_reward_function_that_never_works_stops_the_first_rollout():
    def judge(completion_ids):
        raise OSError("no answer")

    with pytest.raises(ConfigError, match=r"reward function judge, row \d+ .*OSError: no answer"):
        agent(judge).learn(1)


# --- tokenizers of all kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "special",
    [{}, {"pad_token": None}, {"pad_token": "<eos>"}, {"eos_token": None}, {"eos_token": None, "pad_token": None}],
    ids=["both", "no pad", "pad is eos", "no eos", "neither"],
)
def test_special_tokens_that_are_missing_or_the_same(special):
    """Completions that end are as long as they are, EOS included; those that do not end have all 6 tokens."""
    model = agent(tokenizer=chars(**special), eos_token_ids=[])
    model.learn(1)
    rollout = model.rollout_buffer
    assert finite(model) and np.isfinite(rollout.log_probs).all()
    for ids, length, cut in zip(rollout.tokens, rollout.lengths, rollout.truncated, strict=True):
        assert len(ids) == length and (length == 6 if cut else ids[-1] in model.env.eos_ids)
        assert not set(ids[:-1]) & set(model.env.eos_ids)


def test_a_chat_of_several_turns_is_trained_on_what_was_said_alone():
    tokenizer = chars(chat=True)
    env = TurnVecEnv(lambda: Echo(turns=2), tokenizer, 3, chat=True, system_prompt="hi", seed=0)
    policy = {"model": tiny(vocabulary=len(tokenizer), max_position_embeddings=256)}
    model = GRPO("CausalLMPolicy", env, group_size=2, n_steps=4, seed=0, policy_kwargs=policy)
    model.learn(1)
    rollout = model.rollout_buffer
    for prompt, ids, trained in zip(rollout.prompt_of, rollout.tokens, rollout.trained, strict=True):
        assert tokenizer.decode(rollout.prompts[prompt]).startswith("<|system|>hi<eos>\n<|user|>")
        heard = tokenizer.decode([i for i, own in zip(ids, trained, strict=True) if not own])
        assert heard.removeprefix("<eos>").startswith("\n<|user|>") and heard.endswith("<eos>\n<|assistant|>")
        assert 2 <= sum(trained) <= 6
    assert finite(model)
