"""Tokenizers as they come: with a chat template, with BOS, with merges, without EOS or pad token. None needs a file."""

from typing import Any

from grpo_rl.text import char_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz<>|/ \n0123456789+=?"
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chars(chat: bool = False, **special: Any) -> Any:
    """One token a character; `special` overwrites special tokens (pad_token=None: there is none)."""
    tokenizer = char_tokenizer(LETTERS)
    if chat:
        tokenizer.chat_template = CHAT
    for name, token in special.items():
        setattr(tokenizer, name, token)
    return tokenizer


def merging() -> Any:
    """Knows "a", "b" and "ab": ids of "a" then "b" do not survive decode → encode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4, "!": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def with_bos() -> Any:
    """Puts <bos> in front of a text and <eos> behind it, as many do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = char_tokenizer("abc")
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    specials = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=specials)
    return tokenizer


def byt5() -> Any:
    """A byte a token, and </s> behind each text."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()
