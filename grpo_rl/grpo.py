"""Group Relative Policy Optimization as an SB3 algorithm.

Where we deviate from the GRPO paper (arXiv 2402.03300): credit is each step's reward-to-go, compared with members alive
at the same age (`credit="outcome"` gives the paper's form); the advantage's scale is the minibatch's, as in PPO
(`advantage_scale="group"` gives the z-score); KL to a reference enters the loss as k2, whose gradient is the KL's.
"""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.type_aliases import GymEnv, Schedule
from stable_baselines3.common.utils import FloatSchedule, update_learning_rate
from stable_baselines3.common.vec_env import VecEnv

from grpo_rl import advantages as adv
from grpo_rl import defaults, objective
from grpo_rl.buffers import GroupBuffer
from grpo_rl.checks import (
    check_arguments,
    check_auxiliary,
    check_batch,
    check_completions,
    check_normalizers,
    policy_arguments,
)
from grpo_rl.curriculum import CurriculumDriver
from grpo_rl.errors import ConfigError, ForkError, did_you_mean, warn
from grpo_rl.fast.update import Programs
from grpo_rl.frame import Frame
from grpo_rl.groups.assign import Grouping, choose_grouping
from grpo_rl.groups.make import make_group_env
from grpo_rl.normalize import ReturnScale
from grpo_rl.policies.control import CnnPolicy, ControlPolicy, MlpPolicy, MultiInputPolicy
from grpo_rl.policies.language import BaseUnderAdapters, CausalLMPolicy
from grpo_rl.precision import Precision, check_underflow
from grpo_rl.regression import RidgeValue
from grpo_rl.replay import Replay, judge
from grpo_rl.sampling.steps import StepSampler
from grpo_rl.sampling.tokens import TokenSampler
from grpo_rl.text.vec_env import TextVecEnv, is_text
from grpo_rl.token_buffer import TokenBuffer
from grpo_rl.tracking import check_update, log_groups, log_update, together
from grpo_rl.trust_region import TARGET_KL, Steered, next_scale
from grpo_rl.types import Batch

AuxiliaryLoss = Callable[[Any, Batch], th.Tensor]
"""(policy, batch) -> loss per row (M,) or scalar; its gradient reaches the policy together with the others."""

ROLLOUT_STEPS = 2048
"""Transitions per rollout, over all envs, when n_steps is None."""
COMPLETIONS = 64
"""Completions per rollout of a language model, rounded down to whole groups, when n_steps is None."""
EPISODE_FORKS, CRITIC_FREE_FORKS, HYBRID_FORKS = (0.5, 0.0), (0.75, 0.25), (0.1, 0.0)
"""Default chances (fork_prob, reset_prob) for groups of episodes, critic-free windows and windows of the hybrid."""
HINT = (
    "long episodes learn slowly without a value head (Hopper-v5, 300k steps, sampled actions: 349 against 2109 with one"
    " in study mujoco-hybrid); value_head=True adds it"
)
HYBRID_GROUP_WEIGHT = 0.25
"""Default share of the group advantage beside GAE, at steps with a sibling."""


