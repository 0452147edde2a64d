"""Recipes: what is shipped works, what is written is understood, what is wrong is refused in one clear line."""

import shutil

import pytest
import torch as th
import yaml
from stable_baselines3 import PPO

from grpo_rl.errors import ConfigError
from grpo_rl.lab.build import build_agent, build_env, make_env
from grpo_rl.lab.study import load_study
from grpo_rl.recipes import (
    PACKAGE,
    SECTIONS,
    find,
    load_object,
    load_recipe,
    make_recipe,
    merge,
    names,
    parameters,
    shipped,
    takes_schedule,
)

ENV = """
import gymnasium, numpy

class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=4, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return numpy.zeros(2, dtype=numpy.float32), {}

    def step(self, action):
        self.place += 1
        return numpy.zeros(2, dtype=numpy.float32), float(action), self.place == self.length, False, {}
"""
EXTRACTOR = """
from stable_baselines3.common.torch_layers import FlattenExtractor

class Half(FlattenExtractor):
    def forward(self, observations):
        return super().forward(observations) / 2
"""


def small(**sections):
    """The smallest recipe, with sections on top."""
    return make_recipe(merge({"environment": {"id": "CartPole-v1"}}, sections), "test.yaml")


# -------------------------------------------------------------------------------------------------------------- shipped


@pytest.mark.parametrize("name", names())
def test_a_shipped_recipe_builds_and_trains(name, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path))
    monkeypatch.setattr("grpo_rl.text.toy.teach", lambda *arguments: None)  # base models that know nothing will do
    recipe = load_recipe(name, ["training.steps=64", "optimization.n_epochs=1", "optimization.n_steps=16"])
    assert recipe.description, "`grpo-rl list` shows it"
    env = build_env(recipe)
    agent = build_agent(recipe, env).learn(recipe.training.steps)
    env.close()
    assert agent.num_timesteps >= 64
    assert all(th.isfinite(parameter).all() for parameter in agent.policy.parameters())


@pytest.mark.parametrize("name", names("experiments"))
def test_a_shipped_study_is_valid(name):
    study = load_study(name)
    assert study.description
    assert len(study.runs()) == len(study.seeds) * len(study.tasks) * len(study.agents)


def test_the_study_of_recipes_has_them_all():
    study = load_study("recipes")
    assert {task: settings["recipe"] for task, settings in study.tasks.items()} == {name: name for name in names()}


def test_what_is_shipped_is_not_looked_for_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "hopper.yaml").write_text("environment: {id: CartPole-v1}")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("hopper").environment.id == "Hopper-v5"


def test_agents_and_envs_are_folders_not_packages():
    assert not [path for folder in ("agents", "envs") for path in (shipped() / folder).rglob("__init__.py")]
    assert not [path for path in PACKAGE.rglob("*") if path.stem in ("agents", "envs") and "_recipes" not in path.parts]


# --------------------------------------------------------------------------------------------------------- what it says


def test_settings_reach_the_agent():
    recipe = small(
        training={"seed": 5},
        environment={"n_groups": 2},
        model={"net_arch": [8], "activation_fn": "torch.nn:ReLU"},
        optimization={"group_size": 4, "learning_rate": {"start": 3e-4, "end": 0}, "batch_size": 32},
    )
    env = build_env(recipe)
    agent = build_agent(recipe, env)
    assert (env.num_envs, agent.n_envs, agent.group_size, agent.batch_size, agent.seed) == (8, 8, 4, 32, 5)
    # Half-way between 3e-4 and 0.
    assert agent.lr_schedule(0.5) == pytest.approx(1.5e-4)
    assert [type(layer) for layer in agent.policy.mlp_extractor.policy_net] == [th.nn.Linear, th.nn.ReLU]
    env.close()


def test_numbers_are_those_of_yaml_1_2_and_of_the_signature(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "training: {steps: 1e3}\nenvironment: {id: CartPole-v1}\n"
        "optimization: {learning_rate: 3e-4, gamma: 1, n_steps: 2e2}"
    )
    recipe = load_recipe(path)
    assert (recipe.training.steps, type(recipe.training.steps)) == (1000, int)
    assert recipe.optimization == {"learning_rate": 0.0003, "gamma": 1.0, "n_steps": 200}
    assert [type(value) for value in recipe.optimization.values()] == [float, float, int]
    assert recipe.name == "mine"


def test_overrides_win_and_reach_into_mappings():
    recipe = load_recipe(
        "hopper",
        [
            "optimization.learning_rate=1e-4",
            "optimization.clip_range={start: 0.3, end: 0.1}",
            "environment.kwargs.frame_skip=2",
            "training.seed=3",
        ],
    )
    assert recipe.optimization["learning_rate"] == 0.0001
    assert recipe.optimization["clip_range"] == {"start": 0.3, "end": 0.1}
    assert recipe.environment.kwargs == {"frame_skip": 2}
    assert recipe.training.seed == 3
    assert recipe.optimization["value_head"] is True, "what is not overridden stays"


def test_a_saved_recipe_reads_back_as_it_was(tmp_path):
    recipe = load_recipe("hopper", ["training.seed=3"])
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    again = load_recipe(path)
    again.source = recipe.source
    assert again == recipe


