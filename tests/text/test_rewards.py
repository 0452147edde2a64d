"""Reward functions: called as TRL calls them, and one that fails costs its own opinion only."""

import functools
import warnings

import numpy as np
import pytest
import torch as th

from grpo_rl.errors import ConfigError
from grpo_rl.text.rewards import Rewards, overlong
from grpo_rl.text.tasks import Prompt

NAN = np.nan


def prompts(n, **columns):
    return [Prompt((3, i), f"text {i}", f"text {i}", 10 + i, {k: v[i] for k, v in columns.items()}) for i in range(n)]


def ask(rewards, n=3, **columns):
    return rewards(prompts(n, **columns), [f"said {i}" for i in range(n)], [[7, i] for i in range(n)])


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def test_a_function_gets_everything_or_what_it_names():
    seen = {}

    def everything(**given):
        seen.update(given)
        return [0.0, 0.0]

    def some(completion_ids, answer):
        return [ids[1] + right for ids, right in zip(completion_ids, answer, strict=True)]

    values = ask(Rewards([everything, some]), 2, answer=[10, 20], user=["x", None])
    assert seen == {
        "prompts": ["text 0", "text 1"],
        "completions": ["said 0", "said 1"],
        "completion_ids": [[7, 0], [7, 1]],
        "prompt_ids": [[3, 0], [3, 1]],
        "prompt_texts": ["text 0", "text 1"],
        "answer": [10, 20],
        "user": ["x", None],
    }
    assert values.tolist() == [[0, 10], [0, 21]]


def test_a_function_sees_what_the_template_opened():
    """Chats as TRL hands them over, and beside them the prompt as the model read it, <think> included."""
    chat = [{"role": "user", "content": "hi"}]
    prompt = Prompt((1,), "<|user|>hi<|assistant|><think>", chat, 0, {})

    def thinks(prompts, completions, prompt_texts):
        assert prompts == [chat] and completions == [[{"role": "assistant", "content": "</think>2"}]]
        whole = prompt_texts[0] + completions[0][0]["content"]
        return [float("<think></think>" in whole)]

    assert Rewards(thinks)([prompt], ["</think>2"], [[5]]).tolist() == [[1.0]]


def test_rows_with_different_columns():
    mixed = [Prompt((1,), "a", "a", 0, {"x": 1}), Prompt((1,), "b", "b", 1, {"y": 2})]
    assert Rewards(lambda x, y: [x == [1, None], y == [None, 2]])(mixed, ["", ""], [[], []]).tolist() == [[1], [1]]


@pytest.mark.parametrize(
    "values", [[1, True, None], np.array([1, 1, NAN]), (th.tensor(1.0), 1.0, None), iter([1.0, 1, None])]
)
def test_numbers_of_every_kind(values):
    rewards = Rewards(lambda prompts: values if not isinstance(values, np.ndarray) else [*values[:2], None])
    np.testing.assert_array_equal(ask(rewards), [[1], [1], [NAN]])


def test_weights_and_opinions_by_hand():
    """0.5·1 + 2·3 = 6.5; one has no opinion: 2·3 = 6; nobody has: NaN."""
    rewards = Rewards([length, length], weights=[0.5, 2.0])
    values = np.array([[1.0, 3.0], [NAN, 3.0], [NAN, NAN]])
    np.testing.assert_array_equal(rewards.weighted(values), [6.5, 6.0, NAN])


def test_names():
    class Judge:
        def __call__(self, prompts):
            return [0.0]

    functions = [length, length, Judge(), functools.partial(length), lambda prompts: [0.0]]
    assert Rewards(functions).names == ("length", "length_1", "Judge", "length_3", "<lambda>")


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        ([], None, "reward_funcs: expected one or more functions"),
        (["length"], None, "reward_funcs: expected one or more functions"),
        ([length], [1, 2], "reward_weights: expected 1 finite numbers, one for each of length"),
        ([length], [NAN], "reward_weights"),
    ],
)
def test_what_is_no_reward(functions, weights, message):
    with pytest.raises(ConfigError, match=message):
        Rewards(functions, weights)


def broken(when, how):
    """Worked once; from its second call on it fails where `when(row)`."""
    calls = []

    def reward(prompts, completions):
        calls.append(len(prompts))
        rows = [int(text.split()[1]) for text in completions]
        if len(calls) == 1:
            return [1.0] * len(rows)
        return how(rows, [when(row) for row in rows])

    return reward


def raises(rows, bad):
    if any(bad):
        raise ZeroDivisionError("no such answer")
    return [1.0] * len(rows)


def gives_nan(rows, bad):
    return [NAN if b else 1.0 for b in bad]


def gives_infinity(rows, bad):
    return [np.inf if b else 1.0 for b in bad]


def gives_text(rows, bad):
    return ["good" if b else 1.0 for b in bad]


def gives_too_few(rows, bad):
    return [1.0 for b in bad if not b]


FAILURES = [
    (raises, "it raised ZeroDivisionError: no such answer"),
    (gives_nan, "it gave nan, not a finite number or None"),
    (gives_infinity, "it gave inf, not a finite number"),
    (gives_text, "it gave 'good', not a finite number"),
    (gives_too_few, "it gave 0 values for 1 rows"),
]


