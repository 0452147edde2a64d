"""`Unicode`: the space of any text. Gymnasium's `Text` refuses most characters, and the empty string by default."""

import string
from typing import Any

import numpy as np
from gymnasium.spaces import Text

LONGEST = 1 << 20
"""Characters of the longest text, when nothing else is said."""


class Unicode(Text):
    """All strings of 0 … `max_length` characters, whatever the characters are.

    Samples are short and printable, as they are only looked at. As there is no finite set of characters, the space
    has no array form: `gymnasium.spaces.flatten` refuses it. Several texts side by side are an array of objects: shape
    () and dtype object say so to SB3's DummyVecEnv, in which `evaluate_policy` steps an env.

    Args:
        max_length: In characters, both ends included.
        seed: Of `sample`.
    """

    def __init__(self, max_length: int = LONGEST, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable, seed=seed)
        self._shape, self.dtype = (), np.dtype(object)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random printable text of 0 … 32 characters; masks as `Text.sample` takes them."""
        if mask is not None or probability is not None:
            return super().sample(mask, probability)
        size = int(self.np_random.integers(min(self.max_length, 32) + 1))
        return "".join(self.np_random.choice(self.character_list, size=size))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def __reduce__(self) -> Any:
        """As its length: the arrays of `Text` have types that are no plain data. A copy has an RNG of its own."""
        return type(self), (), {"max_length": self.max_length}

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Unicode({self.max_length})"

    def __eq__(self, other: object, /) -> bool:
        return isinstance(other, Unicode) and self.max_length == other.max_length
