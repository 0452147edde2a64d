"""What README and docs say is so: their Python runs, their links lead somewhere, their tables are current."""

import inspect
import re

import pytest

from grpo_rl import GRPO
from grpo_rl.grpo import HINT
from grpo_rl.lab.report import scores
from grpo_rl.lab.statistics import iqm
from grpo_rl.lab.study import finished, load_study
from grpo_rl.recipes import PACKAGE, load_object

ROOT = PACKAGE.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "agents" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
PYTHON = [
    (page, number, code)
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    if not code.startswith("def ")  # methods, shown without their class
]


@pytest.mark.parametrize(
    ("page", "number", "code"), PYTHON, ids=[f"{page.stem}-{number}" for page, number, _ in PYTHON]
)
def test_python_on_a_page_runs(page, number, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(re.sub(r"\.learn\([\d_]+\)", ".learn(100)", code), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_guide_names_every_option_and_its_default():
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8"), re.M
    )
    parameters = inspect.signature(GRPO.__init__).parameters
    shown = {}
    for names, defaults in rows:
        names = re.findall(r"`(\w+)`", names)
        if set(names) <= set(parameters):
            texts = [text.strip() for text in defaults.split(",")] if len(names) > 1 else [defaults]
            texts = texts if len(texts) == len(names) else texts * len(names)  # one default for all of the row
            shown |= {name: re.split("[:;]", text)[0].strip() for name, text in zip(names, texts, strict=True)}
    ours = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert set(ours) <= set(shown), "an option that the guide does not explain"
    for name, text in shown.items():
        default = parameters[name].default
        if name in ("fork_prob", "reset_prob"):  # the table shows what None stands for
            assert default is None
        else:
            assert text in (repr(default), f'"{default}"'), name


def test_the_table_of_forks_is_current():
    script = ROOT / "docs" / "make_forking_table.py"
    assert load_object(f"{script}:written")() == load_object(f"{script}:table")(), f"run python {script.name}"


def test_the_results_of_the_readme_are_current():
    script = ROOT / "docs" / "make_results.py"
    shown = load_object(f"{script}:MARKERS").search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown is not None
    assert shown[0] == load_object(f"{script}:section")(), "run make tables"


def test_the_hint_at_the_value_head_quotes_the_study():
    study = load_study("mujoco-hybrid")
    rows = finished(study, study.folder())
    without, beside = (
        iqm([scores(rows, "Hopper-v5", agent, "sampled", study.evaluation.last)])
        for agent in ("grpo-critic-free", "grpo-hybrid")
    )
    assert f"{without:.0f} against {beside:.0f} with one" in HINT
