"""Tables between markers."""

from grpo_rl.lab.pages import Page


def test_tables_are_written_between_their_markers_and_nothing_else_changes(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "before\n<!-- a:begin -->\nold\n<!-- a:end -->\nbetween\n<!-- b:begin -->\n\n<!-- b:end -->\nafter\n"
    )
    page = Page(path, tmp_path / "found.json", {"a": lambda found: f"| {found['x']} |", "b": lambda found: r"\1"})
    page.keep({"x": 3})
    assert page.table() == "| 3 |\n\\1"
    assert page.written() == "old\n"
    page.write()
    assert page.written() == page.table()
    assert path.read_text() == (
        "before\n<!-- a:begin -->\n| 3 |\n<!-- a:end -->\nbetween\n<!-- b:begin -->\n\\1\n<!-- b:end -->\nafter\n"
    )
