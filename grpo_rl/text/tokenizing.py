"""From text to ids and back, once: prompts, chat templates, ends of a completion, what an env says between two turns.

Ids are the truth and text is read from them. A completion is never encoded again: decode → encode may give other ids
than those that were sampled, and then their log-probabilities would be of another text.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_rl.errors import ConfigError, check_whole, did_you_mean, warn
from grpo_rl.text.decoding import StopStrings, are

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, Any]]
"""A chat: [{"role": "user", "content": "…"}, …]."""

UNBOUNDED = 1_000_000
"""A tokenizer's model_max_length above this says nothing: transformers writes 1e30 there."""

_MARK = "\u2402completion\u2403"


class TokenText(str):
    """A text that knows its ids: what text envs show, and the completions that they are given."""

    ids: tuple[int, ...]

    def __new__(cls, text: str, ids: Sequence[int]) -> TokenText:
        made = super().__new__(cls, text)
        made.ids = tuple(int(i) for i in ids)
        return made

    def __getnewargs__(self) -> tuple[str, tuple[int, ...]]:  # type: ignore[override]
        return str(self), self.ids


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, for toy tasks: needs no files.

    Ids: 0 is <pad>, 1 <eos>, 2 <unk> for all other characters, then those of `alphabet` in their order, each once.

    Raises:
        ConfigError: A character comes twice, or there is none.
    """
    if not isinstance(alphabet, str):
        raise ConfigError(f"alphabet: expected a text, its characters, got {alphabet!r:.80}")
    if not alphabet or len(set(alphabet)) < len(alphabet):
        twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
        raise ConfigError(f"alphabet: expected different characters, got {alphabet!r}; more than once: {twice}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a chat, a non-empty list of messages."""
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt)
    )


def prompts_of(given: Any) -> tuple[list[Any], bool]:
    """The prompts that `predict` was given, and whether it was one alone; ConfigError for what is none."""
    single = isinstance(given, str) or is_messages(given)
    if isinstance(given, np.ndarray):
        given = np.atleast_1d(given)
    several = isinstance(given, Iterable) and not isinstance(given, bytes | Mapping)
    sources = list(given) if several and not single else [given]
    for source in sources:
        if not isinstance(source, str) and not is_messages(source):
            raise ConfigError(
                "predict: expected a text or a list of texts, or messages in place of a text, such as"
                f' [{{"role": "user", "content": "…"}}], got {source!r:.80}'
            )
    return sources, single


def eos_ids(tokenizer: Any, more: Iterable[int] = ()) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's own, if it has one, and `more`. Sorted, each once."""
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(sorted({int(i) for i in (*own, *more)}))


def pad_id(tokenizer: Any) -> int:
    """What fills the room before shorter prompts. Nothing reads it: masks are made from lengths, never from ids."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return int(next((i for i in known if i is not None), 0))


def left_pad(rows: Sequence[Sequence[int]], pad: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids, set flush right.

    Args:
        rows: N lists of ids.
        pad: Fills the left.
        length: L; None: that of the longest row.

    Returns:
        ids (N, L) int64 and mask (N, L) bool, True for ids that are there. Positions are `mask.cumsum(1) - 1`.
    """
    length = max(map(len, rows)) if length is None else length
    ids, mask = np.full((len(rows), length), pad, np.int64), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        if row:
            ids[i, -len(row) :], mask[i, -len(row) :] = row, True
    return ids, mask


def vocabulary_of(tokenizer: Any) -> str:
    """A digest of which token has which id, 16 hexadecimal digits: equal where a model can take either tokenizer."""
    pairs = sorted((int(i), str(token)) for token, i in tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=8).hexdigest()


def checked_encoding(encoding: Mapping[str, Any]) -> Mapping[str, Any]:
    """`encoding`, arguments of `Encoder` beside its first two; ConfigError for a name that is none of them."""
    valid = [name for name in Encoder.__dataclass_fields__ if name not in ("tokenizer", "max_new_tokens")]
    if unknown := sorted(encoding.keys() - set(valid)):
        raise ConfigError(f'no argument "{unknown[0]}": {did_you_mean(unknown[0], valid)}')
    return encoding


