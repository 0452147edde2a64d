"""SubprocGroupVecEnv: the numbers of one GroupVecEnv, forks inside and across workers, and no process left behind."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import wrappers
from probe_envs import Counter, Probe, Walk, box, grpo
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from grpo_rl import GroupVecEnv, make_group_env
from grpo_rl.checkpoint import load_checkpoint, save_checkpoint
from grpo_rl.errors import ConfigError, ForkError, WorkerError
from grpo_rl.forks.snapshot import Snapshot
from grpo_rl.groups.workers import HeldSnapshot, SubprocGroupVecEnv


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert [child.name for child in multiprocessing.active_children() if child.name.startswith("grpo_rl")] == []


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Any:
    """Builds envs in workers; closes them after the test."""
    made: list[SubprocGroupVecEnv] = []

    def build(env: Any, n_groups: int, group_size: int, n_workers: int = 2, **settings: Any) -> SubprocGroupVecEnv:
        made.append(
            make_group_env(
                env,
                n_groups,
                group_size,
                vec_env_cls=SubprocVecEnv,
                vec_env_kwargs={"n_workers": n_workers},
                **settings,
            )
        )
        return made[-1]

    yield build
    for env in made:
        env.close()


def plain(info: dict[str, Any]) -> dict[str, Any]:
    """An info without the wall-clock time of its episode."""
    episode = {name: value for name, value in info.get("episode", {}).items() if name != "t"}
    return {name: value for name, value in info.items() if name != "episode"} | (
        {"episode": episode} if episode else {}
    )


def assert_same(ours: Any, theirs: Any) -> None:
    np.testing.assert_equal(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


def states(env: Any) -> np.ndarray:
    return np.stack(env.get_attr("state"))


# ---------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_every_call_gives_what_one_group_vec_env_gives(workers: Any, n_workers: int) -> None:
    """200 steps over ends of episodes, with forks by any map, snapshots, frozen columns and resets of groups."""
    settings: dict[str, Any] = {"seed": 3, "max_episode_steps": 20}
    ours, theirs = workers("Pendulum-v1", 4, 3, n_workers, **settings), make_group_env("Pendulum-v1", 4, 3, **settings)
    assert (ours.num_envs, ours.n_groups, ours.group_size, ours.n_workers) == (12, 4, 3, n_workers)
    assert ours.group_of.tolist() == theirs.group_of.tolist()
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    envs, rng = (ours, theirs), np.random.default_rng(0)
    held: list[Any] = []
    assert_same(*(env.reset() for env in envs))
    for step in range(200):
        if step % 7 == 3:
            sources = rng.integers(12, size=12)
            assert_same(*(env.fork(sources) for env in envs))
        if step % 50 == 10:
            held = [env.snapshot(5) for env in envs]
        if step % 50 == 30:
            for column in (11, 5):
                assert_same(*(env.restore(column, snapshot) for env, snapshot in zip(envs, held, strict=True)))
        if step % 20 == 5:
            for env in envs:
                env.frozen[:] = False
                env.frozen[[1, 5, *(range(6, 12) if step % 40 == 5 else ())]] = True
        if step % 30 == 20:
            assert_same(*(env.reset_group(2) for env in envs))
        if step == 150:
            assert_same(*(env.reset() for env in envs))
        actions = rng.uniform(-2, 2, (12, 1)).astype(np.float32)
        (*left, infos), (*right, expected) = (env.step(actions) for env in envs)
        assert_same(left, right)
        np.testing.assert_equal([*map(plain, infos)], [*map(plain, expected)])
        np.testing.assert_equal(*(env.reset_infos for env in envs))
        np.testing.assert_array_equal(*(env.frozen for env in envs))


def test_mujoco_forks_across_workers(workers: Any) -> None:
    settings: dict[str, Any] = {"seed": 1}
    envs = workers("Ant-v5", 2, 2, **settings), make_group_env("Ant-v5", 2, 2, **settings)
    assert_same(*(env.reset() for env in envs))
    rng = np.random.default_rng(0)
    for step in range(12):
        if step in (4, 8):
            assert_same(*(env.fork([3, 0, 1, 1]) for env in envs))
        actions = rng.uniform(-1, 1, (4, 8)).astype(np.float32)
        assert_same(*(env.step(actions)[:3] for env in envs))


@pytest.mark.parametrize(
    "settings",
    [
        {"group_kind": "episode", "group_size": 4},
        {"group_kind": "window", "group_size": 4},
        {"group_kind": "episode", "group_size": 8, "fork_prob": 0.5},  # one lane over both workers
        {"value_head": True, "group_size": 4},
        {"grouping": "seed", "group_size": 4},
        {"grouping": "batch", "group_size": 4},
    ],
    ids=str,
)
def test_training_gives_the_same_weights(workers: Any, settings: dict[str, Any]) -> None:
    """Two iterations in two workers, and in this process."""

    def weights(env: Any) -> th.Tensor:
        model = grpo(env, **settings)
        model.learn(2 * 32 * 8)
        assert model._iterations >= 2
        return th.nn.utils.parameters_to_vector(model.policy.parameters())

    here = weights(make_group_env("CartPole-v1", 2, 4, seed=0))
    assert th.equal(weights(workers("CartPole-v1", 2, 4, seed=0)), here)


# ------------------------------------------------------------------------------------------------------ SB3's interface


def test_env_methods_and_attributes(workers: Any) -> None:
    env, here = workers("Pendulum-v1", 3, 2, seed=0), make_group_env("Pendulum-v1", 3, 2, seed=0)
    for each in (env, here):
        each.reset()
        each.step(np.zeros((6, 1), np.float32))
    assert env.get_attr("g") == [10.0] * 6
    np.testing.assert_array_equal(env.get_attr("state", [5, 0, 3]), np.stack(here.get_attr("state", [5, 0, 3])))
    np.testing.assert_array_equal(env.get_attr("state", -1), here.get_attr("state", -1))
    assert env.env_is_wrapped(Monitor) == [True] * 6
    assert env.env_is_wrapped(wrappers.ClipAction, [1, 4]) == [False, False]
    assert env.has_attr("max_speed") and not env.has_attr("nothing")
    assert env.env_method("get_total_steps", indices=[4, 1]) == [1, 1]
    for each in (env, here):
        each.set_attr("g", 9.0, [0, 5])
    assert env.env_method("get_wrapper_attr", "g") == here.env_method("get_wrapper_attr", "g")
    env.set_options({"x_init": 0.0, "y_init": 0.0})
    np.testing.assert_array_equal(env.reset(), [[1, 0, 0]] * 6)
    assert (env.render_mode, env.metadata) == ("rgb_array", {"render_modes": ["human", "rgb_array"]})
    with pytest.raises(AttributeError, match="nothing") as caught:
        env.get_attr("nothing")
    assert "raised in worker 0 (groups 0 … 1)" in caught.value.__notes__[0]
    assert env.get_attr("g", [1]) == [10.0]  # such an error ends nothing


def test_seeds_are_sb3s(workers: Any) -> None:
    env, here = workers("Pendulum-v1", 2, 2), make_group_env("Pendulum-v1", 2, 2)
    assert env.seed(7) == here.seed(7) == [7, 8, 9, 10]
    assert_same(env.reset(), here.reset())
    env._seeds = here._seeds = [5, 5, 6, 6]  # as seeded groups set them
    assert_same(env.reset(), here.reset())


class Local(Probe):
    """Dict observations; the class reaches workers by value where a test defines it."""

    observation_space = gym.spaces.Dict({"a": box(2), "b": gym.spaces.Discrete(5)})

    def observe(self) -> Any:
        return {"a": np.full(2, self.t, np.float32), "b": self.t % 5}

    def step(self, action: Any) -> Any:
        self.t += int(action)
        return self.observe(), 1.0, self.t > 8, False, {}


def test_dict_observations_and_classes_that_cannot_be_imported(workers: Any) -> None:
    class Inner(Local):
        pass

    env = workers(Inner, 2, 1)
    obs = env.reset()
    assert set(obs) == {"a", "b"}
    obs, *_ = env.step(np.array([1, 0]))
    assert obs["a"].tolist() == [[1, 1], [0, 0]]
    assert obs["b"].tolist() == [1, 0]
    obs = env.fork([0, 0])  # across workers
    assert obs["a"].tolist() == [[1, 1], [1, 1]]
    assert env.snapshot(1).fetch().kinds == (Monitor, Inner)
    row = env.restore(0, env.snapshot(1).fetch())
    assert row["a"].tolist() == [1, 1]
    assert env.env_is_wrapped(Inner) == [False, False]


def test_results_are_no_views(workers: Any) -> None:
    env = workers(Counter, 1, 2, 1)
    first = env.reset()
    second, *_ = env.step(np.zeros(2, int))
    assert first.tolist() == [[0, 0], [0, 0]]
    second[:] = 9
    assert env.buf_obs[None].tolist() == [[0, 1], [0, 1]]


def test_a_worker_with_frozen_columns_alone_is_left_in_peace(workers: Any) -> None:
    env = workers(Counter, 2, 2)
    env.reset()
    env.frozen[2:] = True
    os.kill(env._workers[1].process.pid, signal.SIGSTOP)
    obs, rewards, dones, infos = env.step(np.zeros(4, int))
    os.kill(env._workers[1].process.pid, signal.SIGCONT)
    assert obs.tolist() == [[0, 1], [0, 1], [0, 0], [0, 0]]
    assert (rewards.tolist(), dones.tolist(), infos[2:]) == ([0, 0, 0, 0], [False] * 4, [{}, {}])


# ---------------------------------------------------------------------------------------------------- snapshots, states


def test_snapshots_stay_in_their_worker_until_they_are_needed_elsewhere(workers: Any) -> None:
    env = workers("Pendulum-v1", 2, 2, seed=0)
    env.reset()
    held = env.snapshot(0)
    assert isinstance(held, HeldSnapshot)
    start = states(env)[0]
    for column in (0, 1, 2, 3):
        env.step(np.ones((4, 1), np.float32))
        env.restore(column, held)
        np.testing.assert_array_equal(states(env)[column], start)
    for travelled in (held.fetch(), copy.deepcopy(held)):
        assert isinstance(travelled, Snapshot)
        here = make_group_env("Pendulum-v1", 1, 1)
        here.restore(0, travelled)
        np.testing.assert_array_equal(states(here)[0], start)
        env.step(np.ones((4, 1), np.float32))
        env.restore(3, here.snapshot(0))
        np.testing.assert_array_equal(states(env)[3], start)
    worker, key = held._worker, held._key
    del held
    env.reset()  # the next message says so
    with pytest.raises(KeyError):
        env._ask([(worker, "fetch", key)])


class Secretive(Probe):
    """Its state can be copied, but does not pickle."""

    def __init__(self) -> None:
        self.secret = Unpicklable()

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), 0.0, False, False, {}


class Unpicklable:
    def __deepcopy__(self, memo: Any) -> Unpicklable:
        return Unpicklable()

    def __reduce__(self) -> Any:
        raise TypeError("a secret does not pickle")


def test_a_state_that_does_not_pickle_stays_inside_its_worker(workers: Any) -> None:
    env = workers(Secretive, 2, 2, monitor=False)
    env.reset()
    env.step(np.zeros(4, int))
    env.frozen[:] = [True, False, True, False]
    obs, *_ = env.step(np.zeros(4, int))
    assert obs.ravel().tolist() == [1, 2, 1, 2]
    with pytest.raises(ForkError, match=r"Secretive\) cannot leave its worker.*a secret does not pickle.*n_workers=1"):
        env.fork([1, 1, 1, 3])
    assert env.get_attr("t") == [1, 2, 1, 2]
    assert env.fork([1, 1, 3, 3]).ravel().tolist() == [2, 2, 2, 2]
    held = env.snapshot(0)
    env.restore(1, held)
    with pytest.raises(ForkError, match="cannot leave its worker"):
        env.restore(2, held)


@pytest.mark.parametrize("n_workers", [1, 2, 0], ids=["one worker", "two workers", "no worker"])
def test_a_run_goes_on_anywhere(workers: Any, n_workers: int) -> None:
    """The state of an env in two workers, in another number of them or in this process: the same future."""

    def future(env: Any) -> list[Any]:
        rng = np.random.default_rng(1)
        found = [env.fork([1, 1, 2, 0])]
        for _ in range(30):
            obs, rewards, dones, infos = env.step(rng.uniform(-2, 2, (4, 1)).astype(np.float32))
            found += [obs, rewards, dones, [*map(plain, infos)]]
        return [
            *found,
            env.get_attr("episode_lengths"),
            env.env_method("get_total_steps"),
            env.frozen.copy(),
            env.reset(),
        ]

    settings: dict[str, Any] = {"seed": 3, "max_episode_steps": 12}
    env = workers("Pendulum-v1", 2, 2, **settings)
    env.reset()
    for step in range(20):
        env.step(np.full((4, 1), 0.1 * step, np.float32))
    env.fork([0, 3, 2, 3])
    env.frozen[1] = True
    state = env.state()
    settings["seed"] = 9
    other = (
        workers("Pendulum-v1", 2, 2, n_workers, **settings)
        if n_workers
        else make_group_env("Pendulum-v1", 2, 2, **settings)
    )
    other.reset()
    expected = future(env)
    for _ in range(2):  # the state is not used up
        other.set_state(state)
        np.testing.assert_equal(future(other), expected)
    with pytest.raises(ConfigError, match=r"expected the state of 2 envs in 1 groups, got that of 4 envs in 2 groups"):
        workers("Pendulum-v1", 1, 2, 1).set_state(state)


def test_a_checkpoint_of_workers_resumes_bit_for_bit(workers: Any, tmp_path: Path) -> None:
    """From two workers into one: roots that were kept in a worker, statistics and frames included."""

    def agent(seed: int, n_workers: int) -> Any:
        env = VecNormalize(workers("Pendulum-v1", 2, 2, n_workers, seed=seed, max_episode_steps=20))
        return grpo(env, group_kind="episode", fork_prob=0.7)

    model = agent(0, 2)
    model.learn(256)
    save_checkpoint(model, tmp_path / "checkpoint")
    rest = 256 + model.num_timesteps
    model.learn(256, reset_num_timesteps=False)
    assert model.num_timesteps >= rest
    other = agent(5, 1)
    load_checkpoint(other, tmp_path / "checkpoint")
    other.learn(256, reset_num_timesteps=False)
    assert other.num_timesteps == model.num_timesteps
    assert other._forks == model._forks > 0
    np.testing.assert_array_equal(other.env.obs_rms.mean, model.env.obs_rms.mean)
    ours, theirs = (th.nn.utils.parameters_to_vector(m.policy.parameters()) for m in (other, model))
    assert th.equal(ours, theirs)


# --------------------------------------------------------------------------------------------------------------- errors


class Fails(Counter):
    """Raises, or ends its process, in step `at` or at `reset`."""

    def __init__(self, how: str = "", at: int = 2) -> None:
        self.how, self.at = how, at

    def reset(self, **kwargs: Any) -> Any:
        if self.how == "reset":
            raise LookupError("no such start")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self.t == self.at and self.how == "raise":
            raise ZeroDivisionError("in the env")
        if self.t == self.at and self.how == "odd":
            raise Odd("in", "the env")
        if self.t == self.at and self.how == "exit":
            os._exit(3)
        if self.t == self.at and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Odd(Exception):
    """Pickles, but cannot be read back."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def failing(how: str) -> SubprocGroupVecEnv:
    """Columns 0 and 1 are well; column 3, in worker 1, fails."""
    return SubprocGroupVecEnv([Fails, Fails, Fails, lambda: Fails(how)], 2, n_workers=2)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("raise", ZeroDivisionError, "in the env"),
        ("odd", WorkerError, r"worker 1 \(group 1\): .*Odd: in the env"),
        ("exit", WorkerError, r"worker 1 \(group 1\) ended with code 3"),
        ("kill", WorkerError, r"worker 1 \(group 1\) was ended by signal SIGKILL.*short of memory"),
    ],
)
def test_an_error_in_a_step_ends_all_workers(how: str, error: type[Exception], words: str) -> None:
    env = failing(how)
    pids = [worker.process.pid for worker in env._workers]
    env.reset()
    for _ in range(2):
        env.step(np.zeros(4, int))
    with pytest.raises(error, match=words) as caught:
        env.step(np.zeros(4, int))
    if how in ("raise", "odd"):
        text = "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)
        assert "line" in text and "in step" in text and "test_workers.py" in text  # the env's own traceback
    assert env.closed
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids)
    with pytest.raises(WorkerError, match="build the env anew"):
        env.step(np.zeros(4, int))
    env.close()


