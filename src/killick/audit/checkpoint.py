"""Checkpoints: the signed root of a store's seals, the entries of one seal, and the keys. Uses no store.

A checkpoint is a C2SP signed note: the store's id, the number of entries, their root, and an Ed25519 signature. The
entries of its seal may follow; they must hash to that root. docs/file-formats.md describes the format.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from killick.errors import ProofBroken, SealRefused
from killick.model import events as e
from killick.model import hashing
from killick.model.merkle import Frontier
from killick.type_init import ready

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_ED25519: Final = b"\x01"
_ID_BYTES: Final = 4
_DIGITS_MAX: Final = 20
_DASH: Final = "— "
_encode: Final = msgspec.json.Encoder().encode


# keys ---------------------------------------------------------------------------------------------


def new_key() -> tuple[bytes, bytes]:
    """A new private key and its public key, as PEM."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return private, key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)


def private_key(pem: bytes) -> Ed25519PrivateKey:
    """Loads the signing key. Raises SealRefused if it is invalid."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        why = "is locked with a password" if isinstance(error, TypeError) else "is not a private key in PEM"
        raise SealRefused("key", f"{why}; killick store seal --new-key FILE makes one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SealRefused("key", "is not an Ed25519 key; killick store seal --new-key FILE makes one")
    return key


def public_key(pem: bytes | str) -> Ed25519PublicKey:
    """Loads the verification key. Raises ProofBroken if it is invalid."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    given = pem.encode() if isinstance(pem, str) else pem
    if b"PRIVATE KEY" in given:
        raise ProofBroken("key", "is a private key; verification takes the public one, FILE.pub")
    try:
        key = load_pem_public_key(given)
    except ValueError:
        raise ProofBroken(
            "key", "is not a public key in PEM; give the FILE.pub that was made with the private one"
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise ProofBroken("key", "is not an Ed25519 key; give the FILE.pub that was made with the private one")
    return key


def key_id(origin: str, key: Ed25519PublicKey) -> bytes:
    """The id by which a signature names its key."""
    return sha256(origin.encode() + b"\n" + _ED25519 + key.public_bytes_raw()).digest()[:_ID_BYTES]


# checkpoints --------------------------------------------------------------------------------------


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is", tag="killick.entries"):
    """The line before a seal's entries: the index of the first, and the peaks of the tree before them."""

    first: int
    peaks: tuple[e.Digest, ...] = ()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A signed root of a store's entries. `entries` are those of its seal, if the file has them."""

    origin: str
    size: int
    root: bytes
    note: str
    listed: Listed | None = None
    entries: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The signed text."""
        return self.note.partition("\n\n")[0] + "\n"

    def signatures(self) -> Iterator[tuple[str, bytes, bytes]]:
        """The signatures: name, key id, signature."""
        for line in self.note.partition("\n\n")[2].split("\n"):
            name, _, given = line.removeprefix(_DASH).partition(" ")
            raw = _from_base64(given)
            if line.startswith(_DASH) and raw is not None and len(raw) > _ID_BYTES:
                yield name, raw[:_ID_BYTES], raw[_ID_BYTES:]

    def check(self, key: Ed25519PublicKey, place: str = "checkpoint") -> None:
        """Raises ProofBroken unless this key signed it."""
        from cryptography.exceptions import InvalidSignature

        wanted = (self.origin, key_id(self.origin, key))
        for name, known, signature in self.signatures():
            if (name, known) == wanted:
                try:
                    return key.verify(signature, self.text.encode())
                except InvalidSignature:
                    raise ProofBroken(place, "its signature is invalid: it was changed") from None
        raise ProofBroken(place, "is not signed with this key")


def signed(origin: str, size: int, root: bytes, key: Ed25519PrivateKey) -> str:
    """A checkpoint as a signed note."""
    text = f"{origin}\n{size}\n{b64encode(root).decode()}\n"
    signature = key_id(origin, key.public_key()) + key.sign(text.encode())
    return f"{text}\n{_DASH}{origin} {b64encode(signature).decode()}\n"


def checkpoint(given: str | bytes, place: str = "checkpoint") -> Checkpoint:
    """Parses a checkpoint; its signature is not checked yet. Raises ProofBroken if it is malformed."""
    try:
        whole = (given if isinstance(given, str) else given.decode()).replace("\r\n", "\n")  # as mail writes lines
    except UnicodeDecodeError:
        raise ProofBroken(place, "is not a checkpoint; give a file of `killick store seal --out`") from None
    text, _, rest = whole.partition("\n\n")
    signatures, _, listed = rest.partition("\n\n")
    lines = text.split("\n")
    root = _from_base64(lines[2]) if len(lines) >= 3 else None
    if root is None or len(root) != hashing.HASH_BYTES or not lines[0] or not _is_number(lines[1]) or not signatures:
        raise ProofBroken(place, "is not a checkpoint; give a file of `killick store seal --out`")
    note = f"{text}\n\n{signatures.rstrip()}\n"
    found = Checkpoint(origin=lines[0], size=int(lines[1]), root=root, note=note)
    return _with_entries(found, listed, place) if listed else found


def checked(given: str | bytes, key: Ed25519PublicKey | None, place: str = "checkpoint") -> Checkpoint:
    """Parses a checkpoint and checks its signature. Raises ProofBroken otherwise."""
    found = checkpoint(given, place)
    if key is None:
        raise ProofBroken(place, "can only be trusted by its signature; give the public key too")
    found.check(key, place)
    return found


def _with_entries(found: Checkpoint, listed: str, place: str) -> Checkpoint:
    """A checkpoint with the entries of its seal, which must hash to its root."""
    broken = ProofBroken(place, "its entries do not hash to its root: they were changed")
    try:
        header, lines = entries_in(listed)
        tree = frontier(header.first, header.peaks)
        for line in lines:
            tree.add(hashing.leaf(line.encode()))
            SealedRun.read(line)
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise broken from None
    if (tree.size, tree.root) != (found.size, found.root):
        raise broken
    return msgspec.structs.replace(found, listed=header, entries=tuple(lines))


def frontier(size: int, peaks: Iterable[e.Digest]) -> Frontier:
    """A tree from its peaks. Raises ValueError if they do not fit the size."""
    return Frontier(size, map(e.from_text, peaks))


def _from_base64(text: str) -> bytes | None:
    try:
        raw = b64decode(text, validate=True)
    except ValueError:
        return None
    return raw if b64encode(raw).decode() == text else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < _DIGITS_MAX and str(int(text)) == text


# entries ------------------------------------------------------------------------------------------


class SealedRun(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One entry: a run up to `seq`, its hash there and the root over its leaves. `gone` says that it left the store:
    `pruned`, into `file` with that sha256; or `removed`, without a record of where to."""

    run: str
    seq: int
    hash: e.Digest
    root: e.Digest | None = None
    gone: Literal["pruned", "removed"] | None = None
    file: str | None = None
    sha256: str | None = None

    @property
    def line(self) -> str:
        """The line that is hashed."""
        return _encode(self).decode()

    @classmethod
    def read(cls, line: str) -> SealedRun:
        """Parses a line."""
        return msgspec.json.decode(line.encode(), type=ready(cls))


def entries_in(text: str) -> tuple[Listed, list[str]]:
    """A seal's entries, and the line before them."""
    header, *lines = text.removesuffix("\n").split("\n")
    return msgspec.json.decode(header.encode(), type=ready(Listed)), lines