@pytest.mark.parametrize(("how", "message"), FAILURES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_row_that_fails_is_named_and_costs_only_itself(how, message):
    rewards = Rewards([broken(lambda row: row == 1, how), length])
    ask(rewards)
    with pytest.warns(UserWarning, match=rf"reward function reward, row 11 .*prompt 'text 1'.*{message}.* 1 of 3 rows"):
        values = ask(rewards)
    np.testing.assert_array_equal(values, [[1, 6], [NAN, 6], [1, 6]])
    assert rewards.failures.tolist() == [1, 0]


@pytest.mark.parametrize(("how", "message"), FAILURES, ids=lambda x: getattr(x, "__name__", ""))
def test_after_it_has_worked_a_function_may_fail_everywhere(how, message):
    rewards = Rewards([broken(lambda row: True, how), length])
    ask(rewards)
    with pytest.warns(UserWarning, match="3 of 3 rows count as None"):
        values = ask(rewards)
    np.testing.assert_array_equal(values, [[NAN, 6]] * 3)


@pytest.mark.parametrize(("how", "message"), FAILURES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_function_that_has_never_worked_is_an_error(how, message):
    rewards = Rewards(lambda completions: how([0] * len(completions), [True] * len(completions)))
    with pytest.raises(ConfigError, match=rf"reward function <lambda>, row 10 .*{message}"):
        ask(rewards)


def test_a_single_number_is_no_list():
    with pytest.raises(ConfigError, match=r"it gave 1\.0; expected a list of 1 values"):
        ask(Rewards(lambda completions: 1.0))


def test_a_function_that_only_fails_on_many_rows_is_asked_one_by_one():
    def judge(completions):
        if len(completions) > 1:
            raise MemoryError("too much at once")
        return [1.0]

    with pytest.warns(UserWarning, match="judge fails for 3 rows together, not alone: too much at once"):
        values = ask(Rewards(judge))
    assert values.tolist() == [[1.0]] * 3


def test_warnings_become_rare():
    rewards = Rewards(broken(lambda row: row == 1, gives_nan))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(10):
            ask(rewards)
    assert len(said) == 4, "the first, second, fourth and eighth of nine failing calls"
    assert rewards.failures.tolist() == [9]


def test_ctrl_c_is_no_failure():
    def reward(prompts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(Rewards(reward))


# --- the soft punishment of length ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "punished"),
    [(0, 0), (12, 0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1), (17, -1), (400, -1)],
)
def test_overlong_by_hand(tokens, punished):
    """L_max 16, L_cache 4: 0 up to 12, then (12 - length) / 4, then -1 (DAPO, equation 13)."""
    assert overlong(16, cache=4)(completion_ids=[[7] * tokens]) == [punished]


def test_overlong_is_a_reward_function_like_others():
    """Tokens are counted, not characters; with weight 0.5 beside another."""
    rewards = Rewards([length, overlong(2, cache=2)], [1.0, 0.5])
    values = rewards(prompts(3), ["abcdef", "ab", ""], [[7], [7, 8], []])
    assert rewards.names == ("length", "overlong")
    assert values.tolist() == [[6, -0.5], [2, -1], [0, 0]]
    assert rewards.weighted(values).tolist() == [5.75, 1.5, 0]


@pytest.mark.parametrize("cache", [0, -1, 17])
def test_overlong_names_what_it_expects(cache):
    with pytest.raises(ConfigError, match=rf"1 ≤ cache ≤ max_length=16 tokens, got cache={cache}"):
        overlong(16, cache)


def test_a_function_gets_lists_of_its_own():
    """One that empties them takes nothing from its own retry, from the next function or from the dataset."""
    messages = [{"role": "user", "content": "hi"}]
    rows = [Prompt((3,), "hi", messages, 0, {"tags": ["x"]})]

    def untidy(prompts, completion_ids, tags, **columns):
        count = len(prompts)
        prompts[0][0].clear(), prompts.clear(), completion_ids[0].clear(), tags[0].clear()
        return [float(count)]

    def after(prompts, completion_ids, tags, **columns):
        return [float(prompts[0] == messages and completion_ids == [[7]] and tags == [["x"]])]

    assert Rewards([untidy, after])(rows, ["said"], [[7]]).tolist() == [[1.0, 1.0]]
    assert messages == [{"role": "user", "content": "hi"}] and rows[0].columns["tags"] == ["x"]


def test_async_functions_are_awaited_on_one_loop():
    """In a thread that has a running loop, as notebooks do, too; one that fails is asked row by row, as others are."""
    import asyncio

    loops = set()

    async def judge(completions, **columns):
        loops.add(id(asyncio.get_running_loop()))
        return list(await asyncio.gather(*(asyncio.sleep(0, float(len(text))) for text in completions)))

    async def picky(completions, **columns):
        if "said 1" in completions:
            raise OSError("busy")
        return [1.0] * len(completions)

    rewards = Rewards([judge, picky])
    with pytest.warns(UserWarning, match="OSError: busy"):
        assert ask(rewards)[:, 0].tolist() == [6, 6, 6]

    async def notebook():
        return ask(rewards)

    np.testing.assert_array_equal(asyncio.run(notebook()), [[6, 1], [6, NAN], [6, 1]])
    assert len(loops) == 1
