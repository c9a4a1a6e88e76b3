"""Reads and edits the configuration objects of a checkpoint without the classes that made them.

`cfg` is a plain dict, an `argparse.Namespace` or an omegaconf DictConfig, nested in any way, in lists too; `args` of
older files is a Namespace. All of them are walked as mappings. omegaconf keeps a node's children in `_content` and a
leaf's value in `_val` (omegaconf 2.0 to 2.4); a leaf of a union type has the real leaf in its `_content`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from tasks.torchfile.inert import Inert

Leaf = str | int | float | bool | None
Setter = Callable[[Leaf], None]


def children(node: object) -> MutableMapping[Any, Any] | None:
    """Return a node's children by name, or None for a leaf. The mapping is the node's own: edits reach the file."""
    if isinstance(node, dict):
        return node
    if not isinstance(node, Inert) or not isinstance(node.state, dict):
        return None
    content = node.state.get("_content", node.state if "_val" not in node.state else None)
    return content if isinstance(content, dict) else None


def _elements(node: object) -> Sequence[object]:
    """Return what a list holds, or nothing."""
    if isinstance(node, Inert) and isinstance(node.state, dict):
        node = node.state.get("_content")
    return node if isinstance(node, list | tuple) else ()


def _unwrapped(node: object) -> object:
    """Return the leaf in a leaf of a union type, else the node itself."""
    if isinstance(node, Inert) and isinstance(node.state, dict) and "_val" not in node.state:
        content = node.state.get("_content")
        return content if isinstance(content, Inert) else node
    return node


def value(node: object) -> Leaf:
    """Return a leaf's value; None for what is not a plain value."""
    node = _unwrapped(node)
    if isinstance(node, Inert) and isinstance(node.state, dict):
        node = node.state.get("_val")
    return node if isinstance(node, str | int | float | bool) else None


def get(node: object, *path: str) -> Leaf:
    """Return the value at a path of names, or None where there is none."""
    for name in path:
        below = children(node)
        if below is None or name not in below:
            return None
        node = below[name]
    return value(node)


def leaves(node: object) -> Iterator[tuple[str, Leaf, Setter]]:
    """Yield (name, value, setter) of every leaf below a node that has a name; lists are walked, their leaves have none.

    Cost is linear in what there is, however often it is shared.
    """
    seen: set[int] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        below = children(node)
        inside = _elements(node) if below is None else below
        if id(inside) in seen:
            continue
        seen.add(id(inside))
        if below is None:
            stack += inside
            continue
        for name, child in below.items():
            if children(child) is not None or _elements(child):
                stack.append(child)
            elif isinstance(name, str):
                yield name, value(child), _setter(below, name, _unwrapped(child))


def _setter(parent: MutableMapping[Any, Any], name: str, child: object) -> Setter:
    def put(new: Leaf) -> None:
        if isinstance(child, Inert) and isinstance(child.state, dict) and "_val" in child.state:
            child.state["_val"] = new
        else:
            parent[name] = new

    return put
