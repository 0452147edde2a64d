"""The progress bar counts env steps."""

from grpo_rl import GRPO
from grpo_rl.progress import ProgressBar


def test_the_bar_counts_steps_that_were_made_not_vector_steps() -> None:
    """Groups of whole episodes freeze members that have ended: fewer steps than vector steps times columns."""
    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=32, n_epochs=1, seed=0)
    bar = ProgressBar()
    model.learn(300, callback=[bar])
    assert bar.pbar.n == model.num_timesteps
    assert model.rollout_buffer.mask.sum() < len(model.rollout_buffer) * model.n_envs
    first = bar.pbar.n
    model.learn(300, callback=[again := ProgressBar()], reset_num_timesteps=False)
    assert again.pbar.n == model.num_timesteps - first  # what this call adds
