"""A run of SB3's PPO under VecNormalize is evaluated, later too, through the statistics that it trained with."""

import json

import numpy as np

from grpo_rl.lab.build import open_run, seen_by
from grpo_rl.lab.run import evaluate_run, train_run
from grpo_rl.recipes import make_recipe


def test_evaluation_sees_what_training_saw(tmp_path):
    recipe = make_recipe(
        {
            "class": "stable_baselines3:PPO",
            "training": {"steps": 256, "episodes": 2},
            "environment": {"id": "Pendulum-v1", "normalize": True},
            "optimization": {"n_steps": 128, "n_epochs": 1},
        },
        "ppo.yaml",
    )
    run = train_run(recipe, tmp_path, say=lambda line: None)
    first = json.loads((run / "evaluation.json").read_text())
    recipe, agent = open_run(run)
    normalizer = agent.get_vec_normalize_env()
    obs = np.array([1.0, 0.0, 8.0], np.float32)
    expected = (obs - normalizer.obs_rms.mean) / np.sqrt(normalizer.obs_rms.var + normalizer.epsilon)
    np.testing.assert_allclose(seen_by(agent)(obs), expected, rtol=1e-5)
    # The first reset's row and 256 steps, one column, no row of an evaluation.
    assert round(normalizer.obs_rms.count - 1e-4) == 257
    evaluate_run(run, agent, recipe, say=lambda line: None)
    assert json.loads((run / "evaluation.json").read_text()) == first
