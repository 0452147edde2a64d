"""A bound on the networks that are built for a file: a line of JSON may claim a network of any size.

Whatever the claim is written in (layers of the policy, a features extractor, the shape of a space), building it asks
torch for empty tensors. Those of an agent are in its file, so all of them together cannot be far larger than it.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch as th
from torch.overrides import TorchFunctionMode

from grpo_rl.errors import ConfigError

SPARE = 64 << 20
"""Bytes that any agent may ask for, beside the size of its weights."""
TIMES = 4
"""How many times the size of its weights: copies, other widths of numbers, layers that are built and replaced."""
_EMPTY = (th.empty, th.zeros, th.ones, th.rand, th.randn, th.full)


class Bounded(TorchFunctionMode):
    """Within it, new tensors of more bytes in all than an agent with `stored` bytes of weights needs are refused.

    Args:
        name: Of the file, for the error.
        stored: Bytes of its weights, unpacked.

    Raises:
        ConfigError: Before the memory is asked for.
    """

    def __init__(self, name: str, stored: int) -> None:
        super().__init__()
        self.name, self.stored, self.asked = name, stored, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _EMPTY:
            self.asked += _bytes(args, kwargs)
            if self.asked > TIMES * self.stored + SPARE:
                raise ConfigError(
                    f"{self.name}: it describes networks of {self.asked:,} bytes or more, but holds"
                    f" {self.stored:,} bytes of weights: it is damaged or made to fill the memory, and is not loaded"
                )
        return func(*args, **kwargs)


def _bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    size = args[0] if args and isinstance(args[0], tuple | list) else kwargs.get("size", args)
    if isinstance(size, int):
        size = (size,)
    dtype = kwargs.get("dtype") or th.get_default_dtype()
    return math.prod(int(number) for number in size if isinstance(number, int)) * dtype.itemsize
