"""What numpy does for torch's operators. Those that are not here are run by torch, on the same memory.

Elementwise functions take arrays that still have to be broadcast, and need not know to what shape.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th

aten = th.ops.aten
Function = Callable[..., Any]
_sum: Any = np.add.reduce
_largest: Any = np.maximum.reduce


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    if high is not None:
        x = np.minimum(x, high)
    return x if low is None else np.maximum(x, low)


def _power(x: Any, exponent: Any) -> Any:
    return np.square(x) if exponent == 2 else np.power(x, exponent)


def _tanh_backward(gradient: Any, y: Any) -> Any:
    slope = np.multiply(y, y)
    np.subtract(1, slope, out=slope)
    return np.multiply(gradient, slope)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _silu_backward(gradient: Any, x: Any) -> Any:
    gate = _sigmoid(x)
    return gradient * gate * (1 + x * (1 - gate))


def _elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    return np.where(x > 0, scale * x, scale * alpha * np.expm1(input_scale * np.minimum(x, 0)))


def _elu_backward(gradient: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any) -> Any:
    low = x + scale * alpha if is_result else scale * alpha * np.exp(input_scale * np.minimum(x, 0))
    return gradient * np.where(x > 0, scale, input_scale * low)


def _leaky_relu(x: Any, slope: Any = 0.01) -> Any:
    return np.where(x > 0, x, slope * x)


def _squared_error_backward(gradient: Any, x: Any, y: Any, reduction: int) -> Any:
    return 2 * gradient * (x - y)


ELEMENTWISE: dict[Any, Function] = {
    aten.add.Tensor: operator.add,
    aten.add.Scalar: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.sub.Scalar: operator.sub,
    aten.rsub.Scalar: lambda x, y: y - x,
    aten.mul.Tensor: operator.mul,
    aten.mul.Scalar: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.div.Scalar: operator.truediv,
    aten.neg.default: operator.neg,
    aten.reciprocal.default: lambda x: 1 / x,
    aten.abs.default: np.abs,
    aten.sqrt.default: np.sqrt,
    aten.exp.default: np.exp,
    aten.expm1.default: np.expm1,
    aten.log.default: np.log,
    aten.log1p.default: np.log1p,
    aten.tanh.default: np.tanh,
    aten.relu.default: lambda x: np.maximum(x, 0),
    aten.sigmoid.default: _sigmoid,
    aten.silu.default: lambda x: x * _sigmoid(x),
    aten.silu_backward.default: _silu_backward,
    aten.elu.default: _elu,
    aten.elu_backward.default: _elu_backward,
    aten.leaky_relu.default: _leaky_relu,
    aten.leaky_relu_backward.default: lambda gradient, x, slope, _: (
        gradient * np.where(x > 0, 1, slope).astype(x.dtype)
    ),
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: np.maximum,
    aten.clamp_max.default: np.minimum,
    aten.maximum.default: np.maximum,
    aten.minimum.default: np.minimum,
    aten.where.self: np.where,
    aten.masked_fill.Scalar: lambda x, mask, value: np.where(mask, value, x),
    aten.tanh_backward.default: _tanh_backward,
    aten.sigmoid_backward.default: lambda gradient, y: gradient * y * (1 - y),
    aten.threshold_backward.default: lambda gradient, x, threshold: gradient * (x > threshold),
    aten.mse_loss.default: lambda x, y, reduction: np.square(x - y),
    aten.mse_loss_backward.default: _squared_error_backward,
    aten.logical_not.default: np.logical_not,
    aten.isfinite.default: np.isfinite,
}
COMPARING: dict[Any, Function] = {
    aten.eq.Tensor: operator.eq,
    aten.eq.Scalar: operator.eq,
    aten.ne.Tensor: operator.ne,
    aten.ne.Scalar: operator.ne,
    aten.lt.Tensor: operator.lt,
    aten.lt.Scalar: operator.lt,
    aten.le.Tensor: operator.le,
    aten.le.Scalar: operator.le,
    aten.gt.Tensor: operator.gt,
    aten.gt.Scalar: operator.gt,
    aten.ge.Tensor: operator.ge,
    aten.ge.Scalar: operator.ge,
    aten.bitwise_or.Tensor: operator.or_,
    aten.bitwise_and.Tensor: operator.and_,
    aten.logical_or.default: np.logical_or,
    aten.logical_and.default: np.logical_and,
}
"""Elementwise too, with a result that is not of its operands' type."""


