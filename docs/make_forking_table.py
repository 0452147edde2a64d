"""Writes the table of docs/forking.md: which environments of Gymnasium fork exactly, found by trying.

    python docs/make_forking_table.py

The newest version of each environment that Gymnasium brings is probed: two fresh instances, a fork every 25 steps, across
ends of episodes, 200 steps compared bit for bit. tests/test_docs.py fails when the table is out of date.
"""

import re
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np

from grpo_rl import probe_fork

PAGE = Path(__file__).with_name("forking.md")
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
FAMILIES = {"classic_control": "classic control", "toy_text": "toy text", "mujoco": "MuJoCo", "box2d": "Box2D"}


def newest_ids() -> dict[str, list[str]]:
    """Ids by family, sorted: of each name the highest version that Gymnasium itself registers."""
    newest: dict[str, gym.envs.registration.EnvSpec] = {}
    for spec in gym.registry.values():
        family = re.match(r"gymnasium\.envs\.(\w+)", str(spec.entry_point))
        if family and family[1] in FAMILIES and spec.namespace is None:
            known = newest.get(spec.name)
            if known is None or (spec.version or 0) > (known.version or 0):
                newest[spec.name] = spec
    found: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for spec in newest.values():
        found[str(spec.entry_point).split(".")[2]].append(spec.id)
    return {family: sorted(ids) for family, ids in found.items()}


def starts_alike(env_id: str) -> bool:
    """Whether resets with one seed give one first observation, in a fresh instance and after an episode."""
    starts = []
    for earlier_steps in (0, 20):
        env = gym.make(env_id)
        env.reset(seed=1)
        env.action_space.seed(1)
        for _ in range(earlier_steps):
            if any(env.step(env.action_space.sample())[2:4]):
                env.reset()
        starts.append(np.asarray(env.reset(seed=7)[0]))
        env.close()
    return bool(np.array_equal(*starts))


def table() -> str:
    """The Markdown table. Times are left out: they belong to a machine."""
    lines = ["| family | environment | exact forks | copied by | groups by |", "|---|---|---|---|---|"]
    for family, ids in newest_ids().items():
        for env_id in ids:
            report = probe_fork(env_id)
            means = "fork" if report.exact else "seed" if starts_alike(env_id) else "batch"
            exact = "yes" if report.exact else "no"
            lines.append(f"| {FAMILIES[family]} | {env_id} | {exact} | {report.how or '–'} | {means} |")
    return "\n".join(lines)


def written() -> str:
    """The table that the page holds now."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
