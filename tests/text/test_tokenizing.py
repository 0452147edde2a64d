"""Prompts become ids once, completions never do, and what ends one is found whatever it is spelled with."""

import pickle

import numpy as np
import pytest
from tokenizers_of_all_kinds import byt5, chars, merging, with_bos

from grpo_rl.errors import ConfigError
from grpo_rl.text.tokenizing import Encoder, StopStrings, TokenText, char_tokenizer, eos_ids, left_pad, pad_id


def test_a_char_tokenizer_by_hand():
    tokenizer = char_tokenizer("ab")
    assert len(tokenizer) == 5  # <pad> <eos> <unk> a b
    assert tokenizer("ba<eos>")["input_ids"] == [4, 3, 1]
    assert tokenizer("ax")["input_ids"] == [3, 2]
    assert tokenizer.decode([3, 4, 1], skip_special_tokens=True) == "ab"


def test_an_alphabet_has_each_character_once():
    with pytest.raises(ConfigError, match=r"more than once: \['a'\]"):
        char_tokenizer("aba")


def test_left_padding_by_hand():
    ids, mask = left_pad([[7, 8, 9], [5], []], pad=0)
    assert ids.tolist() == [[7, 8, 9], [0, 0, 5], [0, 0, 0]]
    assert mask.tolist() == [[True, True, True], [False, False, True], [False, False, False]]
    assert (mask.cumsum(1) - 1).clip(0).tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0]]


def test_the_mask_goes_by_length_where_pad_is_a_token_of_the_text():
    """pad == eos, and the text itself ends with it: the last EOS stays."""
    ids, mask = left_pad([[5, 1], [6, 7, 1]], pad=1)
    assert ids.tolist() == [[1, 5, 1], [6, 7, 1]]
    assert mask.tolist() == [[False, True, True], [True, True, True]]


@pytest.mark.parametrize(
    ("special", "eos", "pad"),
    [
        ({}, (1,), 0),
        ({"pad_token": None}, (1,), 1),
        ({"pad_token": "<eos>"}, (1,), 1),
        ({"eos_token": None}, (), 0),
        ({"eos_token": None, "pad_token": None}, (), 0),
    ],
    ids=["both", "no pad", "pad is eos", "no eos", "neither"],
)
def test_special_tokens_that_are_missing_or_the_same(special, eos, pad):
    tokenizer = chars(**special)
    assert (eos_ids(tokenizer), pad_id(tokenizer)) == (eos, pad)
    encoder = Encoder(tokenizer, 4)
    assert encoder.prompt("ab")[1] == (3, 4)
    assert encoder.ended([3, 1]) == bool(eos)


def test_a_completion_ends_with_any_of_several_eos_ids():
    encoder = Encoder(chars(), 4, eos_token_ids=[9])
    encoder.fit_model(100, eos_token_ids=[12, 9])
    assert encoder.eos_ids == (1, 9, 12)
    assert [encoder.ended([3, last]) for last in (1, 9, 12, 4)] == [True, True, True, False]
    assert not encoder.ended([])


def test_a_stop_string_is_found_across_tokens_and_only_there():
    stop = StopStrings(merging(), ["ba"])
    ids = [2, 4, 2]  # "a" "ab" "a": "aaba"
    assert [stop.found(ids[: i + 1]) for i in range(3)] == [False, False, True]
    assert not StopStrings(merging(), ["!"]).found(ids)
    assert not StopStrings(merging()).found(ids)


def test_a_stop_string_of_many_bytes():
    tokenizer = byt5()
    ids = tokenizer("xx→→", add_special_tokens=False)["input_ids"]
    stop = StopStrings(tokenizer, "→→")
    assert [stop.found(ids[:n]) for n in (len(ids) - 1, len(ids))] == [False, True]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="in every text"):
        StopStrings(chars(), ["x", ""])


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [(chars(), (3, 4)), (with_bos(), (6, 3, 4)), (byt5(), (100, 101)), (merging(), (4,))],
    ids=["plain", "bos and eos", "eos behind", "merging"],
)
def test_a_plain_prompt_has_what_belongs_in_front_and_nothing_behind(tokenizer, ids):
    """BOS where the tokenizer puts one; no EOS, after which a model would start another text. ByT5: byte + 3."""
    assert Encoder(tokenizer, 4).prompt("ab") == ("ab", ids)


def test_a_chat_goes_through_the_template_with_its_system_prompt():
    encoder = Encoder(chars(chat=True), 4, system_prompt="be kind")
    text, ids = encoder.prompt([{"role": "user", "content": "hi"}])
    assert text == "<|system|>be kind<eos>\n<|user|>hi<eos>\n<|assistant|>"
    assert chars().decode(ids) == text
    own, _ = encoder.prompt([{"role": "system", "content": "no"}, {"role": "user", "content": "hi"}])
    assert own.startswith("<|system|>no<eos>") and "kind" not in own


def test_plain_prompts_are_a_chat_where_that_is_asked():
    assert Encoder(chars(chat=True), 4, chat=True).prompt("hi")[0] == "<|user|>hi<eos>\n<|assistant|>"
    assert Encoder(chars(), 4, chat=True, chat_template="{{ messages[0].content }}=").prompt("hi")[0] == "hi="
    assert Encoder(chars(), 4, system_prompt="say ").prompt("hi")[0] == "say hi"


