"""What is kept outside a store: the signed root of its seals, the entries of one, and the keys. Touches no store.

A checkpoint is a signed note of C2SP: the store's id, how many entries there are, their root, and an Ed25519 signature.
The lines of its seal's entries may follow, which come to that root or are not believed. docs/proof.md describes it.
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

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_ED25519: Final = b"\x01"
_ID_BYTES: Final = 4
_DASH: Final = "— "
_encode: Final = msgspec.json.Encoder().encode


# keys ---------------------------------------------------------------------------------------------


def new_key() -> tuple[bytes, bytes]:
    """A private key and its public one, as PEM."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return private, key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)


def private_key(pem: bytes) -> Ed25519PrivateKey:
    """The key that signs. SealRefused when it is none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        why = "is locked with a password" if isinstance(error, TypeError) else "is no private key in PEM"
        raise SealRefused("key", f"{why}; killick store seal --new-key FILE makes one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SealRefused("key", "is no Ed25519 key; killick store seal --new-key FILE makes one")
    return key


def public_key(pem: bytes | str) -> Ed25519PublicKey:
    """The key that proves. ProofBroken when it is none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    given = pem.encode() if isinstance(pem, str) else pem
    if b"PRIVATE KEY" in given:
        raise ProofBroken("key", "is a private key, which nobody needs to verify; give the public one, FILE.pub")
    try:
        key = load_pem_public_key(given)
    except ValueError:
        raise ProofBroken(
            "key", "is no public key in PEM; give the FILE.pub that was made with the private one"
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise ProofBroken("key", "is no Ed25519 key; give the FILE.pub that was made with the private one")
    return key


def key_id(origin: str, key: Ed25519PublicKey) -> bytes:
    """What a signature names its key by."""
    return sha256(origin.encode() + b"\n" + _ED25519 + key.public_bytes_raw()).digest()[:_ID_BYTES]


# checkpoints --------------------------------------------------------------------------------------


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is", tag="killick.entries"):
    """The line before a seal's entries: the index of the first, and the peaks of the tree before them."""

    first: int
    peaks: tuple[e.Digest, ...] = ()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A signed root: of which store, over how many entries. `entries` are of its seal, where the file has them."""

    origin: str
    size: int
    root: bytes
    note: str
    listed: Listed | None = None
    entries: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What is signed."""
        return self.note.partition("\n\n")[0] + "\n"

    def signatures(self) -> Iterator[tuple[str, bytes, bytes]]:
        """Who signed it: the name, the key's id, the signature."""
        for line in self.note.partition("\n\n")[2].split("\n"):
            name, _, given = line.removeprefix(_DASH).partition(" ")
            raw = _from_base64(given)
            if line.startswith(_DASH) and raw is not None and len(raw) > _ID_BYTES:
                yield name, raw[:_ID_BYTES], raw[_ID_BYTES:]

    def check(self, key: Ed25519PublicKey, place: str = "checkpoint") -> None:
        """ProofBroken unless this key signed it."""
        from cryptography.exceptions import InvalidSignature

        wanted = (self.origin, key_id(self.origin, key))
        for name, known, signature in self.signatures():
            if (name, known) == wanted:
                try:
                    return key.verify(signature, self.text.encode())
                except InvalidSignature:
                    raise ProofBroken(place, "its signature does not hold: it was changed") from None
        raise ProofBroken(place, "is not signed with this key")


def signed(origin: str, size: int, root: bytes, key: Ed25519PrivateKey) -> str:
    """A checkpoint as a signed note."""
    text = f"{origin}\n{size}\n{b64encode(root).decode()}\n"
    signature = key_id(origin, key.public_key()) + key.sign(text.encode())
    return f"{text}\n{_DASH}{origin} {b64encode(signature).decode()}\n"


def checkpoint(given: str | bytes, place: str = "checkpoint") -> Checkpoint:
    """A checkpoint as it was written; its signature is still to be checked. ProofBroken when it is none."""
    try:
        whole = (given if isinstance(given, str) else given.decode()).replace("\r\n", "\n")  # as mail writes lines
    except UnicodeDecodeError:
        raise ProofBroken(place, "is no checkpoint") from None
    text, _, rest = whole.partition("\n\n")
    signatures, _, listed = rest.partition("\n\n")
    lines = text.split("\n")
    root = _from_base64(lines[2]) if len(lines) >= 3 else None
    if root is None or len(root) != hashing.HASH_BYTES or not lines[0] or not _is_number(lines[1]) or not signatures:
        raise ProofBroken(place, "is no checkpoint")
    note = f"{text}\n\n{signatures.rstrip()}\n"
    found = Checkpoint(origin=lines[0], size=int(lines[1]), root=root, note=note)
    return _with_entries(found, listed, place) if listed else found


def checked(given: str | bytes, key: Ed25519PublicKey | None, place: str = "checkpoint") -> Checkpoint:
    """A checkpoint that this key signed. ProofBroken otherwise."""
    found = checkpoint(given, place)
    if key is None:
        raise ProofBroken(place, "is worth what its signature is; give the public key too")
    found.check(key, place)
    return found


def _with_entries(found: Checkpoint, listed: str, place: str) -> Checkpoint:
    """A checkpoint with the entries of its seal, which come to its root or are not believed."""
    broken = ProofBroken(place, "its entries do not come to its root: they were changed")
    try:
        header, lines = entries_in(listed)
        tree = frontier(header.first, header.peaks)
        for line in lines:
            tree.add(hashing.leaf(line.encode()))
            SealedRun.read(line)
    except (ValueError, msgspec.DecodeError):
        raise broken from None
    if (tree.size, tree.root) != (found.size, found.root):
        raise broken
    return msgspec.structs.replace(found, listed=header, entries=tuple(lines))


def frontier(size: int, peaks: Iterable[e.Digest]) -> Frontier:
    """A tree from its peaks as they are written. ValueError when they do not fit."""
    return Frontier(size, map(e.from_text, peaks))


def _from_base64(text: str) -> bytes | None:
    try:
        raw = b64decode(text, validate=True)
    except ValueError:
        return None
    return raw if b64encode(raw).decode() == text else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text


# entries ------------------------------------------------------------------------------------------


class SealedRun(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One entry: a run up to `seq`, its hash there and the root over its leaves. `gone` says that it left the store:
    `pruned`, into `file` with that sha256; or `removed`, and nobody said where to."""

    run: str
    seq: int
    hash: e.Digest
    root: e.Digest | None = None
    gone: Literal["pruned", "removed"] | None = None
    file: str | None = None
    sha256: str | None = None

    @property
    def line(self) -> str:
        """As it is hashed."""
        return _encode(self).decode()

    @classmethod
    def read(cls, line: str) -> SealedRun:
        """From its line."""
        return msgspec.json.decode(line.encode(), type=cls)


def entries_in(text: str) -> tuple[Listed, list[str]]:
    """A seal's entries, and the line before them."""
    header, *lines = text.removesuffix("\n").split("\n")
    return msgspec.json.decode(header.encode(), type=Listed), lines
