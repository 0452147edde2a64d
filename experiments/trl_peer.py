"""`TRL`: an agent of ours whose training is TRL's GRPOTrainer, so that a study can run both side by side.

Model, prompts, rewards, optimiser, schedule and evaluation are GRPO's own objects; only sampling and the update are
TRL's, with the settings that docs/from-trl.md puts side by side. TRL is not needed to load this file:

    pip install -c constraints.txt -e '.[text,bench]'
"""

import tempfile
from typing import Any, cast

import torch as th
from stable_baselines3.common.callbacks import BaseCallback

from grpo_rl import GRPO
from grpo_rl.errors import ConfigError

LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo")
"""Loss types of the same name and meaning."""
SAME = {"value_head": False, "baseline_discount": 1.0, "compression": None, "tied_groups": "keep", "kl_coef": 0.0}
SAME |= {"ent_coef": 0.0, "target_kl": None, "trust_region": None, "entropy_quantile": 0.0, "auxiliary_losses": None}
"""What a setting has to be, as the peer does nothing about it."""


class TRL(GRPO):
    """`GRPO`, trained by TRL.

    A rollout's step is reported to callbacks where GRPO reports it: after its completions are scored, before the
    update on them. The learning rate follows the same schedule over sampled tokens.

    Raises:
        ConfigError: A setting that the comparison does not cover, or TRL is not installed.
    """

    def learn(self, total_timesteps: int, callback: Any = None, **kwargs: Any) -> "TRL":  # type: ignore[override]
        """Trains for `total_timesteps` sampled tokens, rounded up to whole rollouts."""
        for name, value in SAME.items():
            if getattr(self, name) != value:
                raise ConfigError(f"{name}={getattr(self, name)!r}: the TRL peer trains with {value!r} only")
        if self.loss_type not in LOSSES:
            raise ConfigError(f'loss_type="{self.loss_type}": the TRL peer has {", ".join(LOSSES)}')
        total, callback = self._setup_learn(total_timesteps, callback)
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(total, callback, folder)
            callback.on_training_start(locals(), globals())
            trainer.train()
        callback.on_training_end()
        self.policy.set_training_mode(False)
        return self

    def trainer(self, total: int, callback: BaseCallback, folder: str) -> Any:
        """TRL's trainer for this agent; it stops after `total` tokens."""
        try:
            from trl import GRPOTrainer
        except ImportError as error:
            raise ConfigError(f"the peer needs TRL: pip install -c constraints.txt trl ({error})") from error
        from transformers import PrinterCallback, TrainerCallback

        agent, env, policy = self, cast(Any, self.env), cast(Any, self.policy)
        rewards = env.task.rewards

        def score(prompts: list[Any], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> Any:
            """The first reward; it is called once a rollout, which makes it the place to count tokens."""
            values = rewards.functions[0](
                prompts=prompts, completions=completions, completion_ids=completion_ids, **columns
            )
            agent.num_timesteps += sum(map(len, completion_ids))
            agent._update_current_progress_remaining(agent.num_timesteps, total)
            callback.update_locals({"self": agent})
            callback.on_step()  # may evaluate
            policy.backbone.model.train()  # TRL asks the model whether it is being trained
            policy.optimizer.param_groups[0]["lr"] = agent.lr_schedule(agent._current_progress_remaining)
            return values

        class End(TrainerCallback):
            """Ends training with the epochs of the last rollout."""

            def on_step_end(self, args: Any, state: Any, control: Any, **unread: Any) -> None:
                steps = args.num_iterations * args.steps_per_generation // args.gradient_accumulation_steps
                control.should_training_stop = agent.num_timesteps >= total and state.global_step % steps == 0

        first = self.lr_schedule(1)
        schedule = th.optim.lr_scheduler.LambdaLR(
            policy.optimizer, lambda _: self.lr_schedule(self._current_progress_remaining) / first
        )
        trainer = GRPOTrainer(
            model=policy.backbone.model,
            reward_funcs=[score, *rewards.functions[1:]],
            args=self.config(total, folder),
            train_dataset=dataset(env.task.source.rows),
            processing_class=env.encoder.tokenizer,
            callbacks=[End()],
            optimizers=(policy.optimizer, schedule),
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def config(self, total: int, folder: str) -> Any:
        """TRL's names for this agent's settings; `folder` takes what it writes."""
        from trl import GRPOConfig

        batch = self.batch_size or self.n_steps
        forward = min(self.micro_batch_size or batch, batch)
        env, policy = cast(Any, self.env), cast(Any, self.policy)
        rollouts = total // self.n_steps + 1  # at most: a completion has one token or more
        return GRPOConfig(
            output_dir=folder,
            num_generations=self.group_size,
            generation_batch_size=self.n_steps,
            per_device_train_batch_size=forward,
            gradient_accumulation_steps=batch // forward,
            num_iterations=self.n_epochs,
            max_steps=rollouts * self.n_epochs * (self.n_steps // batch),
            max_completion_length=env.encoder.max_new_tokens,
            temperature=policy.temperature,
            top_k=policy.top_k,
            top_p=policy.top_p,
            loss_type=self.loss_type,
            scale_rewards=self.scale,
            reward_weights=env.task.rewards.weights.tolist(),
            beta=0.0,
            epsilon=self.clip_range(1.0),
            epsilon_high=self.clip_range_high,
            delta=self.clip_delta,
            mask_truncated_completions=self.mask_truncated,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed or 0,
            disable_dropout=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )


def dataset(rows: Any) -> Any:
    """Our rows as a `datasets.Dataset`: prompt and columns."""
    from datasets import Dataset

    pairs = [rows[i] for i in range(len(rows))]
    return Dataset.from_list([{"prompt": prompt, **columns} for prompt, columns in pairs])