def test_merge_goes_key_by_key_and_changes_nothing():
    first, second = {"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "b": {"z": 5}}
    assert merge(first, second) == {"a": {"x": 1, "y": 4}, "b": {"z": 5}}
    assert first == {"a": {"x": 1, "y": 2}, "b": 3}


# ----------------------------------------------------------------------------------------------------------------- code


def test_code_is_found_next_to_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "corridor.py").write_text(ENV)
    (tmp_path / "half.py").write_text(EXTRACTOR)
    path = tmp_path / "corridor.yaml"
    path.write_text(
        """
environment:
  class: corridor.py:Corridor
  kwargs: {length: 6}
  wrappers: [{class: "gymnasium.wrappers:TimeLimit", kwargs: {max_episode_steps: 3}}]
model: {features_extractor_class: half.py:Half}
optimization: {group_size: 2, n_steps: 16, n_epochs: 1, batch_size: 8}
"""
    )
    monkeypatch.chdir("/")
    recipe = load_recipe(path)
    env = make_env(recipe.environment)
    env.reset()
    steps = [env.step(1)[2:4] for _ in range(3)]
    assert steps == [(False, False), (False, False), (False, True)], "a corridor of 6, cut after 3"
    vec = build_env(recipe)
    agent = build_agent(recipe, vec).learn(32)
    vec.close()
    # The class is wrapped where observations are normalised, and itself elsewhere.
    assert any(type(module).__name__ == "Half" for module in agent.policy.modules())


def test_a_run_moved_elsewhere_still_finds_its_code(tmp_path):
    (tmp_path / "corridor.py").write_text(ENV)
    recipe = make_recipe({"environment": {"class": "corridor.py:Corridor"}}, "test", tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "run" / "recipe.yaml").environment.class_ == f"{tmp_path / 'corridor.py'}:Corridor"


def test_an_environment_may_be_a_file_of_its_own(tmp_path):
    (tmp_path / "cart.yaml").write_text("id: CartPole-v1\nkwargs: {render_mode: null}")
    (tmp_path / "mine.yaml").write_text("environment: cart.yaml")
    recipe = load_recipe(tmp_path / "mine.yaml", ["environment.n_groups=3"])
    assert (recipe.environment.id, recipe.environment.n_groups) == ("CartPole-v1", 3)
    assert recipe.environment.kwargs == {"render_mode": None}


def test_another_algorithm_and_a_subclass_can_be_named(tmp_path):
    ppo = small(
        **{"class": "stable_baselines3:PPO", "optimization": {"n_steps": 64}, "environment": {"normalize": True}}
    )
    env = build_env(ppo)
    agent = build_agent(ppo, env)
    assert (type(agent).__name__, agent.n_envs, agent.get_vec_normalize_env() is not None) == ("PPO", 1, True)
    (tmp_path / "mine.py").write_text(
        "from grpo_rl import GRPO\n\n\nclass Mine(GRPO):\n    def __init__(self, *args, extra: int = 0, **kwargs):\n"
        "        self.extra = extra\n        super().__init__(*args, **kwargs)\n"
    )
    data = {"class": "mine.py:Mine", "environment": {"id": "CartPole-v1"}, "optimization": {"extra": 4, "gamma": 0.9}}
    recipe = make_recipe(data, "test", tmp_path)
    agent = build_agent(recipe, build_env(recipe))
    assert (agent.extra, agent.gamma) == (4, 0.9)


def test_schedules_stay_what_yaml_said_until_the_agent_is_built():
    recipe = small(optimization={"learning_rate": {"start": 1e-3, "end": 1e-4}})
    assert recipe.optimization["learning_rate"] == {"start": 1e-3, "end": 1e-4}
    agent = build_agent(recipe, build_env(recipe))
    assert (agent.lr_schedule(1), agent.lr_schedule(0)) == pytest.approx((1e-3, 1e-4))


