"""All parameters of a policy as one vector, and torch's Adam on it as one call.

The parameters stay torch's own: each becomes a view of its piece of the vector, and so do Adam's averages and step
counts in `optimizer.state`. Saving, loading, and steps by `optimizer.step()` in between work as ever.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch as th

_AVERAGES = ("exp_avg", "exp_avg_sq")


class FlatParameters:
    """The parameters of `policy`, laid out anew; see `possible`."""

    def __init__(self, policy: Any) -> None:
        self.parameters: list[th.nn.Parameter] = list(policy.parameters())
        self.optimizer: th.optim.Optimizer = policy.optimizer
        self.vector = self._flat([parameter.detach() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, self._pieces(self.vector), strict=True):
            parameter.data = piece
        self.gradient = th.zeros_like(self.vector)
        self._array = self.gradient.numpy()
        self.averages = [th.zeros_like(self.vector) for _ in _AVERAGES]
        self.steps = th.zeros(len(self.parameters))

    @staticmethod
    def possible(policy: Any) -> bool:
        """Whether all parameters are trained, float32, on the CPU, and by plain Adam."""
        parameters, optimizer = list(policy.parameters()), policy.optimizer
        groups = optimizer.param_groups
        return (
            type(optimizer) is th.optim.Adam
            and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
            and "step" not in vars(optimizer)
            and len(groups) == 1
            and not any(groups[0][name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
            and not (groups[0]["weight_decay"] and groups[0].get("decoupled_weight_decay"))
            and isinstance(groups[0]["lr"], float)
            and [id(parameter) for parameter in groups[0]["params"]] == [id(parameter) for parameter in parameters]
            and all(p.requires_grad and p.dtype == th.float32 and p.device.type == "cpu" for p in parameters)
        )

    def holds(self, policy: Any) -> bool:
        """Whether `policy` still is what this was made from, in the same memory."""
        mine = self._pieces(self.vector)
        return self.optimizer is policy.optimizer and [p.data_ptr() for p in policy.parameters()] == [
            piece.data_ptr() for piece in mine
        ]

    def begin(self) -> None:
        """Takes over what Adam's state is now: a checkpoint may have been loaded, or the state forgotten."""
        pieces = zip(*(self._pieces(average) for average in self.averages), self.steps.unbind(), strict=True)
        for parameter, (first, second, step) in zip(self.parameters, pieces, strict=True):
            state: Any = self.optimizer.state[parameter]
            for name, piece in (*zip(_AVERAGES, (first, second), strict=True), ("step", step)):
                given = state.get(name)
                if given is None:
                    piece.zero_()
                elif given.data_ptr() != piece.data_ptr():
                    piece.copy_(given)
                state[name] = piece

    def clip(self, gradients: Sequence[np.ndarray], max_norm: float) -> th.Tensor:
        """Takes `gradients`, one a parameter, clipped as by `clip_grad_norm_`; gives the norm that they had."""
        gradient = self._array
        np.concatenate([piece.ravel() for piece in gradients], out=gradient)
        norm = np.sqrt(np.dot(gradient, gradient))
        if not norm + 1e-6 <= max_norm:  # nor if it is not a number
            gradient *= max_norm / (norm + np.float32(1e-6))
        return th.tensor(norm)

    def step(self) -> None:
        """One step of Adam along the gradient of `clip`."""
        self.steps += 1
        options = self.optimizer.param_groups[0]
        beta1, beta2 = options["betas"]
        th._fused_adam_(
            [self.vector],
            [self.gradient],
            [self.averages[0]],
            [self.averages[1]],
            [],
            [self.steps[0]],
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _flat(self, tensors: Sequence[th.Tensor]) -> th.Tensor:
        return th.cat([tensor.reshape(-1) for tensor in tensors])

    def _pieces(self, vector: th.Tensor) -> list[th.Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        return [
            piece.view(parameter.shape) for piece, parameter in zip(vector.split(sizes), self.parameters, strict=True)
        ]
