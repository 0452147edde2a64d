"""What a pickle would import, call and change, found without unpickling it.

A pickle is a program without branches for a small stack machine. `trace` runs it on stand-ins: nothing is imported,
called, hashed or compared, and every import, call and change of state becomes a `Step`. What it cannot follow, it
refuses, so that a pickle which it has read does nothing else when Python runs it.
"""

import pickletools
import re
from typing import Any, Literal, NamedTuple

MAX_OPERATIONS = 2_000_000
"""A longer program is refused."""
MAX_KEY = 64
"""Leaves of a tuple that is a dictionary's key: hashing a nested tuple may take for ever."""
_UNHASHABLE = 1 << 60


class UnreadableError(ValueError):
    """A pickle that is damaged, or that does what no ordinary pickle does."""


class Item:
    """A stand-in on the stack.

    Attributes:
        kind: "plain" (a literal), "tuple", "container" (list, dict, set), "global" (a module's name) or "result" of a
            call.
        value: The literal; the tuple's items; else None.
        name: "module.name" of a global, or of what was called for a result.
        size: Leaves; more than any key may have where something other than literals is in it.
    """

    __slots__ = ("kind", "name", "size", "value")

    def __init__(self, kind: str, value: Any = None, name: tuple[str, str] | None = None, size: int = 1) -> None:
        self.kind, self.value, self.name, self.size = kind, value, name, size

    def __str__(self) -> str:
        if self.kind == "plain":
            text = repr(self.value[:200] if isinstance(self.value, str | bytes | bytearray) else self.value)
            return text if len(text) < 80 else f"{text[:77]}…"
        return ".".join(self.name) if self.kind == "global" and self.name else "…"

    def literals(self) -> tuple[Any, ...] | None:
        """The values of a tuple of literals, None for anything else."""
        if self.kind != "tuple" or any(item.kind != "plain" for item in self.value):
            return None
        return tuple(item.value for item in self.value)


class Step(NamedTuple):
    """One thing that the pickle would do.

    Attributes:
        action: "imports" a name, "calls" it, or "changes" it or the object that it made.
        module, name: What; of a changed object, what was called to make it.
        items: The call's arguments, or the new state.
        made: Whether what is changed was made by a call in this pickle.
    """

    action: Literal["imports", "calls", "changes"]
    module: str
    name: str
    items: tuple[Item, ...] = ()
    made: bool = False

    def __str__(self) -> str:
        name = f"{self.module}.{self.name}"
        if self.action != "calls":
            return f"{self.action} {name}"
        arguments = ", ".join(str(item) for item in self.items[:3])
        return f"calls {name}({arguments}{', …' if len(self.items) > 3 else ''})"


def trace(data: bytes) -> list[Step]:
    """The steps of a pickle, in their order.

    Raises:
        UnreadableError: It is damaged, longer than MAX_OPERATIONS, or refers to what is outside of it.
    """
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > MAX_OPERATIONS:
                raise UnreadableError(f"more than {MAX_OPERATIONS:,} operations")
            machine.run(opcode.name, argument)
    except UnreadableError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise UnreadableError(" ".join(f"{type(error).__name__} {error}".split())[:200]) from None
    return machine.steps


