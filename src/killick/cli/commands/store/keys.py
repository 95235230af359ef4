"""`killick store rotate`: the data keys of an encrypted store, wrapped by a new master key."""

from __future__ import annotations

from killick.cli.context import Shell, command, current_user
from killick.history.phrasing import counted


@command("rotate")
def rotate_command(shell: Shell) -> None:
    """Wrap the data keys of an encrypted store by a new master key.

    KILLICK_KEYS names the new key first, then the old one. Values are not rewritten, and workers need not stop.
    Afterwards the old key opens nothing, except a backup from before.

    \b
      KILLICK_KEYS=new.key,old.key killick store rotate
    """
    count = shell.client.store.rotate_keys(by=current_user())
    shell.emit({"keys": count})
    shell.say("✓", f"wrapped {counted(count, 'data key')} by the first master key; take the old one away")
