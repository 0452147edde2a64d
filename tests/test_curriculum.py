"""Curricula: rules by hand, one difficulty for a group, forks, workers, saved runs, and errors that say what to do."""

import csv
import json
import pickle
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from grpo_rl import GRPO, make_group_env, probe_fork
from grpo_rl.curriculum import (
    AdaptiveDifficulty,
    Curriculum,
    CurriculumCallback,
    CurriculumDriver,
    LinearSchedule,
    PiecewiseSchedule,
    full_difficulty,
    make_env,
    parse_difficulty,
)
from grpo_rl.curriculum.rules import Course
from grpo_rl.errors import ConfigError
from grpo_rl.forks.snapshot import capture, restore, transfer
from grpo_rl.lab import build
from grpo_rl.recipes import make_recipe


class Stairs(gym.Env):
    """Climbs `difficulty` at each step for `length` steps; succeeds if the last action was 1. Its snapshot forgets the
    difficulty."""

    observation_space = spaces.Box(-100, 100, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, length=4, difficulty=0.0):
        self.length, self.difficulty, self.asked = length, difficulty, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.asked = options
        self.height, self.steps = 0.0, 0
        return self._obs(), {}

    def step(self, action):
        self.steps += 1
        self.height += self.difficulty
        over = self.steps == self.length
        return self._obs(), float(action), over, False, {"is_success": bool(action)} if over else {}

    def get_snapshot(self):
        return self.height, self.steps

    def set_snapshot(self, state):
        self.height, self.steps = state

    def _obs(self):
        return np.array([self.height], np.float32)


class Picky(Stairs):
    """Refuses a difficulty above 1."""

    @property
    def difficulty(self):
        return self._difficulty

    @difficulty.setter
    def difficulty(self, value):
        if value > 1:
            raise ValueError(f"{value} is above 1")
        self._difficulty = value


def episode(env, *actions, seed=None):
    """The difficulty of an episode of these actions, as its infos say it, and the height reached."""
    _, info = env.reset(seed=seed)
    found = {info["difficulty"]}
    for action in actions:
        obs, _, _, _, info = env.step(action)
        found.add(info["difficulty"])
    assert len(found) == 1, "one difficulty from the start to the end"
    return found.pop(), float(obs[0])


# ---------------------------------------------------------------------------------------------------------------- rules


def test_an_adaptive_difficulty_by_hand():
    rule = AdaptiveDifficulty(start=1, end=4, step=2, raise_above=0.8, lower_below=0.4)
    assert rule.moved(1, 0.9) == 3, "1 + 2"
    assert rule.moved(3, 0.9) == 4, "3 + 2 is beyond the end"
    assert rule.moved(4, 1.0) == 4
    assert rule.moved(4, 0.3) == 2, "4 − 2"
    assert rule.moved(2, 0.0) == 1, "2 − 2 is below the start"
    assert [rule.moved(3, rate) for rate in (0.4, 0.6, 0.8)] == [3, 3, 3], "within the band, its ends included"


def test_an_adaptive_difficulty_may_lead_downwards():
    rule = AdaptiveDifficulty(start=1.0, end=0.5, step=0.25)
    assert [rule.moved(1.0, 1.0), rule.moved(0.75, 1.0), rule.moved(0.5, 0.0)] == [0.75, 0.5, 0.75]


def test_one_move_is_a_tenth_of_the_way_by_default():
    assert AdaptiveDifficulty(start=2, end=-3).step == 0.5


def test_a_rate_is_that_of_the_window_at_the_current_difficulty():
    course = Course(AdaptiveDifficulty(start=0, end=1, step=0.5, raise_above=0.7, lower_below=0.3, window=4))
    course.observe([(0.0, True)] * 3)
    assert course.advance(0) == 0.0, "three episodes are no window of four"
    course.observe([(0.0, False)])
    assert (course.success_rate, course.advance(0)) == (0.75, 0.5), "3 of 4 is above 0.7"
    assert course.success_rate is None, "nothing is known about the new difficulty"
    course.observe([(0.0, True)] * 4 + [(0.5, False)] * 3)
    assert (course.success_rate, course.advance(0)) == (0.0, 0.5), "those begun at 0.0 do not count"
    course.observe([(0.5, True), (0.5, False)])
    # The last four at 0.5: failed, failed, succeeded, failed: 1 of 4 is below 0.3.
    assert (course.success_rate, course.advance(0)) == (0.25, 0.0)


