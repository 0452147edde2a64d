"""Writes README.md's results again, between its markers, from the committed numbers of the studies: `make tables`."""

import re
from pathlib import Path

from grpo_rl.lab.report import results
from grpo_rl.lab.study import finished, load_study

STUDIES = ("mujoco-hybrid", "cartpole-acrobot")
MARKERS = re.compile(r"(?<=<!-- results:begin -->\n).*(?=<!-- results:end -->)", re.DOTALL)


def section() -> str:
    """The studies in short, each with a link to its report."""
    lines = []
    for name in STUDIES:
        study = load_study(name)
        rows = finished(study, study.folder(), say=print)
        if rows:
            lines += [*results(study, rows), "", f"Rerun: `grpo-rl bench {name}`. All of it, with curves and machine:"]
            lines += [f"[report](experiments/results/{name}/report.md).", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    readme = Path(__file__).parents[1] / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(MARKERS.sub(lambda _: section(), text), encoding="utf-8")
