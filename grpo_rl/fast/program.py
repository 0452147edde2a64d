"""A function of tensors, traced once and run by numpy from then on.

Small networks on a CPU spend their time in torch's dispatcher and autograd engine, not in arithmetic: an operator costs
it microseconds, numpy a third of one. `trace` records which operators a function runs, its backward pass included, and
writes them down again as a straight line of numpy calls. The function stays the only place where the mathematics is.

What the tensors that the function closes over hold (parameters, statistics) is read anew at each call: the program
works on their memory. Python values (settings) are those of the tracing.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch as th
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from grpo_rl.fast import ops


class Untraceable(Exception):
    """Why there is no program for a function."""


def trace(
    function: Callable[..., Sequence[th.Tensor]],
    inputs: Sequence[th.Tensor],
    shorter: Sequence[th.Tensor] | None = None,
) -> Callable[..., list[Any]]:
    """The numpy form of `function(*inputs) -> tensors`: it takes arrays like `inputs`, and gives arrays.

    With `shorter`, the same inputs with fewer rows, some or all of them, the program takes any number of rows: what
    differs between the two tracings is what depends on it.

    Raises:
        Untraceable: The function asks for a tensor's value, writes to what it closes over, or is not for numpy.
    """
    recorded = _record(function, inputs)
    other = recorded if shorter is None else _record(function, shorter)
    try:
        return _Translation(recorded, other).function()
    except Untraceable:
        raise
    except Exception as error:  # an operator used in a way that is not foreseen here
        raise Untraceable(f"{type(error).__name__}: {error}") from error


def _record(function: Callable[..., Sequence[th.Tensor]], inputs: Sequence[th.Tensor]) -> dict[fx.Node, Any]:
    """The operators that `function` runs, in their order, and what each gave."""
    with _no_validation(), _OneHot(), th.random.fork_rng(devices=[]):
        try:
            graph = make_fx(function)(*inputs)
            graph.graph.eliminate_dead_code()
            samples = _Samples(graph)
            samples.run(*inputs)
        except Exception as error:  # whatever a function may raise whose tensors have no values to ask for, or no names
            raise Untraceable(f"{type(error).__name__}: {error}") from error
    return samples.values


@contextlib.contextmanager
def untouched(module: th.nn.Module) -> Iterator[None]:
    """Leaves the buffers of `module` as they were: running statistics must not count what is done to compare."""
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)


@contextlib.contextmanager
def _no_validation() -> Iterator[None]:
    """Distributions ask whether their parameters are valid; a tensor that is being traced cannot say."""
    before = th.distributions.Distribution._validate_args
    th.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        th.distributions.Distribution.set_default_validate_args(before)


class _OneHot(TorchFunctionMode):
    """`one_hot` without a look at the values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(("tensor", "num_classes"), args, strict=False)), **(kwargs or {})}
        if function is not functional.one_hot or given.get("num_classes", -1) < 0:
            return function(*args, **(kwargs or {}))
        tensor, classes = given["tensor"], given["num_classes"]
        return (tensor.unsqueeze(-1) == th.arange(classes, device=tensor.device)).long()


