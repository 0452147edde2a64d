"""Old rollouts that train again: each correction against values worked out by hand, whole runs against plain ones."""

import numpy as np
import pytest
import torch as th
from probe_envs import Bandit, Delayed, Walk, grpo
from stable_baselines3.common.vec_env import VecNormalize

from grpo_rl import LinearSchedule, make_group_env
from grpo_rl import advantages as adv
from grpo_rl.errors import ConfigError
from grpo_rl.fast import update
from grpo_rl.fast.update import NumpyUpdate
from grpo_rl.objective import approx_kl, clip_fraction, clipped_surrogate
from grpo_rl.replay import Replay, effective_size, importance_weights, probabilities

pytestmark = pytest.mark.filterwarnings("ignore:A rollout of", "ignore:builtin type", "ignore:groups. ")


def walk(**settings):
    """A hybrid on a continuous walk, with everything that moves between rollouts."""
    env = make_group_env(lambda: Walk(10, truncates=True), 1, 2, seed=0)
    return grpo(env, **{"value_head": True, "normalize_obs": True, "normalize_reward": True} | settings)


# --- the mathematics --------------------------------------------------------------------------------------------------
def test_generalised_clipping_by_hand():
    ratio = th.tensor([0.5, 0.5, 0.5, 2.0, 2.0, 1.0])
    centre = th.tensor([0.5, 1.0, 1.0, 1.6, 1.6, 1.0])
    advantage = th.tensor([1.0, 1.0, -1.0, 3.0, -3.0, 2.0])
    # Ranges q ± 0.2: [0.3, 0.7], [0.8, 1.2] twice, [1.4, 1.8] twice. min(ρA, clip(ρ)A):
    expected = [0.5, 0.5, -0.8, 5.4, -6.0, 2.0]
    loss = clipped_surrogate(ratio.log(), th.zeros(6), advantage, 0.2, centre=centre)
    assert (-loss).tolist() == pytest.approx(expected, rel=1e-6)
    high = clipped_surrogate(ratio.log(), th.zeros(6), advantage, 0.2, 0.3, centre=centre)
    assert (-high).tolist() == pytest.approx([0.5, 0.5, -0.8, 5.7, -6.0, 2.0], rel=1e-6)  # 1.6 + 0.3
    # Out of its range is what is below and above by more than ε; where nothing has moved, nothing is.
    assert clip_fraction(ratio, 0.2, centre=centre).item() == pytest.approx(4 / 6)
    assert clip_fraction(centre, 0.2, centre=centre).item() == 0


def test_about_one_it_is_ppos():
    generator = th.Generator().manual_seed(0)
    logp, old, advantage = th.randn(3, 50, generator=generator)
    ours = clipped_surrogate(logp, old, advantage, 0.2, centre=th.ones(50))
    assert th.equal(ours, clipped_surrogate(logp, old, advantage, 0.2))


def test_the_gradient_of_old_rows_is_the_policys_own():
    """Over all actions of μ, each as often as μ takes it: −Σ π_k(a)·A(a)·∇log π(a) at π = π_k, whatever μ is."""
    logits = th.tensor([0.3, -0.5, 1.0], requires_grad=True)
    behaviour = th.tensor([0.6, 0.3, 0.1])
    advantage = th.tensor([1.0, -2.0, 0.5])
    logp = logits.log_softmax(0)
    centre = (logp.detach() - behaviour.log()).exp()
    (behaviour * clipped_surrogate(logp, behaviour.log(), advantage, 0.2, centre=centre)).sum().backward()
    policy = logits.detach().softmax(0)
    expected = -policy * (advantage - (policy * advantage).sum())
    assert logits.grad.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_v_trace_by_hand():
    rewards = th.tensor([[1.0], [2.0], [4.0], [8.0]])
    values = th.tensor([[0.5], [1.0], [2.0], [1.0]])
    ends = th.tensor([[False], [True], [False], [True]])
    tails = th.tensor([[9.0], [3.0], [9.0], [0.0]])  # alive after the second step, terminated after the fourth
    ratio = th.tensor([[0.5], [0.25], [3.0], [2.0]])
    advantages, returns = adv.gae(rewards, values, ends, tails, 0.5, 0.8, ratio)
    # δ = 1 + .5·1 − .5 = 1; 2 + .5·3 − 1 = 2.5; 4 + .5·1 − 2 = 2.5; 8 − 1 = 7. γλ = 0.4.
    # A = 1 + .4·.25·2.5 = 1.25; 2.5 (an end); 2.5 + .4·min(1, 2)·7 = 5.3; 7.
    assert advantages.flatten().tolist() == pytest.approx([1.25, 2.5, 5.3, 7.0])
    # V + min(1, q)·A
    assert returns.flatten().tolist() == pytest.approx([0.5 + 0.625, 1 + 0.625, 2 + 5.3, 1 + 7])


