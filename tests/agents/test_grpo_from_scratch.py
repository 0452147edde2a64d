"""The one-file GRPO computes what the library computes, and learns."""

import ast
import subprocess
import sys

import gymnasium as gym
import pytest
import torch as th
from torch.distributions import Categorical

from grpo_rl import GRPO, objective
from grpo_rl import advantages as adv
from grpo_rl.recipes import load_object, shipped
from grpo_rl.types import Batch

FILE = shipped() / "agents" / "grpo_from_scratch.py"


def scratch(name):
    return load_object(f"{FILE}:{name}")


def episodes(seed, steps=12, groups=3, members=4):
    """Rewards, mask and truncated (T, P, G) of episodes of random lengths, some of them cut by a time limit."""
    rng = th.Generator().manual_seed(seed)
    lengths = th.randint(1, steps + 1, (groups, members), generator=rng)
    rows = th.arange(steps)[:, None, None]
    truncated = (rows == lengths - 1) & (th.rand((groups, members), generator=rng) < 0.4)
    return th.randn((steps, groups, members), generator=rng).double(), rows < lengths, truncated


# --------------------------------------------------------------------------------------------------------- by hand


def test_reward_to_go_by_hand():
    # Two members, γ = 1/2. The first fails after 2 steps: R = 4 + 2/2 = 5, 2. The second is cut alive after 3 steps:
    # r̄ = (4 + 2 + 1 + 1 + 7)/5 = 3, so r̄/(1 − γ) = 6 lies beyond: 7 + 6/2 = 10, 1 + 10/2 = 6, 1 + 6/2 = 4.
    rewards = th.tensor([[4.0, 1], [2, 1], [99, 7]])[:, None].double()  # the 99 was never played
    mask = th.tensor([[True, True], [True, True], [False, True]])[:, None]
    truncated = th.tensor([[False, False], [False, False], [False, True]])[:, None]
    returns = scratch("reward_to_go")(rewards, mask, truncated, 0.5)
    assert returns[:, 0].tolist() == [[5, 4], [2, 6], [0, 10]]


def test_group_advantages_by_hand():
    # Two groups of three. At step 0 all live: 3 − (1 + 5)/2 = 0, 1 − (3 + 5)/2 = −3, 5 − (3 + 1)/2 = 3.
    # At step 1 the first group has one survivor, who is compared with the other group: 8 − (1 + 2 + 3)/3 = 6;
    # the other group with itself: 1 − (2 + 3)/2 = −1.5, 2 − 2 = 0, 3 − (1 + 2)/2 = 1.5. At step 2 one lives: 0.
    returns = th.tensor([[[3.0, 1, 5], [1, 1, 1]], [[8, 0, 0], [1, 2, 3]], [[7, 0, 0], [0, 0, 0]]]).double()
    mask = returns != 0
    assert scratch("group_advantages")(returns, mask).tolist() == [
        [[0, -3, 3], [0, 0, 0]],
        [[6, 0, 0], [-1.5, 0, 1.5]],
        [[0, 0, 0], [0, 0, 0]],
    ]


# ------------------------------------------------------------------------------------------------ as the library


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [0.5, 0.99])
def test_its_advantages_are_the_librarys(seed, gamma):
    rewards, mask, truncated = episodes(seed)
    ours = scratch("group_advantages")(scratch("reward_to_go")(rewards, mask, truncated, gamma), mask)

    # The library's axes are (T, N) with N = P·G; a segment ends where its column is alive for the last time.
    flat = [x.flatten(1) for x in (rewards, mask, truncated)]
    ends = flat[1] & ~th.cat([flat[1][1:], th.zeros_like(flat[1][:1])])
    tails = flat[2] * adv.alive_tail(*flat[:2], gamma)
    ends[-1] = True
    returns = adv.reward_to_go(th.where(flat[1], flat[0], 0), ends, tails, gamma)
    group = th.arange(rewards.shape[1]).repeat_interleave(rewards.shape[2]).expand(returns.shape)
    age = th.arange(len(returns))[:, None].expand(returns.shape)
    theirs = adv.group_advantages(returns, group, age, flat[1], baseline="leave_one_out")

    scale = theirs.abs().max()  # a tail of r̄/(1 − γ) is large, and the library's numbers are float32
    th.testing.assert_close(ours.flatten(1) / scale, theirs.double() / scale, rtol=0, atol=1e-6)


