"""`TokenEnv`: one step, one token; any agent of SB3 can step it, and it says what the fast path says."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from sums import ROWS, make
from talking_envs import Echo
from tiny_models import tiny
from tokenizers_of_all_kinds import chars

from grpo_rl import GRPO, make_group_env, probe_fork
from grpo_rl.errors import ConfigError, ForkError
from grpo_rl.policies.language import CausalLMPolicy
from grpo_rl.text import PromptEnv, PromptVecEnv, TokenEnv, TurnVecEnv

EOS, A, B = 1, 3, 4


def talking(**settings):
    return TokenEnv(Echo(turns=2), chars(), 3, **{"max_length": 20, **settings})


def seen(obs):
    """The ids of an observation, without what fills the left."""
    return obs["input_ids"][obs["attention_mask"] == 1].tolist()


@pytest.mark.parametrize("env", [lambda: TokenEnv(make()), talking], ids=["prompts", "turns"])
def test_it_passes_the_checks_of_gymnasium_and_sb3(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env(), skip_render_check=True)
        sb3_check_env(env())


def test_a_completion_token_by_token():
    """ "0+0=", then "0" and EOS: 1·1 - 0.1·2 with the last token."""
    env = TokenEnv(make())
    obs, _ = env.reset(options={"row": 0})
    prompt = chars()("0+0=")["input_ids"]
    assert obs["input_ids"].shape == obs["attention_mask"].shape == (8,)
    assert seen(obs) == prompt and obs["attention_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    zero = chars()("0")["input_ids"][0]
    obs, reward, terminated, truncated, info = env.step(np.int64(zero))
    assert seen(obs) == [*prompt, zero] and (reward, terminated, truncated, info) == (0.0, False, False, {})
    obs, reward, terminated, truncated, info = env.step(np.int64(EOS))
    assert seen(obs) == [*prompt, zero, EOS] and (terminated, truncated) == (True, False)
    assert reward == pytest.approx(0.8)
    assert (info["completion"], info["completion_ids"], info["row"]) == ("0", [zero, EOS], 0)


def test_a_completion_ends_at_its_limit_or_a_stop_string():
    env = TokenEnv(make())
    env.reset()
    assert [env.step(np.int64(A))[2] for _ in range(4)] == [False, False, False, True]
    env = TokenEnv(make(stop_strings=["ab"]))
    env.reset()
    assert [env.step(np.int64(token))[2] for token in (B, A, B)] == [False, False, True]


def test_turns_token_by_token():
    """The env repeats "a", which is seen at once and was no action; the reward is the length of each turn's text."""
    env = talking()
    first = seen(env.reset(seed=0)[0])
    env.step(np.int64(A))
    obs, reward, terminated, _, info = env.step(np.int64(EOS))
    assert seen(obs) == [*first, A, EOS, A] and (reward, terminated) == (1.0, False)
    assert info["completion_ids"] == [A, EOS]
    rewards, dones = zip(*(env.step(np.int64(B))[1:3] for _ in range(3)), strict=True)
    assert rewards == (0.0, 0.0, 3.0) and dones == (False, False, True)


def test_a_conversation_that_outgrows_the_observation_is_truncated():
    env = talking(max_length=6)
    env.reset()
    env.step(np.int64(A))
    *_, terminated, truncated, _ = env.step(np.int64(EOS))  # 1 + 2 + 1 so far: 3 more do not fit
    assert (terminated, truncated) == (False, True)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_whole_completions_earn_the_same(seed):
    rng = np.random.default_rng(seed)
    fast, slow = PromptVecEnv(make()), TokenEnv(make())
    fast.seed(seed)
    fast.start(6, 1)
    said, earned = [], []
    for prompt in fast.prompts:
        obs, _ = slow.reset(options={"row": prompt.row})
        assert seen(obs) == list(prompt.ids)
        done, total = False, 0.0
        while not done:
            _, reward, done, _, info = slow.step(rng.integers(1, len(chars())))
            total += reward
        said.append(info["completion_ids"])
        earned.append(total)
    fast.reply(range(6), said)
    np.testing.assert_allclose(fast.weighted(fast.score()), earned)


def test_turns_earn_the_same_too():
    fast, slow = TurnVecEnv(lambda: Echo(turns=2), chars(), 3), talking()
    fast.start(1, 1)
    slow.reset()
    turns = [[A, EOS], [B, A, B]]
    fast_rewards = [fast.reply([0], [ids])[0].reward for ids in turns]
    slow_rewards = [sum(slow.step(np.int64(i))[1] for i in ids) for ids in turns]
    assert fast_rewards == slow_rewards == [1.0, 3.0]


def test_ppo_of_sb3_steps_it():
    model = PPO("MultiInputPolicy", TokenEnv(make()), n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0)
    model.learn(64)
    assert model.num_timesteps == 64
    action, _ = model.predict(model.get_env().reset())
    assert 0 <= action[0] < len(chars())