def test_v_trace_where_no_ratio_is_below_one_is_gae():
    generator = th.Generator().manual_seed(0)
    rewards, values, tails = th.randn(3, 12, 4, generator=generator)
    ends = th.rand(12, 4, generator=generator) < 0.2
    ends[-1] = True
    above = 1 + th.rand(12, 4, generator=generator)
    for plain, ours in zip(
        adv.gae(rewards, values, ends, tails, 0.9, 0.8),
        adv.gae(rewards, values, ends, tails, 0.9, 0.8, above),
        strict=True,
    ):
        assert th.equal(plain, ours)
    one_step = adv.gae(rewards, values, ends, tails, 0.9, 0.8, th.zeros(12, 4))  # impossible actions: nothing follows
    assert th.allclose(one_step[0], adv.gae(rewards, values, ends, tails, 0.9, 0.0)[0])
    assert th.equal(one_step[1], values)


def test_weighted_moments_by_hand():
    x, weight = th.tensor([1.0, 3.0, 5.0]), th.tensor([1.0, 1.0, 2.0])
    # mean 3.5; Σw(x − mean)²/Σw = (6.25 + .25 + 2·2.25)/4 = 2.75; 1 − Σ(w/Σw)² = 1 − 6/16 = .625; std = √4.4
    expected = [(value - 3.5) / 4.4**0.5 for value in (1, 3, 5)]
    assert adv.weighted_standardize(x, weight).tolist() == pytest.approx(expected, rel=1e-6)
    assert adv.weighted_standardize(x, 7 * weight).tolist() == pytest.approx(expected, rel=1e-6)
    even = adv.weighted_standardize(x, th.full((3,), 0.2))
    assert even.tolist() == pytest.approx(adv.masked_standardize(x).tolist(), abs=1e-6)
    for equal in (th.full((7,), 0.1), th.full((7,), -3e6), th.zeros(7)):
        assert th.equal(adv.weighted_standardize(equal, th.rand(7)), th.zeros(7))


def test_kl_of_old_rows_by_hand():
    """Over all actions of μ, weighted by π_k/μ, it is KL(π_k‖π): the policy before against the policy now."""
    behaviour, before, now = th.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.25, 0.25, 0.5]])
    weight = behaviour * (before / behaviour)
    kl = (before * (before / now).log()).sum()
    assert approx_kl(now.log(), before.log(), weight).item() == pytest.approx(kl.item(), rel=1e-5)


def test_effective_size_by_hand():
    assert effective_size(th.tensor([1.0, 3.0])).item() == pytest.approx(16 / 20)
    assert effective_size(th.full((5,), 0.3)).item() == pytest.approx(1)
    assert effective_size(th.tensor([1e-6, 1e-6, 1e-6, 4.0])).item() == pytest.approx(1 / 4, abs=1e-4)


# --- priorities -------------------------------------------------------------------------------------------------------
def test_priorities_and_weights_by_hand():
    # |A| = 1 and 3, and a tenth of their mean beside each: 1.2 and 3.2.
    chances = probabilities(np.array([-1.0, 3.0]), 1.0)
    assert chances == pytest.approx([3 / 11, 8 / 11])
    assert probabilities(np.array([-1.0, 3.0]), 0.5) == pytest.approx(np.sqrt([1.2, 3.2]) / (1.2**0.5 + 3.2**0.5))
    assert probabilities(np.array([-1.0, 3.0]), 0.0).tolist() == probabilities(np.zeros(2), 1.0).tolist() == [0.5, 0.5]
    # 1/(2P) = 11/6 and 11/16; over the larger 1 and 3/8.
    assert importance_weights(chances, 1.0) == pytest.approx([1, 3 / 8])
    assert importance_weights(chances, 0.5) == pytest.approx([1, (3 / 8) ** 0.5])
    assert importance_weights(chances, 0.0) == pytest.approx([1, 1])


