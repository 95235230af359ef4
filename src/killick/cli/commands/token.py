"""`killick token`: who may ask the server, and for how much: make, list and revoke tokens."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, Final, get_args

import click
from rich.text import Text

from killick.cli import style
from killick.cli.context import Shell, by_option, command, who_options
from killick.cli.secret_files import FILE, new_secret
from killick.model.retry import seconds
from killick.model.system_events import Scope
from killick.store.grants import Grant
from killick.workers import tokens
from killick.workers.tokens import Token

SAYS: Final = {"viewer": "looks", "operator": "looks and acts on runs", "admin": "also reads Killick's own logs"}


@command("create")
@click.argument("name")
@click.option("--scope", type=click.Choice(get_args(Scope)), default="viewer", show_default=True,
              help="A viewer reads, an operator also acts on runs, an admin reads Killick's own logs.")  # fmt: skip
@click.option("--expires", metavar="SPAN", help="Its lifetime, such as 30d.  [default: until it is revoked]")
@click.option("--agent", "agents", metavar="AGENT", multiple=True,
              help="Only the runs of this agent. May be repeated.")  # fmt: skip
@click.option("--tag", "tags", metavar="TAG", multiple=True,
              help="Only runs with this tag. May be repeated: then with all of them.")  # fmt: skip
@click.option("--out", type=FILE, help="Write it to this new file, which only you may read, instead of printing it.")
@by_option
def create_command(
    shell: Shell, name: str, scope: Scope, expires: str | None, agents: tuple[str, ...], tags: tuple[str, ...],
    out: Path | None, by: str | None,
) -> None:  # fmt: skip
    """Create a token for NAME, and print it. It is not stored, and cannot be shown again.

    The record has NAME with every action of the token. A server that ran without tokens requires them from the first
    one on.

    \b
    killick token create ann --scope operator
    killick token create mia --scope operator --agent review --tag tenant=acme
    killick token create ci --expires 30d --out ci.token
    """
    holds, grant = None if expires is None else seconds(expires), Grant(agents, tags)
    engine = shell.creating().runtime.engine
    with contextlib.ExitStack() as stack:
        file = None if out is None else stack.enter_context(new_secret(out))
        made, text = tokens.issue(engine, name, scope, expires_seconds=holds, by=by, grant=grant)
        if file is not None:
            file.write(f"{text}\n".encode())
    if shell.json:
        shell.emit({**({"token": text} if out is None else {}), **_document(shell, made)})
        return
    if out is None:
        sys.stdout.write(f"{text}\n")
    where = "this is the only time that it is shown" if out is None else f"it is in {out} alone"
    shell.note(f"{made.name}, {made.scope} ({SAYS[made.scope]}{_reach(made)}), {_until(made)}; {where}")


@command("list")
def list_command(shell: Shell) -> None:
    """List the tokens: owner, scope, and whether each is valid.

    \b
    killick token list --json
    """
    found = tokens.tokens(shell.client.runtime.engine)
    shell.emit([_document(shell, each) for each in found])
    if not found and not shell.json:
        shell.note("no tokens; `killick token create NAME` makes one, and from then on the server asks for them")
    now = shell.clock.now_us()
    wide = max((len(each.name) for each in found), default=0)
    for each in found:
        lead = Text(f"{each.id}  ", style="bold cyan").append(f"{each.name:<{wide}}  ", style="bold")
        lead.append(f"{each.scope:<8}  ").append_text(_status_text(each, now)).append(_reach(each))
        shell.print(lead)


def _status_text(token: Token, now_us: int) -> Text:
    if token.revoked_at_us is not None:
        who = f" by {token.revoked_by}" if token.revoked_by else ""
        return Text(f"revoked{who} {style.moment(token.revoked_at_us)}", style="dim")
    if not token.holds(now_us):
        return Text(f"expired {style.moment(token.expires_at_us or 0)}", style="dim")
    return Text(_until(token), style="green").append(f", made {style.moment(token.issued_at_us)}", style="dim")


def _reach(token: Token) -> str:
    grant = Grant(token.agents, token.tags)
    return f", of {grant} alone" if str(grant) else ""


def _until(token: Token) -> str:
    return f"until {style.moment(token.expires_at_us)}" if token.expires_at_us else "until it is revoked"


@command("revoke", json=False)
@click.argument("token")
@who_options
def revoke_command(shell: Shell, token: str, **who: Any) -> None:
    """Revoke a token, by its id or its name: the next request is refused, and its sessions end.

    \b
    killick token revoke ann --because "left the company"
    """
    gone = tokens.revoke(shell.client.runtime.engine, token, **who)
    shell.out.print(Text(f"{gone.id}  ", style="bold cyan").append(f"{gone.name}  ").append("revoked", style="green"))


def _document(shell: Shell, token: Token) -> dict[str, Any]:
    fields = {name: getattr(token, name) for name in token.__struct_fields__ if name != "hash"}
    return {**fields, "holds": token.holds(shell.clock.now_us())}