@dataclass
class Encoder:
    """How a task's text becomes ids.

    Args:
        tokenizer: Any of transformers'. It may lack a pad token and an EOS token.
        max_new_tokens: Tokens of a completion at most, of each turn's where there are several.
        stop_strings: Each ends a completion, and stays in it.
        eos_token_ids: Ids that end a completion beside the tokenizer's own EOS (chat models have several).
        system_prompt: In front of each prompt: as a system message in a chat (unless it brings one), else as text.
        chat: Whether prompts go through the chat template; None: those that are lists of messages do.
        chat_template: Jinja source in place of the tokenizer's template.
        chat_template_kwargs: For the template, such as {"enable_thinking": False}.
        context: Tokens that the model can take in all; None: the tokenizer's model_max_length, where that says one.

    Raises:
        ConfigError: No tokenizer, a number that is out of range, or chat=True without a template.
    """

    tokenizer: Any
    max_new_tokens: int = 64
    stop_strings: Sequence[str] = ()
    eos_token_ids: Sequence[int] = ()
    system_prompt: str | None = None
    chat: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    context: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.tokenizer) or not hasattr(self.tokenizer, "decode"):
            raise ConfigError(f"tokenizer: expected one of transformers, got {self.tokenizer!r}")
        check_whole("max_new_tokens", self.max_new_tokens)
        check_whole("context", 1 if self.context is None else self.context)
        for name in ("system_prompt", "chat_template"):
            if not isinstance(text := getattr(self, name), str | None):
                raise ConfigError(f"{name}: expected a text, got {text!r:.80}")
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise ConfigError(f"chat_template_kwargs: expected a dict, got {self.chat_template_kwargs!r:.80}")
        if not are(self.eos_token_ids, int | np.integer):
            raise ConfigError(f"eos_token_ids: expected a list of ids, got {self.eos_token_ids!r:.80}")
        self._warned, self._front = False, self._specials_in_front()
        self.stop = StopStrings(self.tokenizer, self.stop_strings)
        self._decoder = self.stop.decoder
        self.eos_ids = eos_ids(self.tokenizer, self.eos_token_ids)
        longest = getattr(self.tokenizer, "model_max_length", None)
        if self.context is None and longest is not None and longest <= UNBOUNDED:
            self.context = int(longest)
        if self.chat:
            self._require_template("chat=True")

    @functools.cached_property
    def vocabulary(self) -> str:
        """`vocabulary_of` its tokenizer, as it was at the first look."""
        return vocabulary_of(self.tokenizer)

    def prompt(self, source: str | Messages) -> tuple[str, tuple[int, ...]]:
        """The whole text of a prompt and its ids, special tokens in front included.

        Raises:
            ConfigError: No tokens at all, or a chat without a template.
        """
        text = self.render(source)
        return text, self._whole(source, text, self.encode(text))

    def render(self, source: str | Messages) -> str:
        """The whole text of a prompt: through the chat template, or with the system prompt in front.

        Raises:
            ConfigError: A chat without a template.
        """
        if not self.is_chat(source):
            return (self.system_prompt or "") + str(source)
        messages: Messages = [{"role": "user", "content": source}] if isinstance(source, str) else list(source)
        if self.system_prompt is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return self._template(messages)

    def lengths(self, sources: Sequence[str | Messages]) -> list[int]:
        """Tokens of many prompts at once: 0 for one that is empty."""
        texts = [self.render(source) for source in sources]
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            len(row) + (0 if self.is_chat(source) else len(self._front))
            for source, row in zip(sources, rows, strict=True)
        ]

    def ids_of(self, source: str | Messages) -> tuple[int, ...]:
        """The ids of a text that an env has shown, or those of `source` as a prompt of one's own."""
        return source.ids if isinstance(source, TokenText) else self.prompt(source)[1]

    def hear(self, sources: Iterable[str | Messages]) -> None:
        """Settles `chat` where it was left: a task of messages only is a chat, and texts are a user's from then on."""
        if self.chat is None and all(not isinstance(source, str) for source in sources):
            self.chat = True

    def reply(self, text: str, completion: Sequence[int]) -> tuple[int, ...]:
        """The ids that what an env says adds after a completion: to be read by the model, not to be trained on.

        In a chat they close the assistant's message and open the next one; an EOS that ended the completion and would
        be closed twice is left out.
        """
        if not self.chat:
            return tuple(self.encode(text))
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        messages.append({"role": "user", "content": text})
        whole = self._template(messages)
        if whole.count(_MARK) != 1:
            raise ConfigError(
                "chat_template: it changes what the assistant has said, so turns cannot follow each other"
            )
        ids = self.encode(whole.partition(_MARK)[2])
        return tuple(ids[1:] if completion and ids and completion[-1] == ids[0] and ids[0] in self.eos_ids else ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        return self._decoder(ids)

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a completion has ended by itself: by an EOS or a stop string."""
        return bool(ids) and (ids[-1] in self.eos_ids or self.stop.found(ids))

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without special tokens; ConfigError for what is none."""
        if not isinstance(text, str):
            raise ConfigError(f"expected a text, got {text!r:.80}")
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def is_chat(self, source: str | Messages) -> bool:
        """Whether a prompt goes through the chat template."""
        return bool(self.chat) or not isinstance(source, str)

    def overflow(self, n_tokens: int) -> bool:
        """Whether `n_tokens` leave no room for a completion."""
        return self.context is not None and n_tokens + self.max_new_tokens > self.context

    def check_length(self, n_tokens: int, where: str) -> None:
        """Raises ConfigError for a prompt of `n_tokens` that leaves no room for a completion; `where` names it."""
        if self.overflow(n_tokens):
            raise ConfigError(
                f"{where}: the prompt has {n_tokens} tokens, and with max_new_tokens={self.max_new_tokens} that is"
                f" {n_tokens + self.max_new_tokens}, more than the {self.context} that the model can take; shorten the"
                " prompt or lower max_new_tokens"
            )

    def fit_model(self, vocab_size: int, context: int | None = None, eos_token_ids: Iterable[int] = ()) -> None:
        """Takes the limits of a model: its EOS ids are added, and the shorter context counts.

        Args:
            vocab_size: Rows of its embedding.
            context: Tokens that it can take in all; None: no limit.
            eos_token_ids: Of its generation config.

        Raises:
            ConfigError: The tokenizer has ids that the model does not embed.
        """
        highest = max([*self.tokenizer.get_vocab().values(), *self.eos_ids])
        if highest >= vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(int(highest))
            raise ConfigError(
                f"the tokenizer does not match the model: its highest id is {highest} ({token!r}), and the model embeds"
                f" ids 0 … {vocab_size - 1}; take the tokenizer that the model was trained with, or"
                f" model.resize_token_embeddings({highest + 1})"
            )
        self.eos_ids = eos_ids(self.tokenizer, (*self.eos_ids, *eos_token_ids))
        limits = [limit for limit in (self.context, context) if limit is not None]
        self.context = min(limits) if limits else None

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _whole(self, source: str | Messages, text: str, ids: list[int]) -> tuple[int, ...]:
        if self.tokenizer.unk_token_id in ids and not self._warned:
            self._warned = True
            warn(f"the tokenizer does not know all characters of {text[:80]!r}: the model reads <unk> in their place")
        if not self.is_chat(source):  # a chat template writes its special tokens itself
            ids = [*self._front, *ids]
        if not ids:
            raise ConfigError("the prompt is empty, and the tokenizer puts no token in front of it: give it some text")
        return tuple(ids)

    def _template(self, messages: Messages) -> str:
        self._require_template("a prompt is a list of messages")
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self.chat_template,
                **self.chat_template_kwargs,
            )
        except TemplateError as error:
            raise ConfigError(f"the chat template does not take {messages!r:.200}: {error}") from error

    def _require_template(self, why: str) -> None:
        if self.chat_template is None and not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(f"{why}, but the tokenizer has no chat template: give chat_template=…, or plain prompts")

    def _specials_in_front(self) -> list[int]:
        """The special tokens that the tokenizer puts in front of a text, such as BOS; not those for its end."""
        whole, bare = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        for start in range(len(whole) - len(bare) + 1):
            if list(whole[start : start + len(bare)]) == list(bare):
                return [int(i) for i in whole[:start]]
        return []