class _Samples(fx.Interpreter):
    """What each node of a graph gave for the inputs of the tracing."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        value = self.values[node] = super().run_node(node)
        return value


@dataclass(frozen=True)
class _Rows:
    """`times` the number of rows `plus` so many: a number that is known when the program runs."""

    times: int
    plus: int


class _Kind(NamedTuple):
    """What torch says of a tensor. `shape` has `_Rows` where it depends on the number of rows."""

    shape: tuple[Any, ...]
    dtype: Any


class _Array(NamedTuple):
    """A value of the program: an array that is known now (`known`, `fixed` if it stays so), or a node of the program.

    `shape` is what the function says; the array itself may still have to be broadcast to it (`broadcast`).
    """

    node: fx.Node | None
    known: Any
    fixed: bool
    shape: tuple[Any, ...]
    dtype: Any
    broadcast: bool = False


class _Translation:
    """From two tracings of torch's operators, alike but for the number of rows, to one graph of numpy calls."""

    def __init__(self, samples: dict[fx.Node, Any], others: dict[fx.Node, Any]) -> None:
        self.samples, self.others = samples, others
        self.root = th.nn.Module()
        self.graph = fx.Graph()
        self.arrays: dict[fx.Node, Any] = {}
        self.embedded: dict[int, tuple[fx.Node, Any]] = {}  # by id, which is an array's own as long as it lives
        self.seen: dict[Any, _Array] = {}
        self.transposed: dict[Any, _Array] = {}
        self.rows: tuple[int, int] = (0, 0)
        if len(samples) != len(others):
            raise Untraceable("other operators for another number of rows")
        self.twins = dict(zip(samples, others, strict=True))
        for node in samples:
            if node.op == "placeholder":
                self.arrays[node] = self._placeholder(node)
            elif node.op == "get_attr":
                known = samples[node].detach().numpy()
                self.arrays[node] = _Array(None, known, False, known.shape, known.dtype)
            elif node.op == "output":
                results: Any = node.args[0]
                self.graph.output([self._node(self._full(self.arrays[result])) for result in results])
            else:
                self.arrays[node] = self._call(node)

    def function(self) -> Callable[..., list[Any]]:
        """What the graph says, as a Python function."""
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.root, self.graph).forward

    def _placeholder(self, node: fx.Node) -> _Array:
        made = self.graph.placeholder(node.name)
        here, there = self.samples[node], self.others[self.twins[node]]
        if here.shape != there.shape and not self.rows[0]:
            self.rows = len(here), len(there)
            self.first = made
        return _Array(made, None, False, *self._kind(node))

    # --- one operator -------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        op: Any = node.target
        other: Any = self.twins[node].target
        if op in ops.NEVER:
            raise Untraceable(f"{op} is torch's")
        if op is not other:
            raise Untraceable("other operators for another number of rows")
        args = self._merged(node.args, self.twins[node].args)
        kwargs = self._merged(node.kwargs, self.twins[node].kwargs)
        kind = self._kind(node)
        if op is operator.getitem:
            return self._emit(op, args, kwargs, kind)
        random = th.Tag.nondeterministic_seeded in op.tags
        given = [value for value in _flat([args, kwargs]) if isinstance(value, _Array | _Rows)]
        steady = all(isinstance(value, _Array) and value.fixed for value in given)
        if kind is not None and (op in ops.FILLING or (steady and not random)):
            known = self._known(node, kind)
            if known is not None:
                return known
        written = [number for number, writes in enumerate(ops.writes(op)) if writes]
        if written and (written != [0] or (args[0].node is None and not args[0].fixed)):
            raise Untraceable(f"{op} writes to a tensor from outside")
        op = _functional(op) if written else op
        result = self._translate(op, args, kwargs, kind, random)
        if written:  # from here on, the tensor that was written to is the result
            self.arrays[node.args[0]] = result  # type: ignore[index]
        return result

    def _translate(self, op: Any, args: Any, kwargs: Any, kind: Any, random: bool) -> Any:
        if op in ops.SAME:
            return args[0]
        if op is th.ops.aten._to_copy.default:
            return self._cast(args[0], kind.dtype, booleans=True)
        if op is th.ops.aten.expand.default:
            return args[0]._replace(shape=kind.shape, broadcast=True)
        if op is th.ops.aten.t.default and args[0].node in self.transposed:
            return self.transposed[args[0].node]
        if op in ops.RESHAPING:
            return self._emit(ops.reshape, (self._full(args[0]), kind.shape), {}, kind)
        if kwargs.get("alpha", 1) == 1:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("alpha", "dtype")}
            if op in ops.ELEMENTWISE or op in ops.COMPARING:
                return self._elementwise(op, args, kwargs, kind)
            if op in ops.WHOLE:
                reckoned = np.dtype(np.int64) if args[0].dtype == np.bool_ else args[0].dtype
                result = self._emit(ops.WHOLE[op], _map(args, self._full), kwargs, kind._replace(dtype=reckoned))
                if op is th.ops.aten.t.default and result.node is not None:
                    self.transposed[result.node] = args[0]
                return self._cast(result, kind.dtype, booleans=True)
        return self._emit(ops.by_torch(op), _map(args, self._full), _map(kwargs, self._full), kind, unique=random)

    def _elementwise(self, op: Any, args: Any, kwargs: Any, kind: _Kind) -> _Array:
        if (same := _trivial(op, args)) is not None:
            return same._replace(shape=kind.shape, broadcast=same.broadcast or same.shape != kind.shape)
        arrays = [value for value in args if isinstance(value, _Array)]
        dtype = np.result_type(*(a.dtype for a in arrays)) if op in ops.COMPARING else kind.dtype
        args = tuple(self._cast(value, dtype) if isinstance(value, _Array) else value for value in args)
        function = ops.COMPARING.get(op) or ops.ELEMENTWISE[op]
        whole = any(not a.broadcast and a.shape == kind.shape for a in arrays)
        return self._emit(function, args, kwargs, kind, broadcast=not whole)

    # --- the two tracings ---------------------------------------------------------------------------------------------

    def _merged(self, here: Any, there: Any) -> Any:
        """One form of what both tracings have in a place: arrays for nodes, `_Rows` for what counts rows."""
        if isinstance(here, fx.Node):
            if self.twins[here] is not there:
                raise Untraceable("other operators for another number of rows")
            return self.arrays[here]
        if isinstance(here, dict):
            return {name: self._merged(value, there[name]) for name, value in here.items()}
        if isinstance(here, list | tuple) and len(here) == len(there):
            return tuple(self._merged(a, b) for a, b in zip(here, there, strict=True))
        if here == there:
            return here
        rows, fewer = self.rows
        if rows == fewer or not all(isinstance(value, int | float) and value == int(value) for value in (here, there)):
            raise Untraceable(f"{here} for {rows} rows, {there} for {fewer}")
        times, rest = divmod(int(here - there), rows - fewer)
        if rest:
            raise Untraceable(f"{here} for {rows} rows, {there} for {fewer}")
        return _Rows(times, int(here) - times * rows)

    def _kind(self, node: fx.Node) -> Any:
        """Shape and dtype; None for several tensors, which are only picked from."""
        here, there = self.samples[node], self.others[self.twins[node]]
        if not isinstance(here, th.Tensor):
            return None
        return _Kind(self._merged(tuple(here.shape), tuple(there.shape)), _numpy_dtype(here))

    def _known(self, node: fx.Node, kind: _Kind) -> _Array | None:
        """What is the same at every call: an array, or one number all over an array; None where that is not so."""
        here, there = (
            sample.detach().clone().numpy() for sample in (self.samples[node], self.others[self.twins[node]])
        )
        if here.shape == there.shape and np.array_equal(here, there):
            return _Array(None, here, True, here.shape, here.dtype)
        if here.size and there.size and (here == here.flat[0]).all() and (there == here.flat[0]).all():
            return _Array(None, np.array(here.flat[0]), True, kind.shape, here.dtype, broadcast=True)
        return None

    # --- arrays -------------------------------------------------------------------------------------------------------

    def _emit(
        self, function: Any, args: Any, kwargs: Any, kind: Any, broadcast: bool = False, unique: bool = False
    ) -> Any:
        """The result of a numpy call: now, where it is a view of memory that is known; else a node of the program."""
        values = [value for value in _flat([args, kwargs]) if isinstance(value, _Array | _Rows)]
        if len(values) == 1 and function in ops.VIEWS and isinstance(values[0], _Array) and values[0].node is None:
            known = function(*_map(args, lambda value: value.known))
            if np.shares_memory(known, values[0].known):
                return _Array(None, known, values[0].fixed, known.shape, known.dtype)
        args, kwargs = _map(args, self._node), _map(kwargs, self._node)
        key = (function, _hashable(args), _hashable(kwargs))
        if unique or key not in self.seen:
            node = self.graph.call_function(function, args, kwargs)
            shape, dtype = kind or ((), None)
            self.seen[key] = _Array(node, None, False, shape, dtype, broadcast)
        return self.seen[key]

    def _node(self, value: Any) -> fx.Node:
        if isinstance(value, _Rows):
            return self._emit(
                _rows, (_Array(self.first, None, False, (), None), value.times, value.plus), {}, None
            ).node
        if value.node is not None:
            return value.node
        known = value.known
        if id(known) not in self.embedded:
            name = f"array{len(self.embedded)}"
            setattr(self.root, name, known[()] if value.fixed and known.ndim == 0 else known)
            self.embedded[id(known)] = self.graph.get_attr(name), known
        return self.embedded[id(known)][0]

    def _cast(self, value: _Array, dtype: Any, booleans: bool = False) -> _Array:
        """The array in another type; numpy reckons with booleans as they are."""
        if value.dtype == dtype or (value.dtype == np.bool_ and not booleans):
            return value
        if value.fixed:
            return value._replace(known=value.known.astype(dtype), dtype=dtype)
        return self._emit(_caster(dtype), (value,), {}, _Kind(value.shape, dtype), value.broadcast)

    def _full(self, value: Any) -> Any:
        """The array in its own shape."""
        if not isinstance(value, _Array) or not value.broadcast:
            return value
        if value.node is None and not any(isinstance(size, _Rows) for size in value.shape):
            known = np.broadcast_to(value.known, value.shape)
            return value._replace(known=np.array(known) if value.fixed else known, broadcast=False)
        return self._emit(_broadcast, (value, value.shape), {}, _Kind(value.shape, value.dtype))