def test_a_schedule_goes_by_env_steps_and_its_successes_are_only_logged():
    course = Course(LinearSchedule(start=0.1, end=1.0, steps=1e6))
    assert course.difficulty == 0.1
    # 0.1 + 250,000 / 1,000,000 · 0.9
    assert course.advance(250_000) == pytest.approx(0.325)
    assert course.advance(2_000_000) == 1.0
    course.observe([(0.1, True), (0.9, False), (1.0, None)])
    assert course.success_rate == 0.5


def test_success_is_what_the_env_says_or_a_return_or_a_function():
    info = {"is_success": np.bool_(True)}
    assert AdaptiveDifficulty(0, 1).succeeded(info, -5) is True
    assert AdaptiveDifficulty(0, 1).succeeded({}, 5) is None
    assert AdaptiveDifficulty(0, 1, success_return=10).succeeded(info, 9.9) is False
    assert AdaptiveDifficulty(0, 1, success_return=10).succeeded({}, 10) is True
    assert AdaptiveDifficulty(0, 1, success=lambda info, total: info["lap"] > total).succeeded({"lap": 3}, 2) is True


@pytest.mark.parametrize(
    ("written", "rule", "full"),
    [
        (0.5, parse_difficulty(0.5), 0.5),
        ({"start": 0.1, "end": 1, "steps": 1e6}, LinearSchedule(0.1, 1, 1e6), 1),
        ({"points": [[0, 1], [0.5, 3]], "steps": 100}, PiecewiseSchedule([(0, 1), (0.5, 3)], 100), 3),
        ({"adaptive": {"start": 1, "end": 0.2, "window": 5}}, AdaptiveDifficulty(1, 0.2, window=5), 0.2),
    ],
)
def test_what_a_recipe_says_is_a_rule(written, rule, full):
    assert parse_difficulty(written) == rule
    assert parse_difficulty(rule) is rule
    assert full_difficulty(written) == full
    assert pickle.loads(pickle.dumps(rule)) == rule


@pytest.mark.parametrize(
    ("difficulty", "message"),
    [
        (LinearSchedule(0.1, 1.0), "runs over training progress, which an environment does not know: give it steps="),
        ("lin_1", "give it steps="),
        (lambda progress: progress, "expected a number, a schedule or AdaptiveDifficulty"),
        (None, "not a schedule: None"),
        ({"adaptive": {"begin": 1}}, "adaptive takes start, end, step"),
        ({"adaptive": {"start": 0, "end": 1}, "steps": 5}, "give either adaptive or a schedule, got steps"),
    ],
)
def test_what_is_no_rule_is_refused(difficulty, message):
    with pytest.raises(ConfigError, match=message):
        Curriculum(Stairs(), difficulty)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"end": 0}, "start and end are both 0"),
        ({"end": float("nan")}, "end must be a finite number"),
        ({"step": 0}, "step must be above 0"),
        ({"step": -0.1}, "step must be above 0"),
        ({"lower_below": 0.9}, "lower_below < raise_above"),
        ({"raise_above": 80}, "≤ 1, got 0.4 and 80"),
        ({"window": 0}, "window must be a whole number"),
        ({"success": bool, "success_return": 1}, "not both"),
    ],
)
def test_an_adaptive_difficulty_out_of_range_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AdaptiveDifficulty(**{"start": 0, "end": 1} | settings)


# -------------------------------------------------------------------------------------------------------------- wrapper


def test_an_attribute_is_set_before_each_reset_by_the_envs_own_steps():
    env = Curriculum(Stairs(length=2), LinearSchedule(start=1, end=3, steps=4))
    # After 0, 2, 4 and 6 steps: 1, 2, 3, 3; two steps climb twice that.
    assert [episode(env, 1, 1) for _ in range(4)] == [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0), (3.0, 6.0)]


