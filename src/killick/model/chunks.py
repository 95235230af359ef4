"""Stores values as content-addressed chunks, so that similar values share storage. Does no I/O.

A value's JSON (see `codec`) stays small: large parts become chunks, and a reference takes their place:

    $ref   hash        the JSON stored under it
    $list  [hash, …]   the lists stored under them, concatenated
    $text  [hash, …]   the chunks of a string, concatenated
    $blob  [hash, …]   the chunks of bytes, concatenated

Hashes are base64url without padding. Long hash lists are trees: a hash in $list, $text or $blob may name another node
of the same tag. Chunk boundaries are content-defined, never positional, so after an insertion or a deletion the
following chunks are unchanged.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias
from zlib import crc32

import msgspec
from msgspec import Raw

from killick.errors import KeyRefused, ValueBroken, ValueErased, ValueRefused
from killick.model.cipher import SUFFIX, Cipher, is_encrypted
from killick.model.codec import Erased, plain, restore
from killick.model.hashing import value_hash
from killick.model.typed import convert

STRING_BYTES_MAX: Final = 512
"""A longer string or bytes value, as encoded, is stored as chunks."""

NODE_BYTES_MAX: Final = 1024
"""A longer list or object, as encoded, is split."""

CHILD_BYTES_MAX: Final = 256
"""A longer part of a split object becomes its own chunk."""

WHOLE_BYTES_MAX: Final = 8 * 1024
"""A string or bytes value up to this length is one chunk."""

PIECE_BYTES_MIN: Final = 1024
PIECE_BYTES_MAX: Final = 16 * 1024

CHUNK_BYTES_MIN: Final = 128
CHUNK_BYTES_MORE: Final = 128
"""The average number of bytes in a chunk beyond the minimum."""
CHUNK_BYTES_MAX: Final = 4096

HASHES_MAX: Final = 8
"""The number of hashes in a node above which they are grouped into child nodes."""

LEVELS_MAX: Final = 64
"""More levels than any hash tree that was ever written."""


class Blob(msgspec.Struct, frozen=True):
    """One stored chunk: "text" (UTF-8), "bytes", or "json" (with tags and references)."""

    hash: bytes
    codec: str
    body: bytes | None
    """None if erased."""


class Packed(msgspec.Struct, frozen=True):
    """A value in its stored form."""

    raw: bytes
    """JSON with tags and references, small enough for an event's row."""
    blobs: tuple[Blob, ...]
    """The chunks it refers to, children before parents, each once."""


Fetch: TypeAlias = Callable[[Collection[bytes]], Mapping[bytes, Blob]]
"""Fetches chunks by hash, and possibly others. A hash absent from the result is missing."""


def pack(obj: object, *, at: str = "value", secret_key: bytes | None = None, cipher: Cipher | None = None) -> Packed:
    """Returns the stored form of an object. Raises `ValueRefused`, with the path, for a value that cannot be stored.

    A cipher encrypts the chunks; `raw` names them, and is for the caller to encrypt.
    """
    try:
        raw = _encode(obj)
        # A tag, deep nesting, or an int beyond 64 bits; by `find`, because `in` on bytes is twice as slow.
        marked = raw.find(b'"$') >= 0 or raw.find(b"[[[") >= 0 or raw.translate(_DIGITS).find(_LONG_INT) >= 0
        if not marked and len(raw) <= STRING_BYTES_MAX and _decode(raw) == obj:
            return Packed(raw, ())  # a small value that is already plain JSON, as most are
    except Exception:
        pass  # the slower path below finds the error and its place
    tree = plain(obj, at=at, secret_key=secret_key)
    try:
        raw = _encode(tree)
        if len(raw) <= STRING_BYTES_MAX:
            return Packed(raw, ())
        packer = _Packer(cipher)
        return Packed(packer.fragment(tree), tuple(packer.blobs.values()))
    except RecursionError:
        raise ValueRefused(at, "is nested too deeply; flatten it") from None


