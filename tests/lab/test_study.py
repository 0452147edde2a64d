"""Studies: resumed where they stopped, repeated when settings change, reported with numbers worked out by hand."""

import json

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.lab.measurements import measured, read_table
from grpo_rl.lab.records import Row, Run, Table, read_rows, write_rows
from grpo_rl.lab.report import before, scores, write_report
from grpo_rl.lab.study import bench, finished, load_study, run_once
from grpo_rl.recipes import names

STUDY = """
description: a small one
seeds: [0, 1]
evaluation: {every: 100, episodes: 2, last: 2}
baseline: ppo
targets: {CartPole-v1: {score: 10, within: 100}}
tasks:
  CartPole-v1: {environment: {id: CartPole-v1}, training: {steps: 200}}
agents:
  ours: {optimization: {group_size: 4, n_steps: 16, n_epochs: 1}}
  ppo:
    class: "stable_baselines3:PPO"
    environment: {normalize: true}
    optimization: {n_steps: 64, n_epochs: 1, learning_rate: {start: 3e-4, end: 0}}
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "small.yaml").write_text(STUDY)
    return load_study(tmp_path / "small.yaml")


def rows_of(study, scores):
    """Rows of two evaluations, at 100 and 200 steps, from {(agent, seed): (first, second)}; sampled scores are half."""
    return [
        Row(*run, study.settings(run), 100 * (i + 1), score, score / 2, 1.0, 2.0)
        for run in study.runs()
        if (run.agent, run.seed) in scores
        for i, score in enumerate(scores[run.agent, run.seed])
    ]


def test_a_run_is_evaluated_when_it_is_due(study):
    for agent in ("ours", "ppo"):
        rows = run_once(study, Run("CartPole-v1", agent, 0))
        assert [row.step for row in rows] == [100, 200]
        assert all(8 <= row.mode_mean <= 500 and 8 <= row.sampled_mean <= 500 for row in rows)
        assert 0 < rows[0].cpu_s < rows[1].cpu_s
        assert 0 < rows[0].wall_s < rows[1].wall_s


def test_the_interval_may_be_a_share_of_the_run(study):
    study.evaluation.every = 0.25
    rows = run_once(study, Run("CartPole-v1", "ppo", 0))
    assert [row.step for row in rows] == [50, 100, 150, 200]


def test_only_what_is_missing_is_run(study, tmp_path):
    said = []
    write_rows(tmp_path / "runs.csv", rows_of(study, {("ours", 0): (9, 9), ("ours", 1): (9, 9), ("ppo", 0): (9, 9)}))
    rows = bench(study, tmp_path, jobs=2, say=said.append)
    assert said[0] == "small: 3 of 4 runs are there, 2 at a time"
    assert [line.split()[0] for line in said[1:]] == ["4/4"], "one run was started, PPO's seed 1"
    assert len(rows) == 8
    assert [row[:5] for row in read_rows(tmp_path / "runs.csv")] == [row[:5] for row in rows]
    assert [row.mode_mean for row in rows if row.seed == 0] == [9] * 4, "what was there is untouched"
    assert (tmp_path / "machine.json").is_file()


def test_runs_with_other_settings_are_left_out(study, tmp_path):
    rows = rows_of(study, {("ours", 0): (9, 9), ("ppo", 0): (9, 9)})
    write_rows(tmp_path / "runs.csv", rows)
    said = []
    assert finished(study, tmp_path, said.append) == rows
    assert not said
    study.agents["ours"]["optimization"]["gamma"] = 0.9
    kept = finished(study, tmp_path, said.append)
    assert {row.agent for row in kept} == {"ppo"}
    assert said == ["1 finished runs had other settings, or are no part of the study any more: left out"]
    study.seeds = [1]
    assert finished(study, tmp_path, said.append) == []


def test_a_run_that_fails_is_said_and_the_others_go_on(study, tmp_path):
    study.path.write_text(STUDY.replace("group_size: 4", "group_size: 1").replace("seeds: [0, 1]", "seeds: [0]"))
    said = []
    rows = bench(load_study(study.path), tmp_path, jobs=2, say=said.append)
    assert {row.agent for row in rows} == {"ppo"}
    failed = next(line for line in said if line.startswith("failed"))
    assert "group_size" in failed
    assert "value_head" in (tmp_path / "CartPole-v1-ours-0.failed.log").read_text()


def test_the_report_says_what_the_numbers_say(study, tmp_path):
    # Ours: 4, 12 and 8, 12; both evaluations score: of 4, 8, 12, 12 a quarter is cut at either end: (8 + 12) / 2 = 10.
    # PPO: all 5; ratio 10 / 5 = 2. The sampled scores are half of these, and ours win every pair.
    rows = rows_of(study, {("ours", 0): (4, 12), ("ours", 1): (8, 12), ("ppo", 0): (5, 5), ("ppo", 1): (5, 5)})
    text = write_report(study, rows, tmp_path).read_text()
    ours = next(line for line in text.splitlines() if line.startswith("| ours"))
    cells = [cell.strip() for cell in ours.strip("|").split("|")]
    assert cells[:3] == ["ours", "2", "200"]
    # Resamples are (4, 12, 4, 12), (4, 12, 8, 12), (8, 12, 8, 12): IQMs (4 + 12) / 2, 10 and (8 + 12) / 2.
    assert cells[3] == "10 [8, 10]"
    assert cells[5] == "2 [1.6, 2]"
    assert cells[7:] == ["1.00", "2"]
    # 12 ≥ 10 is first reached at 200, later than 100, in both runs, which hold it at the end.
    assert "- ours: mode ≥ 10 within 100 steps in 0 of 2 runs, and at the last evaluation in 0 of these" in text
    assert "First reached at 200, 200." in text
    assert "First reached at never, never." in text
    assert all((tmp_path / f"{name}.png").is_file() for name in ("curves-mode", "curves-sampled", "profile"))


def test_a_report_of_half_a_study(study, tmp_path):
    text = write_report(study, rows_of(study, {("ours", 0): (4, 12)}), tmp_path).read_text()
    assert "| ppo | 0 | – |" in text


def test_rows_survive_the_file(study, tmp_path):
    rows = rows_of(study, {("ours", 0): (4.25, 12.0)})
    write_rows(tmp_path / "runs.csv", rows)
    assert read_rows(tmp_path / "runs.csv") == rows
    assert read_rows(tmp_path / "none.csv") == []
    assert [path.name for path in tmp_path.glob("runs.*")] == ["runs.csv"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds: [0, 1]", "seeds: []"), "small.yaml: seeds are missing"),
        (("seeds", "seds"), "seeds are missing"),
        (("baseline: ppo", "baseline: pppo"), 'baseline: unknown "pppo": did you mean "ppo"?'),
        (("baseline", "baselin"), 'unknown key "baselin": nearest: baseline'),
        (("every: 100", "every: 30"), "200 steps are no multiple of evaluation.every, 30"),
        (("every: 100, ", ""), "evaluation: expected a mapping with `every`"),
        (("last: 2", "lst: 2"), 'evaluation: unknown key "lst": did you mean "last"?'),
        (("group_size: 4", "groupsize: 4"), 'small.yaml (CartPole-v1, ours), optimization: unknown key "groupsize"'),
        (("targets: {CartPole-v1", "targets: {CartPole"), 'targets: unknown "CartPole": did you mean "CartPole-v1"?'),
        (("seeds", "measurements: {fast: quick}\nseeds"), '"quick" names no code'),
        (("seeds", "measurements: {fast: none.py:quick}\nseeds"), "no file"),
        (("seeds", "measurements: {fast: math:pi}\nseeds"), "math:pi is no function"),
        (("seeds", "measurements: {machine: math:pi}\nseeds"), "machine.json is taken"),
    ],
)
def test_a_mistake_in_a_study_is_named(tmp_path, change, message):
    (tmp_path / "small.yaml").write_text(STUDY.replace(*change))
    with pytest.raises(ConfigError) as error:
        load_study(tmp_path / "small.yaml")
    assert message in str(error.value)


MEASURING = """
from pathlib import Path

