"""Writes what the study text-vs-ppo measured into "GRPO or PPO" of text.md.

python docs/make_text_vs_ppo.py        after `grpo-rl bench text-vs-ppo`
"""

import re
from pathlib import Path
from typing import Any

from grpo_rl.lab.measurements import read_table
from grpo_rl.lab.report import markdown_table
from grpo_rl.lab.study import load_study

PAGE = Path(__file__).with_name("text.md")
MARKERS = re.compile(r"(?<=<!-- text-vs-ppo:begin -->\n).*?(?=\n<!-- text-vs-ppo:end -->)", re.DOTALL)
SIZES = ("0.3M", "3M", "20M")
MEASUREMENTS = ("scores", "costs", "gains")
ALONE, VALUED, OFTEN = "reply, CPU ms", "with its values, CPU ms", "CPU s an iteration"
CLAIMS = (
    ("peak memory", "−33 % (elsewhere −40 %)", "peak over the imports, MiB"),
    ("iterations in equal time", "+63 %", OFTEN),
    ("latency of a short reply", "120 → 80 ms, −33 %", ALONE),
    ("reward for equal computing", "+30 % efficiency", "gained per 1,000 CPU s"),
)
"""What is compared, what the article says of GRPO beside PPO, and the column that says it here."""


def table() -> str:
    """The article's claims beside ours, then the tables of the study; "–" for what is not measured."""
    study = load_study("text-vs-ppo")
    found = {name: read_table(study.folder() / f"{name}.json") for name in MEASUREMENTS}
    blocks = [markdown_table(claims(found["costs"], found["gains"]))]
    for made in found.values():
        if made is not None:
            blocks += [[f"**{made.title}.** {made.notes}"], markdown_table(made.texts())]
    if (study.folder() / "report.md").is_file():
        blocks.append(["Curves, intervals and machine: [report](../experiments/results/text-vs-ppo/report.md)."])
    return "\n\n".join("\n".join(block) for block in blocks)


def written() -> str:
    """What the page holds now."""
    held = MARKERS.search(PAGE.read_text(encoding="utf-8"))
    assert held is not None, "text.md has lost the markers of text-vs-ppo"
    return held[0]


def claims(costs: Any, gains: Any) -> list[list[str]]:
    """GRPO beside both kinds of PPO: the article's figures, and ours at each size."""
    lines = [["GRPO against PPO", "the article says", "PPO is here", *SIZES]]
    for what, said, column in CLAIMS:
        source = gains if column.startswith("gained") else costs
        for first, rival in zip(((what, said), ("", "")), ("ppo-critic", "ppo-head"), strict=True):
            lines.append([*first, rival, *(change(source, size, rival, column) for size in SIZES)])
    return lines


def change(found: Any, size: str, rival: str, column: str) -> str:
    """By how much GRPO's number differs, in per cent of the rival's.

    Of seconds: how many more iterations they hold. Of a reply: the rival's has its value function in the path.
    """
    ours = cell(found, size, "grpo", column)
    theirs = cell(found, size, rival, VALUED if column == ALONE else column)
    if ours is None or theirs is None or min(ours, theirs) <= 0:
        return "–"
    ratio = theirs / ours if column == OFTEN else ours / theirs
    return f"{100 * (ratio - 1):+.0f} %".replace("-", "−")


def cell(table: Any, size: str, agent: str, column: str) -> float | None:
    """A number of a table, by the size and the agent of its row."""
    rows = [] if table is None else table.rows
    return next((row[table.columns.index(column)] for row in rows if row[:2] == [size, agent]), None)


if __name__ == "__main__":
    text, new = PAGE.read_text(encoding="utf-8"), table()
    PAGE.write_text(MARKERS.sub(lambda _: new, text), encoding="utf-8")