# --- what the program calls, and what the translation asks ------------------------------------------------------------
@functools.cache
def _caster(dtype: Any) -> Callable[[Any], Any]:
    def cast(x: Any) -> Any:
        return x.astype(dtype)

    return cast


def _rows(x: Any, times: int, plus: int) -> int:
    return times * len(x) + plus


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    whole = np.empty(shape, x.dtype)
    whole[...] = x
    return whole


def _trivial(op: Any, args: Any) -> _Array | None:
    """The operand that is the result already: of x · 1, x ** 1, and a choice that is always the same."""
    aten = th.ops.aten
    if op is aten.where.self and args[0].fixed and (args[0].known.all() or not args[0].known.any()):
        chosen = args[1] if args[0].known.all() else args[2]
        return chosen if chosen.dtype == np.result_type(args[1].dtype, args[2].dtype) else None
    if op is aten.pow.Tensor_Scalar and args[1] == 1:
        return args[0]
    if op in (aten.mul.Tensor, aten.mul.Scalar):
        for one, other in (args, args[::-1]):
            if isinstance(other, _Array) and _is_one(one, other.dtype):
                return other
    return None


def _is_one(value: Any, dtype: Any) -> bool:
    if isinstance(value, _Array):
        return value.fixed and value.dtype == dtype and bool((value.known == 1).all())
    return isinstance(value, int | float) and value == 1


def _functional(op: Any) -> Any:
    """The operator that gives what an in-place one writes."""
    packet, overload = op._schema.name.split("::")[1].removesuffix("_"), op._overloadname
    found = getattr(getattr(th.ops.aten, packet, None), overload, None)
    return op if found is None else found


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(tree, _Array | _Rows):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _map(value, function) for name, value in tree.items()}
    return type(tree)(_map(value, function) for value in tree) if isinstance(tree, list | tuple) else tree


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple) and not isinstance(tree, _Array):
        for value in tree:
            yield from _flat(value)
    else:
        yield tree


def _hashable(tree: Any) -> Any:
    if isinstance(tree, dict):
        tree = tuple(sorted(tree.items()))
    return tuple(map(_hashable, tree)) if isinstance(tree, list | tuple) else (type(tree), tree)


def _numpy_dtype(tensor: th.Tensor) -> Any:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))
