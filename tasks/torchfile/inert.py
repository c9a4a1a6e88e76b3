"""Stand-ins for everything that a checkpoint names and this tool must not run.

A global becomes a class of its own, made here; nothing is imported and nothing named in a file is called. An object of
such a global remembers how it was made (``args``), what was put into it (``list_items``, ``dict_items``) and its
``state``, so it can be read, and written back as it came.

>>> namespace = inert_global("argparse", "Namespace")
>>> cfg = namespace.__new__(namespace)
>>> cfg.__setstate__({"lr": 0.1})
>>> global_name(cfg), cfg.state, is_instance_of(cfg, "argparse.Namespace")
('argparse.Namespace', {'lr': 0.1}, True)
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Self

NO_STATE = Ellipsis
"""What ``state`` is where nothing was set; ``None`` is a state that a file can give, ``Ellipsis`` is not."""

NEW = "new"
"""Made by the class itself, without ``__init__``."""
NEW_WITH_KEYWORDS = "new-with-keywords"
CALLED = "called"
"""Made by calling the global, or the inert object in ``function``, with ``args``."""


class InertType(type):
    """The class of stand-in classes; calling one makes a remembered call, or what ``builder`` gives for it."""

    global_module: str
    global_qualname: str
    builder: Callable[[InertType, tuple[object, ...]], object] | None

    def __call__(cls, *args: object) -> Any:
        if cls.builder is not None:
            return cls.builder(cls, args)
        return make_call(cls, args)

    def __repr__(cls) -> str:
        return f"<global {cls.global_module}.{cls.global_qualname}>"

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls!r} is named by a file and cannot be changed: {name}")


class Inert:
    """An object of a global that is not built. Compared by identity."""

    __slots__ = ("args", "dict_items", "function", "keywords", "list_items", "made_by", "state")

    made_by: str
    function: object
    "the global or the inert object that was called; None unless called"
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    state: Any
    list_items: list[Any]
    dict_items: list[tuple[Any, Any]]

    def __new__(cls, *args: object, **keywords: object) -> Self:
        made = object.__new__(cls)
        made.made_by = NEW_WITH_KEYWORDS if keywords else NEW
        made.function = None
        made.args = args
        made.keywords = keywords
        made.state = NO_STATE
        made.list_items = []
        made.dict_items = []
        return made

    def __call__(self, *args: object) -> Inert:
        return make_call(self, args)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        self.dict_items.append((key, value))

    def append(self, item: object) -> None:
        self.list_items.append(item)

    def extend(self, items: Iterable[object]) -> None:
        self.list_items.extend(items)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (
            type(self),
            self.made_by,
            self.function,
            self.args,
            self.keywords,
            self.state,
            self.list_items,
            self.dict_items,
        )

    def __repr__(self) -> str:
        return f"<{global_name(self)} object>"


class InertCall(Inert):
    """What an inert object gave when it was called; it has no global of its own."""

    __slots__ = ()


def make_call(function: object, args: tuple[object, ...]) -> Inert:
    """Make the object that stands for ``function(*args)``."""
    cls: Any = function if isinstance(function, InertType) else InertCall
    made: Inert = Inert.__new__(cls, *args)
    made.made_by = CALLED
    made.function = function
    return made


def inert_global(
    module: str, name: str, builder: Callable[[InertType, tuple[object, ...]], object] | None = None
) -> InertType:
    """Make the stand-in class of a global; ``builder(cls, args)`` may answer calls of it with a value.

    Not cached: the caller keeps one per name. Two classes of one name are written as one global.
    """
    called = None if builder is None else staticmethod(builder)
    names = {"__slots__": (), "global_module": module, "global_qualname": name, "builder": called}
    return InertType("Inert", (Inert,), names)


def global_name(value: object) -> str | None:
    """Give "module.name" of a stand-in class, or of the class of an inert object; None for all else."""
    cls: object = value if isinstance(value, InertType) else type(value)
    if isinstance(cls, InertType):
        return f"{cls.global_module}.{cls.global_qualname}"
    return None


def is_instance_of(value: object, name: str) -> bool:
    """Tell whether a value is an inert object (not the class itself) of the global ``"module.name"``."""
    return not isinstance(value, InertType) and global_name(value) == name


def _restore(
    cls: type[Inert],
    made_by: str,
    function: object,
    args: tuple[object, ...],
    keywords: dict[str, object],
    state: object,
    list_items: list[object],
    dict_items: list[tuple[object, object]],
) -> Inert:
    made: Inert = Inert.__new__(cls, *args, **keywords)
    made.made_by, made.function, made.state = made_by, function, state
    made.list_items, made.dict_items = list_items, dict_items
    return made


def _reduce_type(cls: InertType) -> tuple[Callable[..., InertType], tuple[Any, ...]]:
    # A builder that is bound to one load cannot go with it, and has no more to do.
    builder = cls.builder if isinstance(cls.builder, FunctionType) else None
    return inert_global, (cls.global_module, cls.global_qualname, builder)


# Lets inert objects cross a process boundary with the plain pickle module.
copyreg.pickle(InertType, _reduce_type)