def test_a_template_gets_its_own_arguments():
    template = "{{ messages[0].content }}{% if think %}<think>{% endif %}"
    encoder = Encoder(chars(), 4, chat=True, chat_template=template, chat_template_kwargs={"think": True})
    assert encoder.prompt("hi")[0] == "hi<think>"


def test_a_chat_without_a_template_is_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        Encoder(chars(), 4, chat=True)
    with pytest.raises(ConfigError, match="list of messages, but the tokenizer has no chat template"):
        Encoder(chars(), 4).prompt([{"role": "user", "content": "hi"}])


def test_what_the_env_says_closes_the_turn_once():
    """After an EOS of its own the completion's message is closed; cut off, it is not, and the env's ids close it."""
    encoder, tokenizer = Encoder(chars(chat=True), 4, chat=True), chars()
    done, cut = tokenizer("ok<eos>")["input_ids"], tokenizer("ok")["input_ids"]
    closed = "\n<|user|>more<eos>\n<|assistant|>"
    assert tokenizer.decode(encoder.reply("more", done)) == closed
    assert tokenizer.decode(encoder.reply("more", cut)) == "<eos>" + closed
    assert tokenizer.decode(Encoder(chars(), 4).reply("more", done)) == "more"


def test_a_template_that_rewrites_answers_is_refused_for_turns():
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match="changes what the assistant has said"):
        Encoder(chars(), 4, chat=True, chat_template=template).reply("more", [3])


def test_a_tokenizer_with_ids_beyond_the_model():
    encoder = Encoder(chars(), 4)
    highest = len(chars()) - 1
    with pytest.raises(ConfigError, match=rf"does not match the model: its highest id is {highest} \('\?'\)"):
        encoder.fit_model(vocab_size=highest)
    encoder.fit_model(vocab_size=highest + 1)


def test_the_shorter_context_counts():
    encoder = Encoder(chars(), 10, context=50)
    encoder.fit_model(100, context=20)
    assert encoder.context == 20
    encoder.check_length(10, "row 3")
    with pytest.raises(ConfigError, match=r"row 3: the prompt has 11 tokens, and with max_new_tokens=10 that is 21"):
        encoder.check_length(11, "row 3")
    tokenizer = chars()
    tokenizer.model_max_length = 30
    assert Encoder(tokenizer, 4).context == 30


@pytest.mark.parametrize(
    ("arguments", "message"), [({"max_new_tokens": 0}, "max_new_tokens"), ({"context": 0}, "context")]
)
def test_limits_are_positive(arguments, message):
    with pytest.raises(ConfigError, match=f"{message}=0: expected a whole number, 1 or more"):
        Encoder(chars(), **arguments)


def test_no_tokenizer_and_no_text():
    with pytest.raises(ConfigError, match="tokenizer: expected one of transformers, got None"):
        Encoder(None)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        Encoder(chars()).prompt("")
    assert Encoder(with_bos()).prompt("")[1] == (6,)


def test_unknown_characters_are_said_once():
    encoder = Encoder(char_tokenizer("ab"))
    with pytest.warns(UserWarning, match="does not know all characters of 'aX'"):
        assert encoder.prompt("aX")[1] == (3, 2)
    encoder.prompt("aY")


def test_a_text_that_knows_its_ids():
    text = TokenText("ab", np.array([3, 4]))
    assert text == "ab" and text.ids == (3, 4)
    assert pickle.loads(pickle.dumps(text)).ids == (3, 4)
    encoder = Encoder(chars())
    assert encoder.ids_of(TokenText("ab", [9, 9])) == (9, 9)
    assert encoder.ids_of("ab") == (3, 4)


def test_a_stop_string_is_not_found_in_the_name_of_a_special_token():
    """ "a" is in "<pad>", which nobody reads; "<pad>" as a stop string means the token itself."""
    tokenizer = chars()
    assert not StopStrings(tokenizer, ["a"]).found([0]) and StopStrings(tokenizer, ["a"]).found([0, 3])
    assert StopStrings(tokenizer, ["<pad>"]).found([3, 0]) and StopStrings(tokenizer, ["a<pad>"]).found([3, 0])
    assert not StopStrings(tokenizer, ["a<pad>"]).found([4, 0])


def test_ids_that_the_tokenizer_does_not_know_are_named_and_left_out():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    encoder = Encoder(tokenizer, 4, stop_strings=["b"])
    ids = [*encoder.encode("a"), 390, *encoder.encode("c")]
    with pytest.warns(UserWarning, match="such as 390: it embeds more than the tokenizer's 384"):
        assert encoder.decode(ids) == "ac"
    assert not encoder.stop.found(ids) and encoder.stop.found([*ids, *encoder.encode("b")])


def test_a_task_of_messages_only_is_a_chat():
    """Texts given later are a user's; where a task has both, each goes as it is."""
    messages = [{"role": "user", "content": "ab"}]
    encoder, mixed = Encoder(chars(chat=True), 4, system_prompt="s"), Encoder(chars(chat=True), 4)
    encoder.hear([messages])
    mixed.hear([messages, "ab"])
    assert encoder.render("ab") == encoder.render(messages) and "<|system|>s" in encoder.render("ab")
    assert mixed.render("ab") == "ab"
