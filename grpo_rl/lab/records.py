"""The numbers of a study: which run, evaluated when, with what score, kept as CSV; and tables of what it measured
beside its runs. Imports nothing heavy."""

import csv
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Run(NamedTuple):
    """Which run of a study."""

    task: str
    agent: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task} {self.agent} seed {self.seed}"

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.-]+", "-", f"{self.task}-{self.agent}-{self.seed}")


class Row(NamedTuple):
    """One evaluation of one run; a line of runs.csv.

    Attributes:
        task, agent, seed: Which run.
        settings: Digest of the recipe and the protocol: rows of other settings are not mixed.
        step: Environment steps at which the evaluation was due; it is made at the first vector step from there on.
            0: before training (`evaluation.before`).
        mode_mean, sampled_mean: Mean return with the mode of the policy and with sampled actions.
        wall_s, cpu_s: Seconds of training so far, evaluations not counted.
    """

    task: str
    agent: str
    seed: int
    settings: str
    step: int
    mode_mean: float
    sampled_mean: float
    wall_s: float
    cpu_s: float

    @property
    def run(self) -> Run:
        return Run(self.task, self.agent, self.seed)


class Table(NamedTuple):
    """What a measurement found.

    Attributes:
        title: A heading of the report.
        columns: Heads, with units.
        rows: Cells: numbers as they were measured (a page shows four digits of a float), texts, None for "–".
        notes: How it was measured, and what it says; Markdown under the table.
    """

    title: str
    columns: list[str]
    rows: list[list[str | int | float | None]]
    notes: str = ""

    def texts(self) -> list[list[str]]:
        """Head and rows as they are shown."""
        return [list(self.columns), *([_shown(cell) for cell in row] for row in self.rows)]


def _shown(cell: str | int | float | None) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def read_rows(path: Path) -> list[Row]:
    """The rows of a runs.csv; none where there is no file."""
    if not path.is_file():
        return []
    kinds = typing.get_type_hints(Row)
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**{name: kinds[name](value) for name, value in line.items()}) for line in csv.DictReader(file)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes runs.csv, whole or not at all."""
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in rows)
    draft.replace(path)
