"""docs/from-trl.md names what exists: arguments, losses and figures of the log."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from stable_baselines3.common.logger import configure
from tiny_models import language_model, sampled

from grpo_rl import GRPO
from grpo_rl.defaults import LANGUAGE
from grpo_rl.objective import LOSSES
from grpo_rl.policies.language import CausalLMPolicy
from grpo_rl.text.prompt_env import PromptEnv

PAGE = (Path(__file__).parents[2] / "docs" / "from-trl.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.+\|$", section, re.M)][2:]


def test_every_argument_on_the_page_exists() -> None:
    theirs = set(inspect.signature(GRPO.__init__).parameters)
    of_policy = set(inspect.signature(CausalLMPolicy.__init__).parameters)
    of_env = set(inspect.signature(PromptEnv.__init__).parameters)
    seen = 0
    for _, ours, _ in rows("Table of names"):
        for code in re.findall(r"`([^`]+)`", ours):
            if match := re.match(r'policy_kwargs=\{"(\w+)"', code):
                assert match[1] in of_policy, code
            elif match := re.search(r"PromptEnv\((\w+)", code):
                assert match[1] in of_env, code
            elif re.fullmatch(r"\w+(=.*)?", code) and code != "PromptEnv":
                assert code.split("=")[0] in theirs, code
            else:
                continue
            seen += 1
    assert seen > 20


def test_every_loss_is_on_the_page() -> None:
    named = {row[0].strip('"') for row in rows("Losses")}
    assert named == set(LOSSES) - {"clipped"}


def test_every_name_in_the_log_is_logged() -> None:
    model = language_model(kl_coef=0.1)
    model.set_logger(configure(None, []))
    sampled(model)
    model.train()
    log = model.logger.name_to_value
    for theirs, ours in rows("Names in the log"):
        names = re.findall(r"`([^`]+)`", theirs if ours == "the same" else ours)
        for name in names:
            name = name.replace("{name}", "agreement")
            assert name in log or name.startswith("time/"), name


def test_defaults_are_those_of_the_signatures() -> None:
    """The right column of "Defaults that differ": name and value, of GRPO, its policy or its env."""
    known = {}
    for made in (GRPO, CausalLMPolicy, PromptEnv):
        known |= {name: p.default for name, p in inspect.signature(made.__init__).parameters.items()}
    known["batch_size"] = LANGUAGE["batch_size"]
    found = re.findall(r"`(\w+)` ([^|:]+?)(?=:| \|)", PAGE.split("### Defaults that differ")[1].split("\n## ")[0])
    assert len(found) >= 6
    for name, value in found:
        assert repr(known[name]).replace("'", '"') == value, name


@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL: pip install -c constraints.txt trl")
def test_defaults_of_trl_are_those_of_the_version_on_the_page() -> None:
    from trl import GRPOConfig, GRPOTrainer

    assert f"version {version('trl')}" in PAGE.replace("\n", " "), "check the page against this version"
    defaults = {item.name: item.default for item in fields(GRPOConfig)}
    table = PAGE.split("### Defaults that differ")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| ([^|:]+?)(?=:| \|)", table, re.M)
    assert len(found) >= 7
    assert {name: repr(defaults[name]) for name, _ in found} == dict(found)
    same = {"num_generations": 8, "num_iterations": 1, "learning_rate": 1e-6, "max_grad_norm": 1.0, "beta": 0.0}
    same |= {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "entropy_coef": 0.0, "temperature": 1.0}
    same |= {"top_entropy_quantile": 1.0, "mask_truncated_completions": False, "lr_scheduler_type": "linear"}
    assert {name: defaults[name] for name in same} == same
    named = {name for row in rows("Table of names") for name in re.findall(r"`(\w+)", row[0])}
    assert named <= set(defaults) | set(inspect.signature(GRPOTrainer.__init__).parameters)