def test_rows_are_drawn_as_often_as_they_should_be():
    """χ² of 16 rows over 200 passes; 37.7 is exceeded once in a thousand runs with 15 degrees of freedom."""
    np.random.seed(0)
    replay = Replay(1, priority=0.7)
    replay.chances = probabilities(np.arange(16.0), 0.7)
    drawn = np.concatenate([row for _ in range(200) for row in replay.shuffled(5)])
    counts, expected = np.bincount(drawn, minlength=16), 200 * 16 * replay.chances
    assert counts.sum() == 200 * 16 and expected.max() > 8 * expected.min()
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 37.7
    even = ((counts - 200) ** 2 / 200).sum()
    assert even > 37.7  # the test can tell


def test_weights_remove_the_bias_of_a_bandit():
    """The mean of what was paid over drawn rows: with β = 1 it is that of all rows, with β = 0 it is not."""
    paid = np.array([0.0, 0.0, 0.0, 8.0])  # one row in four was paid: A = −2 and 6 about the mean of 2
    advantages = paid - paid.mean()
    chances = probabilities(advantages, 1.0)  # |A| + 0.3: 2.3 three times, 6.3
    assert chances == pytest.approx([2.3 / 13.2] * 3 + [6.3 / 13.2])

    def expectation(beta):
        weight = importance_weights(chances, beta)
        return (chances * weight * paid).sum() / (chances * weight).sum()

    assert expectation(1.0) == pytest.approx(2.0)
    assert expectation(0.0) == pytest.approx(8 * 6.3 / 13.2)
    np.random.seed(0)
    replay = Replay(1, priority=1.0)
    replay.chances, replay.importance = chances, importance_weights(chances, 1.0)
    drawn = np.concatenate([index for _ in range(5000) for index in replay.shuffled()])
    weight = replay.weights(drawn)
    assert (weight * paid[drawn]).sum() / weight.sum() == pytest.approx(2.0, abs=0.1)
    assert paid[drawn].mean() == pytest.approx(8 * 6.3 / 13.2, abs=0.1)


@pytest.mark.parametrize(("beta", "unbiased"), [(1.0, True), (0.0, False)])
def test_the_loss_over_draws_has_the_gradient_of_all_rows(beta, unbiased):
    """What a draw gives on average, Σ P·w·∇loss, is the gradient of all rows alike times one constant, if β is 1."""
    model = walk(priority=1.0, priority_beta=beta, normalize_advantage=False).learn(64)
    rows, chances = model.rows.batch(), th.tensor(model.rows.chances).float()
    gradients = []
    for weight in (th.full((64,), 1 / 64), chances * 64 * rows.weight):
        model.policy.optimizer.zero_grad()
        model.loss(rows._replace(weight=weight), 0.2)[0].backward()
        gradients.append(th.cat([p.grad.flatten() for p in model.policy.parameters()]))
    even, drawn = gradients
    drawn /= (chances * 64 * rows.weight).sum()
    assert th.allclose(even, drawn, rtol=1e-3, atol=1e-5) is unbiased
    assert len(rows.weight) == 64 and (drawn - even).norm() / even.norm() > (0 if unbiased else 0.01)


# --- in the algorithm -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings", [{}, {"value_head": False, "normalize_reward": False}], ids=["hybrid", "critic-free"]
)
def test_with_one_rollout_so_far_it_is_the_plain_update(settings):
    plain, ours = walk(**settings).learn(64), walk(reuse=3, **settings).learn(64)
    for a, b in zip(plain.policy.parameters(), ours.policy.parameters(), strict=True):
        assert th.allclose(a, b, atol=1e-6)
    assert ours.rows.size == plain.rows.size and ours.logger.name_to_value["reuse/effective_size"] == 1


def test_reuse_of_one_is_no_reuse():
    model = walk(reuse=1).learn(192)
    assert model.replay is None and model.rows is model.rollout_buffer
    assert not any(name.startswith("reuse/") for name in model.logger.name_to_value)


