"""MuJoCo's messages: the harmless ones of a build are left out, others are heard, files stay where they belong."""

import gymnasium as gym
import mujoco
import pytest

from grpo_rl import make_group_env, probe_fork
from grpo_rl.lab.build import make_env
from grpo_rl.mujoco_log import log_into, quiet_build
from grpo_rl.recipes import Environment

needs_log_config = pytest.mark.skipif(not hasattr(mujoco, "MjLogConfig"), reason="MuJoCo has no setting for its log")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def log_setting():
    before = mujoco.MjLogConfig.get()
    yield
    before.set()


def unstable(env: gym.Env) -> None:
    """One step of a simulation that is broken."""
    data = env.unwrapped.data
    data.qpos[0] = float("nan")
    mujoco.mj_step(env.unwrapped.model, data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_group_env("HalfCheetah-v5", group_size=2).close(),
        lambda: make_env(Environment(id="HalfCheetah-v5")).close(),
        lambda: probe_fork("HalfCheetah-v5", steps=1),
    ],
    ids=["make_group_env", "recipe", "probe"],
)
def test_building_half_cheetahs_says_and_leaves_nothing(make, tmp_path, capfd, recwarn):
    make()
    assert capfd.readouterr() == ("", "")
    assert not recwarn
    assert list(tmp_path.iterdir()) == []


def test_other_messages_of_a_build_are_warnings():
    with pytest.warns(RuntimeWarning, match="MuJoCo: .*unstable") as caught, quiet_build():
        unstable(gym.make("InvertedPendulum-v5"))
    assert [warning.filename for warning in caught] == [__file__]


def test_a_handler_of_the_users_is_put_back():
    heard = []
    mujoco.set_mju_user_warning(heard.append)
    try:
        with quiet_build():
            env = gym.make("InvertedPendulum-v5")
        unstable(env)
    finally:
        mujoco.set_mju_user_warning(None)
    assert len(heard) == 1
    assert "unstable" in heard[0]


@needs_log_config
def test_what_a_simulation_says_is_printed_and_kept_in_the_folder_of_the_run(tmp_path, capfd, log_setting):
    run = tmp_path / "run"
    run.mkdir()
    log_into(run)
    unstable(make_env(Environment(id="InvertedPendulum-v5")))
    assert "The simulation is unstable" in capfd.readouterr().err
    assert "The simulation is unstable" in (run / "MUJOCO_LOG.TXT").read_text()
    assert list(tmp_path.iterdir()) == [run]
