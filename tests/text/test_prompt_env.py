"""`PromptEnv` is a Gymnasium env of prompts, completions and rewards."""

import string
import warnings

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from sums import ROWS, correct, make, tokens
from tokenizers_of_all_kinds import chars

from grpo_rl.errors import ConfigError
from grpo_rl.text import PromptEnv, PromptVecEnv, TokenText, Unicode
from grpo_rl.text.vec_env import TextVecEnv


def no_opinion(prompts):
    return [None] * len(prompts)


@given(st.text())
def test_every_text_is_in_the_space(text):
    assert text in Unicode()


def test_the_space_of_texts():
    space = Unicode(3)
    assert "" in space and "abc" in space and "abcd" not in space and 3 not in space and b"abc" not in space
    assert space == Unicode(3) != Unicode(4) and space != gym.spaces.Text(3)
    assert not space.is_np_flattenable
    space.seed(0)
    samples = {space.sample() for _ in range(100)}
    assert all(sample in space for sample in samples) and "" in samples
    assert set("".join(samples)) <= set(string.printable)
    assert isinstance(gym.spaces.Text(3), type(space).__mro__[1])


def test_it_passes_gymnasiums_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="the tokenizer does not know")  # actions are any text here
        check_env(make(), skip_render_check=True)


def test_an_episode_by_hand():
    """ "3" for "1+2=": 1·1 - 0.1·1."""
    env = make()
    obs, info = env.reset(options={"row": 5})
    assert obs == "1+2=" and info == {"row": 5}
    assert isinstance(obs, TokenText) and chars().decode(obs.ids) == "1+2="
    obs, reward, terminated, truncated, info = env.step("3")
    assert (obs, reward, terminated, truncated) == ("", pytest.approx(0.9), True, False)
    assert info == {"row": 5, "rewards": {"correct": 1.0, "tokens": 1.0}}


def test_ids_that_were_sampled_are_those_that_are_scored():
    env = make()
    env.reset(seed=0)
    *_, info = env.step(TokenText("3", [6, 6, 1]))
    assert info["rewards"]["tokens"] == 3.0


def test_no_opinion_is_no_reward():
    env = PromptEnv(ROWS, no_opinion, chars())
    env.reset()
    assert env.step("3")[1] == 0.0


def test_the_seed_decides_the_order():
    orders = []
    for seed in (1, 1, 2):
        env = make()
        orders.append([env.reset(seed=seed)[0], *(env.reset()[0] for _ in range(8))])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(row["prompt"] for row in ROWS)


def test_a_column_has_an_order_of_its_own():
    env = make()
    before = env.source.state()["order"]
    twin = env.column(seed=3)
    twin.reset()
    assert env.source.state()["order"] == before and env.prompt is None
    assert twin.rewards is env.rewards and twin.encoder is env.encoder


def test_reasoning_gym_needs_no_reward_function():
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    data = reasoning_gym.create_dataset("spell_backward", size=4, seed=0)
    env = PromptEnv(data, tokenizer=chars(), seed=0)
    with pytest.warns(UserWarning, match="does not know"):  # capitals
        _, info = env.reset()
    assert env.step(data[info["row"]]["answer"])[1] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "no rows"),
        ({"prompts": ["a", 3]}, "prompts, row 1: expected a text"),
        ({"reward_funcs": None}, "only reasoning-gym brings its own"),
        ({"reward_weights": [1.0, 2.0, 3.0]}, "expected 2 finite numbers, one for each of correct, tokens"),
        ({"reward_weights": ["1", "2"]}, "expected 2 finite numbers"),
        ({"reward_weights": {}}, "expected 2 finite numbers"),
        ({"reward_funcs": 5}, "reward_funcs: expected one or more functions, got"),
        ({"stop_strings": [5]}, "stop_strings: expected a list of texts"),
        ({"eos_token_ids": 5}, "eos_token_ids: expected a list of ids"),
        ({"system_prompt": 5}, "system_prompt: expected a text, got 5"),
        ({"chat": True, "chat_template": "{{ nope("}, "the chat template does not take"),
        ({"max_new_tokens": "4"}, "max_new_tokens='4': expected a whole number"),
        ({"seed": -1}, "seed=-1: expected a whole number, 0 or more"),
        ({"tokenizer": None}, "tokenizer: expected one of transformers"),
        ({"context": 5}, "prompts, row 0: the prompt has 4 tokens"),
        ({"chat": True}, "no chat template"),
        ({"grouping": "user"}, "grouping='user' is unknown"),
    ],
)
def test_what_cannot_work_is_said_at_once(arguments, message):
    given = {"prompts": ROWS, "reward_funcs": [correct, tokens], "tokenizer": chars(), "max_new_tokens": 4}
    with pytest.raises(ConfigError, match=message):
        PromptEnv(**(given | arguments))


def test_rows_and_completions_that_are_none_are_said():
    env = make()
    for options, words in (
        ({"row": 99}, "no row 99; expected 0"),
        ({"row": "x"}, "no row 'x'"),
        ({"rwo": 1}, "expected op"),
    ):
        with pytest.raises(ConfigError, match=words):
            env.reset(options=options)
    env.reset()
    with pytest.raises(ConfigError, match="expected a text, got 5"):
        env.step(5)


@pytest.mark.parametrize("wrap", [VecNormalize, VecMonitor], ids=lambda wrap: wrap.__name__)
def test_wrappers_of_vec_envs_are_refused_with_what_to_do_instead(wrap):
    with pytest.raises(ConfigError, match=r"Give it to GRPO as it is: .*reward_weights"):
        wrap(make())
    assert not hasattr(make(), "num_envs"), "it is no VecEnv"
    with pytest.raises(ConfigError, match="VecMonitor: whole completions do not pass"):
        TextVecEnv.of(VecMonitor(PromptVecEnv(make())))
    for wrong, words in ((0, "n_envs=0: expected a whole number"), ("x", "n_envs='x'")):
        with pytest.raises(ConfigError, match=words):
            PromptVecEnv(make(), wrong)


def test_no_step_before_a_reset():
    with pytest.raises(gym.error.ResetNeeded):
        make().step("3")
