"""Pages of the docs whose tables a script makes from a committed file of findings, between markers of their names."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Page:
    """A page with tables between `<!-- name:begin -->` and `<!-- name:end -->`.

    Args:
        path: Of the page.
        findings: A JSON file: what was measured.
        tables: Name to a function that makes the table of the findings.
    """

    path: Path
    findings: Path
    tables: dict[str, Callable[[Any], str]]

    def table(self) -> str:
        """All tables, as the findings say."""
        found = self.read()
        return "\n".join(make(found) for make in self.tables.values())

    def written(self) -> str:
        """The tables that the page holds now."""
        text = self.path.read_text(encoding="utf-8")
        return "\n".join(found[0] for name in self.tables if (found := _between(name).search(text)))

    def write(self) -> None:
        """Puts the tables into the page."""
        text, found = self.path.read_text(encoding="utf-8"), self.read()
        for name, make in self.tables.items():
            table = make(found)
            text = _between(name).sub(lambda _, table=table: table, text)  # type: ignore[misc]
        self.path.write_text(text, encoding="utf-8")

    def read(self) -> Any:
        """The findings."""
        return json.loads(self.findings.read_text(encoding="utf-8"))

    def keep(self, found: Any) -> None:
        """Writes the findings, for `read`."""
        self.findings.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _between(name: str) -> re.Pattern[str]:
    return re.compile(f"(?<=<!-- {name}:begin -->\n).*?(?=\n<!-- {name}:end -->)", re.DOTALL)
