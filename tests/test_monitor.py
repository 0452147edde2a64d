"""The monitor: what it measures by hand, when it speaks, and that each injected fault is called by its own name."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from probe_envs import Probe, Walk, grpo
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback

from grpo_rl import make_group_env
from grpo_rl.buffers import GroupBuffer
from grpo_rl.errors import ConfigError
from grpo_rl.health import FINDINGS, METRICS, cures_of, shown_range, with_ranges
from grpo_rl.lab.build import build_agent, build_env
from grpo_rl.monitor import MEMORY, Diagnosis, HealthMonitor, HealthWarning, diagnose, health_metrics, settings_of
from grpo_rl.recipes import PACKAGE, load_recipe

# ------------------------------------------------------------------------------------------------------------ measuring


def rollout(rewards: Any, group: Any, mask: Any = None, advantages: Any = None) -> GroupBuffer:
    """Steps (T, N) of columns whose one segment ends with the last row that counts; age is the row."""
    rewards, group = np.array(rewards, np.float32), np.array(group)
    mask = np.ones(rewards.shape, bool) if mask is None else np.array(mask)
    buffer = GroupBuffer(spaces.Discrete(2), spaces.Discrete(2), "cpu")
    zeros = np.zeros(rewards.shape[1])
    for t, row in enumerate(rewards):
        buffer.add(
            observations=zeros.astype(int),
            actions=zeros.astype(int),
            rewards=row,
            log_probs=zeros.astype(np.float32) - 0.5,
            values=None,
            group=group,
            age=np.full(rewards.shape[1], t),
            mask=mask[t],
            discounted=zeros,
        )
        for column in np.flatnonzero(mask[t] & ~mask[t + 1 : t + 2].any(axis=0)):
            buffer.end(column, terminated=True, next_obs=None)
    buffer.finish()
    buffer.advantages = th.zeros(rewards.shape) if advantages is None else th.tensor(advantages)
    return buffer


def test_two_groups_by_hand() -> None:
    # Returns at γ = 1: group 0 has 2 and 0 at age 0, 1 and 0 at age 1; group 1 has 2 and 2, 0 and 0: tied.
    figures = health_metrics(rollout([[1, 0, 2, 2], [1, 0, 0, 0]], [0, 0, 1, 1]), gamma=1.0)
    assert figures["tied_groups"] == 0.5
    assert figures["group_size"] == 2
    # best − mean: 1 (twice), 0.5 (twice), 0 (four times); the squared deviations are 1, 1, 1/4, 1/4 and 0.
    assert figures["reward_gap"] == pytest.approx((3 / 8) / math.sqrt(2.5 / 8))
    assert figures["reward_scale"] == 2
    assert figures["magnitude"] == pytest.approx(math.log10(2))


def test_one_winner_of_eight_and_nobody() -> None:
    # One has 1: the mean is 1/8, the gap 7/8, the spread sqrt(1/8·7/8): together sqrt(7).
    figures = health_metrics(rollout([[1, 0, 0, 0, 0, 0, 0, 0]], [0] * 8), gamma=0.99)
    assert figures["reward_gap"] == pytest.approx(math.sqrt(7))
    nobody = health_metrics(rollout([[3.0] * 8], [0] * 8), gamma=0.99)
    assert (nobody["reward_gap"], nobody["tied_groups"]) == (0, 1)


def test_eight_normal_members_have_the_gap_of_order_statistics() -> None:
    # E[max of 8] = 1.4236 standard deviations; the spread about the group's own mean is sqrt(7/8) of them.
    rewards = np.random.default_rng(0).normal(size=(1, 8 * 500))
    figures = health_metrics(rollout(rewards, np.repeat(np.arange(500), 8)), gamma=1.0)
    assert figures["reward_gap"] == pytest.approx(1.4236 / math.sqrt(7 / 8), abs=0.03)


def test_the_scale_of_rewards_and_the_order_of_columns_do_not_matter_to_groups() -> None:
    rewards, group = np.random.default_rng(1).normal(size=(5, 8)), np.repeat([0, 1], 4)
    order = np.random.default_rng(2).permutation(8)
    first = health_metrics(rollout(rewards, group), gamma=0.9)
    other = health_metrics(rollout(1000 * rewards[:, order], group[order]), gamma=0.9)
    for name in ("reward_gap", "tied_groups", "group_size"):
        assert other[name] == pytest.approx(first[name], rel=1e-4)


def test_what_is_masked_is_not_read() -> None:
    # The second member lives one step, and what its column holds after that is no number.
    figures = health_metrics(rollout([[1, 0], [1, np.nan]], [0, 0], [[True, True], [True, False]]), gamma=1.0)
    assert figures["group_size"] == pytest.approx((2 + 2 + 1) / 3)
    assert figures["reward_gap"] == pytest.approx(1.0)  # 2 and 0 at age 0: best − mean 1, spread 1
    assert figures["reward_scale"] == 1


def test_without_siblings_groups_are_not_judged() -> None:
    assert {"reward_gap", "tied_groups"}.isdisjoint(health_metrics(rollout([[1, 2]], [0, 1]), gamma=0.9))


def test_advantages_are_measured_as_they_reach_the_loss() -> None:
    buffer = rollout([[0, 0, 0, 0]], [0] * 4, advantages=[[10.0, 12.0, 14.0, 16.0]])
    scaled, raw = health_metrics(buffer, 1.0, "batch"), health_metrics(buffer, 1.0, "none")
    assert (scaled["advantage_mean"], scaled["advantage_std"]) == (pytest.approx(0, abs=1e-6), pytest.approx(1))
    assert (raw["advantage_mean"], raw["advantage_std"]) == (13, pytest.approx(math.sqrt(20 / 3)))


# -------------------------------------------------------------------------------------------------------------- judging


def rows(**courses: list[float]) -> list[dict[str, float]]:
    """A log of 100 steps a row from courses by metric name; None leaves a cell empty."""
    keys = {metric.name: metric.key for metric in METRICS} | {"returns": "rollout/ep_rew_mean"}
    length = len(next(iter(courses.values())))
    return [
        {"time/total_timesteps": 100.0 * (i + 1), "train/n_updates": i}
        | {keys.get(name, name): course[i] for name, course in courses.items() if course[i] is not None}
        for i in range(length)
    ]


def names(log: list[dict[str, float]], **settings: Any) -> list[str]:
    return [finding.name for finding in diagnose(log, settings)]


def test_one_finding_for_one_episode_of_trouble_and_another_when_it_comes_back() -> None:
    bad, good = 0.2, 0.01
    found = diagnose(rows(approx_kl=[bad] * 2 + [good] + [bad] * 5 + [good] * 3 + [bad] * 3))
    # Two rows are not three; rows 4 to 8 are trouble, over after three good ones; rows 12 to 14 are trouble again.
    assert [(f.name, f.since, f.until, f.over) for f in found] == [
        ("large_steps", 400, 800, True),
        ("large_steps", 1200, 1400, False),
    ]


def test_a_good_row_in_between_does_not_end_it() -> None:
    bad, good = 0.2, 0.01
    found = diagnose(rows(approx_kl=[bad] * 3 + [good, good] + [bad] * 3))
    assert [(f.since, f.until, f.over) for f in found] == [(100, 800, False)]


def test_far_out_is_said_at_once_and_so_is_what_is_not_a_number() -> None:
    for value in (2.0, math.inf, math.nan):
        assert names(rows(approx_kl=[0.01, value])) == ["large_steps"]
    assert names(rows(loss=[0.1, math.nan])) == ["near_overflow"]


def test_an_update_that_is_logged_twice_counts_once() -> None:
    log = rows(approx_kl=[0.2, 0.2])
    assert names([*log, log[-1], log[-1]]) == []


def test_returns_without_variance_are_no_finding_about_the_value_head() -> None:
    assert names(rows(explained_variance=[math.nan] * 30)) == []
    assert names(rows(explained_variance=[-1.0] * 11)) == []
    assert names(rows(explained_variance=[-1.0] * 12)) == ["value_function"], "four times the patience"


def test_entropy_is_judged_by_its_start_and_noise_by_its_std() -> None:
    entropy = {"train/entropy_loss": [-0.69, -0.5, -0.03, -0.03, -0.03]}  # 4 % of the start
    assert names(rows(**entropy)) == ["collapsed_entropy"]
    # A differential entropy may be negative: with a std in the log, that is what counts.
    entropy = {"train/entropy_loss": [-0.1, 0.5, 1.0, 1.0, 1.0]}
    assert names(rows(**entropy, **{"train/std": [0.3, 0.25, 0.2, 0.2, 0.2]})) == []
    assert names(rows(**{"train/std": [1.0, 11.0, 12.0, 13.0]})) == ["growing_noise"]


def test_rewards_are_compared_with_the_first_ones_that_are_not_zero() -> None:
    assert names(rows(reward_scale=[0, 0, 1, 1, 1, 50, 50, 50, 50])) == []
    assert names(rows(reward_scale=[0, 0, 1, 1, 1, 500, 500, 500])) == ["exploding_rewards"]
    assert names(rows(reward_scale=[0, 1, 20, 100, 300, 300, 300])) == ["exploding_rewards"], "growth from the start"


def test_ties_at_the_top_are_no_trouble_and_ties_at_the_start_are() -> None:
    tied = [0.0] * 3 + [1.0] * 3
    assert names(rows(tied_groups=tied, returns=[20, 100, 300, 500, 500, 500])) == []
    assert names(rows(tied_groups=tied, returns=[500, 300, 100, 20, 20, 20])) == ["tied_groups"]
    assert names(rows(tied_groups=tied, returns=[-500] * 6)) == ["tied_groups"]
    assert names(rows(tied_groups=tied)) == ["tied_groups"], "before the first episode has ended"


def test_groups_are_not_judged_where_values_teach_or_a_moving_average_does() -> None:
    log = rows(tied_groups=[1.0] * 4, group_size=[1.0] * 4)
    assert names(log) == ["tied_groups", "small_groups"]
    assert names(log, value_head=True) == []
    assert names(log, value_head=False, baseline="moving_average") == ["tied_groups"]
    assert names(log, value_head=False, baseline="regression") == []
    assert names([row | {"train/value_loss": 0.1} for row in log]) == [], "without settings, the log tells"


def test_a_consequence_is_left_out_however_long_it_lasts() -> None:
    # One step too far leaves a policy without entropy, and its groups tied.
    kl, entropy = [0.01, 5.0, *[0.0] * 20], [-0.69, *[-1e-9] * 21]
    found = diagnose(rows(approx_kl=kl, tied_groups=[0.0, *[1.0] * 21], **{"train/entropy_loss": entropy}))
    assert [(f.name, f.over) for f in found] == [("large_steps", False)], "and it is not over while they last"


def test_a_cause_that_is_still_out_of_range_for_too_short_a_time_is_waited_for() -> None:
    growth = [1, 1, 1, 1, 200, 2000, 20_000]
    # The gradient is out for three rows when the rewards are for one.
    assert names(rows(reward_scale=growth, grad_norm=[1, 1, *[2000] * 5])) == ["exploding_rewards"]
    # A row earlier the rewards are still in range: there is nothing to wait for.
    assert names(rows(reward_scale=growth, grad_norm=[1, *[2000] * 6])) == ["large_gradient", "exploding_rewards"]


def test_what_comes_long_after_a_cause_is_a_finding_of_its_own() -> None:
    calm = MEMORY + 3
    kl = [5.0] + [0.01] * (calm + 3)
    late = [0.0] * (calm + 1) + [1.0] * 3
    assert names(rows(approx_kl=kl, tied_groups=late)) == ["large_steps", "tied_groups"]
    soon = [0.0] * 4 + [1.0] * calm
    assert names(rows(approx_kl=kl, tied_groups=soon)) == ["large_steps"]


def test_ranges_and_patience_of_ones_own() -> None:
    log = rows(grad_norm=[6.0, 6.0], ent_coef=[0.0, 0.0])
    assert diagnose(log, patience=2) == []
    assert [f.name for f in diagnose(log, ranges={"grad_norm": (0.05, 5)}, patience=2)] == ["large_gradient"]
    assert [f.name for f in diagnose(log, ranges={"grad_norm": (7, None)}, patience=2)] == ["small_gradient"]
    assert [f.name for f in diagnose(log, ranges={"ent_coef": (0.01, 0.1)}, patience=2)] == ["out_of_range"]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"grad_nrom": (0, 1)}, 'no metric "grad_nrom": did you mean "grad_norm"'),
        ({"grad_norm": 5}, r"expected \(low, high\) with None for an open side, got 5"),
        ({"grad_norm": (2, 1)}, "expected"),
        ({"grad_norm": (math.nan, 1)}, "expected"),
    ],
)
def test_ranges_that_are_none(ranges: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HealthMonitor(ranges=ranges)
    with pytest.raises(ConfigError, match="patience=0"):
        HealthMonitor(patience=0)


# ---------------------------------------------------------------------------------------------------------------- cures


def test_the_table_is_whole() -> None:
    made = {side for metric in METRICS for side in (metric.below, metric.above)}
    assert made == set(FINDINGS), "every finding is made by a metric, and every metric's finding is known"
    order = list(FINDINGS)
    for name, cause in FINDINGS.items():
        assert set(cause.explained_by) <= set(order)
        assert name not in cause.explained_by
    usual = {m.name: m.usual for m in METRICS if m.usual}
    assert usual == {
        "advantage_mean": (-0.1, 0.1),
        "advantage_std": (0.3, 1.5),
        "reward_gap": (0.5, 2),
        "ent_coef": (0.01, 0.1),
        "grad_norm": (0.1, 1),
    }
    assert [shown_range(r) for r in ((0, 1), (None, 1), (1, None), (None, None), None)] == [
        "0 to 1",
        "up to 1",
        "1 or more",
        "any",
        "any",
    ]
    assert with_ranges({"loss": (None, 3)})[[m.name for m in METRICS].index("loss")].warns == (None, 3)


def test_cures_name_what_this_agent_can_change() -> None:
    def cures(finding: str, row: dict[str, float] | None = None, **changed: Any) -> list[str]:
        return cures_of(finding, settings_of(agent) | changed, row or {})

    agent = grpo(learning_rate=3e-4, clip_range=0.2)
    rate = {"train/learning_rate": 3e-3}
    assert cures("large_steps", rate) == [
        "learning_rate=0.001",
        'trust_region="learning_rate"',
        "clip_range=LinearSchedule(0.2, 0.1)",
    ]
    assert cures("large_steps", rate, trust_region="clip_range", clip_range=lambda progress: 0.1, n_epochs=10) == [
        "learning_rate=0.001",
        "n_epochs=5",
    ]
    assert cures("collapsed_entropy", rate)[0] == "ent_coef=0.01"
    assert cures("collapsed_entropy", rate, ent_coef=0.02)[0] == "ent_coef=0.06"
    assert cures("collapsed_entropy", rate, ent_coef=0.1) == ["kl_coef=0.01", "learning_rate=0.001"]
    assert cures("small_groups") == ["group_size=16", 'baseline="moving_average"', "value_head=True"]
    assert cures("tied_groups", advantage_scale="group", ent_coef=0.1) == ["group_size=4"]
    assert cures("uneven_groups", compression="tanh", baseline="weighted") == []
    assert cures("exploding_rewards", normalize_reward=True, compression="tanh") == []
    assert cures("growing_noise", ent_coef=0.03)[0] == "ent_coef=0.01"


def test_the_learning_rate_to_try_follows_the_kl() -> None:
    # lr·sqrt(0.1/KL), at most lr/3, rounded down to one digit: 0.3·sqrt(0.1/40) = 0.015; 0.3/3; 0.002/3 = 0.00067.
    for kl, rate, cure in [(40, 0.3, "0.01"), (0.2, 0.3, "0.1"), (0.01, 0.002, "0.0006"), (math.nan, 0.3, "0.003")]:
        row = {"train/learning_rate": rate, "train/approx_kl": kl}
        cures = cures_of("large_steps", {"learning_rate": rate, "trust_region": None}, row)
        lost = not kl <= 1
        assert cures == [f"learning_rate={cure}"] + ([] if lost else ['trust_region="learning_rate"'])
        message = diagnose([row | {"train/n_updates": i, "train/clip_fraction": 0.6} for i in range(3)])[0].message
        assert ("Start again: this policy is lost." in message) is lost


@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_cure_of_too_large_steps_ends_them(seed: int) -> None:
    def found(learning_rate: float) -> list[Any]:
        env = make_group_env("CartPole-v1", 2, 8, seed=seed)
        agent = grpo(env, learning_rate=learning_rate, n_steps=64, group_size=8, seed=seed, n_epochs=4)
        return watched(agent, 3000)[1].findings

    cure = found(0.5)[0].cures[0]
    assert found(float(cure.removeprefix("learning_rate="))) == []


def test_every_cure_is_an_argument_that_grpo_takes() -> None:
    from grpo_rl import LinearSchedule

    settings = settings_of(grpo(ent_coef=0.02, n_epochs=4, advantage_scale="none", baseline_discount=0.9))
    for finding in FINDINGS:
        for cure in cures_of(finding, settings, {"train/learning_rate": 3e-4}):
            grpo(**eval(f"dict({cure})", {"LinearSchedule": LinearSchedule}))


def test_sb3s_ppo_is_offered_nothing_that_it_does_not_have() -> None:
    settings = settings_of(PPO("MlpPolicy", "CartPole-v1", device="cpu", learning_rate=3e-4, ent_coef=0.0))
    assert cures_of("large_steps", settings, {}) == [
        "learning_rate=0.0001",
        "target_kl=0.02",
        "clip_range=LinearSchedule(0.2, 0.1)",
        "n_epochs=5",
    ]
    assert cures_of("exploding_rewards", settings, {}) == []


# --------------------------------------------------------------------------------------------------------------- faults


class Noisy(Probe):
    """Six steps; action 1 pays 1, and there is noise on it. `factor` multiplies rewards, `still` makes them all 1."""

    factor = 1.0
    still = False

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = float(action == 1) + 0.1 * float(self.np_random.normal())
        return self.observe(), 1.0 if self.still else type(self).factor * reward, self.t >= 6, False, {}


class Still(Noisy):
    still = True


class Growing(BaseCallback):
    """Rewards grow tenfold every other rollout."""

    def _on_rollout_start(self) -> None:
        Noisy.factor *= 10**0.5

    def _on_step(self) -> bool:
        return True


def watched(agent: Any, steps: int, *callbacks: BaseCallback, **settings: Any) -> tuple[list[str], HealthMonitor]:
    """The first words of all health warnings of a training run, and the monitor."""
    monitor = HealthMonitor(**settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agent.learn(steps, callback=[*callbacks, monitor])
    said = [str(w.message) for w in caught if issubclass(w.category, HealthWarning)]
    assert all("\n" not in line and "Try " in line for line in said)
    return [line.split(":")[0] for line in said], monitor


def agent_on(env: Any, n_groups: int = 2, group_size: int = 8, **settings: Any) -> Any:
    return grpo(make_group_env(env, n_groups, group_size), group_size=group_size, **({"n_steps": 16} | settings))


def test_a_healthy_probe_raises_none() -> None:
    assert watched(agent_on(Noisy, learning_rate=3e-3), 5000)[0] == []


@pytest.mark.parametrize("settings", [{}, {"value_head": True}, {"value_head": True, "group_kind": "window"}])
def test_exploding_rewards(settings: dict[str, Any]) -> None:
    try:
        assert watched(agent_on(Noisy, **settings), 4000, Growing())[0] == ["exploding_rewards"]
    finally:
        Noisy.factor = 1.0


@pytest.mark.parametrize("settings", [{}, {"value_head": True}])
def test_the_first_cure_of_exploding_rewards_ends_them(settings: dict[str, Any]) -> None:
    def found(steps: int, **more: Any) -> list[Any]:
        try:
            return watched(agent_on(Noisy, **settings, **more), steps, Growing())[1].findings
        finally:
            Noisy.factor = 1.0

    (exploding,) = found(2500)
    assert exploding.name == "exploding_rewards" and exploding.cures == ["normalize_reward=True"]
    assert found(2500, normalize_reward=True) == []


def test_rewards_are_judged_as_they_reach_the_returns() -> None:
    agent = agent_on(Noisy, normalize_reward=True)
    log = Rows()
    agent.learn(300, callback=[HealthMonitor(), log])
    rollout, last = agent.rollout_buffer, log.rows[-1]
    largest = float(np.abs(rollout.rewards[rollout.mask]).max())
    assert last["health/reward_scale"] == pytest.approx(largest / float(agent.reward_scale.unit()))
    assert last["health/reward_scale"] != pytest.approx(largest)


def test_tied_groups() -> None:
    assert watched(agent_on(Still), 3000)[0] == ["tied_groups"]


@pytest.mark.parametrize(
    ("env", "settings", "steps"),
    [(Noisy, {"ent_coef": -0.5, "learning_rate": 3e-3}, 4000), (Walk, {"ent_coef": -1, "learning_rate": 1e-2}, 9000)],
)
def test_collapsed_entropy(env: Any, settings: dict[str, Any], steps: int) -> None:
    assert watched(agent_on(env, n_epochs=4, **settings), steps)[0] == ["collapsed_entropy"]


@pytest.mark.parametrize(("env", "n_epochs"), [(Noisy, 4), ("CartPole-v1", 10)])
def test_too_large_a_learning_rate(env: Any, n_epochs: int) -> None:
    assert watched(agent_on(env, learning_rate=0.3, n_epochs=n_epochs, n_steps=32), 5000)[0] == ["large_steps"]


@pytest.mark.parametrize("env", [Walk, "CartPole-v1"])
def test_too_small_groups(env: Any) -> None:
    assert watched(agent_on(env, n_groups=1, group_size=2, n_steps=16), 1500)[0] == ["small_groups"]


def test_cartpole_is_healthy() -> None:
    recipe = load_recipe("cartpole", ["training.steps=12000"])
    env = build_env(recipe)
    assert watched(build_agent(recipe, env), recipe.training.steps)[0] == []
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("cartpole", 50_000), ("hopper", 30_000), ("pendulum", 30_000)])
def test_recipes_are_healthy(name: str, steps: int) -> None:
    recipe = load_recipe(name, [f"training.steps={steps}"])
    env = build_env(recipe)
    assert watched(build_agent(recipe, env), steps)[0] == []
    env.close()


# ------------------------------------------------------------------------------------------------------------- watching


class Rows(BaseCallback):
    """Keeps what is logged for each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def _on_rollout_end(self) -> None:
        self.rows.append(dict(self.logger.name_to_value))

    def _on_step(self) -> bool:
        return True


