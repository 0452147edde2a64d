"""The recipe that `--print-config` writes: what it sets, and what else there is."""

import inspect
import re

import pytest
import yaml

from grpo_rl import GRPO
from grpo_rl.lab.template import template
from grpo_rl.recipes import load_recipe, make_recipe, names


@pytest.mark.parametrize("name", names())
def test_it_is_the_same_recipe_with_its_comments_and_without(name, tmp_path):
    """Without the comment signs every default is a setting, so the recipe sets all there is."""
    recipe = load_recipe(name)
    text = template(recipe)
    for written in (text, re.sub(r"^  # ", "  ", text, flags=re.M)):
        (tmp_path / "own.yaml").write_text(written)
        again = load_recipe(tmp_path / "own.yaml")
        assert (again.training, again.environment, again.name) == (recipe.training, recipe.environment, recipe.name)
        assert recipe.model.items() <= again.model.items()
        assert recipe.optimization.items() <= again.optimization.items()


def test_every_option_of_the_algorithm_is_there_once_with_its_default():
    recipe = make_recipe({"environment": {"id": "CartPole-v1"}, "optimization": {"gamma": 0.9}}, "test")
    section = template(recipe).split("\noptimization:\n")[1].split("\nresources:")[0]
    shown = {}
    for line in section.splitlines():
        sign, setting = re.fullmatch(r"  (# )?(\w+: .+)", line).groups()
        ((name, value),) = yaml.safe_load(setting).items()
        assert name not in shown
        assert (name == "gamma") == (sign is None)
        shown[name] = value
    parameters = inspect.signature(GRPO.__init__).parameters
    elsewhere = {"self", "policy", "env", "policy_kwargs", "seed", "device", "verbose", "tensorboard_log"}
    elsewhere |= {"_init_setup_model", "rollout_buffer_class", "rollout_buffer_kwargs"}
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in elsewhere}
    assert shown == defaults | {"gamma": 0.9}


def test_classes_have_the_names_that_recipes_use():
    text = template(load_recipe("cartpole"))
    assert "  # activation_fn: torch.nn.modules.activation:Tanh\n" in text
    assert "  # wandb: null\n" in text
