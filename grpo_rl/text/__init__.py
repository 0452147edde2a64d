"""Language: environments of text, tasks, and generation. Names are imported when they are first used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_rl.text.conversation import Conversation
    from grpo_rl.text.grouping import ByAbility, ByColumn, ByLength, ByPrompt
    from grpo_rl.text.prompt_env import PromptEnv
    from grpo_rl.text.rewards import overlong
    from grpo_rl.text.spaces import Unicode
    from grpo_rl.text.tasks import is_held_out
    from grpo_rl.text.token_env import TokenEnv
    from grpo_rl.text.tokenizing import TokenText, char_tokenizer
    from grpo_rl.text.toy import base_model
    from grpo_rl.text.turns import TurnVecEnv
    from grpo_rl.text.vec_env import PromptVecEnv, TextVecEnv

_HOME = {
    "ByAbility": "grouping",
    "ByColumn": "grouping",
    "ByLength": "grouping",
    "ByPrompt": "grouping",
    "Conversation": "conversation",
    "PromptEnv": "prompt_env",
    "PromptVecEnv": "vec_env",
    "TextVecEnv": "vec_env",
    "TokenEnv": "token_env",
    "TokenText": "tokenizing",
    "TurnVecEnv": "turns",
    "Unicode": "spaces",
    "base_model": "toy",
    "char_tokenizer": "tokenizing",
    "is_held_out": "tasks",
    "overlong": "rewards",
}

__all__ = [
    "ByAbility",
    "ByColumn",
    "ByLength",
    "ByPrompt",
    "Conversation",
    "PromptEnv",
    "PromptVecEnv",
    "TextVecEnv",
    "TokenEnv",
    "TokenText",
    "TurnVecEnv",
    "Unicode",
    "base_model",
    "char_tokenizer",
    "is_held_out",
    "overlong",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"grpo_rl.text.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