def test_its_loss_and_gradient_are_the_librarys():
    rng = th.Generator().manual_seed(0)
    old_logp, advantages = th.randn(64, generator=rng), 3 + 5 * th.randn(64, generator=rng)
    logp = (old_logp + 0.3 * th.randn(64, generator=rng)).requires_grad_()

    ours = scratch("surrogate_loss")(logp, old_logp, advantages, 0.2)
    scaled = objective.masked_standardize(advantages)
    theirs = objective.aggregate(objective.clipped_surrogate(logp, old_logp, scaled, 0.2), th.full((64,), 1 / 64))

    th.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    gradients = [th.autograd.grad(loss, logp)[0] for loss in (ours, theirs)]
    th.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    assert ((logp - old_logp).exp() - 1).abs().max() > 0.2, "some rows are clipped"


def test_with_the_librarys_weights_it_has_the_librarys_loss():
    agent = GRPO("MlpPolicy", "CartPole-v1", seed=0)
    policy = scratch("make_policy")(4, 2)
    theirs = [*agent.policy.mlp_extractor.policy_net.parameters(), *agent.policy.action_net.parameters()]
    for parameter, source in zip(policy.parameters(), theirs, strict=True):
        assert parameter.shape == source.shape
        parameter.data.copy_(source.data)

    obs, actions, advantages = th.randn(32, 4), th.randint(2, (32,)), th.randn(32)
    logp = Categorical(logits=policy(obs)).log_prob(actions)
    old_logp = logp.detach() + 0.3 * th.randn(32)
    loss = scratch("surrogate_loss")(logp, old_logp, advantages, 0.2)
    batch = Batch(obs, actions, old_logp, advantages, th.full((32,), 1 / 32), None, None, None)
    th.testing.assert_close(loss, agent.loss(batch, clip_range=0.2)[0], rtol=0, atol=1e-6)


# -------------------------------------------------------------------------------------------------- it plays and learns


def test_a_group_starts_in_one_state_and_its_rows_are_what_was_played():
    th.manual_seed(0)
    envs = [gym.make("CartPole-v1", max_episode_steps=15) for _ in range(4)]
    policy = scratch("make_policy")(4, 2)
    group = scratch("play_group")(envs, policy, seed=5)

    assert (group.obs[0] == th.tensor(envs[0].reset(seed=5)[0])).all()
    lengths = group.mask.sum(0)
    assert group.rewards.sum(0).tolist() == lengths.tolist(), "CartPole gives 1 for each step"
    assert (lengths[group.truncated.any(0)] == 15).all(), "only the time limit truncates"
    assert not (group.mask[1:] & ~group.mask[:-1]).any(), "nobody comes back after an end"
    logp = Categorical(logits=policy(group.obs)).log_prob(group.actions)
    th.testing.assert_close(logp, group.logp, rtol=0, atol=1e-6)
    # Replayed alone, a member meets the same states: the group's observations are real ones.
    member = int(lengths.argmax())
    obs, _ = envs[0].reset(seed=5)
    for t in range(int(lengths[member])):
        assert (th.tensor(obs) == group.obs[t, member]).all()
        obs = envs[0].step(int(group.actions[t, member]))[0]


def test_it_learns(capsys):
    policy = scratch("train")(total_steps=5_000, seed=0)
    assert scratch("evaluate")(policy, episodes=5) > 100, "a random policy keeps the pole up for about 22 steps"
    assert capsys.readouterr().out.count("mean return") >= 4


def test_the_file_stands_alone_and_its_command_works():
    tree = ast.parse(FILE.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {(getattr(node, "module", None) or node.names[0].name).partition(".")[0] for node in imports}
    assert imported == {"argparse", "typing", "gymnasium", "numpy", "torch"}

    run = subprocess.run([sys.executable, FILE, "--steps", "1", "--seed", "1"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("20 fresh episodes, most likely actions: mean return")