def test_old_rollouts_are_seen_as_the_policy_and_the_values_are_now():
    model = walk(reuse=3, group_weight=0.0, n_epochs=3, learning_rate=0.01).learn(64)
    first = {name: np.copy(getattr(model.rollout_buffer, name)) for name in ("observations", "actions", "log_probs")}
    statistics = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(128, reset_num_timesteps=False)  # two more, with another normaliser in each
    assert not all(th.equal(statistics[name], value) for name, value in model.policy.state_dict().items())
    # Once more, with nothing moved since: the rows are as the policy of now sees them.
    model._remember(model.replay)
    assert [len(rollout.rewards) for rollout in model.replay.rollouts] == [32, 32, 32]
    assert np.array_equal(model.replay.rollouts[0].observations, first["observations"])  # raw, as they came
    oldest = model.rows.batch(np.arange(64))
    with th.no_grad():
        values, log_prob, _ = model.policy.evaluate_actions(oldest.observations, oldest.actions)
    assert oldest.old_log_prob.tolist() == first["log_probs"].flatten().tolist()
    assert th.allclose(oldest.behaviour_ratio, (log_prob - oldest.old_log_prob).exp(), rtol=1e-5)
    assert th.allclose(oldest.old_values, values.flatten(), atol=1e-6)
    assert not th.allclose(oldest.behaviour_ratio, th.ones(64), atol=1e-2)
    newest = model.rows.batch(np.arange(128, 192))
    assert th.equal(newest.behaviour_ratio, th.ones(64))
    # V-trace, from the columns themselves: the target is V + min(1, q)·A.
    target = oldest.old_values + oldest.behaviour_ratio.clamp(max=1) * oldest.advantages
    assert th.allclose(oldest.returns, target, atol=1e-5)
    assert model.reward_scale.count == 192  # statistics have seen each step once


def test_taking_a_rollout_twice_is_taking_it_once():
    model = walk(reuse=3).learn(64)
    model._remember(model.replay)
    assert len(model.replay.rollouts) == 1
    model.learn(256, reset_num_timesteps=False)
    assert len(model.replay.rollouts) == 3 and model.rows.size == 3 * 64


def test_an_epoch_is_one_pass_over_all_rollouts():
    model = walk(reuse=3, n_epochs=2).learn(192)
    drawn = np.concatenate(model.rows.shuffled(32))
    assert sorted(drawn) == list(range(192)) and len(model.rows.shuffled(32)) == 6
    shares = [model.logger.name_to_value[f"reuse/share_of_age_{age}"] for age in range(3)]
    assert shares == pytest.approx([1 / 3] * 3)
    by_priority = walk(reuse=3, priority=1.0).learn(192)
    shares = [by_priority.logger.name_to_value[f"reuse/share_of_age_{age}"] for age in range(3)]
    assert sum(shares) == pytest.approx(1) and shares != pytest.approx([1 / 3] * 3, abs=1e-6)
    assert len(np.unique(np.concatenate(by_priority.rows.shuffled(32)))) < 192  # with replacement


def test_what_is_logged():
    logged = walk(reuse=2).learn(192).logger.name_to_value
    assert 0 < logged["reuse/effective_size"] <= 1
    assert logged["reuse/ratio_mean"] == pytest.approx(1, abs=0.2)
    assert logged["reuse/ratio_max"] >= logged["reuse/ratio_mean"]


@pytest.mark.parametrize(
    "settings",
    [
        {"trust_region": "learning_rate", "target_kl": 0.001},
        {"trust_region": "clip_range"},
        {"target_kl": 1e-6},
        {"cold_start": 128, "cold_start_ramp": 128},
        {"kl_coef": 0.1, "reference_every": 2, "kl_estimator": "unbiased"},
        {"clip_range_vf": 0.2, "clip_range_high": 0.3, "clip_delta": 3.0, "ent_coef": 0.01},
        {"use_sde": True},
        {"value_head": False, "normalize_reward": False},
        {"value_head": False, "credit": "outcome", "advantage_scale": "group"},
        {"value_head": False, "baseline": "regression"},
        {"priority": 0.6, "priority_beta": LinearSchedule(0.4, 1.0)},
    ],
    ids=lambda settings: ", ".join(map(str, settings)),
)
def test_it_goes_with(settings):
    model = walk(reuse=3, n_epochs=2, **settings).learn(320)
    assert model.rows.size == 3 * 64
    assert all(np.isfinite(value) for name, value in model.logger.name_to_value.items() if name.startswith("train"))


