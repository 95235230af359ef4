"""Values as they are stored: in pieces under their hashes, so that values which are alike share them.

A value's JSON (see `codec`) stays small, because what is large moves to pieces and leaves a reference behind:

    $ref   hash        the JSON stored under it
    $list  [hash, …]   the lists stored under them, one after the other
    $text  [hash, …]   the pieces of a string, one after the other
    $blob  [hash, …]   the pieces of bytes, one after the other

A hash is written in base64url without padding. Where there are many, a hash in $list, $text or $blob may name
another node of the same tag. Long strings and lists are cut where their content says so, never by position:
after an insertion or a deletion the cuts, and so the pieces, soon are the same again.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias
from zlib import crc32

import msgspec
from msgspec import Raw

from killick.errors import ValueBroken, ValueErased, ValueRefused
from killick.model.codec import Erased, plain, restore
from killick.model.hashing import value_hash
from killick.model.typed import convert

__all__ = ["Blob", "Erased", "Fetch", "Packed", "Sharing", "check", "children", "pack", "references", "unpack"]

STRING_BYTES_MAX: Final = 512
"""A string or bytes that is longer, as encoded, becomes pieces."""

NODE_BYTES_MAX: Final = 1024
"""A list or object that is longer, as encoded, is split."""

CHILD_BYTES_MAX: Final = 256
"""A longer part of an object that is split moves to a piece of its own."""

WHOLE_BYTES_MAX: Final = 8 * 1024
"""A string or bytes up to this length is one piece."""

PIECE_BYTES_MIN: Final = 1024
PIECE_BYTES_MAX: Final = 16 * 1024

CHUNK_BYTES_MIN: Final = 128
CHUNK_BYTES_MORE: Final = 128
"""How many bytes a chunk holds beyond the least, on average."""
CHUNK_BYTES_MAX: Final = 4096

HASHES_MAX: Final = 8
"""How many hashes a node names before they are grouped into nodes of their own."""

LEVELS_MAX: Final = 64
"""Deeper than any tree of hashes that was ever written."""


class Blob(msgspec.Struct, frozen=True):
    """One stored piece: "text" (UTF-8), "bytes", or "json" (with tags and references)."""

    hash: bytes
    codec: str
    body: bytes | None
    """None where it was erased."""


class Packed(msgspec.Struct, frozen=True):
    """A value in its stored form."""

    raw: bytes
    """JSON with tags and references: small enough for an event's row."""
    blobs: tuple[Blob, ...]
    """What it refers to, children before parents, each once."""


Fetch: TypeAlias = Callable[[Collection[bytes]], Mapping[bytes, Blob]]
"""Finds pieces by their hashes; a hash that is absent from the answer is missing."""


def pack(obj: object, *, at: str = "value", secret_key: bytes | None = None) -> Packed:
    """The object in its stored form. Refuses, by its path, what cannot be stored."""
    raw = _plainly(obj)
    if raw is not None:
        return Packed(raw, ())
    tree = plain(obj, at=at, secret_key=secret_key)
    try:
        raw = _encode(tree)
        if len(raw) <= STRING_BYTES_MAX:
            return Packed(raw, ())
        packer = _Packer()
        return Packed(packer.fragment(tree), tuple(packer.blobs.values()))
    except RecursionError:
        raise ValueRefused(at, "is nested deeper than the stack has room for") from None


def _plainly(obj: object) -> bytes | None:
    """The JSON of what is small and JSON already, which most values are: what reads back equal needs no tags."""
    try:
        raw = _encode(obj)
        if len(raw) > STRING_BYTES_MAX or b'"$' in raw or b"[[[" in raw or _LONG_INT in raw.translate(_DIGITS):
            return None  # it could be a tag, too deep, or an int beyond 64 bits
        return raw if _decode(raw) == obj else None
    except Exception:  # whatever is the matter, the long way finds it and names its place
        return None


def unpack(raw: bytes, fetch: Fetch, type: Any = Any) -> Any:  # noqa: A002
    """The value, as the declared type if one is given; without one, `Erased` stands for what was erased."""
    digest = value_hash("json", raw)
    try:
        value = _tree(digest, raw)
        if b'"$' in raw:
            value = _Reader(_gathered(raw, fetch), keeps_erased=type is Any).value(value, digest)
        return value if type is Any else convert(value, type)
    except RecursionError:
        raise ValueBroken(digest, "nested too deeply to read") from None


