"""Mixed precision: what is 16 bits wide and what stays 32, and the loss scale of fp16."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch as th
from probe_envs import grpo as small_model
from tiny_models import language_model, sampled

from grpo_rl import GRPO
from grpo_rl.errors import ConfigError
from grpo_rl.policies.control import CnnPolicy
from grpo_rl.precision import Precision, check_underflow

CPU = th.device("cpu")


def widths(model: Any) -> set[th.dtype]:
    """What the policy's hidden layers give while it acts and learns."""
    seen: set[th.dtype] = set()
    for module in model.policy.modules():
        if isinstance(module, th.nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    model.learn(256)
    return seen


@pytest.mark.parametrize("value_head", [False, True])
def test_networks_compute_in_16_bits_and_all_else_in_32(value_head: bool) -> None:
    model = small_model("CartPole-v1", precision="bf16-mixed", value_head=value_head)
    assert widths(model) == {th.bfloat16, th.float32}, "float32 is what the last layers hand on"
    assert {parameter.dtype for parameter in model.policy.parameters()} == {th.float32}
    rollout = model.rollout_buffer
    assert rollout.advantages.dtype == th.float32 and rollout.log_probs.dtype == np.float32
    batch = next(rollout.get(16))
    values, log_prob, entropy = model.policy.evaluate_actions(batch.observations, batch.actions)
    assert {x.dtype for x in (values, log_prob, entropy) if x is not None} == {th.float32}
    plain = small_model("CartPole-v1", value_head=value_head)
    assert th.bfloat16 not in widths(plain)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_ratio_is_1_before_the_first_update(env: str) -> None:
    """Actions are sampled by the networks that are updated, in their precision."""
    model = small_model(env, precision="bf16-mixed", n_epochs=1, learning_rate=0.0)
    model.learn(256)
    batch = model.rollout_buffer.batch()
    log_prob = model.policy.evaluate_actions(batch.observations, batch.actions)[1]
    th.testing.assert_close(log_prob, batch.old_log_prob, rtol=0, atol=1e-5)


def test_16_mixed_on_a_cpu_says_what_it_is() -> None:
    with pytest.warns(UserWarning, match='precision="16-mixed" on cpu is carried out as "bf16-mixed"'):
        model = small_model("CartPole-v1", precision="16-mixed")
    assert (model.precision, model._precision.effective, model.policy.autocast) == (
        "16-mixed",
        "bf16-mixed",
        th.bfloat16,
    )


def test_a_scaled_gradient_takes_the_step_of_an_unscaled_one() -> None:
    """SGD at rate 1 from w = 1 on the loss 3w: gradient 3, also after a scale of 65,536 and back: w = −2."""
    weight = th.nn.Parameter(th.tensor(1.0))
    optimizer = th.optim.SGD([weight], lr=1.0)
    precision = Precision("32-true", CPU)
    precision.scale_for(th.float16, CPU)
    precision.backward(3 * weight)
    assert weight.grad == 3 * 65_536
    precision.unscale(optimizer)
    assert precision.verdict(weight.grad) == {"grad_norm": 3.0, "skipped_steps": 0.0}
    precision.step(optimizer)
    assert weight.item() == -2.0


def test_a_gradient_that_overflows_takes_no_step_and_halves_the_scale() -> None:
    weight = th.nn.Parameter(th.tensor(1.0))
    optimizer = th.optim.SGD([weight], lr=1.0)
    precision = Precision("32-true", CPU)
    precision.scale_for(th.float16, CPU)
    precision.backward(weight * 1e38)
    precision.unscale(optimizer)
    assert precision.verdict(weight.grad.abs()) == {"grad_norm": 0.0, "skipped_steps": 1.0}
    precision.step(optimizer)
    assert weight.item() == 1.0 and precision.state()["scale"] == 32_768
    again = Precision("32-true", CPU)
    again.scale_for(th.float16, CPU)
    again.set_state(precision.state())
    assert again.state() == precision.state()


def test_a_language_model_in_fp16_learns_with_a_loss_scale() -> None:
    """`autocast="fp16"` is done on a CPU, too: the first scale is too large for some step or none; the log has both."""
    model = language_model(policy_kwargs={"autocast": "fp16"})
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    rollout = sampled(model)
    assert rollout.advantages.dtype == th.float32
    for _ in range(3):
        model.train()
    log = model.logger.name_to_value
    assert log["train/loss_scale"] == model.loss_scale["scale"] and np.isfinite(log["train/grad_norm"])
    if log["train/skipped_steps"] == 0:
        assert any(not th.equal(value, before[name]) for name, value in model.policy.state_dict().items())


def test_texts_take_the_same_word() -> None:
    model = language_model(precision="bf16-mixed")
    assert model.policy.autocast == th.bfloat16
    rollout = sampled(model)
    (batch,) = rollout.get()
    log_prob = model.policy.evaluate_actions(batch.observations, batch.actions)[1]
    assert log_prob.dtype == th.float32
    th.testing.assert_close(log_prob, batch.old_log_prob, rtol=0, atol=2e-2)


def test_it_survives_saving(tmp_path: Any) -> None:
    model = small_model("CartPole-v1", precision="bf16-mixed")
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model")
    assert (loaded.precision, loaded.policy.autocast) == ("bf16-mixed", th.bfloat16)
    obs = np.zeros((3, 4), np.float32)
    assert np.array_equal(model.predict(obs, deterministic=True)[0], loaded.predict(obs, deterministic=True)[0])


def test_convolutions_in_fp16_are_warned_of_and_nothing_else() -> None:
    from gymnasium import spaces

    policy = CnnPolicy(spaces.Box(0, 255, (3, 36, 36), np.uint8), spaces.Discrete(2), lambda _: 1e-3)
    with pytest.warns(UserWarning, match="underflow to 0 in fp16"):
        check_underflow(policy, th.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_underflow(policy, th.bfloat16)
        check_underflow(small_model("CartPole-v1").policy, th.float16)


def test_unknown_names_and_gsde_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision='fp16': expected one of '32-true', 'bf16-mixed', '16-mixed'"):
        small_model("CartPole-v1", precision="fp16")
    with pytest.raises(ConfigError, match='use_sde=True needs "32-true"'):
        small_model("Pendulum-v1", precision="bf16-mixed", use_sde=True)


@pytest.mark.skipif(
    not th.cuda.is_available(), reason="fp16 of control policies needs a GPU: CPUs take bf16 in its place"
)
def test_16_mixed_on_a_gpu_learns_cartpole() -> None:
    model = small_model("CartPole-v1", precision="16-mixed", device="cuda").learn(4096)
    assert model._precision.effective == "16-mixed" and np.isfinite(model.logger.name_to_value["train/loss"])
