"""Converts Python objects to plain JSON and back. No pickle, no Python paths, no clock.

`chunks` splits large values. An object with one key that starts with "$" is a tag:

    $map        [[key, value], …]    a dict with a non-string key, or with a key that starts with "$"
    $tuple      […]                  also a namedtuple
    $set        […]                  sorted by the elements' canonical text; so is $frozenset
    $bytes      base64               so is $bytearray
    $str        base64 of UTF-16-LE  a string with lone surrogates, which JSON cannot hold
    $int        hex digits           an int beyond 64 bits
    $float      nan, inf, -inf
    $decimal, $uuid, $date           as Python writes them
    $time, $datetime                 ISO 8601, then [Europe/Berlin] for a ZoneInfo and [_fold=1] for a fold
    $timedelta  microseconds
    $secret     hex digits           the keyed digest of a Secret, never its value
    $erased     hex digits           the hash of a part that was erased before this was stored

Enums are stored as their value; dataclasses and pydantic models as an object of their fields by name; msgspec Structs
as msgspec writes them.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from hashlib import blake2b, sha256
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias
from uuid import UUID
from weakref import WeakSet
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from killick.errors import ValueErased, ValueRefused

DEPTH_MAX: Final = 200
"""The maximum nesting depth of containers."""

PATH_CHARS_MAX: Final = 160

TYPES_MAX: Final = 4096
"""The number of types whose conversion a process caches. Later types are resolved on each use."""

Plain: TypeAlias = "bool | int | float | str | bytes | list[Plain] | dict[str, Plain] | None"
"""JSON as Python objects. Bytes occur only directly inside a tag, and are written in base64."""


class Secret:
    """A value that the log must not contain: only a keyed digest is recorded. A Secret from the log has no value.

    value  the value; `reveal` returns it
    """

    __slots__ = ("__weakref__", "_value", "digest")

    def __init__(self, value: object) -> None:
        self._value = value
        self.digest: bytes | None = None

    @classmethod
    def recorded(cls, digest: bytes) -> Secret:
        """Returns the Secret as the log stores it."""
        secret = cls(None)
        secret.digest = digest
        return secret

    def reveal(self) -> Any:
        """Returns the value. Raises ValueErased if only its digest is recorded."""
        if self.digest is not None:
            raise ValueErased(self.digest)
        _REVEALED.add(self)
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls)


_REVEALED: Final[WeakSet[Secret]] = WeakSet()
_HIDDEN_CHARS_MIN: Final = 6
"""Shorter texts occur by chance, and hiding them would garble every other text."""


def without_revealed(text: str) -> str:
    """Returns a text in which every Secret that code has revealed, and still holds, is hidden."""
    for secret in list(_REVEALED):
        value = secret.reveal()
        if isinstance(value, str) and len(value) >= _HIDDEN_CHARS_MIN and value in text:
            text = text.replace(value, repr(secret))
    return text


class Erased(msgspec.Struct, frozen=True):
    """Replaces a stored part that was erased on purpose."""

    hash: bytes

    def __str__(self) -> str:
        return "(erased)"


class Damaged(Erased, frozen=True):
    """Replaces, for readers, the values of an event that are damaged on the disk. Never stored."""

    def __str__(self) -> str:
        return "(damaged)"


def plain(obj: object, *, at: str = "value", secret_key: bytes | None = None, canonically: bool = False) -> Plain:
    """Returns the object as plain JSON in new containers. Raises `ValueRefused`, with the path."""
    try:
        return _LOWER[type(obj)](obj, 0, _How(secret_key, canonically))
    except _Refusal as refusal:
        raise refusal.named(at, obj) from None
    except RecursionError:
        raise ValueRefused(shortened(at), "is nested too deeply; flatten it") from None


def canonical(obj: object, *, at: str = "value", secret_key: bytes | None = None) -> bytes:
    """Returns canonical bytes: equal for equal values, independent of key order, process and version."""
    if (flat := flat_value(obj) if type(obj) in _FLAT else flat_json(obj)) is not None:
        return flat
    tree = plain(obj, at=at, secret_key=secret_key, canonically=True)
    try:
        return _text(tree).encode()
    except RecursionError:
        raise ValueRefused(shortened(at), "is nested too deeply; flatten it") from None


_FLAT: Final = frozenset({str, int, bool, type(None)})
_FLAT_BYTES_MAX: Final = 1024
_LONG: Final = 2**63
_in_order: Final = msgspec.json.Encoder(order="deterministic").encode


def flat_json(obj: Any) -> bytes | None:
    """Returns the canonical bytes of a small dict of short plain values, as most arguments are; else None.

    They are its stored form too. Only where both encoders must agree: ASCII without escapes, no floats, and no text
    that could be a tag.
    """
    if obj.__class__ is not dict:
        return None
    for name, value in obj.items():
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind not in _FLAT or (kind is int and not -_LONG <= value < _LONG) or type(name) is not str:
            return None
    try:
        raw = _in_order(obj)
    except (TypeError, ValueError, UnicodeError, OverflowError):
        return None
    # `in` on bytes raises and clears an error each time, because it first takes its operand for an int.
    marked = raw.find(b"\\") >= 0 or raw.find(b'"$') >= 0 or raw.find(b"\x7f") >= 0
    return None if marked or len(raw) > _FLAT_BYTES_MAX or not raw.isascii() else raw


def flat_value(value: Any) -> bytes | None:
    """Returns the stored form of a short scalar that decodes to itself; None for any other value."""
    if value.__class__ is int:
        return b"%d" % value if -_LONG <= value < _LONG else None
    raw = flat_json({"": value})
    return None if raw is None or len(raw) > _FLAT_BYTES_MAX // 2 else raw[4:-1]


class DigestKey(bytes):
    """The key of secrets in an encrypted store, which keys every digest too, so that none confirms a guess."""

    store_wide: bytes
    """The key for what is compared between unrelated runs."""

    @classmethod
    def of(cls, key: bytes, store_wide: bytes | None = None) -> DigestKey:
        made = cls(key)
        made.store_wide = made if store_wide is None else store_wide
        return made


def digest(obj: object, *, at: str = "value", secret_key: bytes | None = None) -> bytes:
    """Returns the SHA-256 of the canonical bytes; keyed, in an encrypted store."""
    return digest_of(canonical(obj, at=at, secret_key=secret_key), secret_key)


def digest_of(body: bytes, secret_key: bytes | None) -> bytes:
    """Returns the digest of canonical bytes."""
    if type(secret_key) is DigestKey:
        return blake2b(body, digest_size=32, key=secret_key).digest()
    return sha256(body).digest()


def restore(tag: str, payload: Any) -> Any:
    """Decodes a tag from its restored payload. Bad data raises ValueError or a similar error."""
    if tag not in _RESTORE:
        raise ValueError(f"tag {tag} is not known to this build of Killick")
    kind, build = _RESTORE[tag]
    if not isinstance(payload, kind):
        raise ValueError(f"tag {tag} cannot hold a {type(payload).__name__}")
    return build(payload)


# From Python to plain JSON, one function a type. A refusal collects its path on the way up.


class _How(NamedTuple):
    secret_key: bytes | None
    canonically: bool


_Lower: TypeAlias = Callable[[Any, int, _How], Plain]

_TOO_DEEP: Final = f"is nested deeper than {DEPTH_MAX} levels; flatten it"


class _Refusal(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.way: list[tuple[str, object]] = []
        """The steps of the path, from the inside out, each with the object that it leads to."""

    def named(self, at: str, root: object) -> ValueRefused:
        path, reason, seen = "", self.reason, set[int]()
        for step, obj in [(at, root), *reversed(self.way)]:
            path += step
            if id(obj) in seen and reason is _TOO_DEEP:
                reason = "refers to itself; store an id in place of the reference"
                break
            seen.add(id(obj))
        return ValueRefused(shortened(path), reason)


def _base64(body: bytes) -> str:
    return b64encode(body).decode()


# The standard library writes it, so that no dependency's version can change a digest.
_text = json.JSONEncoder(sort_keys=True, allow_nan=False, separators=(",", ":"), default=_base64).encode


def _same(obj: Any, depth: int, how: _How) -> Any:
    return obj


def _int(obj: int, depth: int, how: _How) -> Plain:
    # Hex, because Python limits the number of decimal digits that it parses.
    return obj if -(2**63) <= obj < 2**63 else {"$int": format(obj, "x")}


def _float(obj: float, depth: int, how: _How) -> Plain:
    return obj if math.isfinite(obj) else {"$float": repr(obj)}


def _str(obj: str, depth: int, how: _How) -> Plain:
    if not obj.isascii():
        try:
            obj.encode()
        except UnicodeEncodeError:
            return {"$str": obj.encode("utf-16-le", "surrogatepass")}
    return obj


def _moment(tag: str, iso: Callable[[Any], str]) -> _Lower:
    def lower(obj: time | datetime, depth: int, how: _How) -> Plain:
        text, zone = iso(obj), obj.tzinfo
        if isinstance(zone, ZoneInfo) and zone.key:
            # A zone's offset is not part of the value: governments change it, and a digest must not follow.
            text = f"{iso(obj.replace(tzinfo=None)) if how.canonically else text}[{zone.key}]"
        elif zone is not None and obj.utcoffset() is None:
            raise _Refusal("has a time zone without an offset; use zoneinfo.ZoneInfo or datetime.timezone")
        return {tag: text + "[_fold=1]" if obj.fold else text}

    return lower


def _secret(obj: Secret, depth: int, how: _How) -> Plain:
    if obj.digest is not None:
        return {"$secret": obj.digest.hex()}
    if how.secret_key is None:
        raise _Refusal("cannot store a Secret here; pass it as an argument of a tool")
    value = obj.reveal()
    body = _text(_LOWER[type(value)](value, depth, how._replace(canonically=True))).encode()
    return {"$secret": hmac.digest(how.secret_key, body, "sha256").hex()}


def _list(obj: Iterable[Any], depth: int, how: _How) -> list[Plain]:
    if depth >= DEPTH_MAX:
        raise _Refusal(_TOO_DEEP)
    out: list[Plain] = []
    item = None
    try:
        for item in obj:
            out.append(_LOWER[type(item)](item, depth + 1, how))
    except _Refusal as refusal:
        refusal.way.append((f"[{len(out)}]", item))
        raise
    return out


def _set(tag: str) -> _Lower:
    def lower(obj: Iterable[Any], depth: int, how: _How) -> Plain:
        items = _list(obj, depth, how)
        by_text = {_text(item): item for item in items}
        if len(by_text) < len(items):
            raise _Refusal("has two elements that would be stored alike; keep one of them")
        return {tag: [by_text[text] for text in sorted(by_text)]}

    return lower


def _dict(obj: dict[Any, Any], depth: int, how: _How) -> Plain:
    if depth >= DEPTH_MAX:
        raise _Refusal(_TOO_DEEP)
    for key in obj:
        if type(key) is not str or key[:1] == "$" or not key.isascii():
            return _map(obj, depth, how)
    out: dict[str, Plain] = {}
    key = item = None
    try:
        for key, item in obj.items():
            out[key] = _LOWER[type(item)](item, depth + 1, how)
    except _Refusal as refusal:
        refusal.way.append((step_of(key), item))
        raise
    return out


def _map(obj: dict[Any, Any], depth: int, how: _How) -> Plain:
    """Encodes a dict whose keys need tags."""
    pairs: dict[str, tuple[Any, Plain]] = {}
    key = part = None
    try:
        for key, item in obj.items():
            part = key
            name = _LOWER[type(key)](key, depth + 1, how)
            if not _hashable(name):
                raise _Refusal("cannot be a key: it is stored as a dict or a list; use a tuple or a string")
            part = item
            pairs[_text(name)] = name, _LOWER[type(item)](item, depth + 1, how)
    except _Refusal as refusal:
        refusal.way.append(("(key)" if part is key else step_of(key), part))
        raise
    if len(pairs) < len(obj):
        raise _Refusal("has two keys that would be stored alike; rename one of them")
    if all(type(name) is str and name[:1] != "$" for name, _ in pairs.values()):
        return dict(pairs.values())
    return {"$map": [list(pairs[text]) for text in (sorted(pairs) if how.canonically else pairs)]}


def _hashable(name: Plain) -> bool:
    """Returns whether a converted key is hashable again."""
    if type(name) is not dict:
        return type(name) is not list
    tag, *others = name
    if others or tag[:1] != "$" or tag == "$map":
        return False
    payload = name[tag]
    return type(payload) is not list or all(map(_hashable, payload))


def _enum(obj: Enum, depth: int, how: _How) -> Plain:
    return _LOWER[type(obj.value)](obj.value, depth, how)


def _dataclass(cls: Any) -> _Lower:
    names = [field.name for field in dataclasses.fields(cls)]

    def lower(obj: Any, depth: int, how: _How) -> Plain:
        return _dict({name: getattr(obj, name) for name in names if hasattr(obj, name)}, depth, how)

    return lower


def _struct(cls: type[msgspec.Struct]) -> _Lower:
    """Uses msgspec's own names and tag, which it needs to decode unions."""
    config = cls.__struct_config__
    tag: dict[str, Any] = {} if config.tag is None else {str(config.tag_field): config.tag}
    names = list(zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True))

    def lower(obj: Any, depth: int, how: _How) -> Plain:
        fields = tag | {stored: getattr(obj, name) for stored, name in names}
        if config.array_like:
            return _list(fields.values(), depth, how)
        return _dict({name: item for name, item in fields.items() if item is not msgspec.UNSET}, depth, how)

    return lower