def test_members_fork_in_the_middle_of_a_completion():
    assert probe_fork(lambda: TokenEnv(make())).exact
    env = make_group_env(lambda: TokenEnv(make()), n_groups=1, group_size=3, seed=0)
    env.reset()
    env.step(np.array([A, B, A]))
    obs = env.fork([1, 1, 2])
    assert obs["input_ids"][0].tolist() == obs["input_ids"][1].tolist()
    obs, *_ = env.step(np.array([A, A, A]))
    assert obs["input_ids"][0][-2:].tolist() == [B, A] and obs["input_ids"][2][-2:].tolist() == [A, A]


def test_an_env_that_talks_is_not_forked():
    with pytest.raises(ForkError, match="forks a PromptEnv only"):
        talking().get_snapshot()


@pytest.mark.parametrize(
    ("make_env", "message"),
    [
        (lambda: TokenEnv(make(), chars()), "a PromptEnv brings its tokenizer"),
        (lambda: TokenEnv(make(), max_new_tokens=3), "a PromptEnv brings its tokenizer"),
        (lambda: talking(max_length=None), "max_length: expected the tokens of a whole conversation"),
        (lambda: TokenEnv(make(), vocab_size=10), "vocab_size: expected at least the tokenizer's"),
        (lambda: TokenEnv(make(), max_length=0), "max_length=0: expected a whole number, 1 or more"),
        (lambda: TokenEnv(make(), max_turns=0), "max_turns=0: expected a whole number, 1 or more"),
        (lambda: TokenEnv(None), "TokenEnv: expected an env, got None"),
        (lambda: TokenEnv(make(), max_length=4).reset(), "max_length: expected more than the 4 tokens of the prompt"),
    ],
)
def test_what_cannot_work_is_said(make_env, message):
    with pytest.raises(ConfigError, match=message):
        make_env()


@pytest.mark.parametrize("action", [-1, 10**6, 1.5, "x", None, [3], True], ids=str)
def test_an_action_that_is_no_token_is_refused(action):
    env = TokenEnv(make())
    with pytest.raises(gym.error.ResetNeeded):
        env.step(np.int64(3))
    env.reset()
    with pytest.raises(ConfigError, match="action: expected the id of a token, 0 … "):
        env.step(action)
    assert env.completion == []


def test_a_model_may_embed_more_than_the_tokenizer_has():
    env = TokenEnv(make(), vocab_size=64)
    assert env.action_space.n == 64
    env.reset()
    for _ in range(4):
        *_, info = env.step(np.int64(63))
    assert info["completion"] == ""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 8, "top_p": 0.9}], ids=["plain", "cut"])
def test_the_fast_path_and_single_steps_give_the_same_log_probabilities(family, sampling):
    """Whole completions, sampled with a shared prompt and a cache, against the same tokens one at a time."""
    slow, fast = TokenEnv(make()), PromptVecEnv(make())
    policy = CausalLMPolicy(
        slow.observation_space,
        slow.action_space,
        lambda progress: 1e-3,
        model=tiny(family, len(chars())),
        encoder=fast.encoder,
        **sampling,
    )
    prompts = fast.start(3, 2)
    said = policy.sample([prompt.ids for prompt in prompts], 2, 4, np.arange(6))
    for n, (ids, log_probs) in enumerate(zip(said.ids, said.log_probs, strict=True)):
        obs, _ = slow.reset(options={"row": prompts[n // 2].row})
        seen_log_probs = []
        for token in ids:
            rows = {key: th.as_tensor(row[None]) for key, row in obs.items()}
            with th.no_grad():
                seen_log_probs.append(policy.evaluate_actions(rows, th.tensor([token]))[1].item())
            obs, _, done, _, _ = slow.step(np.int64(token))
        assert done, "the same end"
        np.testing.assert_allclose(seen_log_probs, log_probs, atol=1e-5)


def test_grpo_steps_it_too_with_members_that_fork_in_the_middle_of_completions():
    """The control path: whole completions and single tokens are the same agent."""

    def different(completion_ids):
        return [float(ids[0] % 3 + ids[-1] % 5) for ids in completion_ids]

    env = make_group_env(lambda: TokenEnv(PromptEnv(ROWS, different, chars(), 4)), n_groups=1, group_size=4, seed=0)
    policy = {"model": tiny(vocabulary=len(chars()))}
    model = GRPO(
        "CausalLMPolicy", env, group_size=4, n_steps=32, fork_prob=1.0, learning_rate=1e-3, policy_kwargs=policy, seed=0
    )
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(256)
    assert (model.groups.means, model.groups.kind) == ("fork", "episode")
    assert any(not th.equal(old, new) for old, new in zip(before, model.policy.parameters(), strict=True))
    assert all(th.isfinite(parameter).all() for parameter in model.policy.parameters())