class GRPO(Frame):
    """Group Relative Policy Optimization: PPO's update on advantages taken from a group's own returns.

    Members of a group start from exactly the same state; a member's advantage is its return minus what the others got.
    There is no critic unless `value_head=True` asks for the hybrid objective. Arguments up to `device` are SB3 PPO's,
    in its order and with its defaults.

    Args:
        policy: "MlpPolicy", "CnnPolicy", "MultiInputPolicy", or a subclass of `grpo_rl.MlpPolicy` and its siblings;
            "CausalLMPolicy" for a language model, which `policy_kwargs={"model": …}` names.
        env: a Gymnasium id (one group of `group_size` envs is made), an env, or an SB3 VecEnv, used as it is. A
            gymnasium VectorEnv is built anew as one, or refused with the line to write (`from_vector_env`).
        learning_rate: a float, or a callable of the progress remaining (1 → 0).
        n_steps: steps per env and rollout. None: 2048 transitions in all. Groups of whole episodes take that or more.
        batch_size: rows per minibatch; None, of completions: all.
        n_epochs: passes over a rollout.
        gamma: discount per step. Usual: 0.99 for control, 0.95 dialogue, 0.98 long text, 0.9 immediate reward.
            Left: 0.99; of a language model 1, as its step is a token: L tokens count γ^(L − 1) of their reward.
        gae_lambda: λ of generalised advantage estimation; read with a value head or baseline="regression".
        clip_range: ε, a float or a callable of the progress remaining, such as LinearSchedule(0.3, 0.1).
        clip_range_vf: the same for the value function; None: no clipping.
        normalize_advantage: advantage_scale="batch" under SB3's name; read when `advantage_scale` is None.
        ent_coef: weight of the entropy bonus. vf_coef: weight of the value loss.
        max_grad_norm: gradients are clipped to this norm.
        use_sde, sde_sample_freq: generalised state-dependent exploration, as in SB3.
        rollout_buffer_class, rollout_buffer_kwargs: not offered; anything but None and {} is refused.
        target_kl: stops the epochs of an update once the approximate KL exceeds 1.5 times this; with `trust_region` it
            is what that steers to, and nothing stops.
        stats_window_size: episodes averaged in `rollout/`. tensorboard_log: folder of TensorBoard runs.
        policy_kwargs: for the policy's constructor (net_arch, activation_fn, log_std_init, …).
        verbose: 0 silent, 1 info, 2 debug. seed: of everything. device: "auto", "cpu", "cuda" or a torch device.
        group_size: G, members of a group. 1 needs `value_head` and is plain PPO.
        value_head: add a value network: the hybrid objective (surrogate + entropy − value loss).
        group_kind: "episode": from a reset to the end of every member; "window": n_steps from wherever the members are;
            "auto": windows with a value head, a regression or a time limit above 500 steps, else episodes.
        grouping: "fork" (exact snapshots), "seed" (resets with one seed), "batch" (no common start), or "auto": the
            best that the env allows, announced once with the reason.
        fork_prob: chance that a group starts from the middle of an episode: from a moment of the last group's, or, in
            windows, from one of its members as it is. None: 0.5 for episodes, 0.75 for windows, 0.1 with a value head.
        reset_prob: chance that a window starts from a fresh episode start instead. None: 0.25 critic-free, else 0.
        baseline: "leave_one_out" (RLOO), "mean" (GRPO), "weighted" (by length, OPO), or "moving_average": an
            exponential average of past returns by age, refreshed every `baseline_every` updates. "regression": a value
            function solved in closed form (`grpo_rl.regression`) from the λ-returns of the last four rollouts, for GAE
            as in the hybrid, and no network. Groups, `fork_prob`, `group_weight` are the hybrid's; `group_size` 1 goes.
            In the first rollout values are one constant, its mean reward for ever. For observations without images.
        baseline_discount: factor on the baseline, 0.9–1. Below 1, groups of equal returns move the policy too.
            Unbiased with leave_one_out, but noisier.
        age_discount: a step's group advantage weighs age_discount^age, with age the steps since the root. Siblings are
            alike near their root, and differ by where they are later. 1: no discount. γ: the exact gradient of the
            root's discounted return (Sutton & Barto 2018, section 13.3), for roots that lie all over the episodes.
        credit: "reward_to_go" for each step, or "outcome": a segment's whole return for all of its steps. A language
            model's step is its turn: what a conversation earns from there on, beside the members that have it too.
        advantage_scale: "batch" (z-score of each minibatch, as SB3), "group" (z-score within the group), or "none".
            None: "batch"; of completions "none" for "dr_grpo" and "rloo", else "group" about the group's mean.
        compression: None, "tanh" or "layer_norm" of the group advantage.
        group_weight: share of the group advantage beside GAE in the hybrid, 0–1, at steps with a sibling alive at the
            same age; a float or a callable of the progress remaining. None: 0.25 with forks, else 0. Critic-free: 1.
        cold_start: so many env steps train as PPO (needs `value_head`); then the share of group samples rises to 1.
            Until then windows start as groups with that share of their chance, and of groups of episodes that share
            counts as groups. Afterwards every step with a sibling has the group's advantage (`group_weight` 1).
        cold_start_ramp: over how many env steps it rises. None: as many as `cold_start`.
        trust_region: "learning_rate" or "clip_range": multiply it by 1.5 when an iteration's KL was below half of
            `target_kl` (None: 0.01), divide it when above twice that. None: nothing moves.
        kl_coef: weight of the KL to a reference policy, a frozen copy of the first policy.
        reference_every: the reference becomes a copy of the policy every so many updates. None: never.
        normalize_obs: running normalisation of vector observations inside the policy.
        normalize_reward: rewards are divided by the running std of the discounted return.
        auxiliary_losses: name → (function, weight), see `AuxiliaryLoss`. Not saved: hand them over again at load.
        loss_type: of `objective.LOSSES`. None: "clipped", PPO's; of completions "dapo".
        clip_range_high: ε upwards, None: ε. Of "cispo" the largest ratio (5.0 is usual), which must be given.
        clip_delta: two-sided clipping, a bound δ above 1 on the ratio where A < 0. None: none.
        kl_estimator: the KL's loss, "k1", "k2", "k3" or "unbiased", see `objective.KL_LOSSES`.
        reference_mix: how far the reference moves to the policy when it is renewed; 1: all the way.
        reuse: M, how many of the last rollouts an update draws from. An epoch is one pass over all of them: with M = 4
            a quarter of the epochs makes as many minibatches. Old steps are corrected by q = π/μ, the policy now over
            the one that acted: clipping about q (GePPO), and with values V-trace; without, returns stay as they came.
            For loss_type "clipped", any value function, and baselines of a rollout's own groups.
        priority: α ≥ 0. Above 0, rows are drawn in proportion to |A|^α, and an epoch is as many draws as rows.
        priority_beta: β, 0–1, of the importance weights (1/(n·P))^β that correct for it; 1 corrects in full. A float,
            or a callable of the progress remaining, such as LinearSchedule(0.4, 1.0).
        precision: "32-true"; or "bf16-mixed", "16-mixed" (with a loss scale; on a CPU carried out as "bf16-mixed"):
            networks compute in 16 bits by autocast; parameters, log-probabilities, advantages and statistics are
            float32 all the same. By torch alone. For use on a GPU: on most CPUs it is slower.

    Of language models ("CausalLMPolicy" and an env of texts) `n_steps` counts completions per rollout (None: about 64),
    `batch_size` completions per optimiser step (left: all of them), env steps are sampled tokens, and defaults are
    smaller (`grpo_rl.defaults`). For them only:

        tied_groups: groups whose rewards are all equal: "keep" them with advantage 0, "mask" them (no gradient of the
            KL either, but they count in denominators), "drop" them, or "refill" the rollout with others.
        mask_truncated: completions that were cut at the limit of tokens are left out of the update.
        entropy_quantile: tokens sampled below this quantile of the rollout's entropies have advantage 0.
        micro_batch_size: completions per forward pass. It changes the memory, and no gradient.

    Raises:
        ConfigError, AssertionError: an argument that cannot work, at construction.
        ForkError: grouping="fork" and the env cannot be forked exactly.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
        "CausalLMPolicy": CausalLMPolicy,
    }
    rollout_buffer: GroupBuffer  # type: ignore[assignment]

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str | None,
        learning_rate: float | Schedule = defaults.LEARNING_RATE,
        n_steps: int | None = None,
        batch_size: int | None = defaults.BATCH_SIZE,
        n_epochs: int = defaults.N_EPOCHS,
        gamma: float = defaults.GAMMA,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = defaults.CLIP_RANGE,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = defaults.MAX_GRAD_NORM,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        group_size: int = 8,
        value_head: bool = False,
        group_kind: str = "auto",
        grouping: str = "auto",
        fork_prob: float | None = None,
        reset_prob: float | None = None,
        baseline: str = "leave_one_out",
        baseline_discount: float = 1.0,
        baseline_every: int = 1,
        age_discount: float = 1.0,
        credit: str = "reward_to_go",
        advantage_scale: str | None = None,
        compression: str | None = None,
        group_weight: float | Schedule | None = None,
        cold_start: int = 0,
        cold_start_ramp: int | None = None,
        trust_region: Steered | None = None,
        kl_coef: float = 0.0,
        reference_every: int | None = None,
        normalize_obs: bool = False,
        normalize_reward: bool = False,
        auxiliary_losses: dict[str, tuple[AuxiliaryLoss, float]] | None = None,
        loss_type: str | None = None,
        clip_range_high: float | None = None,
        clip_delta: float | None = None,
        kl_estimator: str = "k2",
        reference_mix: float = 1.0,
        reuse: int = 1,
        priority: float = 0.0,
        priority_beta: float | Schedule = 1.0,
        tied_groups: str = "keep",
        mask_truncated: bool = False,
        entropy_quantile: float = 0.0,
        micro_batch_size: int | None = None,
        precision: str = "32-true",
    ) -> None:
        if isinstance(policy, str) and policy not in self.policy_aliases:
            raise ConfigError(f'policy "{policy}" is unknown: {did_you_mean(policy, self.policy_aliases)}')
        if isinstance(env, str):
            env = _make_env(env, group_size, seed)
        policy = _our_policy(policy)
        language = _is_language(policy)
        lora = language and isinstance(policy_kwargs, dict) and bool(policy_kwargs.get("lora"))
        super().__init__(
            policy,
            env,  # type: ignore[arg-type]
            learning_rate=defaults.settled("learning_rate", learning_rate, language, lora),
            n_steps=n_steps,  # type: ignore[arg-type]
            gamma=defaults.settled("gamma", gamma, language),
            gae_lambda=gae_lambda,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=defaults.settled("max_grad_norm", max_grad_norm, language),
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            rollout_buffer_class=rollout_buffer_class,
            rollout_buffer_kwargs=rollout_buffer_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
            supported_action_spaces=(
                spaces.Box,
                spaces.Discrete,
                spaces.MultiDiscrete,
                spaces.MultiBinary,
                spaces.Text,
            ),
        )
        self.batch_size = defaults.settled("batch_size", batch_size, env is not None and is_text(self))
        self.n_epochs = defaults.settled("n_epochs", n_epochs, language)
        if loss_type == "gspo" and isinstance(clip_range, defaults.Left) and clip_range_high is None:
            clip_range, clip_range_high = defaults.GSPO_CLIP
        self.clip_range = defaults.settled("clip_range", clip_range, language)
        self.clip_range_vf = clip_range_vf
        self.normalize_advantage = normalize_advantage
        self.target_kl = target_kl
        self.group_size = group_size
        self.value_head = value_head
        self.group_kind = group_kind
        self.grouping = grouping
        self.fork_prob = fork_prob
        self.reset_prob = reset_prob
        self.baseline = baseline
        self.baseline_discount = baseline_discount
        self.baseline_every = baseline_every
        self.age_discount = age_discount
        self.credit = credit
        self.advantage_scale = advantage_scale
        self.compression = compression
        self.group_weight = group_weight
        self.cold_start = cold_start
        self.cold_start_ramp = cold_start_ramp
        self.trust_region = trust_region
        self.kl_coef = kl_coef
        self.reference_every = reference_every
        self.normalize_obs = normalize_obs
        self.normalize_reward = normalize_reward
        self.auxiliary_losses = auxiliary_losses
        self.loss_type = loss_type or ("dapo" if env is not None and is_text(self) else "clipped")
        self.clip_range_high = clip_range_high
        self.clip_delta = clip_delta
        self.kl_estimator = kl_estimator
        self.reference_mix = reference_mix
        self.reuse = reuse
        self.priority = priority
        self.priority_beta = priority_beta
        self.tied_groups = tied_groups
        self.mask_truncated = mask_truncated
        self.entropy_quantile = entropy_quantile
        self.micro_batch_size = micro_batch_size
        self.precision = precision
        self._auto_n_steps: int | None = None
        self._baseline_table: list[float] = []
        self._iterations = 0
        self.kl_scale = 1.0
        self.loss_scale: dict[str, float] = {}  # of gradients in fp16, see `Precision.state`
        self._shared_rows: th.Tensor | None = None  # (T, N) bool, hybrid: where the group's advantage had a part
        self.curriculum: CurriculumDriver | None = None
        self.curriculum_state: dict[str, Any] | None = None
        self._forks = self._fork_depths = 0
        self.minibatches_seen: list[Any] = ["", 0]  # settings of the loss, and how many since they are so
        if _init_setup_model:
            self._setup_model()

    # --- set-up -------------------------------------------------------------------------------------------------------

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        check_arguments(self)
        self.clip_range = FloatSchedule(self.clip_range)
        self.clip_range_vf = None if self.clip_range_vf is None else FloatSchedule(self.clip_range_vf)
        self._precision = Precision(self.precision, self.device)
        self.policy = self._new_policy()
        dtype: Any = getattr(self.policy, "autocast", None)
        self._precision.scale_for(dtype, self.device)
        check_underflow(self.policy, dtype)
        self._maybe_recommend_cpu(MlpPolicy.__name__)
        self.reference_policy = self._new_reference() if self.kl_coef else None
        if self.reference_policy is not None and self.normalize_obs:  # both see the same observations
            self.reference_policy.share_normalizer(self.policy)
        self._renew_reference()
        self.reward_scale = ReturnScale().to(self.device)
        fitted = self.baseline == "regression"
        self.regression = RidgeValue(self.observation_space).to(self.device) if fitted else None
        self._programs = Programs(
            self, own_loss=(type(self).loss, type(self).differentiate) == (GRPO.loss, GRPO.differentiate)
        )
        self._setup_sampling()

    def _setup_sampling(self) -> None:
        """The buffer and the sampler, for the env that is there now."""
        buffer = TokenBuffer if is_text(self) else GroupBuffer
        self.rollout_buffer = buffer(self.observation_space, self.action_space, self.device)
        self.replay = Replay(self.reuse, self.priority) if self.reuse > 1 or self.priority else None
        self._sampler: Any = None
        self.curriculum = None if self.env is None or is_text(self) else CurriculumDriver.of(self.env)
        if self.env is None:
            return
        if is_text(self):
            self._setup_text(self.env)
            return
        if self.curriculum is not None and self.curriculum_state is not None:
            self.curriculum.set_state(self.curriculum_state)
        if self.n_steps is None or self.n_steps == self._auto_n_steps:
            self.n_steps = self._auto_n_steps = max(ROLLOUT_STEPS // self.n_envs, 1)
        check_batch(self)
        check_normalizers(self)
        self.groups = choose_grouping(self.env, self.group_size, self.group_kind, self.grouping, self.bootstraps)
        self._announce_groups()
        windows = HYBRID_FORKS if self.bootstraps and not self.cold_start else CRITIC_FREE_FORKS
        fork_prob, reset_prob = windows if self.groups.kind == "window" else EPISODE_FORKS
        self._sampler = StepSampler(
            self,
            self.env,
            self.groups,
            self.group_size,
            fork_prob if self.fork_prob is None else self.fork_prob,
            reset_prob if self.reset_prob is None else self.reset_prob,
        )

    def _setup_text(self, env: Any) -> None:
        """The sampler of completions; the env learns of the model's limits."""
        policy: Any = self.policy
        backbone = policy.backbone
        policy.fit(env.encoder)
        env.check_model(backbone.vocab_size, backbone.context, backbone.eos_ids)
        if self.n_steps is None or self.n_steps == self._auto_n_steps:
            self.n_steps = self._auto_n_steps = max(COMPLETIONS // self.group_size, 1) * self.group_size
        check_completions(self)
        self.groups = Grouping("episode", "prompt", f"completions are compared by {env.grouping}")
        self.rollout_buffer.aggregation = objective.LOSSES[self.loss_type].aggregation  # type: ignore[attr-defined]
        self._sampler = TokenSampler(self, env, self.group_size)

    def _announce_groups(self) -> None:
        """Says once how groups form and why; a fall-back of the critic-free agent is a warning at any verbosity."""
        if self.verbose >= 1:
            print(self.groups)
            if self.groups.kind == "window" and not self.bootstraps:
                print(HINT)
        elif self.grouping == "auto" and self.groups.means != "fork" and not self.bootstraps:
            warn(str(self.groups))

    def _new_policy(self) -> ActorCriticPolicy:
        ours: dict[str, Any] = {}
        if issubclass(self.policy_class, ControlPolicy):
            ours = {"value_head": self.value_head, "normalize_obs": self.normalize_obs}
        elif _is_language(self.policy_class):
            ours = {"value_head": self.value_head}
            if isinstance(self.env, TextVecEnv):
                ours["encoder"] = self.env.encoder
        with policy_arguments(self.policy_class, self.policy_kwargs):
            policy: Any = self.policy_class(
                self.observation_space,
                self.action_space,
                self.lr_schedule,
                use_sde=self.use_sde,
                **(self.policy_kwargs | ours),
            ).to(self.device)
        if hasattr(policy, "compute_in"):
            policy.compute_in(self._precision.dtype)
        elif self._precision.dtype is not None:
            raise ConfigError(f'precision: {type(policy).__name__} knows "32-true" only; take grpo_rl\'s policies')
        return policy

    def _new_reference(self) -> Any:
        """A frozen policy; the model under its adapters where it has some, which needs no copy."""
        if not isinstance(self.policy, CausalLMPolicy):
            return self._new_policy().requires_grad_(False)
        if self.policy.adapters:
            return BaseUnderAdapters(self.policy)
        return self.policy.frozen_copy()

    def _renew_reference(self) -> None:
        """The reference becomes a copy of the policy as it is now; with `reference_mix` below 1 it moves that far."""
        if self.reference_policy is None or isinstance(self.reference_policy, BaseUnderAdapters):
            return
        now = getattr(self.policy, "_orig_mod", self.policy).state_dict()
        if self.reference_mix < 1 and self._iterations:
            for name, value in self.reference_policy.state_dict().items():
                value.lerp_(now[name].to(value), self.reference_mix) if value.is_floating_point() else value.copy_(
                    now[name]
                )
        else:
            self.reference_policy.load_state_dict({name: now[name] for name in self.reference_policy.state_dict()})
        self.reference_policy.set_training_mode(False)

    @property
    def bootstraps(self) -> bool:
        """States have values, by a network or a regression: they are the baseline, and what follows where it is cut."""
        return self.value_head or self.baseline == "regression"

    @property
    def rows(self) -> GroupBuffer | Replay:
        """What an update draws its minibatches from: the rollout, or the last `reuse` of them."""
        return self.replay or self.rollout_buffer

    @property
    def scale(self) -> str:
        """`advantage_scale`, or what SB3's name for it says; of texts what goes with the loss and the baseline."""
        names = ("advantage_scale", "normalize_advantage", "loss_type", "baseline", "baseline_discount")
        return defaults.settled_scale(text=is_text(self), **{name: getattr(self, name) for name in names})

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """As SB3's; groups form anew on the new env."""
        super().set_env(env, force_reset)
        self._setup_sampling()

    # --- one iteration: collect → advantages → objective → update -----------------------------------------------------

    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: GroupBuffer, n_rollout_steps: int
    ) -> bool:
        """Fills the buffer with one rollout of groups and their advantages. False if the callback stopped it."""
        assert self._sampler is not None and self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)
        self._sampler.group_share = self._group_share()
        if self.curriculum is not None:
            self.curriculum.before_rollout(self.num_timesteps)
        if not self._sampler.sample(callback, rollout_buffer, n_rollout_steps):
            return False
        rollout_buffer.advantages = self.estimate_advantages(rollout_buffer)
        if self.reference_policy is not None:
            rollout_buffer.ref_log_prob = self._reference_log_prob(rollout_buffer)
        if isinstance(rollout_buffer, TokenBuffer):
            rollout_buffer.choose(self.tied_groups, self.mask_truncated, self.entropy_quantile)
        log_groups(self, rollout_buffer)
        if self.curriculum is not None:
            self.curriculum_state = self.curriculum.state()
            for name, value in self.curriculum.metrics().items():
                self.logger.record(name, value)
        callback.on_rollout_end()
        return True

    @th.no_grad()
    def estimate_advantages(self, rollout: GroupBuffer) -> th.Tensor:
        """Advantages (T, N) float32 of a finished rollout; override it for a rule of your own.

        Without values: reward-to-go, in which a member cut alive goes on with the mean reward, minus the group's
        baseline. With them: GAE, mixed with the group advantage of the λ-returns by `group_weight`.
        """
        rewards = rollout.tensor(rollout.rewards)
        new = rollout.behaviour_ratio is None  # else statistics have it already
        if self.normalize_reward:
            if new:
                self.reward_scale.update(rollout.tensor(rollout.discounted[rollout.mask]))
            rewards = self.reward_scale(rewards)
        ends = rollout.tensor(rollout.ends)
        values, tails = self._values(rollout, rewards)
        if values is None:
            returns = adv.reward_to_go(rewards, ends, tails, self.gamma)
            return self.group_advantages(rollout, returns, ends) * self._age_weight(rollout)
        rollout.old_values = values
        advantages, rollout.returns = adv.gae(
            rewards, values, ends, tails, self.gamma, self.gae_lambda, rollout.behaviour_ratio
        )
        lambda_returns = advantages + values
        if isinstance(rollout, TokenBuffer) and self.scale != "none":  # of steps each minibatch is scaled
            advantages = adv.masked_standardize(advantages, rollout.tensor(rollout.mask))
        if self.regression is not None and new:
            targets = rollout.returns[rollout.tensor(rollout.mask)] * self._reward_unit
            self.regression.keep(rollout.rows()[0], targets)
        weight = self._group_weight()
        if weight == 0:
            self._shared_rows = None
            return advantages
        siblings = adv.has_sibling(*(rollout.tensor(array) for array in (rollout.group, rollout.age, rollout.mask)))
        weights = weight * siblings * self._age_weight(rollout) * self._group_samples(rollout)
        if new:
            self._shared_rows = weights > 0
        return adv.mix(self.group_advantages(rollout, lambda_returns, ends), advantages, weights)

    def group_advantages(self, rollout: GroupBuffer, returns: th.Tensor, ends: th.Tensor) -> th.Tensor:
        """Group-relative advantages (T, N) of returns (T, N), before the minibatch's scale."""
        if isinstance(rollout, TokenBuffer):
            return rollout.spread(self._compare(*rollout.outcomes(returns, self.credit == "reward_to_go")))
        group, age, mask = (rollout.tensor(array) for array in (rollout.group, rollout.age, rollout.mask))
        if self.credit == "outcome":
            returns = adv.outcome_returns(returns, ends)
        return self._compare(returns, adv.segment_lengths(ends, mask), group, age, mask)

    def _compare(
        self, returns: th.Tensor, lengths: th.Tensor, group: th.Tensor, age: th.Tensor, mask: th.Tensor
    ) -> th.Tensor:
        """Advantages of returns beside those of the group's others at the same age, all (T, N)."""
        if self.baseline == "moving_average":
            table = th.tensor(self._baseline_table, device=returns.device)
            if not len(table) or self._iterations % self.baseline_every == 0:
                table = adv.moving_average(table, returns, age, mask)
                self._baseline_table = table.tolist()
            advantages = th.where(mask, returns - self.baseline_discount * adv.lookup(table, age), 0)
            if self._scale_in_rollout == "batch":
                advantages = adv.masked_standardize(advantages, mask)
        else:
            advantages = adv.group_advantages(
                returns,
                group,
                age,
                mask,
                baseline="leave_one_out" if self.regression else self.baseline,  # type: ignore[arg-type]
                baseline_discount=self.baseline_discount,
                scale=self._scale_in_rollout,
                weights=lengths.clamp(min=1) if self.baseline == "weighted" else None,
            )
        return adv.compress(advantages, mask, self.compression)  # type: ignore[arg-type]

    @property
    def _scale_in_rollout(self) -> Any:
        """The scale of group advantages as they are made: steps leave "batch" to the minibatch, as SB3 does."""
        return self.scale if self.scale == "group" or is_text(self) else "none"

    def _values(self, rollout: GroupBuffer, rewards: th.Tensor) -> tuple[th.Tensor | None, th.Tensor]:
        """The value of each step, or None, and what lies beyond each end, both (T, N).

        That is 0 after termination; alive, the value of the true next observation, or without values the mean reward
        for ever, r̄/(1 − γ), which is every value of a regression that has seen no rollout yet.
        """
        mask, regression = rollout.tensor(rollout.mask), self.regression
        if rollout.values is None and (regression is None or regression.empty):
            constant = adv.alive_tail(rewards, mask, self.gamma)
            return None if regression is None else mask * constant, rollout.tensor(rollout.alive) * constant
        if regression is None:
            assert rollout.values is not None
            return rollout.tensor(rollout.values), self._tails(rollout, self.policy.predict_values)
        unit = self._reward_unit
        values = th.zeros_like(rewards).masked_scatter_(mask, regression(rollout.rows()[0]) / unit)
        return values, self._tails(rollout, lambda obs: regression(obs) / unit)

    def _tails(self, rollout: GroupBuffer, predict: Callable[[Any], th.Tensor]) -> th.Tensor:
        """What `predict` gives for the true next observation of each end that is alive; elsewhere 0. (T, N)."""
        tails = th.zeros(rollout.mask.shape, device=self.device)
        if rollout.tail_obs:
            steps, columns, obs = zip(*rollout.tail_obs, strict=True)
            stacked = (
                {key: np.stack([o[key] for o in obs]) for key in obs[0]} if isinstance(obs[0], dict) else np.stack(obs)
            )
            tails[list(steps), list(columns)] = predict(self.policy.obs_to_tensor(stacked)[0]).flatten()
        return tails

    @property
    def _reward_unit(self) -> th.Tensor | float:
        """How much reward a scaled reward of 1 is now."""
        return self.reward_scale.unit() if self.normalize_reward else 1.0

    def train(self) -> None:
        """Updates the policy on the rows: `n_epochs` passes over minibatches of `loss`."""
        if self.replay is not None:
            self._remember(self.replay)
        self.policy.set_training_mode(True)
        self._precision.set_state(self.loss_scale)
        self._update_learning_rate(self.policy.optimizer)
        clip_range = self.clip_range(self._current_progress_remaining) * self._scale_of("clip_range")
        update = self._programs.update(clip_range)
        before = None if is_text(self) else copy.deepcopy(self.policy.state_dict())
        kl_limit = None if self.target_kl is None or self.trust_region else 1.5 * self.target_kl
        metrics: list[dict[str, th.Tensor]] = []
        stop = False
        for _ in range(self.n_epochs):
            seen = len(metrics)
            for minibatch in update.minibatches():
                try:
                    terms = update.differentiate(minibatch)
                except ValueError:  # a distribution does not take parameters that are not finite
                    check_update(self, metrics[seen:], before)
                    raise
                metrics.append(terms)
                if kl_limit is not None and terms["approx_kl"] > kl_limit:
                    stop = True
                    break
                terms |= update.clip()
                if before is None and not terms["grad_norm"].isfinite():
                    check_update(self, metrics[seen:], before)
                update.step()
            self._n_updates += 1
            check_update(self, metrics[seen:], before)
            if stop:
                break
        self.loss_scale = self._precision.state()
        log_update(self, metrics, clip_range)
        self._move_trust_region()
        self._iterations += 1
        if self.normalize_obs:
            self.policy.update_normalizer(self.rollout_buffer.rows()[0])  # type: ignore[operator]
        if self.reference_every and self._iterations % self.reference_every == 0:
            self._renew_reference()

    @th.no_grad()
    def _remember(self, replay: Replay) -> None:
        """The last rollouts become what the update draws from, the old ones as policy and values see them now."""
        self.policy.set_training_mode(False)
        for rollout in replay.take(self.rollout_buffer):
            values, log_prob, _ = self.policy.evaluate_actions(*rollout.rows())
            judge(rollout, values, log_prob)
            rollout.advantages = self.estimate_advantages(rollout)
            if self.reference_policy is not None:
                rollout.ref_log_prob = self._reference_log_prob(rollout)
        beta = FloatSchedule(self.priority_beta)(self._current_progress_remaining)
        for name, value in replay.close(beta).items():
            self.logger.record(name, value)

    def differentiate(self, minibatch: Batch, clip_range: float) -> dict[str, th.Tensor]:
        """Adds the gradient of `loss` to the parameters', a micro-batch at a time; its terms for the log."""
        parts = []
        for part in self.rollout_buffer.parts(minibatch, self.micro_batch_size):
            loss, terms = self.loss(part, clip_range)
            self._precision.backward(loss)
            parts.append((len(part.weight), terms))
        return together(parts)

    def loss(self, batch: Batch, clip_range: float) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """Σ weight·(surrogate + KL + entropy + value + auxiliary) over a minibatch, and its terms for the log."""
        values, log_prob, entropy = self.policy.evaluate_actions(batch.observations, batch.actions)
        advantages = batch.advantages
        even = batch.weight if batch.even is None else batch.even
        ratio_now = batch.behaviour_ratio
        shares = None if ratio_now is None else batch.weight * ratio_now  # of rows as the policy now would take them
        if self.scale == "batch" and batch.segment is None:
            advantages = (
                objective.masked_standardize(advantages)
                if shares is None
                else adv.weighted_standardize(advantages, shares)
            )
        clipping = objective.Clipping(clip_range, self.clip_range_high, self.clip_delta, batch.segment, ratio_now)
        surrogate = objective.LOSSES[self.loss_type].surrogate
        policy_loss = objective.aggregate(surrogate(log_prob, batch.old_log_prob, advantages, clipping), batch.weight)
        entropy_loss = objective.aggregate(objective.entropy_loss(entropy, log_prob), even)
        loss = policy_loss + self.ent_coef * entropy_loss
        terms = {"policy_gradient_loss": policy_loss, "entropy_loss": entropy_loss}
        if batch.returns is not None and values is not None:
            clip_vf = self.clip_range_vf and self.clip_range_vf(self._current_progress_remaining)  # type: ignore[operator]
            value_loss = objective.value_loss(values.flatten(), batch.returns, batch.old_values, clip_vf)
            terms["value_loss"] = objective.aggregate(value_loss, batch.weight)
            loss = loss + self.vf_coef * terms["value_loss"]
        if batch.ref_log_prob is not None:
            kl_loss = objective.KL_LOSSES[self.kl_estimator](log_prob, batch.ref_log_prob, batch.old_log_prob)
            kl = objective.aggregate(kl_loss, batch.weight)
            terms["reference_kl"] = objective.aggregate(objective.kl_k3(log_prob, batch.ref_log_prob), even)
            loss = loss + self.kl_coef * kl
        for name, (auxiliary_loss, weight) in (self.auxiliary_losses or {}).items():
            value = check_auxiliary(name, auxiliary_loss(self.policy, batch), len(batch.weight))
            terms[f"auxiliary/{name}"] = value.mean() if batch.even is None else (value * batch.even).sum()
            loss = loss + weight * terms[f"auxiliary/{name}"]
        ratio = (log_prob - batch.old_log_prob).exp()
        before = batch.old_log_prob if ratio_now is None else batch.old_log_prob + ratio_now.log()
        terms["approx_kl"] = objective.approx_kl(log_prob, before, shares)
        terms["clip_fraction"] = objective.clip_fraction(
            ratio, clip_range, centre=1.0 if ratio_now is None else ratio_now
        )
        if batch.segment is not None:
            terms |= objective.clip_ratios(
                log_prob.detach(), batch.old_log_prob, batch.advantages, clipping, self.loss_type
            )
        terms["loss"] = loss
        return loss, {name: term.detach() for name, term in terms.items()}

    # --- what goes with it --------------------------------------------------------------------------------------------

    def _group_weight(self) -> float:
        """The hybrid's `group_weight` now; by default there is one where members do share their state."""
        if self.group_size == 1:
            return 0.0
        if self.group_weight is None:
            return 1.0 if self.cold_start else HYBRID_GROUP_WEIGHT if self.groups.means == "fork" else 0.0
        return float(FloatSchedule(self.group_weight)(self._current_progress_remaining))

    def _group_share(self) -> float:
        """The share of group samples now: 0 through the cold start, then rising to 1."""
        if self.cold_start == 0:
            return 1.0
        return min(max(self.num_timesteps - self.cold_start, 0) / (self.cold_start_ramp or self.cold_start), 1.0)

    def _group_samples(self, rollout: GroupBuffer) -> th.Tensor:
        """Which steps (T, N) belong to a group sample. Windows that are none have no siblings to begin with."""
        share = self._sampler.group_share if self._sampler and self.groups.kind == "episode" else 1.0
        groups, index = np.unique(rollout.group, return_inverse=True)
        chosen = np.random.random(len(groups)) < share if share < 1 else np.ones(len(groups), bool)
        return rollout.tensor(chosen[index].reshape(rollout.group.shape))

    def _scale_of(self, steered: Steered) -> float:
        """What the trust region multiplies this by."""
        return self.kl_scale if self.trust_region == steered else 1.0

    @th.no_grad()
    def _move_trust_region(self) -> None:
        """Measures KL(π_old‖π) over the whole rollout and moves the scale of what is steered."""
        if self.trust_region is None:
            return
        parts = []
        for batch in self.rollout_buffer.get():
            for part in self.rollout_buffer.parts(batch, self.micro_batch_size):
                log_prob = self.policy.evaluate_actions(part.observations, part.actions)[1]
                parts.append((len(part.weight), {"approx_kl": objective.approx_kl(log_prob, part.old_log_prob)}))
        kl = together(parts)["approx_kl"].item() if parts else 0.0
        self.logger.record("train/kl", kl)
        self.logger.record("train/trust_region_scale", self.kl_scale)
        self.kl_scale = next_scale(self.kl_scale, kl, self.target_kl or TARGET_KL, self.trust_region)

    def _update_learning_rate(self, optimizers: list[th.optim.Optimizer] | th.optim.Optimizer) -> None:
        # SB3's schedule, times the trust region's scale.
        rate = self.lr_schedule(self._current_progress_remaining) * self._scale_of("learning_rate")
        self.logger.record("train/learning_rate", rate)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            update_learning_rate(optimizer, rate)

    def _age_weight(self, rollout: GroupBuffer) -> th.Tensor:
        """What the group's advantage weighs at each step's age (T, N)."""
        return self.age_discount ** rollout.tensor(rollout.age).float()

    @th.no_grad()
    def _reference_log_prob(self, rollout: GroupBuffer) -> th.Tensor:
        """Log-probabilities of the rollout's actions under the reference policy: (M,), or (T, N) of tokens."""
        assert self.reference_policy is not None
        evaluate = self.reference_policy.evaluate_actions
        if isinstance(rollout, TokenBuffer):
            return rollout.per_token(lambda obs, actions: evaluate(obs, actions)[1], self.micro_batch_size)
        obs, actions = rollout.rows()
        return evaluate(obs, actions)[1]


def _make_env(env_id: str, group_size: int, seed: int | None) -> VecEnv:
    """One group of `group_size` envs; plain copies where the family cannot be forked."""
    group_size = max(group_size, 1) if isinstance(group_size, int) else group_size  # check_arguments says more of 0
    try:
        return make_group_env(env_id, n_groups=1, group_size=group_size, seed=seed)
    except ForkError:
        return make_vec_env(env_id, n_envs=group_size, seed=seed)


def _is_language(policy: Any) -> bool:
    return policy == "CausalLMPolicy" or (isinstance(policy, type) and issubclass(policy, CausalLMPolicy))


def _our_policy(policy: str | type[ActorCriticPolicy]) -> str | type[ActorCriticPolicy]:
    """SB3's own policy classes stand for ours."""
    ours: dict[Any, type[ActorCriticPolicy]] = {
        ActorCriticPolicy: MlpPolicy,
        ActorCriticCnnPolicy: CnnPolicy,
        MultiInputActorCriticPolicy: MultiInputPolicy,
    }
    if not isinstance(policy, str | type):
        raise ConfigError(f'policy: expected a name, such as "MlpPolicy", or a policy\'s class, got {policy!r:.80}')
    return ours.get(policy, policy)
