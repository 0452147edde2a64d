"""YAML for settings: numbers as YAML 1.2 has them, and nothing that a small file could blow up to.

An alias that is used again and again makes a tree of 2^n leaves out of n lines, and one within its own anchor has no
end: what a file says is measured before it is built.
"""

import re
from typing import Any

import yaml

from grpo_rl.errors import ConfigError

MAX_CHARACTERS = 100_000
MAX_VALUES = 10_000
"""Values in a file, those behind aliases counted each time."""
MAX_DEPTH = 50


class _Loader(yaml.SafeLoader):
    """3e-4 is a number, where PyYAML reads a string. Stops at MAX_DEPTH, before PyYAML's time goes with its square."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes a string that `_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?|\.\d)\d*([eE][-+]?\d+)$"), list("-+0123456789.")
    )


def parse_yaml(text: str, source: str) -> Any:
    """What a YAML text says: None, numbers, strings, dates, lists and dicts.

    Args:
        text: One document.
        source: What messages call it.

    Raises:
        ConfigError: It is not valid, too long, too deep or recursive; one line.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{source}: {len(text):,} characters are more than settings take ({MAX_CHARACTERS:,})")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, source)
        return loader.construct_document(node)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{source}: nested deeper than settings are ({MAX_DEPTH})") from None
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        # PyYAML lets through what int() or date() says of a number or date that is none
        message = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"{source}: not valid YAML: {message[:300]}") from None


def dump_yaml(data: Any) -> str:
    """YAML that `parse_yaml` reads back; keys keep their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _measure(root: yaml.Node, source: str) -> None:
    """Raises ConfigError for a tree with too many values, too deep, or within itself."""
    sizes: dict[int, int] = {}
    path: set[int] = set()
    stack: list[tuple[yaml.Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        parts = _parts(node)
        if done:
            path.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
            if sizes[id(node)] > MAX_VALUES:
                raise ConfigError(f"{source}: its aliases (*name) counted in, it holds more than {MAX_VALUES:,} values")
        elif id(node) in path:
            raise ConfigError(f"{source}: an alias (*name) within what it stands for")
        elif id(node) not in sizes:
            path.add(id(node))
            if len(path) > MAX_DEPTH:
                raise ConfigError(f"{source}: nested deeper than settings are ({MAX_DEPTH})")
            stack.append((node, True))
            stack += [(part, False) for part in parts]


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
