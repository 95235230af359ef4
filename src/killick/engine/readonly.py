"""A context as its code sees it: every way to change it in place is refused, and names `run.update`.

A copy of what is read here (`copy`, `deepcopy`, `dataclasses.replace`, `model_copy`, `list(…)`) is plain and can be
changed. Code that bypasses this, by `object.__setattr__` say, changes its own view and never the record.
"""

# Of what comes in here no type is known.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from copy import copy
from functools import lru_cache
from typing import Any, Final

import msgspec

from killick.errors import ContextReadOnly
from killick.model.codec import TYPES_MAX

_CLASS: Final[Any] = object.__dict__["__class__"]
"""The slot that gives an object its class, even if its type overrides `__class__`."""

_CHANGES: Final[dict[type, tuple[str, ...]]] = {
    dict: ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"),
    list: (
        "__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "clear", "extend", "insert", "pop", "remove",
        "reverse", "sort",
    ),
    set: (
        "__iand__", "__ior__", "__isub__", "__ixor__", "add", "clear", "difference_update", "discard",
        "intersection_update", "pop", "remove", "symmetric_difference_update", "update",
    ),
    bytearray: (
        "__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "clear", "extend", "insert", "pop", "remove",
        "reverse",
    ),
}  # fmt: skip

_NEW_SETS: Final = (
    "__and__", "__or__", "__sub__", "__xor__", "copy", "difference", "intersection", "symmetric_difference", "union",
)  # fmt: skip
"""What gives a set of the very type that it is called on, which is to be a plain one here."""


# what is refused ----------------------------------------------------------------------------------


def _refusing(base: type) -> dict[str, Any]:
    return dict.fromkeys(_CHANGES[base], _refuse)


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Where the entry is not known that this is part of, it is the first that would be changed."""
    raise ContextReadOnly(getattr(self, "_of_entry", None) or next(_named(args, kwargs), None))


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    given: Any = args[0] if args else {}
    names: Any = [given] if isinstance(given, str) else given if isinstance(given, dict) else ()
    yield from (name for name in (*kwargs, *names) if isinstance(name, str))


def _containers() -> dict[type, type]:
    """A read-only twin of each builtin that can be changed; the codec, json and msgspec take it for that builtin."""
    made: dict[type, type] = {}
    for base in _CHANGES:

        def reduced(self: Any, protocol: Any, base: Any = base) -> Any:
            return base, (base(self),)

        def told(self: Any, base: Any = base) -> str:
            return repr(base(self))

        own = {"__slots__": ("_of_entry",), "__reduce_ex__": reduced, "__repr__": told, **_refusing(base)}
        if base is set:
            own |= {name: _as_plain(name) for name in _NEW_SETS}
        made[base] = type(f"ReadOnly{base.__name__.capitalize()}", (base,), own)
    return made


def _as_plain(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        return getattr(set(self), name)(*args)

    return call


_CONTAINERS: Final = _containers()
_ReadOnlyDict: Final[Any] = _CONTAINERS[dict]


class Document(_ReadOnlyDict):  # type: ignore[misc]
    """A context without a declared type: a dict whose entries are attributes too."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the context has no {name!r}; set it with run.update({name}=…)") from None

    __setattr__ = __delattr__ = _refuse


@lru_cache(maxsize=TYPES_MAX)
def _twin(declared: Any, entry: str | None) -> Any:
    """A class whose objects are those of a declared one, and refuse to be changed. It passes for the declared one."""

    def refuse(self: Any, name: str, *value: Any) -> None:
        raise ContextReadOnly(entry or name)

    def reduced(self: Any, protocol: Any) -> Any:
        make, args, *rest = super(twin, self).__reduce_ex__(protocol)
        plain = [declared if arg is twin else arg for arg in (make, *args)]
        return plain[0], tuple(plain[1:]), *rest

    own: dict[str, Any] = {
        "__slots__": (),
        "__module__": declared.__module__,
        "__qualname__": declared.__qualname__,
        "__class__": property(lambda self: declared),
        "__setattr__": refuse,
        "__delattr__": refuse,
        "__reduce_ex__": reduced,
    }
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(declared, name):
            own[name] = _plain_copy(declared, name)
    for base in _CHANGES:
        if issubclass(declared, base):
            own |= _refusing(base)
    meta: Any = type(declared)
    if issubclass(declared, msgspec.Struct):
        own |= {"__eq__": _same_struct(declared), "__hash__": declared.__hash__}
        del own["__slots__"]
        twin: Any = meta(declared.__name__, (declared,), own, frozen=False)
    else:
        # Not by its metaclass, which for a pydantic model would work out its schema again.
        twin = type.__new__(meta, declared.__name__, (declared,), own)
    return twin


