"""The text tasks of envs/: their rewards by hand, their prompts, and base models that know them by half."""

import re
import sys

import numpy as np
import pytest
import torch as th
from gymnasium.utils.env_checker import check_env

from grpo_rl.errors import ConfigError
from grpo_rl.recipes import load_object, shipped

ENVS = shipped() / "envs"


def code(reference):
    return load_object(f"{ENVS}/{reference}")


def prompts(env, n):
    return [env.source.draw() for _ in range(n)]


@pytest.mark.filterwarnings("ignore:the tokenizer does not know")
@pytest.mark.parametrize("name", ["reversal.py:Reversal", "addition.py:Addition", "countdown.py:Countdown"])
def test_a_task_is_a_gymnasium_env(name):
    check_env(code(name)(rows=20), skip_render_check=True)


@pytest.mark.parametrize(
    ("task", "read", "said", "reward"),
    [
        ("reversal.py:Reversal", "abcdef>", "fedcba", 1.0),
        ("reversal.py:Reversal", "abcdef>", "abcdef", 0.0),
        ("addition.py:Addition", "12+30=", "42", 1.0),
        ("addition.py:Addition", "12+30=", "43", 0.0),
        ("countdown.py:Countdown", "3 5 2=17 ", "3*5+2", 1.1),
        ("countdown.py:Countdown", "3 5 2=17 ", "2+5*3", 1.1),
        ("countdown.py:Countdown", "3 5 2=17 ", "3+5+2", 0.1),
        ("countdown.py:Countdown", "3 5 2=17 ", "9+8", 0.0),
        ("countdown.py:Countdown", "3 5 2=17 ", "35 2", 0.0),
        ("countdown.py:Countdown", "3 5 2=17 ", "", 0.0),
    ],
)
def test_rewards_by_hand(task, read, said, reward):
    env = code(task)(rows=1)
    columns = {"answer": [{"abcdef>": "fedcba", "12+30=": "42"}.get(read)], "numbers": [[3, 5, 2]], "target": [17]}
    values = [function(completions=[said], **columns)[0] for function in env.rewards.functions]
    assert np.dot(values, env.rewards.weights) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *[("3*5+2", 17), ("2+3*5", 17), (" 9-2-3 ", 4), ("7", 7)],
        *[(text, None) for text in ("2**9", "1/2", "--3", "(", "print()", "3 5", "True+1", "1.5", "\0", "")],
    ],
)
def test_expressions_are_read_not_executed(expression, value):
    assert code("countdown.py:value")(expression) == value


@pytest.mark.parametrize("task", ["reversal.py:Reversal", "addition.py:Addition"])
def test_the_right_answer_fits_and_earns_1(task):
    env = code(task)(rows=50)
    for prompt in prompts(env, 50):
        ids = env.encoder.encode(prompt.columns["answer"])
        assert len(ids) < env.encoder.max_new_tokens, "with its EOS"
        assert env.rewards([prompt], [env.encoder.decode(ids)], [ids]).tolist() == [[1.0]]


def test_every_puzzle_has_the_answer_it_was_made_of():
    env = code("countdown.py:Countdown")(rows=200)
    for prompt in prompts(env, 200):
        assert env.rewards([prompt], [prompt.columns["example"]], [()]).tolist() == [[1.0, 1.0]]
        assert len(prompt.columns["example"]) < env.encoder.max_new_tokens


def puzzle(prompt):
    """What makes two prompts the same task: its word, or its numbers in any order, and the target of a game."""
    given, _, target = prompt.rpartition(":")[2].partition("=")
    return (*sorted(re.findall(r"[a-z]+|\d+", given.lower())), "=", target)


TASKS = {
    "reversal.py": "Reversal",
    "addition.py": "Addition",
    "countdown.py": "Countdown",
    "spell_backward.py": "SpellBackward",
}


@pytest.mark.parametrize("file", TASKS)
def test_held_out_tasks_are_in_no_training_and_in_no_base(file):
    """Disjoint as puzzles, not only as texts: 3+5 is 5+3, and "3 5 2=17" is "2 3 5=17"."""
    if file == "spell_backward.py":
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    make = code(f"{file}:{TASKS[file]}")
    trained, evaluated = (
        {puzzle(prompt) for prompt, _ in make(rows=1500, held_out=held_out).source.rows} for held_out in (False, True)
    )
    taught = {puzzle(prompt) for prompt, _ in code(f"{file}:examples")(np.random.default_rng(1), 1500)}
    assert min(map(len, (trained, evaluated, taught))) > 150  # there are some 190 held-out games of three numbers
    assert not evaluated & trained and not evaluated & taught


def test_puzzles_are_told_apart_by_numbers_and_target():
    assert puzzle("3 5 2=17 ") == puzzle("2 3 5=17 ") != puzzle("3 5 2=16 ")
    assert puzzle("12+30=") == puzzle("30+12=") != puzzle("13+29=")


