"""A traced function gives what the function gives; what cannot be traced says why."""

import numpy as np
import pytest
import torch as th
from torch import nn
from torch.nn import functional

from grpo_rl.fast.program import Untraceable, trace


def both(function, *inputs):
    """What `function` gives and what its program gives, for other inputs than those that it was traced with."""
    program = trace(function, [th.ones_like(x) for x in inputs])
    expected = [tensor.detach().numpy() for tensor in function(*inputs)]
    return expected, program(*(x.numpy() for x in inputs))


FUNCTIONS = {
    "arithmetic": lambda x, y: [2 * x + y / 3 - 1, -x * y, 1 / y, x - 2, 2 - x, abs(x), x**2, x**3],
    "comparisons": lambda x, y: [x > y, x <= 0.5, (x == x) & (y < 0), (x > 0) | (y > 0), th.where(x > 0, x, y)],
    "bounds": lambda x, y: [x.clamp(-0.5, 0.5), x.clamp(min=0), x.clamp(y - 1, y + 1), th.min(x, y), th.max(x, y)],
    "functions": lambda x, y: [x.exp(), (x * x + 1).log(), x.tanh(), x.sigmoid(), x.expm1(), (x * x).sqrt()],
    "sums": lambda x, y: [x.sum(), x.sum(1), x.sum(0, keepdim=True), x.mean(), x.mean(1), x.amin(), x.amax(1)],
    "shapes": lambda x, y: [x.t(), x.reshape(-1), x.unsqueeze(1), x[:, 1:], x[2], x.flatten(), th.cat([x, y], 1)],
    "broadcasting": lambda x, y: [x[:, :1].expand(4, 3) * y, (x[0] + th.ones(4, 3)).sum(0), x.sum(1)[:, None] + y],
    "types": lambda x, y: [
        x.double() * y,
        (x > 0).float().mean(),
        (x > 0).sum() / 3,
        x.double().float(),
        x * th.tensor(2),
    ],
    "softmax": lambda x, y: [x.softmax(1), x.log_softmax(1), x.logsumexp(1), x.gather(1, (y > 0).long())],
    "written in place": lambda x, y: [(x + 1).mul_(y).add_(1), (x + 0).masked_fill_(y > 0, 7.0)],
    "constants": lambda x, y: [
        th.ones(3) + x,
        th.where(th.ones(4, 3) > 0, x, y),
        x * th.ones_like(x),
        x + th.arange(3),
    ],
    "one_hot": lambda x, y: [functional.one_hot((x > 0).long(), num_classes=2)],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_gives_what_the_function_gives(name):
    th.manual_seed(0)
    expected, got = both(FUNCTIONS[name], th.randn(4, 3), th.randn(4, 3))
    assert len(got) == len(expected)
    for ours, torchs in zip(got, expected, strict=True):
        assert ours.shape == torchs.shape and ours.dtype == torchs.dtype
        np.testing.assert_allclose(ours, torchs, rtol=2e-6, atol=1e-6)


ROWS = {
    "sums": lambda x: [x.mean(0), x.sum(), x.mean(), (x - x.mean(0)).square().sum() / (len(x) - 1), x.std(0)],
    "shapes": lambda x: [x.flatten(), x.t(), x.reshape(-1, 1), x[:, None].expand(len(x), 2, 3), th.cat([x, x])],
    "constants": lambda x: [
        th.ones(len(x)) * x.sum(1),
        th.ones_like(x).sum(0),
        x * len(x),
        x / len(x),
        th.full((3,), 2.0),
    ],
    "gradients": lambda x: th.autograd.grad((x @ weights.tanh()).mean() + weights.sum(), [weights]),
}
weights = th.arange(1.0, 7.0).reshape(3, 2).requires_grad_()


@pytest.mark.parametrize("name", ROWS)
def test_a_program_for_any_number_of_rows(name):
    program = trace(ROWS[name], [th.ones(5, 3)], [th.ones(4, 3)])
    for rows in (5, 4, 3, 2, 9):
        x = th.randn(rows, 3, generator=th.Generator().manual_seed(rows))
        for ours, torchs in zip(program(x.numpy()), ROWS[name](x), strict=True):
            assert ours.shape == torchs.shape
            np.testing.assert_allclose(ours, torchs.detach().numpy(), rtol=2e-6, atol=1e-6)


def test_what_depends_on_the_rows_in_another_way_is_refused():
    with pytest.raises(Untraceable, match=r"0\.2 for 5 rows, 0\.25 for 4"):
        trace(lambda x: [x * (1 / len(x))], [th.ones(5, 3)], [th.ones(4, 3)])
    with pytest.raises(Untraceable, match="other operators"):
        trace(lambda x: [x.exp() if len(x) == 5 else x.log() + 1], [th.ones(5, 3)], [th.ones(4, 3)])


ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.ELU, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.Sigmoid, nn.Softplus, nn.Mish, nn.Hardtanh]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.__name__)
def test_the_gradient_of_a_network_is_autograds(activation):
    th.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), activation(), nn.LayerNorm(8), nn.Linear(8, 5), activation(), nn.Linear(5, 1))
    parameters = list(net.parameters())
    expected, got = both(lambda x: th.autograd.grad(net(x).square().mean(), parameters), th.randn(6, 3))
    for ours, torchs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, torchs, rtol=1e-5, atol=1e-6 * np.abs(torchs).max())


