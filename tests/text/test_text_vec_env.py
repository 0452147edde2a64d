"""`TextVecEnv`: the sampler's view and SB3's, of prompts and of conversations."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from sums import ROWS, correct, make, tokens
from talking_envs import Echo
from tokenizers_of_all_kinds import chars

from grpo_rl.errors import ConfigError
from grpo_rl.text import PromptEnv, PromptVecEnv, TextVecEnv, TokenText, TurnVecEnv, Unicode
from grpo_rl.text.vec_env import Reply, is_text

A, B, HI = (3,), (4,), (10, 11)


def turns(env=Echo, **settings):
    return TurnVecEnv(env, chars(), 4, **{"seed": 0, **settings})


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_groups_of_a_prompt_lie_side_by_side():
    env = PromptVecEnv(make())
    prompts = env.start(n_groups=2, group_size=3)
    assert len(prompts) == 2 and env.n_conversations == 6
    right = [chars()(prompt.columns["answer"])["input_ids"] for prompt in prompts]
    said = [right[0], right[0], [3], [3], right[1], [3, 3, 1]]
    order = [4, 0, 5, 2, 1, 3]  # completions come as they end
    replies = env.reply(order[:2], [said[i] for i in order[:2]]) + env.reply(order[2:], [said[i] for i in order[2:]])
    assert replies == [Reply((), None, 0.0, True)] * 6
    rewards = env.score()
    assert rewards[:, 0].tolist() == [1, 1, 0, 0, 1, 0]
    assert rewards[:, 1].tolist() == [1, 1, 1, 1, 1, 3]
    np.testing.assert_allclose(env.weighted(rewards), [0.9, 0.9, -0.1, -0.1, 0.9, -0.3])
    assert env.group_ids(rewards, [len(ids) for ids in said]).tolist() == [0, 0, 0, 1, 1, 1]


def test_rewards_are_asked_once_for_all():
    calls = []

    def count(completions):
        calls.append(len(completions))
        return [0.0] * len(completions)

    env = PromptVecEnv(PromptEnv(ROWS, count, chars(), 4))
    env.start(4, 2)
    env.reply(range(8), [A] * 8)
    env.score()
    assert calls == [8]


def test_no_score_before_all_are_complete():
    env = PromptVecEnv(make())
    env.start(2, 2)
    env.reply([0, 1, 3], [A] * 3)
    with pytest.raises(ConfigError, match="1 of 4 are not complete"):
        env.score()


def test_a_start_may_follow_a_start():
    env = PromptVecEnv(make())
    env.start(2, 2)
    env.reply(range(4), [A] * 4)
    env.start(1, 3)
    env.reply(range(3), [B] * 3)
    assert env.score().shape == (3, 2)


def test_what_the_sampler_reads():
    env = PromptVecEnv(make(stop_strings=["="], eos_token_ids=[9]))
    assert (env.max_new_tokens, env.max_turns, env.eos_ids, env.stop_strings) == (4, 1, (1, 9), ("=",))
    assert env.reward_names == ("correct", "tokens") and env.reward_weights.tolist() == [1.0, -0.1]
    assert env.tokenizer is env.encoder.tokenizer


def test_a_models_limits():
    env = PromptVecEnv(make())
    env.check_model(len(chars()), context=8, eos_ids=[5])
    assert env.eos_ids == (1, 5)
    with pytest.raises(ConfigError, match="row 0: the prompt has 4 tokens"):
        env.check_model(len(chars()), context=7)
    with pytest.raises(ConfigError, match="does not match the model"):
        env.check_model(10)


def test_grouping_by_a_column_of_the_dataset():
    env = PromptVecEnv(make(grouping="column:answer"))
    env.start(9, 1)
    env.reply(range(9), [A] * 9)
    groups = env.group_ids(env.score(), [1] * 9)
    by_answer = {prompt.columns["answer"]: group for prompt, group in zip(env.prompts, groups, strict=True)}
    assert [by_answer[prompt.columns["answer"]] for prompt in env.prompts] == groups.tolist()
    assert sorted(np.bincount(groups).tolist()) == [1, 1, 2, 2, 3], "sums of 0 … 2 and 0 … 2"


def test_a_reward_that_fails_later_loses_neither_step_nor_run():
    calls = []

    def judge(completions):
        calls.append(1)
        if len(calls) > 1:
            raise OSError("no answer")
        return [1.0] * len(completions)

    env = PromptVecEnv(PromptEnv(ROWS, [judge, tokens], chars(), 4))
    for _ in range(2):
        env.start(1, 2)
        env.reply([0, 1], [A, HI])
        if not calls:
            env.score()
    with pytest.warns(UserWarning, match="reward function judge, row .*OSError: no answer.*2 of 2 rows count as None"):
        rewards = env.score()
    np.testing.assert_array_equal(rewards, [[np.nan, 1], [np.nan, 2]])
    assert env.weighted(rewards).tolist() == [1, 2]


def test_a_resumed_dataset_goes_on():
    env, other = PromptVecEnv(make(grouping="ability")), PromptVecEnv(make(grouping="ability", seed=9))

    def rollout(env):
        prompts = env.start(3, 2)
        env.reply(range(6), [A] * 6)
        rewards = env.score()
        return [prompt.row for prompt in prompts], env.group_ids(rewards, [1] * 6).tolist()

    rollout(env)
    other.set_state(env.state())
    assert [rollout(env) for _ in range(4)] == [rollout(other) for _ in range(4)]


def test_seeding_starts_the_order_anew():
    env = PromptVecEnv(make())
    orders = []
    for _ in range(2):
        env.seed(5)
        orders.append([prompt.row for prompt in env.start(5, 1)])
    assert orders[0] == orders[1]


# --- SB3's view -------------------------------------------------------------------------------------------------------


class Parrot:
    """Says one thing to everybody."""

    def __init__(self, says):
        self.says = says

    def predict(self, obs, state=None, episode_start=None, deterministic=False):
        assert all(isinstance(text, TokenText) for text in obs)
        return [self.says] * len(obs), state


def test_sb3_evaluates_a_policy_of_text():
    env = PromptVecEnv(PromptEnv(ROWS, correct, chars(), 4), n_envs=3)
    mean, _ = evaluate_policy(Parrot("2"), env, n_eval_episodes=9)
    assert 0 < mean < 1
    returns, lengths = evaluate_policy(Parrot("hi"), turns(n_envs=2), n_eval_episodes=4, return_episode_rewards=True)
    assert returns == [6.0] * 4 and lengths == [3] * 4


def test_evaluations_do_not_move_the_training_order():
    env = PromptVecEnv(make())
    before = env.state()
    env.reset()
    env.step(["3"])
    assert env.state()["prompts"]["order"] == before["prompts"]["order"]


def test_observations_of_a_conversation_hold_all_of_it():
    env = turns(n_envs=1)
    env.seed(0)
    first = env.reset()
    obs, rewards, dones, infos = env.step([TokenText("hi", HI)])
    assert obs.dtype == object and obs[0] == "hi" and obs[0].ids == (*first[0].ids, *HI, *HI)
    assert rewards.tolist() == [2.0] and not dones[0]
    env.step(["a"])
    obs, _, dones, infos = env.step(["a"])
    assert dones[0] and infos[0]["terminal_observation"] == "a" and infos[0]["episode"]["l"] == 3
    assert len(obs[0].ids) == 1, "the next conversation"


def test_a_vec_env_as_sb3_knows_them():
    env = turns(n_envs=2)
    assert env.observation_space == env.action_space == Unicode()
    assert env.get_attr("turns") == [3, 3] and env.env_is_wrapped(Monitor) == [True, True]
    env.set_attr("turns", 1, indices=[1])
    assert env.get_attr("turns") == [3, 1]
    assert env.env_method("get_wrapper_attr", "prefix") == ["", ""]
    env.close()


def test_what_grpo_is_given():
    task = make()
    env = TextVecEnv.of(task)
    assert isinstance(env, PromptVecEnv) and TextVecEnv.of(env) is env and is_text(env) and is_text(task)
    assert isinstance(TextVecEnv.of(Monitor(task)), PromptVecEnv)
    assert not is_text(gym.make("CartPole-v1"))
    with pytest.raises(ConfigError, match=r"give TurnVecEnv\(lambda: YourEnv"):
        TextVecEnv.of(Echo())
    with pytest.raises(ConfigError, match="put what TransformReward does into a reward function"):
        TextVecEnv.of(gym.wrappers.TransformReward(task, lambda r: 2 * r))
