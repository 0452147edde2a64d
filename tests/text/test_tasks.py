"""Datasets of every kind become rows, drawn in an order that resumes; what cannot be used is named."""

import json
from collections import Counter

import pandas as pd
import pytest
from tokenizers_of_all_kinds import chars

from grpo_rl.errors import ConfigError
from grpo_rl.text.tasks import PromptSource, Rows
from grpo_rl.text.tokenizing import Encoder

CHAT = [{"role": "user", "content": "hi"}]


class HuggingFace:
    """What is used of a `datasets.Dataset`."""

    column_names = ("prompt", "answer")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_lists_files_datasets_and_generators_give_the_same_rows(tmp_path):
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": 4}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    expected = [("1+1=", {"answer": 2}), ("2+2=", {"answer": 4})]
    for source in (rows, tuple(rows), file, str(file), HuggingFace(rows), pd.DataFrame(rows), (row for row in rows)):
        assert list(Rows(source)) == expected
    assert rows[0] == {"prompt": "1+1=", "answer": 2}, "the caller's rows stay as they are"


def test_texts_and_chats_are_rows_without_columns():
    assert list(Rows(["a", "b"])) == [("a", {}), ("b", {})]
    assert list(Rows([CHAT])) == [(CHAT, {})]
    assert list(Rows([{"question": "a"}], prompt_column="question")) == [("a", {})]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "list has no rows"),
        ("nowhere.jsonl", "cannot read nowhere.jsonl"),
        (7, "expected a list of texts"),
        ({"prompt": "a"}, "expected a list of texts"),
    ],
)
def test_what_is_no_dataset(source, message):
    with pytest.raises(ConfigError, match=message):
        Rows(source)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a", 7], "row 1: expected a text, or messages"),
        (["a", []], "row 1: expected a text, or messages"),
        ([{"prompt": "a"}, {"question": "b", "x": 1}], r'row 1: no column "prompt"; it has question, x'),
        ([{"prompt": "a", "completions": 1}], "row 0: column 'completions' has the name of what reward functions get"),
    ],
)
def test_a_row_that_is_none_is_named(rows, message):
    with pytest.raises(ConfigError, match=message):
        list(Rows(rows))


def test_a_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\nprompt: b\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 2 is no JSON"):
        Rows(tmp_path / "rows.jsonl")


def test_a_streamed_dataset_is_told_how_to_be_finite():
    class Streamed:
        column_names = ("prompt",)

        def __iter__(self):
            yield {"prompt": "a"}

    with pytest.raises(ConfigError, match=r"list\(dataset.take\(10_000\)\)"):
        Rows(Streamed())


def test_reasoning_gym_brings_its_own_reward():
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    data = reasoning_gym.create_dataset("chain_sum", size=3, seed=1)
    rows = Rows(data)
    prompt, columns = rows[0]
    assert prompt == data[0]["question"] and len(rows) == len(list(rows)) == 3
    assert rows.reward is not None
    asked = {name: [value] * 2 for name, value in columns.items()}
    assert rows.reward(completions=[f" {data[0]['answer']}", "no"], **asked) == [1.0, 0.0]


def source_of(rows, seed=0, **encoding):
    return PromptSource(Rows(rows), Encoder(chars(), **{"max_new_tokens": 2, **encoding}), seed)


def test_every_row_comes_once_before_any_comes_again():
    source = source_of(list("abcdefgh"))
    drawn = [[source.draw().text for _ in range(8)] for _ in range(3)]
    assert all(sorted(epoch) == list("abcdefgh") for epoch in drawn)
    assert drawn[0] != drawn[1]


def test_the_order_is_the_seeds_and_goes_on_after_a_stop():
    source, twin, other = source_of(list("abcdefgh")), source_of(list("abcdefgh")), source_of(list("abcdefgh"), seed=1)
    first = [source.draw().row for _ in range(11)]
    assert [twin.draw().row for _ in range(11)] == first != [other.draw().row for _ in range(11)]
    state = source.state()
    rest = [source.draw().row for _ in range(11)]
    other.set_state(state)
    assert [other.draw().row for _ in range(11)] == rest
    other.set_state(state)
    assert [other.draw().row for _ in range(11)] == rest, "what was saved stays as it was"


def test_a_prompt_beyond_the_context_is_named_at_once():
    with pytest.raises(ConfigError, match="row 1: the prompt has 5 tokens, and with max_new_tokens=2 that is 7"):
        source_of(["abcd", "abcde"], context=6)


def test_a_prompt_beyond_the_models_context_is_named_too():
    source = source_of(["abcd", "abcde"])
    source.encoder.fit_model(100, context=7)
    source.check()
    source.encoder.fit_model(100, context=6)
    with pytest.raises(ConfigError, match="row 1: the prompt has 5 tokens"):
        source.check()


def test_a_row_beyond_those_that_were_checked_is_passed_over(monkeypatch):
    monkeypatch.setattr("grpo_rl.text.tasks.CHECKED_ROWS", 2)
    source = source_of(["a", "b", "toolong"], context=6)
    with pytest.warns(UserWarning, match="row 2: the prompt has 7 tokens.*passed over"):
        drawn = Counter(source.draw().text for _ in range(6))
    assert drawn == {"a": 3, "b": 3}


def test_an_empty_prompt_is_named():
    with pytest.raises(ConfigError, match="prompts, row 1: the prompt is empty"):
        source_of(["a", ""])


def test_a_chat_without_a_template_is_named():
    with pytest.raises(ConfigError, match=r"prompts, row 1: .*no chat template"):
        source_of(["a", CHAT])


def test_several_datasets_in_one_are_refused_with_what_to_write():
    class DatasetDict(dict):
        column_names = {"train": ["prompt"]}  # noqa: RUF012, as `datasets` has it

    with pytest.raises(ConfigError, match=r'DatasetDict of train, test: give one of them, such as dataset\["train"\]'):
        Rows(DatasetDict(train=["a"], test=["b"]))