def test_figures_are_logged_every_rollout() -> None:
    monitor, log = HealthMonitor(), Rows()
    agent_on(Noisy, ent_coef=0.01).learn(1000, callback=[monitor, log])
    for row in log.rows:
        for name in ("advantage_mean", "advantage_std", "reward_gap", "tied_groups", "group_size", "reward_scale"):
            assert math.isfinite(row[f"health/{name}"])
        assert row["health/ent_coef"] == 0.01
        assert row["health/findings"] == 0
    assert 0 < log.rows[-1]["health/entropy"] <= math.log(2)
    assert log.rows[1]["health/entropy_left"] == 1, "the first update is the start"
    assert len(monitor.diagnosis.values) == len(log.rows) + 1, "the last update is judged when training ends"


def test_watching_changes_nothing() -> None:
    def trained(*callbacks: BaseCallback) -> th.Tensor:
        agent = agent_on(Noisy)
        agent.learn(600, callback=list(callbacks))
        return th.cat([parameter.flatten() for parameter in agent.policy.parameters()])

    assert th.equal(trained(), trained(HealthMonitor()))


def test_learning_on_is_one_course_and_a_history_is_taken_up_in_silence() -> None:
    said: list[str] = []
    agent, monitor = agent_on(Still), HealthMonitor(say=said.append)
    for _ in range(2):
        agent.learn(2000, callback=monitor, reset_num_timesteps=False)
    assert len(said) == 1
    resumed = HealthMonitor(history=rows(tied_groups=[1.0] * 4), say=said.append)
    agent_on(Still).learn(500, callback=resumed)
    assert [finding.since for finding in resumed.findings] == [100]
    assert len(said) == 1