# -------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimisation": {}}, 'test.yaml: unknown section "optimisation": did you mean "optimization"?'),
        (
            {"optimization": {"lerning_rate": 1}},
            'test.yaml, optimization: unknown key "lerning_rate": nearest: learning_',
        ),
        ({"optimization": {"seed": 1}}, 'optimization: unknown key "seed": it is training.seed'),
        ({"optimization": {"n_steps": "many"}}, "test.yaml, optimization.n_steps: expected int or null, got 'many'"),
        ({"optimization": {"n_steps": 2.5}}, "optimization.n_steps: expected int or null, got 2.5"),
        ({"optimization": {"value_head": 1}}, "optimization.value_head: expected bool, got 1"),
        ({"optimization": {"gamma": None}}, "optimization.gamma: expected float, got None"),
        ({"optimization": {"learning_rate": "fast"}}, "optimization.learning_rate: not a schedule: 'fast'"),
        ({"optimization": {"clip_range": {"begin": 1}}}, 'optimization.clip_range: unknown key "begin"'),
        ({"optimization": 3}, "test.yaml, optimization: expected a mapping of settings, got 3"),
        ({"training": {"step": 1}}, 'training: unknown key "step": did you mean "steps"? valid: '),
        ({"training": {"steps": "1e6 or so"}}, "training.steps: expected int, got '1e6 or so'"),
        ({"training": {"steps": 0}}, "training.steps: expected 1 or more, got 0"),
        (
            {"environment": {"id": "CartPole-v9"}},
            'environment.id: Gymnasium knows no "CartPole-v9": nearest: CartPole-v1',
        ),
        ({"environment": {"class": "a.py:B"}}, "test.yaml, environment: give either an id or a class"),
        ({"environment": {"normalize": True}}, "environment.normalize: is for SB3's own algorithms; say optimization"),
        ({"environment": {"n_groups": 0}}, "environment.n_groups: expected 1 or more"),
        ({"model": {"policy": "MplPolicy"}}, 'model: unknown policy "MplPolicy": did you mean "MlpPolicy"?'),
        ({"model": {"net_ach": [8]}}, 'model: unknown key "net_ach": nearest: net_arch'),
        ({"model": {"activation_fn": "Tanh"}}, "model.activation_fn: expected type, got 'Tanh'"),
        ({"class": "torch.nn:Linear"}, "class: torch.nn:Linear is not GRPO, nor another on-policy algorithm of SB3"),
        ({"resources": {"threads": "all"}}, "resources.threads: expected int or null, got 'all'"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_section(sections, message):
    with pytest.raises(ConfigError) as error:
        small(**sections)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimization.lerning_rate=1", 'command line, optimization: unknown key "lerning_rate"'),
        ("optimisation.gamma=1", 'command line: unknown section "optimisation"'),
        ("gamma=1", '"gamma=1" is no setting: expected section.key=value'),
        ("optimization.gamma={", 'command line: cannot read the value of "optimization.gamma={"'),
        ("training.seed=x", "command line, training.seed: expected int, got 'x'"),
    ],
)
def test_a_mistake_on_the_command_line_is_said_to_be_there(override, message):
    with pytest.raises(ConfigError) as error:
        load_recipe("cartpole", [override])
    assert str(error.value).startswith(message)


def test_unknown_names_and_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match='unknown recipe "hoper": did you mean "hopper"'):
        find("hoper")
    with pytest.raises(ConfigError, match="no file "):
        find(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match='unknown study "mujoco": did you mean "mujoco-hybrid"'):
        find("mujoco", "experiments")
    (tmp_path / "broken.yaml").write_text("training: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not valid YAML"):
        load_recipe(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="expected sections"):
        load_recipe(tmp_path / "list.yaml")


def test_unknown_code_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        load_object(f"{tmp_path}/none.py:Name")
    with pytest.raises(ConfigError, match="no_such_module"):
        load_object("no_such_module:Name")
    (tmp_path / "some.py").write_text("Thing = 1")
    with pytest.raises(ConfigError, match='has no "Thin": did you mean "Thing"'):
        load_object(f"{tmp_path}/some.py:Thin")


def test_an_environment_that_cannot_be_made_is_one_line():
    recipe = small(environment={"kwargs": {"gravitas": 3}})
    with pytest.raises(ConfigError, match=r"cannot make environment CartPole-v1: .*gravitas"):
        build_env(recipe)


def test_every_section_is_documented():
    import grpo_rl.recipes

    example = yaml.safe_load(grpo_rl.recipes.__doc__.split("\n\n")[1])
    assert set(SECTIONS) < set(example)


def test_recipes_import_without_torch(run_python):
    assert run_python("import sys, grpo_rl.recipes; print('torch' in sys.modules)").strip() == "False"


@pytest.fixture
def run_python():
    import subprocess
    import sys

    return lambda code: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_the_shipped_folder_is_inside_the_package_without_a_checkout(tmp_path, monkeypatch):
    shutil.copytree(PACKAGE, tmp_path / "grpo_rl", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("grpo_rl.recipes.PACKAGE", tmp_path / "grpo_rl")
    assert shipped() == tmp_path / "grpo_rl" / "_recipes"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert shipped() == tmp_path / "grpo_rl" / "_recipes", "a project that holds a copy is no checkout of ours"


def test_schedules_are_known_for_sb3s_own_algorithms_too() -> None:
    hints = parameters(PPO)
    assert takes_schedule(hints["learning_rate"])
    assert takes_schedule(hints["clip_range"])
    assert not takes_schedule(hints["gamma"])


@pytest.mark.parametrize("name", ["hopper", "halfcheetah", "cartpole", "acrobot", "pendulum", "vine"])
def test_recipes_that_fork_in_the_middle_of_episodes_do_so(name: str) -> None:
    """Short rollouts, so that a tenth of the windows, or half of the groups (4,000 steps at most), is not none."""
    recipe = load_recipe(name, ["optimization.n_epochs=1", "optimization.n_steps=16", "training.seed=0"])
    agent = build_agent(recipe, build_env(recipe)).learn(20_000)
    assert agent._forks > 0
    assert agent._fork_depths > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "found nothing: the file is empty"), (b"\x89PNG\xf6", "not a text file"), (b"- 1", "found list")],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, message):
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(tmp_path / "x.yaml")
