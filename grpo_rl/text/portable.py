"""An `Encoder` as plain data, which a file can hold, and back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from grpo_rl.errors import ConfigError
from grpo_rl.text.tokenizing import Encoder, vocabulary_of


def encoder_of(encoder: Encoder | dict[str, Any] | None, tokenizer: Any = None) -> Encoder | None:
    """The encoder that arguments of a policy mean.

    Args:
        encoder: One, or what `portable_encoder` gave; None: made from `tokenizer`.
        tokenizer: None: the encoder's. In place of one that has no files.

    Returns:
        None where there is no tokenizer.

    Raises:
        ConfigError: Another `tokenizer` than the encoder's.
    """
    if isinstance(encoder, dict):
        files = encoder["tokenizer"]
        if tokenizer is None and files is None:
            return None
        return Encoder(**(encoder | {"tokenizer": _read_tokenizer(files) if tokenizer is None else tokenizer}))
    if encoder is None:
        return None if tokenizer is None else Encoder(tokenizer)
    if not isinstance(encoder, Encoder):
        raise ConfigError(f"encoder: expected a grpo_rl.text.tokenizing.Encoder, got {encoder!r:.80}")
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise ConfigError(f"policy_kwargs={{'tokenizer': …}}: expected one of transformers, got {tokenizer!r:.80}")
    if tokenizer is not None and vocabulary_of(tokenizer) != encoder.vocabulary:
        raise ConfigError(
            "policy_kwargs={'tokenizer': …} has another vocabulary than the env's tokenizer: give the model's"
        )
    return encoder


def portable_encoder(encoder: Encoder) -> dict[str, Any]:
    """The encoder as plain data; its tokenizer as the text of its files, None where it writes none."""
    fields = {name: getattr(encoder, name) for name in Encoder.__dataclass_fields__}
    fields["stop_strings"], fields["eos_token_ids"] = list(encoder.stop.strings), list(encoder.eos_ids)
    fields["chat_template_kwargs"] = dict(encoder.chat_template_kwargs)
    fields["tokenizer"] = _tokenizer_files(encoder.tokenizer)
    return fields


def _tokenizer_files(tokenizer: Any) -> dict[str, str] | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
            return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}
        except (AttributeError, NotImplementedError, UnicodeDecodeError):  # one of the user's own
            return None


def _read_tokenizer(files: dict[str, str]) -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / Path(name).name).write_text(text, encoding="utf-8")
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