def _model(cls: Any) -> _Lower:
    """Uses field names, since validation and serialization aliases may differ."""
    names = list(cls.model_fields)

    def lower(obj: Any, depth: int, how: _How) -> Plain:
        held: dict[str, Any] = obj.__dict__
        extra: dict[str, Any] = obj.model_extra or {}
        return _dict({name: held[name] for name in names if name in held} | extra, depth, how)

    def lower_root(obj: Any, depth: int, how: _How) -> Plain:
        return _LOWER[type(obj.root)](obj.root, depth, how)

    return lower_root if cls.__pydantic_root_model__ else lower


def _narrowed(base: type, exactly: Callable[[Any], Any]) -> _Lower:
    """Stores a subclass of a scalar, such as numpy's float64, as that scalar."""
    return lambda obj, depth, how: _BUILTIN[base](exactly(obj), depth, how)


def _refused(obj: object, depth: int, how: _How) -> NoReturn:
    cls = type(obj)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    if hasattr(cls, "get_secret_value"):
        raise _Refusal(f"cannot store a {name}; use killick.Secret")
    if hasattr(cls, "tolist"):
        raise _Refusal(f"cannot store a {name}; store what its tolist() returns")
    raise _Refusal(
        f"cannot store a {name}; use one of: JSON types, dataclasses, pydantic models, msgspec Structs, "
        "enums, dates and times, bytes, Decimal, UUID, tuples, sets"
    )


