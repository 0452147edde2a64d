"""Models of transformers, PEFT's around them included: made, given a float type to be trained in, and as plain data.

What is trained has fp32 weights. In bf16 neighbouring numbers are 1/256 to 1/128 apart, relative to their size, and a
step that is smaller than half of that is rounded away: AdamW's at a learning rate of 1e-6 changes hardly any weight.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch as th
from torch import nn

from grpo_rl.errors import ConfigError, check_whole, did_you_mean, warn

Model = str | nn.Module | dict[str, Any] | Callable[[], nn.Module]
_HALVES = {"bfloat16": th.bfloat16, "float16": th.float16}


def make_model(
    model: Model, lora: int | dict[str, Any] | None = None, dtype: th.dtype | None = None
) -> tuple[nn.Module, th.dtype | None]:
    """The module that is trained, and the float type that its forward passes are to run in.

    Args:
        model: a path or hub id, a module, a function that makes one, a configuration, or what `portable_model` gave,
            which is made as it was: then the others are not looked at.
        lora: see `add_lora`; None: no adapters, or those of `model`.
        dtype: of all parameters; None: see `widen`.

    Returns:
        The module; and bf16 where its parameters were that and are fp32 now, else None: in what they are.

    Raises:
        ConfigError: No causal language model of `transformers`, or no such adapters.
    """
    if isinstance(model, dict) and "config" in model:
        return _rebuilt(model), None
    made = load_model(model, dtype)
    if lora is not None:
        made = add_lora(made, lora)
    if dtype is None:
        return made, widen(made)
    if dtype in _HALVES.values() and any(parameter.dtype in _HALVES.values() for parameter in _trained(made)):
        warn(
            "dtype: 16-bit weights are trained, and steps below 1/256 of a weight are rounded away: at small learning"
            ' rates hardly any changes. Leave dtype out: weights are fp32 then; with autocast="bf16" (or a bf16 model)'
            " they are computed with in bf16"
        )
    return made, None


def load_model(model: Model, dtype: th.dtype | None = None) -> nn.Module:
    """The module that `model` names: a path or hub id, a module, a function that makes one, or a configuration.

    Raises:
        ConfigError: It is no causal language model of `transformers`, or has adapters that are prompts.
    """
    made: Any
    if isinstance(model, str | dict):
        made = _of_transformers(model, dtype)
    else:
        made = model if isinstance(model, nn.Module) else model() if callable(model) else model
    lm = base_model(made) if isinstance(made, nn.Module) else made
    body = getattr(lm, str(getattr(lm, "base_model_prefix", "")), None)
    if not isinstance(body, nn.Module) or body is lm or lm.get_output_embeddings() is None:
        raise ConfigError(
            f"model={type(made).__name__}: expected a causal language model of transformers (a path, a hub id, a module"
            " such as LlamaForCausalLM, or a function that makes one)"
        )
    for name, config in _adapters(made).items():
        if config.is_prompt_learning:
            raise ConfigError(
                f'model: its adapter "{name}" ({config.peft_type.value}) is a prompt that PEFT puts in front of all'
                " others; expected adapters inside the model, such as LoRA"
            )
    return made if dtype is None else made.to(dtype)


def _of_transformers(model: str | dict[str, Any], dtype: th.dtype | None) -> Any:
    """A model by its path or hub id, or a new one by its configuration; `dtype` None: the one that it says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if isinstance(model, str):
            return AutoModelForCausalLM.from_pretrained(model, dtype=dtype or "auto")
        given = {} if dtype is None else {"dtype": dtype}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model), trust_remote_code=False, **given)
    except (OSError, ValueError, TypeError) as error:  # its own, for no such path, kind or file
        what = " ".join(str(error).split())
        raise ConfigError(f"model={model!r:.200}: transformers makes no causal language model of it: {what}") from error