def test_an_option_of_reset_and_others_beside_it():
    env = Curriculum(Stairs(), 0.5, option="level")
    _, info = env.reset(options={"other": 1})
    assert (env.unwrapped.asked, info["difficulty"]) == ({"other": 1, "level": 0.5}, 0.5)
    assert env.unwrapped.difficulty == 0.0, "the attribute is left alone"


def test_a_function_gets_the_env_and_the_difficulty():
    def lengthen(env, difficulty):
        env.unwrapped.length = int(difficulty)

    env = Curriculum(Stairs(), 2, apply=lengthen)
    env.reset()
    assert [env.step(1)[2] for _ in range(2)] == [False, True]


def test_an_attribute_may_be_a_wrappers_or_deeper_inside():
    class Shift(gym.ObservationWrapper):
        shift = 0.0

        def observation(self, obs):
            return obs + np.float32(self.shift)

    env = Curriculum(gym.wrappers.TimeLimit(Shift(Stairs()), 3), 0.25, attribute="shift")
    assert env.reset()[0] == 0.25
    env = make_env("InvertedPendulum-v5", 0.01, attribute="model.opt.timestep")
    env.reset()
    assert env.unwrapped.model.opt.timestep == 0.01


def test_an_adaptive_wrapper_alone_follows_its_own_episodes():
    env = Curriculum(Stairs(length=1), AdaptiveDifficulty(start=1, end=2, step=0.5, window=2))
    assert [episode(env, action)[0] for action in (1, 1, 1, 1, 0, 0, 0)] == [1, 1, 1.5, 1.5, 2, 2, 1.5]


def test_make_env_takes_an_id_a_class_or_a_factory():
    assert make_env("CartPole-v1", difficulty=3.0, attribute="gravity").unwrapped.gravity == 3.0
    assert make_env(Stairs, difficulty=3.0, length=7).unwrapped.length == 7
    assert make_env(lambda: Stairs(5), difficulty=3.0).unwrapped.length == 5
    with pytest.raises(ConfigError, match=r"an env that is made is Curriculum\(env"):
        make_env(Stairs(), difficulty=3.0)


def test_its_spec_builds_it_again():
    env = make_env("CartPole-v1", difficulty=LinearSchedule(1, 2, 10), attribute="gravity")
    again = gym.make(env.spec)
    assert again.reset(seed=0)[1] == {"difficulty": 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"difficulty": 1, "attribute": "slope"}, 'Stairs has no attribute "slope".*attribute=….*option=….*apply='),
        ({"difficulty": 1, "attribute": "difficulty", "option": "level"}, "give one of .* not attribute and option"),
        ({"difficulty": 1, "attribute": "unwrapped.slope"}, 'no attribute "unwrapped.slope"'),
        ({"difficulty": 1, "apply": lambda env: None}, "Stairs refuses difficulty 1 .*function"),
    ],
)
def test_a_way_that_the_env_does_not_have_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Curriculum(Stairs(), **settings)


def test_the_default_attribute_must_be_there():
    with pytest.raises(ConfigError, match='CartPoleEnv has no attribute "difficulty"'):
        make_env("CartPole-v1", difficulty=0.5)


def test_a_difficulty_that_the_env_refuses_is_refused_at_once():
    Curriculum(Picky(), LinearSchedule(0, 1, 100))
    with pytest.raises(ConfigError, match=r"Picky refuses difficulty 1.5 .*ValueError: 1.5 is above 1"):
        Curriculum(Picky(), LinearSchedule(0, 1.5, 100))


def test_one_curriculum_is_enough():
    with pytest.raises(ConfigError, match="has a Curriculum already"):
        Curriculum(Monitor(Curriculum(Stairs(), 1)), 2)


# ---------------------------------------------------------------------------------------------------------------- forks