def unpack(raw: bytes, fetch: Fetch, type: Any = Any) -> Any:  # noqa: A002
    """Returns the value, converted to the declared type if given. Without one, erased parts become `Erased`."""
    try:
        value = _tree(None, raw)
        if raw.find(b'"$') >= 0:  # tags, references or ciphertext
            digest = value_hash("json", raw)
            if is_encrypted(raw):
                raise KeyRefused(f"value {digest.hex()[:12]}", _ENCRYPTED)
            value = _Reader(_fetched(raw, fetch), keeps_erased=type is Any).value(value, digest)
        return value if type is Any else convert(value, type)
    except RecursionError:
        raise ValueBroken(value_hash("json", raw), "nested too deeply to read") from None


class SharedReader:
    """Reads many values that share chunks, each chunk once. Equal parts of two values are the same object.

    Reading a growing conversation costs only its new part. Callers must not mutate the values.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._pieces: dict[str, Blob] = {}
        self._reader = _SharingReader(self._pieces, keeps_erased=True)

    def expect(self, raws: Iterable[bytes]) -> None:
        """Prefetches the chunks of these values in one batch. Values that are never read do no harm."""
        _fetched(b"\n".join(raws), self._fetch, self._pieces)

    def unpack(self, raw: bytes, *, expected: bool = False) -> Any:
        """Returns the value, with `Erased` for erased parts. `expected`: its chunks are prefetched."""
        digest = value_hash("json", raw)
        try:
            self.expect(() if expected else [raw])
            return self._reader.value(_tree(digest, raw), digest)
        except RecursionError:
            raise ValueBroken(digest, "nested too deeply to read") from None


def references(raw: bytes) -> list[bytes]:
    """Returns the hashes that this JSON names directly."""
    return [_hash(name) for name in _names(raw)]


def children(blob: Blob) -> list[bytes]:
    """Returns the hashes that a chunk names directly; an encrypted one hides them."""
    if blob.codec.endswith(SUFFIX):
        return []
    _known(blob)
    return references(blob.body) if blob.codec == "json" and blob.body is not None else []


def gathered(written: Iterable[bytes], fetch: Fetch, known: dict[bytes, Blob] | None = None) -> dict[bytes, Blob]:
    """Fetches every chunk below these JSON texts, level by level. Adds it to the known ones, and returns all."""
    found: dict[bytes, Blob] = {} if known is None else known
    wanted = [digest for raw in written for digest in references(raw)]
    while wanted := [digest for digest in dict.fromkeys(wanted) if digest not in found]:
        level = fetch(wanted)
        for digest in wanted:
            if digest not in level:
                raise ValueBroken(digest, "missing")
            found[digest] = level[digest]
        wanted = [below for digest in wanted for below in children(found[digest])]
    return found


def check(blob: Blob) -> bool:
    """Returns whether the body matches its hash. An erased chunk always matches."""
    return blob.body is None or value_hash(blob.codec, blob.body) == blob.hash


_ENCRYPTED: Final = "is encrypted; read it through its store, opened with keys="

_CODECS: Final = {"$text": "text", "$blob": "bytes"}

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode

_LONG_INT: Final = b"0" * 19
_DIGITS: Final = bytes(48 if chr(byte).isdecimal() and byte < 128 else 32 for byte in range(256))

# Quotes inside strings are escaped, and a user's own "$ref" key is stored as a $map pair. So in our compact JSON these
# bytes are always a reference.
REFERENCE: Final = re.compile(rb'\{"\$(?:ref|list|text|blob)":([^{}]*)\}')
_NAME: Final = re.compile(rb'"([\w-]{43})"')


def _names(raw: bytes) -> dict[str, None]:
    """Returns the hashes in their written form, each once, in order."""
    found = (name for payload in REFERENCE.findall(raw) for name in _NAME.findall(payload))
    return dict.fromkeys(name.decode() for name in found)


def _hash(name: str) -> bytes:
    return urlsafe_b64decode(name + "=")


def _known(blob: Blob) -> None:
    if blob.codec.endswith(SUFFIX) and blob.body is not None:
        raise KeyRefused(f"value {blob.hash.hex()[:12]}", _ENCRYPTED)
    if blob.codec not in ("json", "text", "bytes"):
        raise ValueBroken(blob.hash, f"codec {blob.codec!r} is not known to this build of Killick")


# Writing.

# Chosen by experiment: this table cuts prose in several scripts, code, CSV, logs and base64 every 2 to 8 KB.
_TABLE: Final = bytes.fromhex("f820bb62cc1a62fb45f4e0dd95d425fb5a0c63153f62636cf600c25e11cb7f04")
_CLASSES: Final = bytes(_TABLE[byte // 8] >> byte % 8 & 1 for byte in range(256))
_CUT: Final = bytes((0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1))


def _pieces(body: bytes, *, text: bool) -> Iterator[bytes]:
    """Splits by content, and text only between characters."""
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
    """Finds a chunk's end: each byte has one of two classes, and a cut follows a fixed pattern of twelve classes."""
    least, most = start + PIECE_BYTES_MIN, start + PIECE_BYTES_MAX
    found = classes.find(_CUT, least - len(_CUT), most)
    if found >= 0:
        return found + len(_CUT)
    if most >= len(body):
        return most
    # Rows of a table are too similar for that pattern. For those, four classes and a checksum decide.
    end = classes.find(_CUT[-4:], least, most)
    while end >= 0 and crc32(body[end - 64 : end]) % 128:
        end = classes.find(_CUT[-4:], end + 1, most)
    return most if end < 0 else end