def _addmm(bias: Any, x: Any, weight: Any) -> Any:
    y = np.dot(x, weight)
    y += bias
    return y


def _axis(axis: Any) -> Any:
    """As numpy takes it: None for all, a number for one."""
    axes = [axis] if isinstance(axis, int) else list(axis or ())
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _reduced(ufunc: Any) -> Function:
    def reduce(x: Any, axis: Any = None, keepdim: bool = False) -> Any:
        return ufunc.reduce(x, _axis(axis), None, None, keepdim)

    return reduce


def _mean(x: Any, axis: Any = None, keepdim: bool = False) -> Any:
    total = _sum(x, _axis(axis), None, None, keepdim)
    return total / (x.size // np.size(total))


def _logsumexp(x: Any, axis: Any, keepdim: bool = False) -> Any:
    top = _largest(x, _axis(axis), None, None, True)
    total = np.log(_sum(np.exp(x - top), _axis(axis), None, None, True)) + top
    return total if keepdim else np.squeeze(total, _axis(axis))


def _softmax(x: Any, axis: int, half_to_float: bool) -> Any:
    y = np.exp(x - _largest(x, axis, None, None, True))
    return y / _sum(y, axis, None, None, True)


def _softmax_backward(gradient: Any, y: Any, axis: int, dtype: Any) -> Any:
    weighted = gradient * y
    return weighted - y * _sum(weighted, axis, None, None, True)


def _slice(x: Any, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[(slice(None),) * (axis % x.ndim) + (slice(start, end, step),)]


def _select(x: Any, axis: int, index: int) -> Any:
    return x[(slice(None),) * (axis % x.ndim) + (index,)]


def transpose(x: Any) -> Any:
    """A matrix on its side."""
    return x.T


def reshape(x: Any, shape: tuple[int, ...]) -> Any:
    """`x.reshape(shape)`, in a third of the time of `np.reshape`."""
    return x.reshape(shape)


WHOLE: dict[Any, Function] = {
    aten.mm.default: np.dot,
    aten.addmm.default: _addmm,
    aten.sum.default: _reduced(np.add),
    aten.sum.dim_IntList: _reduced(np.add),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.amin.default: _reduced(np.minimum),
    aten.amax.default: _reduced(np.maximum),
    aten.logsumexp.default: _logsumexp,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.t.default: transpose,
    aten.transpose.int: np.swapaxes,
    aten.permute.default: np.transpose,
}
"""These need each operand in its full shape."""
VIEWS = {reshape, transpose, np.transpose, np.swapaxes}
"""They may give a view of the memory that they are given."""
RESHAPING = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default}
RESHAPING |= {aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}
SAME = {aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default}
FILLING = {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.new_zeros.default}
FILLING |= {aten.new_ones.default, aten.new_full.default}
"""What they give depends on shapes only."""
NEVER = {aten.convolution.default}
"""What torch does as well alone: a program with one of these is not worth having."""


def writes(op: Any) -> list[bool]:
    """For each argument of `op`, whether it writes to it."""
    return [argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments]


def by_torch(op: Any) -> Function:
    """`op` on arrays, run by torch on their memory. What it would write to is copied first."""
    written = writes(op)

    def tensor(value: Any, copied: bool = False) -> Any:
        if isinstance(value, np.ndarray):
            return th.from_numpy(value if value.flags.writeable and not copied else value.copy())
        if isinstance(value, np.generic):
            return th.tensor(value)
        return [tensor(item) for item in value] if isinstance(value, list | tuple) else value

    def array(result: Any) -> Any:
        if isinstance(result, th.Tensor):
            return result.numpy()
        return tuple(array(item) for item in result) if isinstance(result, list | tuple) else result

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [tensor(value, copied) for value, copied in zip(args, written, strict=False)]
        return array(op(*given, **{name: tensor(value) for name, value in kwargs.items()}))

    run.__name__ = op._opname
    return run
