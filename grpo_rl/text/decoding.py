"""From ids to text, and the strings in it that end a completion."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from grpo_rl.errors import ConfigError, warn


def are(values: Any, kind: Any) -> bool:
    """Whether these are several of a kind; a text is no list of texts."""
    return isinstance(values, Iterable) and not isinstance(values, str) and all(isinstance(v, kind) for v in values)


def special_tokens(tokenizer: Any) -> set[str]:
    """The texts of the tokens that `skip_special_tokens` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    named = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    return named | {str(token.content) for token in added if token.special}


class Decoder:
    """From ids to text. Ids that the tokenizer does not know have none: a model may embed more than it was given.

    Args:
        tokenizer: Of transformers; some raise for such ids, others leave them out, as it is done here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._warned = tokenizer, False

    def __call__(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids.

        Raises:
            ConfigError: The tokenizer fails, and not for ids that it does not know.
        """
        try:
            return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except Exception as error:  # whatever a tokenizer raises
            unknown = sorted(set(ids) - self.known)
            if not unknown:
                raise ConfigError(f"the tokenizer cannot decode the ids {list(ids)!r:.200}: {error!r}") from error
            self._warn(unknown)
            return self.tokenizer.decode([i for i in ids if i in self.known], skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def known(self) -> frozenset[int]:
        """All ids of the tokenizer."""
        return frozenset(int(i) for i in self.tokenizer.get_vocab().values())

    def _warn(self, unknown: Sequence[int]) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"the model says ids that the tokenizer does not know, such as {unknown[0]}: it embeds more than the"
                f" tokenizer's {len(self.known)}. They have no text;"
                f" model.resize_token_embeddings({max(self.known) + 1}) takes them away"
            )


class StopStrings:
    """Says whether a completion holds one of some strings, whatever tokens it is spelled with.

    They are looked for in the text that the completion decodes to. That has no special tokens; only a string that holds
    the whole text of one, such as "<|im_end|>", is looked for where these are written out.

    Args:
        tokenizer: Decodes.
        strings: None of them empty.

    Raises:
        ConfigError: An empty string, or what is no text.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str] = ()) -> None:
        self.decoder = Decoder(tokenizer)
        strings = (strings,) if isinstance(strings, str) else strings
        if not are(strings, str):
            raise ConfigError(f"stop_strings: expected a list of texts, got {strings!r:.80}")
        self.strings = tuple(strings)
        if "" in self.strings:
            raise ConfigError('stop_strings: "" is in every text; give the strings that end a completion')
        special = special_tokens(tokenizer) if self.strings else set()
        self._special = tuple(string for string in self.strings if any(token in string for token in special))
        self._plain = tuple(string for string in self.strings if string not in self._special)
        # A character is four tokens at most (bytes); what was in front of the last few has been looked at before.
        self._tail = 4 * max(map(len, self.strings), default=0) + 4

    def found(self, ids: Sequence[int]) -> bool:
        """Whether a stop string is in what the last ids say. Call it after each token."""
        tail = ids[-self._tail :]
        for strings, skip in ((self._plain, True), (self._special, False)):
            text = self.decoder(tail, skip) if strings else ""
            if any(string in text for string in strings):
                return True
        return False
