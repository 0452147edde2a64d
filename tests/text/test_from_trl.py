"""docs/from-trl.md names what exists: arguments, losses and figures of the log."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from stable_baselines3.common.logger import configure
from tiny_models import language_model, sampled

from grpo_rl import GRPO
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