def _chunks(items: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Groups encoded items. The probability that a chunk ends after an item is proportional to the item's length."""
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
"""A string up to this length stays short even if each character becomes a six-byte escape."""

_SMALL: Final = frozenset((type(None), bool, int, float))


class _Packer:
    """Encodes plain JSON bottom-up and moves large parts into chunks."""

    def __init__(self, cipher: Cipher | None = None) -> None:
        self.blobs: dict[bytes, Blob] = {}
        self._cipher = cipher

    def fragment(self, node: Any) -> bytes:
        """Returns the bytes of a node. Consumes the node: its parts are replaced by their bytes."""
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
        """Moves the larger parts out first. If the rest is still too long, stores it as a list of pairs."""
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
        """Builds a tree of hashes, grouped level by level."""
        while len(names) > HASHES_MAX:
            names = [self.put("json", _node(tag, chunk)) for chunk in _chunks(names)]
        return _node(tag, names)

    def put(self, codec: str, body: bytes) -> bytes:
        """Adds one chunk and returns its hash in written form."""
        if self._cipher is not None:
            codec, body = codec + SUFFIX, self._cipher.encrypt(body, codec.encode())
        digest = value_hash(codec, body)
        if digest not in self.blobs:
            self.blobs[digest] = Blob(digest, codec, body)
        return b'"' + urlsafe_b64encode(digest)[:43] + b'"'


def _node(tag: bytes, names: list[bytes]) -> bytes:
    return b'{"' + tag + b'":[' + b",".join(names) + b"]}"


# Reading.


def _fetched(raw: bytes, fetch: Fetch, known: dict[str, Blob] | None = None) -> dict[str, Blob]:
    """As `gathered`, by the written form of the hashes. Refuses an encrypted chunk."""
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
    """Decodes JSON with tags and references into new Python objects."""

    def __init__(self, pieces: Mapping[str, Blob], *, keeps_erased: bool) -> None:
        self.pieces = pieces
        self.keeps_erased = keeps_erased

    def value(self, node: Any, digest: bytes) -> Any:
        """Decodes one node; `digest` is the hash of the chunk that contains it.

        References are followed in the same call: reading must not need a deeper stack than writing did.
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
        """Returns the leaf chunks of a hash tree, from left to right."""
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
    """Decodes each reference once and shares the result."""

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
        """Returns the items below some hashes. Each hash is visited once, whether it names items or more hashes."""
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


def _tree(digest: bytes | None, body: bytes) -> Any:
    """Decodes JSON; an error names its digest, or that of the body."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueBroken(digest or value_hash("json", body), f"not JSON ({error})") from None


def _tagged(node: Any) -> tuple[str | None, Any]:
    kind = node.__class__
    if kind is dict and len(node) == 1:
        [(tag, payload)] = node.items()
        if tag[:1] == "$":
            return tag, payload
    return None, None


_SCALARS: Final = frozenset({str, int, bool, float, type(None)})


def through_codec(value: Any, *, at: str = "output", secret_key: bytes | None = None) -> Any:
    """Returns a value as the log returns it. Arguments need `secret_key`: they may contain a Secret."""
    if type(value) in _SCALARS:
        return value
    packed = pack(value, at=at, secret_key=secret_key)
    blobs = {blob.hash: blob for blob in packed.blobs}
    return unpack(packed.raw, lambda _: blobs)