class Sharing:
    """Reads many values that share pieces, each piece once: what is alike in two of them is the very same object.

    A conversation that grows is read at the cost of what is new. Whoever gets the values only reads them.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._pieces: dict[str, Blob] = {}
        self._reader = _SharingReader(self._pieces, keeps_erased=True)

    def expect(self, raws: Iterable[bytes]) -> None:
        """Fetch what these values are made of, all of them at once; it is no harm if they are never read."""
        _gathered(b"\n".join(raws), self._fetch, self._pieces)

    def unpack(self, raw: bytes) -> Any:
        """The value, with `Erased` for what was erased."""
        digest = value_hash("json", raw)
        try:
            self.expect([raw])
            return self._reader.value(_tree(digest, raw), digest)
        except RecursionError:
            raise ValueBroken(digest, "nested too deeply to read") from None


def references(raw: bytes) -> list[bytes]:
    """The hashes that this JSON names itself."""
    return [_hash(name) for name in _names(raw)]


def children(blob: Blob) -> list[bytes]:
    """The hashes that a piece names itself."""
    _known(blob)
    return references(blob.body) if blob.codec == "json" and blob.body is not None else []


def check(blob: Blob) -> bool:
    """Whether the body is what its hash says. An erased piece has nothing left to be wrong."""
    return blob.body is None or value_hash(blob.codec, blob.body) == blob.hash


_CODECS: Final = {"$text": "text", "$blob": "bytes"}

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode

_LONG_INT: Final = b"0" * 19
_DIGITS: Final = bytes(48 if chr(byte).isdecimal() and byte < 128 else 32 for byte in range(256))

# Inside a string a quote is escaped, and a user's own key "$ref" stands in a pair of a $map. So in the JSON
# that we write, which is compact, these bytes are a reference wherever they occur.
_REFERENCE: Final = re.compile(rb'\{"\$(?:ref|list|text|blob)":([^{}]*)\}')
_NAME: Final = re.compile(rb'"([\w-]{43})"')


def _names(raw: bytes) -> dict[str, None]:
    """The hashes as they are written, each once, in order."""
    found = (name for payload in _REFERENCE.findall(raw) for name in _NAME.findall(payload))
    return dict.fromkeys(name.decode() for name in found)


def _hash(name: str) -> bytes:
    return urlsafe_b64decode(name + "=")


def _known(blob: Blob) -> None:
    if blob.codec not in ("json", "text", "bytes"):
        raise ValueBroken(blob.hash, f"codec {blob.codec!r} is not known to this build of Killick")


# Writing.

# Of many such tables this one cuts prose in several scripts, code, CSV, logs and base64 every 2 to 8 KB.
_TABLE: Final = bytes.fromhex("f820bb62cc1a62fb45f4e0dd95d425fb5a0c63153f62636cf600c25e11cb7f04")
_CLASSES: Final = bytes(_TABLE[byte // 8] >> byte % 8 & 1 for byte in range(256))
_CUT: Final = bytes((0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1))


def _pieces(body: bytes, *, text: bool) -> Iterator[bytes]:
    """Cuts by content, and text between characters."""
    if len(body) <= WHOLE_BYTES_MAX:
        yield body
        return
    classes, start = body.translate(_CLASSES), 0
    while start < len(body):
        end = _cut(body, classes, start)
        while text and end < len(body) and body[end] & 0xC0 == 0x80:
            end += 1
        yield body[start:end]
        start = end


def _cut(body: bytes, classes: bytes, start: int) -> int:
    """Where a piece ends: a byte has one of two classes, and a cut falls behind twelve in a certain order."""
    least, most = start + PIECE_BYTES_MIN, start + PIECE_BYTES_MAX
    found = classes.find(_CUT, least - len(_CUT), most)
    if found >= 0:
        return found + len(_CUT)
    if most >= len(body):
        return most
    # The rows of a table are too much alike for that. There, four classes and the right checksum will do.
    end = classes.find(_CUT[-4:], least, most)
    while end >= 0 and crc32(body[end - 64 : end]) % 128:
        end = classes.find(_CUT[-4:], end + 1, most)
    return most if end < 0 else end


def _chunks(items: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Groups encoded items. A chunk ends behind an item with a chance in proportion to its length."""
    chunk: list[bytes] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += len(item) + 1
        chosen = crc32(item) % CHUNK_BYTES_MORE <= len(item)
        if size >= CHUNK_BYTES_MAX or (chosen and size >= CHUNK_BYTES_MIN):
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


_SHORT_CHARS_MAX: Final = STRING_BYTES_MAX // 6 - 1
"""A string up to this length stays short even if each character becomes an escape of six bytes."""

_SMALL: Final = frozenset((type(None), bool, int, float))


