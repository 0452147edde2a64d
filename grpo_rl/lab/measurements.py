"""What a study measures beside its learning runs: speed or memory, as tables that functions of its own make.

    measurements: {memory: "text_vs_trl.py:memory"}      # in the study's YAML; file.py is looked up from its folder

A function takes nothing and returns a `Table`. `bench` calls it in a process of its own with one thread, after the
runs and with nothing beside it. The table is kept in <name>.json, for docs and tests to read, and shown in report.md.
"""

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch as th

from grpo_rl.errors import ConfigError
from grpo_rl.lab.records import Table
from grpo_rl.recipes import load_object


def settings(reference: str) -> str:
    """Digest of the code that measures: the file of the function, and its name. Comments and layout do not count.

    Raises:
        ConfigError: It names no function.
    """
    function = load_object(reference)
    if not inspect.isfunction(function):
        raise ConfigError(f"{reference} is no function; expected one that takes nothing and returns a Table")
    code = ast.dump(ast.parse(Path(inspect.getfile(function)).read_text(encoding="utf-8")))
    return hashlib.sha256(f"{code} {function.__name__}".encode()).hexdigest()[:8]


def measure(reference: str, name: str) -> Table:
    """Calls the function; its table.

    Raises:
        ConfigError: It returns something else, or rows of another width than its columns.
    """
    table = load_object(reference)()
    if not isinstance(table, Table):
        raise ConfigError(f"measurement {name}: expected a grpo_rl.lab.records.Table, got {type(table).__name__}")
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ConfigError(f"measurement {name}: expected {len(table.columns)} cells in a row, got {list(row)}")
    return table


def read_table(path: Path, digest: str | None = None) -> Table | None:
    """The table kept at `path`; None where there is none, or only one of another digest (None: any will do)."""
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return Table(**data["table"]) if digest in (None, data["settings"]) else None


def measured(measurements: Mapping[str, str], folder: Path) -> dict[str, Table]:
    """The tables in `folder` that belong to these measurements with their present code."""
    found = {name: read_table(folder / f"{name}.json", settings(where)) for name, where in measurements.items()}
    return {name: table for name, table in found.items() if table is not None}


if __name__ == "__main__":
    th.set_num_threads(1)
    name, reference, out = sys.argv[1:]
    content = {"settings": settings(reference), "table": measure(reference, name)._asdict()}
    draft = Path(out).with_suffix(".draft")
    draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(out)
