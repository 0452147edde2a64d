"""Agents' files from anywhere: what they would execute, and whether they can be read at all."""

from grpo_rl.loading.archive import Contents, ZipPath, foreign_arguments, inspect_zip, open_zip

__all__ = ["Contents", "ZipPath", "foreign_arguments", "inspect_zip", "open_zip"]