def _plain_copy(declared: Any, name: str) -> Callable[..., Any]:
    def copied(self: Any, *memo: Any) -> Any:
        made = getattr(declared, name)(self, *memo)
        if type(made) is type(self):
            _CLASS.__set__(made, declared)
        return made

    return copied


def _same_struct(declared: Any) -> Callable[[Any, Any], bool]:
    """msgspec compares Structs of one type only."""

    def same(self: Any, other: Any) -> bool:
        names = declared.__struct_fields__
        return other.__class__ is declared and all(getattr(self, name) == getattr(other, name) for name in names)

    return same


# making a value so --------------------------------------------------------------------------------


def document(entries: dict[str, Any]) -> Document:
    """A context without a declared type, read-only throughout."""
    return Document({name: read_only(value, name) for name, value in entries.items()})


def read_only(value: Any, entry: str | None = None) -> Any:
    """A twin of a value that is read-only throughout; `entry` is the entry of the context that it is part of."""
    kind: Any = type(value)
    if kind in _CONTAINERS:
        if kind is dict:
            items: Any = {key: read_only(item, _below(entry, key)) for key, item in value.items()}
        else:
            items = value if kind is bytearray else [read_only(item, entry) for item in value]
        made = _CONTAINERS[kind](items)
        made._of_entry = entry
        return made
    if isinstance(value, tuple | frozenset):
        parts = [read_only(item, entry) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    if isinstance(value, msgspec.Struct):
        return _object(value, kind.__struct_fields__, msgspec.structs.force_setattr, entry)
    if dataclasses.is_dataclass(kind):
        return _object(value, [field.name for field in dataclasses.fields(kind)], object.__setattr__, entry)
    if hasattr(kind, "__pydantic_root_model__"):
        made = _object(value, list(value.__dict__), object.__setattr__, entry)
        if made.__pydantic_extra__ is not None:
            object.__setattr__(made, "__pydantic_extra__", read_only(made.__pydantic_extra__, entry))
        return made
    return _container(value, entry) if isinstance(value, tuple(_CONTAINERS)) else value


def _below(entry: str | None, key: Any) -> str | None:
    """What is in the document itself is an entry of it; all that is in an entry is part of that."""
    return entry if entry is not None or not isinstance(key, str) else key


def _object(value: Any, names: Any, put: Callable[[Any, str, Any], None], entry: str | None) -> Any:
    """A copy, since a default that was declared may be shared by all that have it."""
    declared: Any = type(value)
    made = copy(value)
    for name in names:
        if hasattr(made, name):
            put(made, name, read_only(getattr(made, name), entry or name))
    _CLASS.__set__(made, _twin(declared, entry))
    return made


def _container(value: Any, entry: str | None) -> Any:
    """An object of a user's subclass of a builtin; one that cannot change its class becomes that builtin."""
    base = next(base for base in _CONTAINERS if isinstance(value, base))
    made = copy(value)
    if base is dict:
        for key, item in dict.items(made):
            dict.__setitem__(made, key, read_only(item, _below(entry, key)))
    elif base is list:
        list.__setitem__(made, slice(None), [read_only(item, entry) for item in list.__iter__(made)])
    try:
        _CLASS.__set__(made, _twin(made.__class__, entry))
    except TypeError:
        return read_only(base(made), entry)
    return made