def base_model(model: Any) -> Any:
    """The causal language model itself, where `model` may be PEFT's around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def add_lora(model: Any, settings: int | dict[str, Any]) -> Any:
    """`model` under LoRA adapters: `settings` are the rank, or arguments of `peft.LoraConfig`.

    Raises:
        ConfigError: PEFT is missing, or takes no such settings for this model.
    """
    peft = _peft()
    if not isinstance(settings, Mapping):
        check_whole("lora", settings)
    given = dict(settings) if isinstance(settings, Mapping) else {"r": settings}
    valid = peft.LoraConfig.__dataclass_fields__
    if unknown := sorted(given.keys() - valid.keys()):
        raise ConfigError(f'lora: peft.LoraConfig has no "{unknown[0]}": {did_you_mean(unknown[0], valid)}')
    try:
        return peft.get_peft_model(model, peft.LoraConfig(**({"task_type": "CAUSAL_LM"} | given)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lora={settings!r:.200}: {' '.join(str(error).split())}") from error


def widen(model: nn.Module) -> th.dtype | None:
    """Makes 16-bit parameters that are trained fp32, in place; frozen ones stay as they are.

    Returns:
        bf16 where some were bf16: the forward passes can go on in it, by autocast. None: they run as the parameters
        are. Where trained ones were fp16, frozen ones become fp32 too: gradients in fp16 would need a loss scale.
    """
    kinds = {parameter.dtype for parameter in _trained(model)} & set(_HALVES.values())
    for parameter in model.parameters() if th.float16 in kinds else _trained(model):
        if parameter.dtype in _HALVES.values():
            parameter.data = parameter.data.float()
    return th.bfloat16 if kinds == {th.bfloat16} else None


def portable_model(model: nn.Module) -> dict[str, Any]:
    """A model without its weights as plain data, from which `make_model` builds one that takes them.

    Returns:
        Its configuration, those of its adapters and which of them is in use, the names of frozen parameters, and of
        parameters and buffers by their type where it is a 16-bit one.
    """
    halves: dict[str, list[str]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype in _HALVES.values():
            halves.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(name)
    return {
        "config": base_model(model).config.to_dict(),
        "adapters": {name: _plain(config.to_dict()) for name, config in _adapters(model).items()},
        "active": getattr(model, "active_adapter", None),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "halves": halves,
    }


def _rebuilt(form: dict[str, Any]) -> nn.Module:
    try:
        model = _of_transformers(form["config"], th.float32)
        for name, settings in form["adapters"].items():
            model = _under(model, name, settings)
        if form["active"] is not None:
            model.set_adapter(form["active"])
        frozen = set(form["frozen"])
        dtypes = {name: _HALVES[kind] for kind, names in form["halves"].items() for name in names}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model: a description that is damaged, or of another version: {error!r:.200}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
        if name in dtypes:
            parameter.data = parameter.data.to(dtypes[name])
    for at, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and (whole := f"{at}.{name}" if at else name) in dtypes:
                module._buffers[name] = buffer.to(dtypes[whole])
    return model


def _under(model: Any, name: str, settings: dict[str, Any]) -> Any:
    """`model` under one more adapter, whose weights come later: they begin in the plainest way."""
    peft = _peft()
    begins = settings.get("init_lora_weights", True)
    plainest = {"init_lora_weights": True} if "init_lora_weights" in settings else {}
    named = {"base_model_name_or_path": None, "megatron_config": None, "inference_mode": False}
    config = peft.PeftConfig.from_peft_type(**(settings | plainest | {k: v for k, v in named.items() if k in settings}))
    if _adapters(model):
        model.add_adapter(name, config)
    else:
        model = peft.get_peft_model(model, config, adapter_name=name)
    if plainest:
        config.init_lora_weights = begins
    config.base_model_name_or_path = settings.get("base_model_name_or_path")
    return model


def _adapters(model: Any) -> dict[str, Any]:
    """PEFT's configurations by their adapters' names; none for a model without."""
    return dict(model.peft_config) if base_model(model) is not model else {}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError('adapters need PEFT: pip install "grpo_rl[text,peft]"') from error
    return peft


def _plain(value: Any) -> Any:
    """Enums as their values, sets and tuples as lists."""
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(part) for name, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.value if isinstance(value, enum.Enum) else value
