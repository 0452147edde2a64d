"""`Conversation` keeps the ids of all that was said, and ends where it must."""

import warnings

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env
from talking_envs import Echo
from tokenizers_of_all_kinds import chars, merging

from grpo_rl.errors import ConfigError
from grpo_rl.text import Conversation, TokenText
from grpo_rl.text.tokenizing import Encoder


def talk(env=None, tokenizer=None, max_turns=16, **encoding):
    return Conversation(env or Echo(), Encoder(tokenizer or chars(), 4, **encoding), max_turns)


def test_a_conversation_keeps_every_id():
    conversation, tokenizer = talk(), chars()
    first, info = conversation.reset(seed=0)
    assert first.ids == tuple(tokenizer(str(first))["input_ids"]) and info == {"user": str(first)}
    second, reward, terminated, truncated, _ = conversation.step(TokenText("hi", [10, 11, 1]))
    assert (str(second), reward, terminated, truncated) == ("hi", 2.0, False, False)
    assert conversation.said == (10, 11)
    assert second.ids == (*first.ids, 10, 11, 1, 10, 11)


def test_ids_survive_turns_though_decode_and_encode_would_change_them():
    """ "a" then "b" were sampled; encoded again they would be the one token "ab"."""
    tokenizer = merging()
    conversation = talk(Echo(prefix="!"), tokenizer)
    assert tokenizer(tokenizer.decode([2, 3]))["input_ids"] == [4]
    first, _ = conversation.reset(seed=0)
    second, *_ = conversation.step(TokenText("ab", [2, 3]))
    third, *_ = conversation.step(TokenText("ab", [2, 3]))
    assert third.ids == (*first.ids, 2, 3, 4, 2, 3, 4), "the env's own words are encoded, and only they"
    assert third.ids[: len(second.ids)] == second.ids


def test_a_chat_of_turns_is_what_the_template_would_have_written():
    conversation, tokenizer = talk(tokenizer=chars(chat=True), chat=True), chars()
    first, _ = conversation.reset(seed=0)
    second, *_ = conversation.step(TokenText("hi", tokenizer("hi<eos>")["input_ids"]))
    assert tokenizer.decode(second.ids) == chars(chat=True).apply_chat_template(
        [
            {"role": "user", "content": tokenizer.decode(first.ids)[8:9]},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": "hi"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )


def test_the_env_hears_text_and_ends_the_conversation():
    env = Echo(turns=2)
    conversation = talk(env)
    conversation.reset()
    assert not any(conversation.step(TokenText("hi", [10, 11, 1]))[2:4])
    assert conversation.step("ho")[2:4] == (True, False)
    assert env.heard == ["hi", "ho"] and conversation.said == ()


def test_too_many_turns_are_a_truncation():
    conversation = talk(max_turns=2)
    conversation.reset()
    assert conversation.step("a")[2:4] == (False, False)
    assert conversation.step("a")[2:4] == (False, True)


def test_a_conversation_that_outgrows_the_context_is_a_truncation():
    """1 + (2 + 2) + 4 new = 9 fit into 9; 5 + (2 + 2) + 4 do not."""
    conversation = talk(context=9)
    conversation.reset()
    assert conversation.step("aa")[2:4] == (False, False)
    assert conversation.step("aa")[2:4] == (False, True)


def test_a_first_text_beyond_the_context_is_an_error():
    with pytest.raises(ConfigError, match=r"first text 'aaaaaa\w': the prompt has 7 tokens"):
        talk(Echo(prefix="aaaaaa"), context=10).reset()


def test_only_envs_that_talk():
    with pytest.raises(ConfigError, match=r"expected a gymnasium.spaces.Text observation space"):
        talk(gym.make("CartPole-v1"))


def test_a_conversation_passes_gymnasiums_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # actions are any text
        check_env(talk(), skip_render_check=True)