def test_words_go_where_they_are_wanted_and_the_end_is_said_when_asked() -> None:
    said: list[str] = []
    monitor = HealthMonitor(say=said.append, verbose=1)
    monitor.diagnosis = Diagnosis({"value_head": False})
    for row in rows(tied_groups=[1.0] * 3 + [0.0] * 3):
        monitor.num_timesteps = int(row["time/total_timesteps"])
        monitor._judge(row)
    assert said[0].startswith("health: tied_groups: tied_groups is 1 at 300 steps (up to 0.9 is healthy)")
    assert said[1:] == ["health: tied_groups is over at 600 steps"]


def test_sb3s_ppo_is_judged_by_what_it_logs() -> None:
    def ppo(learning_rate: float) -> PPO:
        return PPO("MlpPolicy", "CartPole-v1", learning_rate, n_steps=128, seed=0, device="cpu", n_epochs=4)

    assert watched(ppo(3e-4), 1500)[0] == []
    said, monitor = watched(ppo(0.1), 1500)
    assert said == ["large_steps"]
    assert {"advantage_std", "reward_scale", "ent_coef"} <= monitor.diagnosis.values[0].keys()
    assert "group_size" not in monitor.diagnosis.values[0]


def test_an_algorithm_without_rollouts_is_refused() -> None:
    with pytest.raises(ConfigError, match="HealthMonitor reads rollouts, which DQN has none of"):
        DQN("MlpPolicy", "CartPole-v1", device="cpu").learn(10, callback=HealthMonitor())


def test_the_page_about_the_monitor_has_every_metric_and_finding_with_its_ranges() -> None:
    text = (PACKAGE.parent / "docs" / "monitor.md").read_text(encoding="utf-8")
    table = {cells[1].strip(" `"): cells for line in text.splitlines() if len(cells := line.split("|")) == 8}
    for metric in METRICS:
        _, _, key, _, usual, warns, findings, _ = (cell.strip() for cell in table[metric.name])
        assert (key, usual, warns) == (f"`{metric.key}`", shown_range(metric.usual), shown_range(metric.warns))
        for finding, bound in zip((metric.below, metric.above), metric.warns, strict=True):
            assert bound is None or f"`{finding}`" in findings
    for finding, cause in FINDINGS.items():
        line = [line for line in text.splitlines() if line.startswith(f"| `{finding}` |")][-1]
        assert all(option in line for option, _ in cause.cures if option not in ("target_kl", "trust_region")), finding