def test_an_error_in_a_reset_or_at_construction_ends_all_workers() -> None:
    env = failing("reset")
    with pytest.raises(LookupError, match="no such start"):
        env.reset()
    assert env.closed

    def broken() -> gym.Env:
        raise OSError("no such robot")

    with pytest.raises(OSError, match="no such robot") as caught:
        SubprocGroupVecEnv([Counter, Counter, broken, broken], 2, n_workers=2)
    assert "in broken" in caught.value.__notes__[0]
    with pytest.raises(ForkError, match="built alike"):
        SubprocGroupVecEnv([Counter, lambda: Monitor(Counter())], 1, n_workers=2)


def test_a_worker_that_is_killed_from_outside() -> None:
    env = failing("")
    env.reset()
    os.kill(env._workers[0].process.pid, signal.SIGKILL)
    env._workers[0].process.join()
    with pytest.raises(WorkerError, match=r"worker 0 \(group 0\) was ended by signal SIGKILL"):
        env.step(np.zeros(4, int))
    assert env.closed


def test_training_says_what_happened_and_leaves_nothing() -> None:
    model = grpo(failing("raise"), group_kind="window", grouping="batch")
    with pytest.raises(ZeroDivisionError) as caught:
        model.learn(512)
    assert any("env steps" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"vec_env_kwargs": {"n_workers": 3}},
            r"n_workers: expected 1 … 2, since a group stays inside one worker, got 3",
        ),
        ({"vec_env_kwargs": {"n_workers": 0}}, "n_workers: expected 1 … 2"),
        ({"vec_env_kwargs": {"start_method": "teleport"}}, "start_method='teleport' is unknown here: use fork"),
        ({"vec_env_kwargs": {"n_worker": 2}}, 'did you mean "n_workers"'),
        ({"vec_env_cls": DummyVecEnv, "vec_env_kwargs": {"n_workers": 2}}, "they are for vec_env_cls=SubprocVecEnv"),
        ({"vec_env_cls": VecFrameStack}, r"VecFrameStack.*DummyVecEnv, the default.*SubprocVecEnv"),
    ],
)
def test_arguments(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_group_env(Counter, 2, 2, **({"vec_env_cls": SubprocVecEnv} | settings))


def test_defaults() -> None:
    assert type(make_group_env(Counter, 2, 2, vec_env_cls=DummyVecEnv)) is GroupVecEnv
    env = make_group_env(Walk, 2, 2, vec_env_cls=SubprocVecEnv)
    assert env.n_workers == min(2, len(os.sched_getaffinity(0)))
    env.close()
    env.close()


def test_an_env_that_is_forgotten_takes_its_workers_with_it(workers: Any) -> None:
    env = make_group_env(Walk, 2, 2, vec_env_cls=SubprocVecEnv)
    pids = [worker.process.pid for worker in env._workers]
    env.reset()
    held = env.snapshot(0)
    del env, held
    gc.collect()
    assert gone(pids)


# ------------------------------------------------------------------------------------------------------ end of a script

SCRIPT = """
import os, signal, sys, time
import numpy as np
from probe_envs import Probe
from stable_baselines3.common.vec_env import SubprocVecEnv
from grpo_rl import make_group_env


class Slow(Probe):
    def step(self, action):
        time.sleep(0.05)
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, False, False, {}


if __name__ == "__main__":
    kwargs = {"n_workers": 2, "start_method": sys.argv[1]}
    env = make_group_env(Slow, 2, 1, vec_env_cls=SubprocVecEnv, vec_env_kwargs=kwargs)
    env.reset()
    print(*(worker.process.pid for worker in env._workers), flush=True)
    try:
        for step in range(200):
            env.step(np.zeros(2, int))
            if step == 2:
                print("stepping", flush=True)
    except KeyboardInterrupt:
        state = env.state()
        t = [snapshot.layers[-1] for snapshot in state["columns"]]
        env.set_state(state)
        obs, *_ = env.step(np.zeros(2, int))
        env.fork([1, 1])
        print("saved", obs.ravel().tolist(), env.get_attr("t"), flush=True)
"""


def start_script(folder: Path, start_method: str) -> tuple[subprocess.Popen[str], list[int]]:
    (folder / "script.py").write_text(SCRIPT)
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    process = subprocess.Popen(
        [sys.executable, str(folder / "script.py"), start_method],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path, start_method: str) -> None:
    process, pids = start_script(tmp_path, start_method)
    assert len(pids) == 2
    process.kill()
    process.wait()
    assert gone(pids)
    process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.slow
def test_after_ctrl_c_the_workers_can_still_be_saved(tmp_path: Path) -> None:
    """The signal goes to the whole group of processes, as from a terminal, in the middle of a step."""
    process, pids = start_script(tmp_path, "forkserver")
    assert process.stdout is not None and process.stdout.readline() == "stepping\n"
    time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert said.startswith("saved")
    first, second = (eval(part + "]") for part in said.strip()[len("saved ") :].split("]")[:2])
    assert first[0] > 1
    assert first == second
    assert process.returncode == 0
    assert gone(pids)
