"""Language models as folders that `transformers` and PEFT load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from grpo_rl.errors import ConfigError, warn
from grpo_rl.policies.models import base_model


def save_model(model: Any, path: str | Path, merge: bool = False) -> None:
    """Writes a model of transformers, or PEFT's around one, into the folder `path`.

    Warns where the adapters that are written lie on a model that came as a module, as nothing names it then.

    Args:
        model: Is left as it is: merging is done on a copy, which takes the model's memory once more.
        path: Made if needed.
        merge: Adapters are merged into the weights, and a whole model is written; else the adapters alone.

    Raises:
        ConfigError: `path` is no path, or the adapters cannot be merged.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"save_pretrained: expected the path of a folder, got {path!r:.80}")
    if base_model(model) is model:
        model.save_pretrained(path)
        return
    if not merge:
        model.save_pretrained(path)
        if not any(config.base_model_name_or_path for config in model.peft_config.values()):
            warn(
                f"{path} has the adapters only, and their model came as a module: from_pretrained needs that, too. Save"
                " a whole model with save_pretrained(path, merge=True), or keep that one and load the adapters onto it:"
                " peft.PeftModel.from_pretrained(model, path)"
            )
        return
    try:
        merged = copy.deepcopy(model).merge_and_unload()
    except AttributeError:
        kinds = ", ".join(sorted(str(config.peft_type.value) for config in model.peft_config.values()))
        raise ConfigError(
            f"save_pretrained(merge=True): adapters of the kind {kinds} do not merge; leave it out"
        ) from None
    merged.save_pretrained(path)