def test_reasoning_gyms_verifier_rewards():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    env = code("spell_backward.py:SpellBackward")(rows=50)
    for prompt in prompts(env, 50):
        ids = env.encoder.encode(prompt.columns["answer"])
        assert len(prompt.ids) < 12 and len(ids) < env.encoder.max_new_tokens, "the words of the question are one token"
        wrong = "".join(
            chr(ord("a") + (ord(letter) - ord("a") + 1) % 26) for letter in prompt.columns["answer"].lower()
        )
        assert env.rewards([prompt] * 2, [env.encoder.decode(ids), wrong], [ids, ids])[:, 0].tolist() == [1, 0]


def test_without_reasoning_gym_the_recipe_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"reasoning-gym, which is not installed: pip install 'grpo_rl\[reasoning\]'"):
        code("spell_backward.py:SpellBackward")(rows=5)


# --- the dialogue -----------------------------------------------------------------------------------------------------


def test_answers_in_the_dialogue_by_hand():
    answer = code("dialogue.py:answer")
    assert [answer(guess, 8) for guess in ("3", "12", "8", "08", "", "x", "-8", "٣")] == list("><==????")


def test_the_sooner_a_number_is_guessed_the_better():
    """Halving finds any of 8 in four turns; the guess in turn t is worth 1 - (t - 1)/4."""
    env = code("dialogue.py:Dialogue")()
    for seed in range(30):
        said, low, high, turn, over = env.reset(seed=seed)[0], 0, 7, 0, False
        assert said == "0-7?"
        while not over:
            guess = (low + high) // 2
            said, reward, over, _, info = env.step(str(guess))
            low, high = (guess + 1, high) if said == ">" else (low, guess - 1)
            turn += 1
        assert info["is_success"] and reward == 1 - (turn - 1) / 4


def test_what_halving_is_worth():
    """docs/text.md's 0.59: of 8 numbers 1, 2, 4 and 1 are found in turn 1, 2, 3 and 4: (1 + 2·¾ + 4·½ + ¼) / 8."""
    env, total = code("dialogue.py:Dialogue")(), 0.0
    for number in range(8):
        env.reset(seed=0)
        env.number, low, high, over = number, 0, 7, False
        while not over:
            guess = (low + high) // 2
            said, reward, over, _, _ = env.step(str(guess))
            low, high = (guess + 1, high) if said == ">" else (low, guess - 1)
        total += reward / 8
    assert total == 0.59375


def test_the_members_of_a_group_guess_the_same_number():
    env = code("dialogue.py:make")(seed=0)
    env.start(8, 2)
    numbers = [talk.unwrapped.number for talk in env._talks]
    assert numbers[::2] == numbers[1::2] and len(set(numbers)) > 2


def test_examples_of_the_dialogue_keep_to_what_is_possible():
    for text, guess in code("dialogue.py:examples")(np.random.default_rng(0), 300):
        opening, *turns = text.replace("?", "?|", 1).replace("<eos>", " ").split("|")
        assert opening == "0-7?" and 0 <= int(guess) <= 7
        said = "".join(turns)
        low, high, number = 0, 7, ""
        for mark in said:
            if mark in "<>" and number:
                low, high = (max(low, int(number) + 1), high) if mark == ">" else (low, min(high, int(number) - 1))
                number = ""
            elif mark.isdigit():
                number += mark
        assert low <= int(guess) <= high


# --- base models ------------------------------------------------------------------------------------------------------


def accuracy(model, env, n, deterministic):
    """Mean reward of the first function on n prompts, sampled without a cache."""
    generator, total = th.Generator().manual_seed(0), 0.0
    for prompt in prompts(env, n):
        said: list[int] = []
        with th.no_grad():
            while not env.encoder.ended(said) and len(said) < env.encoder.max_new_tokens:
                logits = model(th.tensor([[*prompt.ids, *said]])).logits[0, -1]
                drawn = logits.argmax() if deterministic else th.multinomial(logits.softmax(-1), 1, generator=generator)
                said.append(int(drawn))
        total += float(env.rewards([prompt], [env.encoder.decode(said)], [said])[0, 0])
    return total / n


@pytest.mark.slow
def test_the_base_of_the_reversal_is_right_when_greedy_and_mostly_wrong_when_it_samples():
    """About 30 % of sampled answers are right: (1 - 0.18·20/21)⁶ = 0.32 if the noise were all it learnt."""
    model, env = code("reversal.py:base")(), code("reversal.py:Reversal")(held_out=True, rows=200, seed=0)
    assert accuracy(model, env, 200, deterministic=True) > 0.9
    assert 0.2 < accuracy(model, env, 200, deterministic=False) < 0.45