_BUILTIN: Final[dict[type, _Lower]] = {
    type(None): _same,
    bool: _same,
    int: _int,
    float: _float,
    str: _str,
    bytes: lambda obj, depth, how: {"$bytes": bytes(obj)},
    bytearray: lambda obj, depth, how: {"$bytearray": bytes(obj)},
    list: _list,
    tuple: lambda obj, depth, how: {"$tuple": _list(obj, depth, how)},
    set: _set("$set"),
    frozenset: _set("$frozenset"),
    dict: _dict,
    # A decimal context can write the exponent's letter in lower case.
    Decimal: lambda obj, depth, how: {"$decimal": Decimal.__str__(obj).replace("e", "E")},
    UUID: lambda obj, depth, how: {"$uuid": UUID.__str__(obj)},
    date: lambda obj, depth, how: {"$date": date.isoformat(obj)},
    time: _moment("$time", time.isoformat),
    datetime: _moment("$datetime", datetime.isoformat),
    timedelta: lambda obj, depth, how: {"$timedelta": _int(obj // timedelta(microseconds=1), depth, how)},
    Secret: _secret,
    Erased: lambda obj, depth, how: {"$erased": obj.hash.hex()},
    Damaged: lambda obj, depth, how: "damaged; run killick store verify",
}

_INHERITED: Final[dict[type, _Lower]] = _BUILTIN | {
    int: _narrowed(int, int.__int__),
    float: _narrowed(float, float.__float__),
    str: _narrowed(str, str.__str__),
}


class _Lowerings(dict[type, _Lower]):
    """Maps each type to its conversion. Learns user-defined types on first use."""

    def __missing__(self, cls: type) -> _Lower:
        lower = _learned(cls)
        if len(self) < TYPES_MAX:
            self[cls] = lower
        return lower


def _learned(cls: type[Any]) -> _Lower:
    if issubclass(cls, Enum):
        return _enum
    if issubclass(cls, msgspec.Struct):
        return _struct(cls)
    if dataclasses.is_dataclass(cls):
        return _dataclass(cls)
    # Looked up this way because importing pydantic is slow and often unnecessary.
    if hasattr(cls, "__pydantic_root_model__"):
        return _model(cls)
    return next((_INHERITED[base] for base in cls.__mro__ if base in _INHERITED), _refused)


_LOWER: Final = _Lowerings(_BUILTIN)


# From plain JSON back to builtins.


def _pairs_back(pairs: list[Any]) -> dict[Any, Any]:
    """Restores a dict. Erased pairs become the marker as a key."""
    return dict((pair, pair) if isinstance(pair, Erased) else pair for pair in pairs)


def _elements_back(kind: type, items: list[Any]) -> Any:
    """Restores a set, or a list if elements were restored as dicts; a declared type converts that list back."""
    try:
        return kind(items)
    except TypeError:
        return items


def _bytes_back(payload: str | bytes) -> bytes:
    return payload if isinstance(payload, bytes) else b64decode(payload, validate=True)


def _moment_back(parse: Callable[[str], Any], text: str) -> Any:
    iso, *suffixes = text.replace("]", "").split("[")
    moment = parse(iso)
    for suffix in suffixes:
        try:
            change = {"fold": 1} if suffix == "_fold=1" else {"tzinfo": ZoneInfo(suffix)}
        except ZoneInfoNotFoundError:
            raise ValueRefused("value", f"needs the time zone {suffix}; install the tzdata package") from None
        moment = moment.replace(**change)
    return moment


_RESTORE: Final[dict[str, tuple[Any, Callable[[Any], Any]]]] = {
    "$map": (list, _pairs_back),
    "$tuple": (list, tuple),
    "$set": (list, partial(_elements_back, set)),
    "$frozenset": (list, partial(_elements_back, frozenset)),
    "$bytes": ((str, bytes), _bytes_back),
    "$bytearray": ((str, bytes), lambda payload: bytearray(_bytes_back(payload))),
    "$str": ((str, bytes), lambda payload: _bytes_back(payload).decode("utf-16-le", "surrogatepass")),
    "$int": (str, lambda text: int(text, 16)),
    "$float": (str, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__),
    "$decimal": (str, Decimal),
    "$uuid": (str, UUID),
    "$date": (str, date.fromisoformat),
    "$time": (str, partial(_moment_back, time.fromisoformat)),
    "$datetime": (str, partial(_moment_back, datetime.fromisoformat)),
    "$timedelta": (int, lambda count: timedelta(microseconds=count)),
    "$secret": (str, lambda text: Secret.recorded(bytes.fromhex(text))),
    "$erased": (str, lambda text: Erased(bytes.fromhex(text))),
}


# Paths.


def step_of(key: object) -> str:
    """Formats one step of a path: .name, [3] or ['two words']."""
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    try:
        return f"[{shortened(repr(key))}]"
    except ValueError:
        # Python refuses to print an int of thousands of digits.
        return f"[{type(key).__name__}]"


def shortened(path: str) -> str:
    half = PATH_CHARS_MAX // 2
    return path if len(path) <= PATH_CHARS_MAX else f"{path[:half]}…{path[-half:]}"