from grpo_rl.lab.records import Table

def speed():
    calls = Path(__file__).with_name("calls.txt")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    return Table("Speed", ["who", "tokens", "CPU s"], [["ours", 12345, 0.123456], ["theirs", 7, None]], "One thread.")

def broken():
    return Table("Broken", ["one", "two"], [["one"]])
"""


@pytest.fixture
def measuring(tmp_path):
    """A study with nothing to train: its run is there. (study, folder of results, what was said)."""
    text = STUDY.replace("[0, 1]", "[0]").split("  ppo:")[0].replace("baseline: ppo", "packages: [rich, not-there]")
    (tmp_path / "small.yaml").write_text(f"{text}measurements: {{speed: 'measuring.py:speed'}}\n")
    (tmp_path / "measuring.py").write_text(MEASURING)
    study = load_study(tmp_path / "small.yaml")
    (tmp_path / "out").mkdir()
    write_rows(tmp_path / "out" / "runs.csv", rows_of(study, {("ours", 0): (9, 9)}))
    return study, tmp_path / "out", []


def test_a_measurement_is_made_once_kept_and_reported(measuring):
    study, folder, said = measuring
    assert study.missing(finished(study, folder), folder) == ["speed"]
    for _ in range(2):
        rows = bench(study, folder, say=said.append)
    assert (study.path.parent / "calls.txt").read_text() == "x", "once"
    assert [line.split(",")[0] for line in said if "measured" in line] == ["measured speed"]
    assert study.missing(rows, folder) == []
    table = read_table(folder / "speed.json")
    assert table == Table(
        "Speed", ["who", "tokens", "CPU s"], [["ours", 12345, 0.123456], ["theirs", 7, None]], "One thread."
    )
    text = write_report(study, rows, folder).read_text()
    assert "## Speed\n\n| who | tokens | CPU s |\n|---|---|---|\n| ours | 12,345 | 0.1235 |\n| theirs | 7 | – |" in text
    assert "One thread." in text
    assert "[speed.json](speed.json)" in text
    assert (folder / "curves-seconds.png").is_file()
    machine = json.loads((folder / "machine.json").read_text())
    assert machine["rich"][0].isdigit()
    assert machine["not-there"] == "not installed"


def test_a_measurement_is_repeated_when_its_code_changes_and_not_for_a_comment(measuring):
    study, folder, said = measuring
    bench(study, folder, say=said.append)
    code = study.path.parent / "measuring.py"
    code.write_text(MEASURING.replace("def speed():", "def speed():  # how fast"))
    assert list(measured(study.measurements, folder)) == ["speed"]
    code.write_text(MEASURING.replace("12345", "54321"))
    assert measured(study.measurements, folder) == {}


def test_a_measurement_that_fails_is_said(measuring):
    study, folder, said = measuring
    study.measurements = {"broken": study.measurements["speed"].replace(":speed", ":broken")}
    rows = bench(study, folder, say=said.append)
    assert "measurement broken: expected 2 cells in a row, got ['one']" in said[-1]
    assert "expected 2 cells" in (folder / "broken.failed.log").read_text()
    assert not (folder / "broken.json").exists()
    assert study.missing(rows, folder) == ["broken"]


def test_an_evaluation_before_training_is_step_0_and_no_score(study, tmp_path):
    settings = study.settings(study.runs()[0])
    study.evaluation.before = True
    assert study.settings(study.runs()[0]) != settings, "rows without it do not do"
    rows = run_once(study, Run("CartPole-v1", "ppo", 0))
    assert [row.step for row in rows] == [0, 100, 200]
    assert (rows[0].cpu_s, rows[0].wall_s) == (pytest.approx(0, abs=0.01), pytest.approx(0, abs=0.01))
    # last: 2, and only one evaluation of training: the 4 of before is not among the scores.
    rows = [
        Row(*run, study.settings(run), step, score, score / 2, 1.0, 2.0)
        for run in study.runs()
        for step, score in ((0, 4 if run.agent == "ours" else 3), (100, 12))
    ]
    assert scores(rows, "CartPole-v1", "ours", "mode", 2).tolist() == [[12], [12]]
    assert before(rows, "CartPole-v1", "ours", "sampled").tolist() == [[2], [2]]
    text = write_report(study, rows, tmp_path).read_text()
    assert "every 100 steps, and before training," in text
    assert "| agent | seeds | steps | mode: before | sampled: before | mode: IQM |" in text
    assert "| ours | 2 | 100 | 4 | 2 | 12 [12, 12] | 6 [6, 6] |" in text


def test_committed_results_are_those_of_the_committed_studies():
    """Digests are of settings alone: what is added to studies leaves them as they are."""
    for name in names("experiments"):
        study = load_study(name)
        said = []
        finished(study, study.folder(), said.append)
        assert said == []
        kept = {measure for measure in study.measurements if (study.folder() / f"{measure}.json").exists()}
        assert kept == set(measured(study.measurements, study.folder())), "grpo-rl bench measures them again"


def test_a_task_may_start_from_a_recipe(tmp_path):
    text = STUDY.replace(
        "{environment: {id: CartPole-v1}, training: {steps: 200}}", "{recipe: hopper, training: {steps: 200}}"
    )
    (tmp_path / "small.yaml").write_text(text.replace("baseline: ppo\n", "").split("  ppo:")[0])
    recipe = load_study(tmp_path / "small.yaml").recipe(Run("CartPole-v1", "ours", 1))
    assert (recipe.environment.id, recipe.training.steps, recipe.training.seed) == ("Hopper-v5", 200, 1)
    assert recipe.optimization["value_head"] is True, "the recipe's"
    assert recipe.optimization["group_size"] == 4, "the agent's"