class _Packer:
    """Turns plain JSON into bytes from the leaves up, and puts aside what is large."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, Blob] = {}

    def fragment(self, node: Any) -> bytes:
        """The bytes that stand for a node. Uses the node up: its parts give way to their bytes."""
        kind = node.__class__
        if kind is str:
            return self.text(node)
        if kind is bytes and len(node) > STRING_BYTES_MAX:
            return self.tree(b"$blob", [self.put("bytes", piece) for piece in _pieces(node, text=False)])
        if kind is dict or kind is list:
            for place, item in node.items() if kind is dict else enumerate(node):
                part = item.__class__
                if part is str:
                    if len(item) > _SHORT_CHARS_MAX:
                        node[place] = Raw(self.text(item))
                elif part not in _SMALL:
                    node[place] = Raw(self.fragment(item))
        whole = _encode(node)
        if len(whole) <= NODE_BYTES_MAX:
            return whole
        return self.split_object(node) if kind is dict else self.split_list(map(_encode, node))

    def text(self, text: str) -> bytes:
        if len(text) <= STRING_BYTES_MAX:
            encoded = _encode(text)
            if len(encoded) <= STRING_BYTES_MAX:
                return encoded
        return self.tree(b"$text", [self.put("text", piece) for piece in _pieces(text.encode(), text=True)])

    def split_list(self, parts: Iterable[bytes]) -> bytes:
        return self.tree(b"$list", [self.put("json", b"[" + b",".join(chunk) + b"]") for chunk in _chunks(parts)])

    def split_object(self, node: dict[str, Any]) -> bytes:
        """First the larger parts move out; if the rest is still too long it becomes a list of pairs."""
        for key, item in node.items():
            part = _encode(item)
            if len(part) > CHILD_BYTES_MAX:
                node[key] = Raw(b'{"$ref":' + self.put("json", part) + b"}")
        whole = _encode(node)
        if len(whole) <= NODE_BYTES_MAX:
            return whole
        pairs = (b"[" + self.text(key) + b"," + _encode(item) + b"]" for key, item in node.items())
        return b'{"$map":' + self.split_list(pairs) + b"}"

    def tree(self, tag: bytes, names: list[bytes]) -> bytes:
        """A node of hashes; above a few they are grouped, and the groups grouped again."""
        while len(names) > HASHES_MAX:
            names = [self.put("json", _node(tag, chunk)) for chunk in _chunks(names)]
        return _node(tag, names)

    def put(self, codec: str, body: bytes) -> bytes:
        """Keeps one piece and gives its hash as it is written."""
        digest = value_hash(codec, body)
        if digest not in self.blobs:
            self.blobs[digest] = Blob(digest, codec, body)
        return b'"' + urlsafe_b64encode(digest)[:43] + b'"'


def _node(tag: bytes, names: list[bytes]) -> bytes:
    return b'{"' + tag + b'":[' + b",".join(names) + b"]}"


# Reading.


def _gathered(raw: bytes, fetch: Fetch, known: dict[str, Blob] | None = None) -> dict[str, Blob]:
    """Every piece below this JSON by its written hash, fetched level by level; added to those that are known."""
    pieces: dict[str, Blob] = {} if known is None else known
    wanted = {name: None for name in _names(raw) if name not in pieces}
    while wanted:
        hashes = {name: _hash(name) for name in wanted}
        found = fetch(list(hashes.values()))
        below: dict[str, None] = {}
        for name, digest in hashes.items():
            if digest not in found:
                raise ValueBroken(digest, "missing")
            blob = pieces[name] = found[digest]
            _known(blob)
            if blob.codec == "json" and blob.body is not None:
                below |= _names(blob.body)
        wanted = {name: None for name in below if name not in pieces}
    return pieces


_MALFORMED: Final = (ValueError, TypeError, ArithmeticError, LookupError, OSError)


class _Reader:
    """Turns JSON with tags and references into Python objects, fresh ones each time."""

    def __init__(self, pieces: Mapping[str, Blob], *, keeps_erased: bool) -> None:
        self.pieces = pieces
        self.keeps_erased = keeps_erased

    def value(self, node: Any, digest: bytes) -> Any:
        """What a node stands for; the digest is that of the piece it stands in.

        References are followed in the same call: reading must not need more of the stack than writing did.
        """
        tag, payload = _tagged(node)
        if tag == "$ref":
            blob = self.piece(payload, digest)
            if blob.body is None:
                return self.erased(blob.hash)
            digest, node = blob.hash, _tree(blob.hash, blob.body)
            tag, payload = _tagged(node)
        if tag == "$list":
            node = self.joined_lists(payload, digest)
        elif tag == "$text" or tag == "$blob":
            return self.joined_pieces(tag, payload, digest)
        elif tag is not None:
            return self.restored(tag, self.value(payload, digest), digest)
        kind = node.__class__
        if kind is dict or kind is list:
            for place, item in node.items() if kind is dict else enumerate(node):
                part = item.__class__
                if part is dict or part is list:
                    node[place] = self.value(item, digest)
        return node

    def restored(self, tag: str, payload: Any, digest: bytes) -> Any:
        if isinstance(payload, Erased):
            return payload
        try:
            value = restore(tag, payload)
        except ValueRefused:
            raise
        except _MALFORMED as error:
            raise ValueBroken(digest, f"{tag} is malformed ({error})") from None
        return self.erased(value.hash) if isinstance(value, Erased) else value

    def joined_lists(self, names: Any, digest: bytes) -> list[Any]:
        items: list[Any] = []
        for leaf in self.leaves("$list", names, digest):
            part = [self.erased(leaf.hash)] if leaf.body is None else _tree(leaf.hash, leaf.body)
            if type(part) is not list:
                raise ValueBroken(leaf.hash, "not a list, though part of one")
            items += part
        return items

    def joined_pieces(self, tag: str, names: Any, digest: bytes) -> Any:
        bodies: list[bytes] = []
        for leaf in self.leaves(tag, names, digest):
            if leaf.body is None:
                return self.erased(leaf.hash)
            if leaf.codec != _CODECS[tag]:
                raise ValueBroken(leaf.hash, f"{leaf.codec}, though part of a {tag}")
            bodies.append(leaf.body)
        body = b"".join(bodies)
        try:
            return body.decode() if tag == "$text" else body
        except UnicodeDecodeError as error:
            raise ValueBroken(digest, f"{tag} is malformed ({error})") from None

    def leaves(self, tag: str, names: Any, digest: bytes, level: int = 0) -> Iterator[Blob]:
        """The pieces at the bottom of a tree of hashes, from left to right."""
        kind = names.__class__
        if kind is not list or level > LEVELS_MAX:
            raise ValueBroken(digest, f"{tag} is malformed")
        inner = b'{"' + tag.encode() + b'":'
        for name in names:
            blob = self.piece(name, digest)
            if blob.codec == "json" and blob.body is not None and blob.body.startswith(inner):
                yield from self.leaves(tag, _tree(blob.hash, blob.body)[tag], blob.hash, level + 1)
            else:
                yield blob

    def piece(self, name: Any, digest: bytes) -> Blob:
        blob = self.pieces.get(name) if type(name) is str else None
        if blob is None:
            raise ValueBroken(digest, f"{name!r} is not a reference")
        return blob

    def erased(self, digest: bytes) -> Erased:
        if not self.keeps_erased:
            raise ValueErased(digest)
        return Erased(digest)


class _SharingReader(_Reader):
    """The same, but what a reference stands for is made once."""

    def __init__(self, pieces: Mapping[str, Blob], *, keeps_erased: bool) -> None:
        super().__init__(pieces, keeps_erased=keeps_erased)
        self.made: dict[str, Any] = {}
        self.lists: dict[str, list[Any]] = {}

    def value(self, node: Any, digest: bytes) -> Any:
        tag, payload = _tagged(node)
        if tag == "$list":
            return self.listed(payload, digest)
        if tag != "$ref":
            return super().value(node, digest)
        if payload not in self.made:
            blob = self.piece(payload, digest)
            self.made[payload] = (
                self.erased(blob.hash) if blob.body is None else self.value(_tree(blob.hash, blob.body), blob.hash)
            )
        return self.made[payload]

    def listed(self, names: Any, digest: bytes, level: int = 0) -> list[Any]:
        """The items below some hashes; a hash is looked into once, whether it names items or more hashes."""
        if names.__class__ is not list or level > LEVELS_MAX:
            raise ValueBroken(digest, "$list is malformed")
        items: list[Any] = []
        for name in names:
            found = self.lists.get(name)
            if found is None:
                blob = self.piece(name, digest)
                node = [self.erased(blob.hash)] if blob.body is None else _tree(blob.hash, blob.body)
                tag, payload = _tagged(node)
                found = self.listed(payload, blob.hash, level + 1) if tag == "$list" else self.value(node, blob.hash)
                if found.__class__ is not list:
                    raise ValueBroken(blob.hash, "not a list, though part of one")
                self.lists[name] = found
            items += found
        return items


def _tree(digest: bytes, body: bytes) -> Any:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueBroken(digest, f"not JSON ({error})") from None


def _tagged(node: Any) -> tuple[str | None, Any]:
    kind = node.__class__
    if kind is dict and len(node) == 1:
        [(tag, payload)] = node.items()
        if tag[:1] == "$":
            return tag, payload
    return None, None


_SCALARS: Final = frozenset({str, int, bool, float, type(None)})


def through_codec(value: Any, *, at: str = "output", secret_key: bytes | None = None) -> Any:
    """A value as it comes back from the record; with the key of secrets, where arguments may hold some."""
    if type(value) in _SCALARS:
        return value
    packed = pack(value, at=at, secret_key=secret_key)
    blobs = {blob.hash: blob for blob in packed.blobs}
    return unpack(packed.raw, lambda hashes: {digest: blobs[digest] for digest in hashes})