def test_it_works_on_the_memory_of_what_the_function_closes_over():
    weight = th.tensor([1.0, 2.0])
    program = trace(lambda x: [x * weight], [th.zeros(2)])
    weight.mul_(10)
    assert program(np.array([1, 1], np.float32))[0].tolist() == [10, 20]


def test_noise_is_torchs_and_drawn_in_its_order():
    def noisy(x):
        return [x + th.randn(3), th.distributions.Normal(x, 2.0).rsample(), th.bernoulli(th.full((3,), 0.5))]

    program = trace(noisy, [th.zeros(3)])
    th.manual_seed(5)
    expected = [tensor.numpy() for tensor in noisy(th.ones(3))]
    th.manual_seed(5)
    for ours, torchs in zip(program(np.ones(3, np.float32)), expected, strict=True):
        np.testing.assert_allclose(ours, torchs, rtol=1e-6)
    th.manual_seed(5)
    state = th.get_rng_state()
    trace(noisy, [th.zeros(3)])
    assert th.equal(th.get_rng_state(), state)  # tracing draws nothing


def test_nothing_is_reckoned_twice():
    program = trace(lambda x: [x.exp() + 1, x.exp() * 2], [th.ones(3)])
    assert program.__self__.code.count("exp(") == 1


def test_what_is_not_read_is_not_reckoned():
    program = trace(lambda x: [x + 1, x.exp()][:1], [th.ones(3)])
    assert "exp" not in program.__self__.code


counter = th.zeros(())
REFUSED = {
    "a look at a value": (lambda x: [x if x.sum() > 0 else -x], "RuntimeError|GuardOn|DataDependent|item|Error"),
    "a state that is written": (lambda x: [x + counter.add_(1)], "from outside"),
    "a convolution": (lambda x: [functional.conv1d(x[None, None], x[None, None])], "torch's"),
    "an error of its own": (lambda x: [x @ th.ones(7)], "RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_torch(name):
    function, reason = REFUSED[name]
    with pytest.raises(Untraceable, match=reason):
        trace(function, [th.ones(3)])


def test_distributions_ask_again_after_a_tracing():
    before = th.distributions.Distribution._validate_args
    trace(lambda x: [th.distributions.Normal(x, 1.0).log_prob(x)], [th.ones(3)])
    assert th.distributions.Distribution._validate_args is before
    with pytest.raises(ValueError, match="scale"):
        th.distributions.Normal(th.zeros(1), th.tensor([-1.0]), validate_args=True)
