"""A recipe written out in full, to start one's own from: what it sets, and every other option as a comment."""

import inspect
from typing import Any

import yaml

from grpo_rl.defaults import settled
from grpo_rl.lab.build import default
from grpo_rl.policies.language import CausalLMPolicy
from grpo_rl.recipes import NOT_MODEL, NOT_OPTIMIZATION, Recipe, algorithm_class, parameters, resolve


def template(recipe: Recipe) -> str:
    """The YAML of `to_yaml` with `# option: default` lines; without the `# ` each of them is a setting."""
    algorithm = algorithm_class(recipe)
    policy = recipe.model["policy"]
    named = resolve(policy) if ":" in policy else algorithm.policy_aliases[policy]
    offered: dict[str, dict[str, Any]] = {
        "training": {"wandb": None},
        "environment": {"curriculum": None, "evaluation": {}},
        "model": _defaults(named, NOT_MODEL),
        "optimization": {
            name: settled(name, value, issubclass(named, CausalLMPolicy))
            for name, value in _defaults(algorithm, NOT_OPTIMIZATION).items()
        },
    }
    lines = []
    for key, value in yaml.safe_load(recipe.to_yaml()).items():
        lines.append(f"{key}:" if value == {} else _yaml({key: value}))
        given = value if isinstance(value, dict) else {}
        lines += [f"  # {_yaml({name: left})}" for name, left in offered.get(key, {}).items() if name not in given]
    return "\n".join(lines) + "\n"


def _defaults(cls: type[Any], without: set[str]) -> dict[str, Any]:
    found = {name: default(cls, name) for name in parameters(cls, without)}
    return {name: value for name, value in found.items() if value is not inspect.Parameter.empty}


def _yaml(setting: dict[str, Any]) -> str:
    """As YAML; classes and functions by the names that recipes have for them."""
    named = {key: f"{item.__module__}:{item.__name__}" if callable(item) else item for key, item in setting.items()}
    return yaml.safe_dump(named, sort_keys=False, allow_unicode=True, width=1000).rstrip()
