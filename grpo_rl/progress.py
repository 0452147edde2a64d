"""SB3's progress bar, counting the env steps that were really made."""

from stable_baselines3.common.callbacks import ProgressBarCallback


class ProgressBar(ProgressBarCallback):
    """Advances by what `num_timesteps` grew, where SB3's adds n_envs a vector step: frozen members make no step."""

    def _on_step(self) -> bool:
        self.pbar.update(self.model.num_timesteps - self.model._num_timesteps_at_start - self.pbar.n)
        return True