def test_target_kl_is_about_the_policy_before_the_update():
    """However far an old policy is, an update that has not moved yet does not stop; the first step is enough."""
    model = walk(reuse=3, n_epochs=4, learning_rate=0.02).learn(192)
    assert model.logger.name_to_value["reuse/effective_size"] < 0.999
    model.target_kl = 1e-9
    steps = []
    model.policy.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    model.learn(64, reset_num_timesteps=False)
    assert len(steps) == 1


@pytest.mark.parametrize("env", [Bandit, Delayed])
@pytest.mark.parametrize("settings", [{}, {"value_head": True}, {"priority": 0.6}])
def test_it_learns(env, settings):
    model = grpo(env(), reuse=3, learning_rate=0.02, gamma=1.0, **settings).learn(2500)
    probability = model.policy.get_distribution(th.zeros(1, 1)).distribution.probs[0, 1].item()
    assert probability > 0.9


def test_by_numpy_too(monkeypatch):
    """The loss with ratios and weights is traced like any other, and does what torch does."""
    ways = []

    def watched(self, minibatch, plain=NumpyUpdate.differentiate):
        terms = plain(self, minibatch)
        ways.append(self.gradients is not None)
        return terms

    monkeypatch.setattr(NumpyUpdate, "differentiate", watched)
    settings = {"reuse": 3, "n_epochs": 2, "priority": 0.5, "ent_coef": 0.01}
    by_torch = walk(**settings).learn(320)
    assert not any(ways)
    ways.clear()
    monkeypatch.setattr(update, "TRACING_COST", 3)
    by_numpy = walk(**settings).learn(320)
    assert ways.count(False) == 3 and all(ways[3:]) and len(ways) > 20
    for a, b in zip(by_torch.policy.parameters(), by_numpy.policy.parameters(), strict=True):
        assert th.allclose(a, b, atol=1e-3)


def test_another_env_begins_with_nothing():
    model = walk(reuse=3).learn(128)
    assert len(model.replay.rollouts) == 2
    model.set_env(make_group_env(lambda: Walk(5), 1, 2, seed=0))
    assert not model.replay.rollouts
    model.learn(64)
    assert model.rows.size == 64


def test_a_saved_agent_leaves_its_rollouts_behind(tmp_path):
    model = walk(reuse=3, priority=0.5).learn(128)
    model.save(tmp_path / "model")
    loaded = type(model).load(tmp_path / "model", env=make_group_env(lambda: Walk(5), 1, 2, seed=0))
    assert loaded.reuse == 3 and loaded.replay.priority == 0.5 and not loaded.replay.rollouts
    loaded.learn(64, reset_num_timesteps=False)


def test_a_damaged_memory_is_refused():
    model = walk(reuse=3).learn(128)
    state = model.replay.state()
    assert len(state) == 2
    state[0]["rewards"] = state[0]["rewards"][:3]
    with pytest.raises(ConfigError, match="do not go together"):
        model.replay.set_state(state, model.rollout_buffer)


# --- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reuse": 0}, "reuse=0"),
        ({"reuse": 2.5}, "whole number"),
        ({"priority": -1.0}, "priority=-1.0"),
        ({"priority": 1.0, "priority_beta": 2.0}, "priority_beta=2.0"),
        ({"reuse": 2, "loss_type": "cispo", "clip_range_high": 5.0}, 'loss_type="cispo"'),
        ({"reuse": 2, "baseline": "moving_average"}, "moving_average"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        grpo(Bandit(), **settings)


def test_beta_without_priorities_is_warned_about():
    with pytest.warns(UserWarning, match="priority_beta=0.4"):
        grpo(Bandit(), priority_beta=0.4)


def test_statistics_of_an_env_that_move_are_refused():
    env = VecNormalize(make_group_env(Walk, 1, 2, seed=0))
    with pytest.raises(ConfigError, match="normalize_obs=True"):
        grpo(env, reuse=2)
    env = VecNormalize(make_group_env(Walk, 1, 2, seed=0), norm_obs=False)
    with pytest.raises(ConfigError, match="normalize_reward=True"):
        grpo(env, reuse=2)
    grpo(VecNormalize(make_group_env(Walk, 1, 2, seed=0)), priority=0.5)
