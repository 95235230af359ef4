"""Keys of a server: one signs its sessions, one lets the store's owner in. Neither is ever in the store.

A process that reads the store can therefore forge no session. Each key is a 0600 file: next to
a store that is a file, else in the user's state folder. A store in memory has keys that last as long as the process.
"""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from killick.errors import AccessRefused
from killick.model.events import to_text
from killick.permissions import keep, make_folder, state_folder
from killick.store.memory import MemoryStore
from killick.store.protocol import raw_store

if TYPE_CHECKING:
    from killick.client.client import Client

VARIABLE: Final = "KILLICK_SECRET_KEY"
"""The environment variable that gives several servers of one store the same session key."""

SECRET_CHARS_MIN: Final = 32


class OwnerKey(NamedTuple):
    """The text that a program of the store's owner sends, and the file that keeps it, if a file does."""

    text: str
    place: Path | None


def session_key(client: Client) -> bytes:
    """The key that sessions of this store are signed with; AccessRefused where none can be kept."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return kept_key(client, "session").text.encode()
    if len(given) < SECRET_CHARS_MIN:
        raise AccessRefused(VARIABLE, f"is shorter than {SECRET_CHARS_MIN} characters; set a longer random value")
    return sha256(f"{given}\n{client.runtime.store.id}".encode()).digest()


def kept_key(client: Client, name: str) -> OwnerKey:
    """A key of the store by its name, made where there is none yet; AccessRefused where none can be kept."""
    fresh, place = to_text(client.runtime.ids.key()), _place(client, name)
    if place is None:
        return OwnerKey(fresh, None)
    try:
        make_folder(place.parent)
        return OwnerKey(keep(place, fresh), place)
    except OSError as error:
        reason = f"cannot be kept ({error.strerror}); let this user write there, or set {VARIABLE} for sessions"
        raise AccessRefused(str(place), reason) from None


def _place(client: Client, name: str) -> Path | None:
    store = client.runtime.store
    if isinstance(raw_store(store), MemoryStore):
        return None
    if store.proves_life and Path(store.place).is_file():
        return Path(f"{store.place}-{name}-key")
    # The id comes from the store, and is no path that we would trust.
    return state_folder() / f"{sha256(store.id.encode()).hexdigest()[:32]}-{name}-key"
