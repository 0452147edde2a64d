"""What README and docs say is so: their Python runs, their links lead somewhere, their tables are current."""

import inspect
import re

import gymnasium as gym
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.logger import KVWriter, Logger

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
    if not code.startswith(("def ", "import wandb"))  # methods without their class; tests/lab/test_wandb_log.py
]


@pytest.mark.parametrize(
    ("page", "number", "code"), PYTHON, ids=[f"{page.stem}-{number}" for page, number, _ in PYTHON]
)
def test_python_on_a_page_runs(page, number, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(re.sub(r"\.learn\([\d_]+", ".learn(100", code), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    for link, anchor in links:
        if anchor:
            text = ((page.parent / link) if link else page).read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.+)$", text, re.M)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], link


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


def section_of(page: str, title: str) -> str:
    """What stands under a second-level title of a page in docs/."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_argument_of_ppo_is_on_its_page_with_both_defaults():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", section_of("from-ppo.md", "Table of names"), re.M)
    theirs, ours = (inspect.signature(algorithm.__init__).parameters for algorithm in (PPO, GRPO))
    assert [name for name, _, _ in rows] == list(theirs)[1:] == list(ours)[1 : len(theirs)], "all, in their order"

    def written(parameter: inspect.Parameter) -> str:
        default = parameter.default
        return "–" if default is parameter.empty else f'"{default}"' if isinstance(default, str) else repr(default)

    assert rows == [(name, written(theirs[name]), written(ours[name])) for name, _, _ in rows]


def test_what_is_new_beside_ppo_exists():
    new = re.findall(r"^\| (`.+?) \|", section_of("from-ppo.md", "What is new, and when to use it"), re.M)
    names = {name for cell in new for name in re.findall(r"`(\w+)", cell)}
    assert names <= set(inspect.signature(GRPO.__init__).parameters) - set(inspect.signature(PPO.__init__).parameters)
    assert {"group_size", "value_head", "trust_region", "cold_start"} <= names


def test_names_in_the_log_are_those_of_ppo():
    section = section_of("from-ppo.md", "Names in the log")
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", section, re.M)
    listed = {name: said for cell, said in rows for name in re.findall(r"`([\w/]+)`", cell)}
    hybrid = {"value_head": True, "group_size": 2, "clip_range_vf": 0.2}
    found = []
    for algorithm, settings in ((PPO, {"clip_range_vf": 0.2}), (GRPO, hybrid), (GRPO, {"group_size": 2})):
        env = Succeeding(gym.make("Pendulum-v1"))
        model = algorithm("MlpPolicy", env, n_steps=256, n_epochs=1, device="cpu", **settings)
        model.set_logger(Logger(None, [names := Names()]))
        model.learn(1024)
        found.append(names.seen)
    theirs, hybrid, critic_free = found
    assert set(listed) == theirs
    assert theirs <= hybrid
    only_hybrid = {name for name, said in listed.items() if "value_head" in said}
    assert theirs - only_hybrid == theirs & critic_free
    new = {name for name in hybrid - theirs if not name.startswith("group/")}
    assert new == {"train/advantage_mean", "train/advantage_std", "train/grad_norm"}
    assert all(f"`{name}`" in section for name in new)


class Names(KVWriter):
    """Remembers the names that were logged."""

    def __init__(self):
        self.seen = set()

    def write(self, key_values, key_excluded, step=0):
        self.seen |= key_values.keys()

    def close(self):
        pass


class Succeeding(gym.Wrapper):
    """Every end of an episode is a success, and says so."""

    def step(self, action):
        *rest, truncated, info = self.env.step(action)
        return *rest, truncated, info | ({"is_success": True} if truncated else {})


@pytest.mark.parametrize("name", ["engine", "forking_table", "learner", "monitor", "workers"])
def test_the_tables_of_a_page_are_current(name):
    script = ROOT / "docs" / f"make_{name}.py"
    table = load_object(f"{script}:table")()
    assert table.count("\n") > 3
    assert load_object(f"{script}:written")() == table, f"run python docs/{script.name} --tables-only"


@pytest.mark.parametrize("name", ["README.md", "docs/critic-free-or-hybrid.md", "docs/text.md", "docs/from-trl.md"])
def test_the_results_on_a_page_are_current(name):
    script = ROOT / "docs" / "make_results.py"
    shown = load_object(f"{script}:MARKERS").search((ROOT / name).read_text(encoding="utf-8"))
    assert shown is not None
    assert shown[0] == load_object(f"{script}:PAGES")[name](), "run make tables"


def test_parameters_with_and_without_a_value_head_by_hand():
    """Hopper: 11 observations, 3 actions, layers of 64; a network is 11·64 + 64 + 64·64 + 64, a head 64·k + k."""
    hopper = load_object(f"{ROOT / 'docs' / 'make_results.py'}:parameters")()[1]
    network, policy_head, std, value_head = 704 + 64 + 4096 + 64, 3 * 64 + 3, 3, 64 + 1
    critic_free, hybrid = network + policy_head + std, 2 * network + policy_head + std + value_head
    assert (
        hopper[1:] == [f"{critic_free:,}", f"{hybrid:,}", f"{hybrid / critic_free:.2f}"] == ["5,126", "10,119", "1.97"]
    )


def test_the_hint_is_shown_as_it_is_printed():
    page = (ROOT / "docs" / "critic-free-or-hybrid.md").read_text(encoding="utf-8")
    assert HINT in " ".join(page.split())


def test_the_hint_at_the_value_head_quotes_the_study():
    study = load_study("mujoco-hybrid")
    rows = finished(study, study.folder())
    without, beside = (
        iqm([scores(rows, "Hopper-v5", agent, "sampled", study.evaluation.last)])
        for agent in ("grpo-critic-free", "grpo-hybrid")
    )
    assert f"{without:.0f} against {beside:.0f} with one" in HINT