_NAME = re.compile(r"[A-Za-z0-9_.]+\Z")
_MARK = Item("mark", size=_UNHASHABLE)
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack, the memo and the steps so far."""

    def __init__(self) -> None:
        self.stack: list[Item] = []
        self.memo: dict[int, Item] = {}
        self.steps: list[Step] = []

    def run(self, name: str, argument: Any) -> None:
        """One operation."""
        stack = self.stack
        if name in _LITERALS:
            stack.append(Item("plain", argument))
        elif name in _CONSTANTS:
            stack.append(Item("plain", _CONSTANTS[name]))
        elif name in _TUPLES:
            self._tuple([self._pop() for _ in range(_TUPLES[name])][::-1])
        elif name == "TUPLE":
            self._tuple(self._to_mark())
        elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"):
            stack.append(Item("container", size=_UNHASHABLE))
        elif name in ("LIST", "DICT", "FROZENSET"):
            items = self._to_mark()
            self._hash({"LIST": [], "DICT": items[::2], "FROZENSET": items}[name])
            stack.append(Item("container", size=_UNHASHABLE))
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
            self._fill(name)
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            place = len(self.memo) if name == "MEMOIZE" else argument
            if place > MAX_OPERATIONS:  # Python would make room for all places below it
                raise UnreadableError("a place in the memo that is out of reach")
            self.memo[place] = self._top()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._import(name, argument)
        elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"):
            self._call(name, argument)
        elif name == "BUILD":
            state, target = self._pop(), self._top()
            self._change(target, (state,))
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "DUP":
            stack.append(self._top())
        elif name == "POP":
            if not stack:
                raise UnreadableError("nothing to take away")
            stack.pop()
        elif name == "POP_MARK":
            self._to_mark()
        elif name == "STOP":
            self._pop()
        elif name not in ("PROTO", "FRAME"):  # persistent ids, extension codes, buffers: not within the pickle
            raise UnreadableError(f"it refers to something outside of it ({name})")

    def _top(self) -> Item:
        if not self.stack or self.stack[-1] is _MARK:
            raise UnreadableError("the stack is empty")
        return self.stack[-1]

    def _pop(self) -> Item:
        self._top()
        return self.stack.pop()

    def _to_mark(self) -> list[Item]:
        items = []
        while self.stack[-1] is not _MARK:
            items.append(self.stack.pop())
        self.stack.pop()
        return items[::-1]

    def _tuple(self, items: list[Item]) -> None:
        size = 1 + sum(item.size for item in items)
        self.stack.append(Item("tuple", tuple(items), size=min(size, _UNHASHABLE)))

    @staticmethod
    def _hash(keys: list[Item]) -> None:
        for key in keys:
            if key.size > MAX_KEY:
                raise UnreadableError("a key that is neither plain nor a short tuple")

    def _fill(self, name: str) -> None:
        if name in ("APPEND", "SETITEM"):
            items = [self._pop() for _ in range(1 + (name == "SETITEM"))][::-1]
        else:
            items = self._to_mark()
        self._hash({"SETITEM": items[::2], "SETITEMS": items[::2], "ADDITEMS": items}.get(name, []))
        target = self._top()
        if target.kind != "container":
            self._change(target, ())

    def _change(self, target: Item, items: tuple[Item, ...]) -> None:
        if target.name is None:
            raise UnreadableError("a state for something that has none")
        self.steps.append(Step("changes", *target.name, items, made=target.kind == "result"))

    def _import(self, name: str, argument: Any) -> Item:
        if name == "STACK_GLOBAL":
            attribute, module = self._pop().value, self._pop().value
        else:
            module, _, attribute = argument.partition(" ")
        if not all(isinstance(text, str) and _NAME.match(text) for text in (module, attribute)):
            raise UnreadableError("an import without a proper name")
        self.steps.append(Step("imports", module, attribute))
        self.stack.append(Item("global", name=(module, attribute)))
        return self.stack[-1]

    def _call(self, name: str, argument: Any) -> None:
        if name == "INST":
            items, target = self._to_mark(), self._import(name, argument)
            self.stack.pop()
        elif name == "OBJ":
            target, *items = self._to_mark()
        else:
            given = [self._pop() for _ in range(1 + (name == "NEWOBJ_EX"))][::-1]
            target = self._pop()
            known = given[0].kind == "tuple" and name != "NEWOBJ_EX"
            items = list(given[0].value) if known else [Item("container", size=_UNHASHABLE)]
        if target.name is None:
            raise UnreadableError("a call of something that has no name")
        module, attribute = target.name
        if target.kind == "result":  # what was made is called in its turn
            attribute += "(…)"
        self.steps.append(Step("calls", module, attribute, tuple(items)))
        self.stack.append(Item("result", name=(module, attribute), size=_UNHASHABLE))