def test_a_fork_takes_the_difficulty_along_even_if_the_envs_snapshot_forgets_it():
    easy, hard = Curriculum(Stairs(), 1.0), Curriculum(Stairs(), 5.0)
    easy.reset()
    hard.reset()
    easy.step(1)
    transfer(easy, hard)
    obs, _, _, _, info = hard.step(1)
    assert (obs[0], info["difficulty"]) == (2.0, 1.0), "1 + 1, not 1 + 5"
    saved = capture(hard)
    other = Curriculum(Stairs(), 9.0)
    other.reset()
    restore(other, saved)
    assert [other.step(1)[0][0], hard.step(1)[0][0]] == [3.0, 3.0]


@pytest.mark.parametrize(
    "rule", [LinearSchedule(1, 2, 500), AdaptiveDifficulty(1, 2, window=3, success_return=0)], ids=["steps", "adaptive"]
)
def test_its_forks_are_exact_beyond_the_end_of_an_episode(rule):
    report = probe_fork(lambda: Curriculum(Stairs(), rule), steps=300)
    assert report.exact, report.reason


def test_members_of_a_group_share_one_difficulty():
    env = make_group_env(
        lambda: make_env(Stairs, LinearSchedule(0, 1, 100), length=9), n_groups=2, group_size=2, seed=0
    )
    driver = CurriculumDriver.of(env)
    env.reset()
    for steps in (10, 20, 30, 40):  # columns reset at different times, so they differ before the fork
        driver.before_rollout(steps)
        env.reset_group(steps // 10 % 2)
        env.step(np.zeros(4, int))
    assert env.env_method("curriculum_rule")[0] == LinearSchedule(0, 1, 100)
    assert env.get_attr("difficulty") == [0.4, 0.4, 0.3, 0.3]
    obs = env.fork([2, 2, 2, 2])
    assert env.get_attr("difficulty") == [0.3] * 4
    for _ in range(2):
        obs, _, _, infos = env.step(np.zeros(4, int))
        assert (obs == obs[0]).all()
    assert [info["difficulty"] for info in infos] == [0.3] * 4
    env.reset_group(0)
    assert env.get_attr("difficulty") == [0.4, 0.4, 0.3, 0.3], "a fresh start takes the new one"


def test_an_episode_that_began_by_a_fork_in_the_middle_is_no_outcome():
    env = make_group_env(lambda: make_env(Stairs, AdaptiveDifficulty(0, 1), length=2), n_groups=1, group_size=3, seed=0)
    CurriculumDriver.of(env)
    env.reset()
    env.fork([0, 0, 0])  # from the start: three whole episodes
    env.step(np.ones(3, int))
    env.fork([0, 1, 0])  # in the middle
    env.step(np.array([1, 0, 1]))
    assert env.env_method("curriculum_outcomes") == [[(0.0, True)], [(0.0, False)], []]


def test_an_episode_that_a_checkpoint_goes_on_with_is_still_whole():
    first, again = (make_group_env(lambda: make_env(Stairs, 1, length=2), 1, 2, seed=0) for _ in range(2))
    for env in (first, again):
        CurriculumDriver.of(env)
        env.reset()
    first.step(np.ones(2, int))
    first.fork([0, 0])
    for column in range(2):
        restore(again.envs[column], capture(first.envs[column], lasting=True))
    again.step(np.ones(2, int))
    assert again.env_method("curriculum_outcomes") == [[(1.0, True)], []]


# --------------------------------------------------------------------------------------------------------------- driver


def vec_env(kind):
    envs = [lambda: Monitor(make_env(Stairs, LinearSchedule(0, 1, 100)))] * 2
    if kind == "group":
        return make_group_env(lambda: make_env(Stairs, LinearSchedule(0, 1, 100)), 1, 2, seed=0)
    if kind == "group in workers":
        make = partial(make_env, Stairs, LinearSchedule(0, 1, 100))
        return make_group_env(make, 2, 1, seed=0, vec_env_cls=SubprocVecEnv)
    if kind == "workers":
        return SubprocVecEnv(envs)
    return VecFrameStack(VecNormalize(DummyVecEnv(envs)), 2) if kind == "wrapped" else DummyVecEnv(envs)


@pytest.mark.parametrize("kind", ["dummy", "group", "group in workers", "workers", "wrapped"])
def test_a_driver_tells_all_columns_wherever_they_run(kind):
    env = vec_env(kind)
    driver = CurriculumDriver.of(env)
    env.reset()
    driver.before_rollout(50)
    env.step(np.array([1, 0]))
    assert env.get_attr("difficulty") == [0.0, 0.0], "an episode keeps its own"
    for _ in range(3):
        _, _, dones, infos = env.step(np.array([1, 0]))
    assert dones.all() and [info["difficulty"] for info in infos] == [0.0, 0.0]
    assert env.get_attr("difficulty") == [0.5, 0.5]
    assert driver.metrics() == {"curriculum/difficulty": 0.5}
    assert driver.state() == {"difficulty": 0.5, "successes": [True, False]}
    assert driver.metrics() == {"curriculum/difficulty": 0.5, "curriculum/success_rate": 0.5}
    env.close()


def test_its_state_is_json_and_goes_on_where_it_was():
    def make():
        return DummyVecEnv([lambda: make_env(Stairs, AdaptiveDifficulty(0, 1, step=0.5, window=3), length=1)] * 2)

    first, again = make(), make()
    driver = CurriculumDriver.of(first)
    first.reset()
    first.step(np.array([1, 1]))
    first.step(np.array([1, 1]))
    driver.before_rollout(4)
    first.step(np.array([0, 1]))
    state = json.loads(json.dumps(driver.state()))
    assert state == {"difficulty": 0.5, "successes": []}, "these two episodes began at 0"
    resumed = CurriculumDriver.of(again)
    again.reset()
    again.step(np.array([0, 0]))  # forgotten
    resumed.set_state(state)
    again.reset()
    assert again.get_attr("difficulty") == first.get_attr("difficulty") == [0.5, 0.5]
    for env, going in ((first, driver), (again, resumed)):
        env.step(np.array([1, 1]))
        env.step(np.array([1, 1]))
        going.before_rollout(10)
    assert driver.state() == resumed.state() == {"difficulty": 1.0, "successes": []}


def test_a_vec_env_without_a_curriculum_has_no_driver():
    assert CurriculumDriver.of(DummyVecEnv([Stairs])) is None


def test_columns_must_be_alike():
    with pytest.raises(ConfigError, match="1 of 2 columns have a Curriculum"):
        CurriculumDriver.of(DummyVecEnv([Stairs, lambda: Curriculum(Stairs(), 1)]))
    with pytest.raises(ConfigError, match="all columns must follow one rule"):
        CurriculumDriver.of(DummyVecEnv([lambda: Curriculum(Stairs(), 1), lambda: Curriculum(Stairs(), 2)]))


def test_an_adaptive_rule_without_a_success_says_what_to_do():
    env = DummyVecEnv([lambda: make_env("CartPole-v1", AdaptiveDifficulty(9, 10), attribute="gravity")])
    driver = CurriculumDriver.of(env)
    env.reset()
    while not env.step(np.array([1]))[2].any():
        pass
    with pytest.raises(ConfigError, match=r'no "is_success".*success=function\(info, episode_return\), or success_ret'):
        driver.before_rollout(1)


# ----------------------------------------------------------------------------------------------------------- algorithms


def logged(folder, name):
    with (folder / "progress.csv").open() as file:
        return [float(row[f"curriculum/{name}"]) for row in csv.DictReader(file)]


def test_grpo_drives_it_logs_it_and_goes_on_after_a_load(tmp_path):
    def make():
        return make_group_env(
            lambda: make_env(Stairs, AdaptiveDifficulty(0, 5, step=1, window=4, success_return=0)), 1, 4
        )

    settings = {"group_size": 4, "n_steps": 32, "batch_size": 32, "n_epochs": 1, "group_kind": "episode"}
    agent = GRPO("MlpPolicy", make(), **settings, fork_prob=0.0, seed=0, device="cpu")
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    seen = []
    agent.learn(
        512, callback=lambda local, _: seen.extend(info["difficulty"] for info in local["infos"] if info) or True
    )
    # Every episode succeeds, so each of the four rollouts of 128 steps but the first starts with one move.
    assert agent.curriculum_state["difficulty"] == 3.0
    assert sorted(set(seen)) == [0.0, 1.0, 2.0, 3.0]
    assert seen == sorted(seen)
    assert logged(tmp_path, "difficulty") == [0.0, 1.0, 2.0, 3.0]
    assert logged(tmp_path, "success_rate") == [1.0] * 4
    agent.save(tmp_path / "agent.zip")
    env = make()
    loaded = GRPO.load(tmp_path / "agent.zip", env=env, device="cpu")
    assert loaded.curriculum.metrics()["curriculum/difficulty"] == 3.0
    env.reset()
    assert env.get_attr("difficulty") == [3.0] * 4


def test_ppo_of_sb3_is_driven_by_a_callback(tmp_path):
    def make():
        return make_vec_env(lambda: make_env(Stairs, LinearSchedule(0, 1, 128)), n_envs=2)

    agent = PPO("MlpPolicy", make(), n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    agent.learn(128, callback=CurriculumCallback())
    # Four rollouts of 32 steps: the last one starts after 96 of 128 steps.
    assert agent.curriculum_state["difficulty"] == 0.75
    assert logged(tmp_path, "difficulty") == [0.0, 0.25, 0.5, 0.75]
    assert all(0 < rate < 1 for rate in logged(tmp_path, "success_rate"))
    agent.save(tmp_path / "agent.zip")
    loaded = PPO.load(tmp_path / "agent.zip", env=make(), device="cpu")
    loaded.learn(32, callback=CurriculumCallback(), reset_num_timesteps=False)
    assert loaded.curriculum_state["difficulty"] == 1.0


def test_a_callback_where_nothing_is_to_be_driven_is_refused():
    settings = {"n_steps": 32, "batch_size": 32, "device": "cpu"}
    with pytest.raises(ConfigError, match="no env of this model has a Curriculum"):
        PPO("MlpPolicy", DummyVecEnv([Stairs]), **settings).learn(16, callback=CurriculumCallback())
    env = DummyVecEnv([lambda: make_env(Stairs, 1)] * 2)
    with pytest.raises(ConfigError, match="GRPO drives the curriculum itself"):
        GRPO("MlpPolicy", env, group_size=2, **settings).learn(16, callback=CurriculumCallback())


# -------------------------------------------------------------------------------------------------------------- recipes


def recipe(**curriculum):
    environment = {"id": "CartPole-v1", "curriculum": {"attribute": "gravity"} | curriculum}
    return make_recipe({"environment": environment, "optimization": {"group_size": 2}}, "test.yaml")


def test_a_recipe_trains_with_it_and_evaluates_at_the_full_difficulty():
    made = recipe(difficulty={"start": 5, "end": 9, "steps": 100})
    env = build.build_env(made)
    env.reset()
    assert env.get_attr("gravity") == [5.0, 5.0]
    assert build.build_agent(made, env).curriculum is not None
    assert build.make_env(made.environment).reset()[1]["difficulty"] == 9.0
    assert "curriculum:" in made.to_yaml()


def test_a_recipe_of_sb3s_own_algorithm_is_driven_too():
    environment = {
        "id": "CartPole-v1",
        "curriculum": {"attribute": "gravity", "difficulty": {"start": 5, "end": 9, "steps": 256}},
    }
    settings = {"class": "stable_baselines3:PPO", "optimization": {"n_steps": 64}, "environment": environment}
    made = make_recipe(settings, "test.yaml")
    agent = build.build_agent(made, build.build_env(made))
    agent.learn(192, callback=build.drivers(agent))
    # Rollouts of 64 steps: the third starts after 128 of 256.
    assert agent.curriculum_state["difficulty"] == 7.0
    made = recipe(difficulty=9)
    assert build.drivers(build.build_agent(made, build.build_env(made))) == [], "GRPO drives itself"


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        ({"difficulty": {"start": 5, "end": 9}}, r"test.yaml, environment.curriculum: .*give it steps"),
        ({"dificulty": 1}, 'unknown key "dificulty": did you mean "difficulty"'),
        ({"difficulty": 1, "option": 3}, "environment.curriculum.option: expected str"),
        ({}, "environment.curriculum: not a schedule: None"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused(curriculum, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**curriculum)
