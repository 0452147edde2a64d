"""The doctor's look at a run: the log as HealthMonitor saw it, the table, the exit status."""

import numpy as np
import pytest

from grpo_rl.cli import main
from grpo_rl.errors import ConfigError
from grpo_rl.lab.build import build_agent, build_env
from grpo_rl.lab.health import examine, read_log, report, settings_of_recipe
from grpo_rl.lab.logs import open_logs
from grpo_rl.monitor import HealthMonitor, settings_of
from grpo_rl.recipes import load_recipe


def run_of(tmp_path, steps, *settings, monitor=True):
    """A run's folder with recipe and log, as `grpo-rl train` writes them, and the monitor."""
    recipe = load_recipe("cartpole", [f"training.steps={steps}", *settings])
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    env = build_env(recipe)
    agent, watching = build_agent(recipe, env), HealthMonitor(say=lambda line: None)
    agent.set_logger(open_logs(tmp_path))
    agent.learn(steps, callback=watching if monitor else None)
    agent.dump_logs()
    agent.logger.close()
    env.close()
    return watching


@pytest.mark.parametrize("settings", [[], ["optimization.learning_rate=0.3"]])
def test_the_doctor_says_what_the_monitor_said(tmp_path, settings):
    monitor = run_of(tmp_path, 3000, *settings)
    diagnosis = examine(tmp_path)
    assert diagnosis.findings == monitor.findings
    assert [f.name for f in monitor.findings] == (["large_steps"] if settings else [])
    for ours, seen in zip(diagnosis.values, monitor.diagnosis.values, strict=True):
        # The file's row also holds what the monitor made of its figures (entropy …): the same again.
        assert {name: ours[name] for name in seen} == pytest.approx(seen)


def test_the_report_has_a_table_the_findings_with_cures_and_a_drawing(tmp_path):
    run_of(tmp_path, 2000, "optimization.group_size=2")
    said = []
    assert report(tmp_path, said.append) == 1
    table = {line.split()[0]: line for line in said}
    assert table["group_size"].split()[2:5] == ["2.5", "or", "more"] and table["group_size"].endswith("100%")
    assert "0.1 to 1" in table["grad_norm"]
    assert table["small_groups:"].endswith("to the end]") and "group_size=16" in table["small_groups:"]
    assert (tmp_path / "health.png").stat().st_size > 10_000


def test_a_log_without_the_monitor_is_judged_by_what_it_has(tmp_path, capsys):
    run_of(tmp_path, 1200, monitor=False)
    assert main(["doctor", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "HealthMonitor was not there" in printed
    assert "healthy: " in printed
    assert "approx_kl" in printed and "reward_gap" not in printed


def test_an_error_that_stopped_the_run_is_a_finding(tmp_path):
    run_of(tmp_path, 600)
    (tmp_path / "error.log").write_text("Traceback …\nValueError: broken motor\n", encoding="utf-8")
    said = []
    assert report(tmp_path, said.append) == 1
    assert any(line.startswith("stopped by an error: ValueError: broken motor") for line in said)
    (tmp_path / "model.zip").write_bytes(b"")
    assert report(tmp_path, said.append) == 0, "it has finished since"


def test_a_log_may_be_cut_and_hold_what_is_no_number(tmp_path):
    (tmp_path / "progress.csv").write_text(
        "time/total_timesteps,train/approx_kl,train/loss\n10,,inf\n20,0.5,nan\n30,junk", encoding="utf-8"
    )
    first, second, third = read_log(tmp_path)
    assert first == {"time/total_timesteps": 10, "train/loss": float("inf")}
    assert np.isnan(second["train/loss"])
    assert third == {"time/total_timesteps": 30}


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no run"):
        report(tmp_path)
    (tmp_path / "recipe.yaml").write_text("environment: {id: CartPole-v1}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"progress.csv is missing or empty"):
        report(tmp_path)
    assert read_log(tmp_path) == []


@pytest.mark.parametrize("name", ["cartpole", "hopper", "gridworld", "vine"])
def test_a_recipes_settings_are_those_of_its_agent(name):
    recipe = load_recipe(name)
    env = build_env(recipe)
    assert set(settings_of_recipe(recipe)) == set(built := settings_of(build_agent(recipe, env)))
    for option, value in settings_of_recipe(recipe).items():
        if option not in ("learning_rate", "clip_range"):  # written otherwise in YAML, and constants in schedules
            assert value == built[option], option
    env.close()
