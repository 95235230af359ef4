"""`killick store seal` and `prove`, and `killick store verify --proof`: the files and the words around seals. Decides
nothing."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.filesize import decimal

from killick.audit.checkpoint import checkpoint, new_key
from killick.audit.proof import Proved, extends, prove, verify_proof
from killick.audit.seal import SEALS, Sealed, seal
from killick.cli import style
from killick.cli.commands.store.maintenance import some
from killick.cli.context import Shell, command, current_user, run_argument
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.progress import progress
from killick.cli.secret_files import FILE, SEAL_KEY, new_secret
from killick.clock import timestamp
from killick.errors import ProofBroken
from killick.history.phrasing import counted
from killick.permissions import create_private, read_input, read_secret, refuse_database

# seal ---------------------------------------------------------------------------------------------


@command("seal")
@click.option("--key", type=FILE, envvar=SEAL_KEY, help=f"The private key to sign with, in PEM.  [env: {SEAL_KEY}]")
@click.option("--new-key", type=FILE, help="Create a key here, and seal with it; FILE.pub is the verifier's key.")
@click.option("--out", type=FILE, help="Write the checkpoint to this file instead of stdout.")
def seal_command(shell: Shell, key: Path | None, new_key: Path | None, out: Path | None) -> Exit:
    """Seal the events since the last seal.

    A seal covers every run by one signed Merkle root, the checkpoint. Keep it outside the store. With it and the public
    key, `killick store verify --checkpoint FILE --key PUB` detects changed events, removed runs and a rolled-back
    store.

    \b
      killick store seal --new-key seal.pem --out monday.seal
    """
    if out is not None and out.exists():
        _check_older(shell, out)
    signer = _key(shell, key, new_key)
    with progress(shell) as tell:
        done = seal(shell.log, signer, at_us=shell.clock.now_us(), by=current_user(), progress=tell)
    if out is not None:
        written(out, done.file.encode())
    lost = [run for run, file in done.gone.items() if file is None]
    shell.emit({**msgspec.to_builtins(done), "out": None if out is None else str(out)})
    _print_sealed(shell, done, out)
    return Exit.BAD if done.refused or lost else Exit.DONE


def _key(shell: Shell, key: Path | None, new: Path | None) -> bytes:
    if new is None:
        if key is None:
            raise CommandFailed(
                f"seal: needs a key to sign with; --new-key FILE makes one, --key FILE or {SEAL_KEY} names it"
            )
        with unreadable(key):
            return read_secret(key)
    private, public = new_key()
    pub = new.with_name(f"{new.name}.pub")
    for path, data in ((new, private), (pub, public)):
        with new_secret(path) as file:
            file.write(data)
    shell.note(f"made a new key: {new}, keep it private; {pub} is the verifier's key")
    return private


def _check_older(shell: Shell, out: Path) -> None:
    """A checkpoint gives way only to one that grew out of it: otherwise it is evidence."""
    try:
        older = checkpoint(found_in(out), str(out))
    except ProofBroken:
        raise CommandFailed(f"{out}: is there, and is no checkpoint; name another file") from None
    if not extends(shell.log, older):
        raise CommandFailed(
            f"{out}: this store does not match that checkpoint, which is kept; see the differences with "
            f"killick store verify --checkpoint {shlex.quote(str(out))} --key PUB",
            Exit.BAD,
        )


def _print_sealed(shell: Shell, done: Sealed, out: Path | None) -> None:
    for run, why in done.refused.items():
        shell.say("✗", (run, "bold"), f"  {why}: it is not sealed")
        shell.say_next("store", "verify", run)
    for run, file in some(shell, done.gone.items()):
        where = f"was pruned into {file}" if file else "is missing, and no archive of it is on record"
        shell.say("~" if file else "✗", (run, "bold"), f"  {where}")
    if done.other_key is not None:
        shell.say("~", f"the seal before was signed with another key, {done.other_key}")
    if done.fresh:
        runs = sum(run != SEALS for run in done.runs)
        what = f"seal {done.number:,}: {counted(runs, 'run')}, {counted(done.events, 'new event')}"
        shell.say("✓", what, f", signed with key {done.key}")
    else:
        shell.say("✓", f"nothing changed since seal {done.number:,}, signed with key {done.key}")
    if out is None:
        shell.print(done.file.partition("\n{")[0])
        shell.say(
            "", "Keep this where no process can change it together with the store; --out FILE writes it, and more."
        )
    else:
        shell.say("", "  ", (str(out), "bold"), "  keep it where no process can change it together with the store")


# prove --------------------------------------------------------------------------------------------


@command("prove")
@run_argument
@click.argument("seq")
@click.option("--values", is_flag=True, help="Include the event's values, not only their hash.")
@click.option("--since", type=FILE, help="A checkpoint of the verifier: the proof shows that the seals extend it.")
@click.option("--out", type=FILE, help="Write the proof to this file instead of stdout.")
def prove_command(shell: Shell, run: str, seq: str, values: bool, since: Path | None, out: Path | None) -> None:
    """Write a proof of one event, for a verifier without the store.

    The proof is one small file that reveals that event alone; `killick store verify --proof FILE --key PUB` verifies it
    anywhere. The event has to be sealed. `killick show RUN --log` lists events and their numbers.
    """
    if not seq.removeprefix("@").isdecimal():
        raise CommandFailed(f"{seq}: is no event's number; killick show {run} --log lists them")
    number = int(seq.removeprefix("@"))
    kept = None if since is None else found_in(since)
    proof = prove(shell.log, run, number, values=values, since=kept)
    if out is None:
        click.echo(proof.file, nl=False)
        return
    written(out, proof.file)
    size = checkpoint(proof.checkpoint).size
    shell.emit({"run": run, "seq": number, "size": size, "bytes": len(proof.file), "out": str(out)})
    shell.say("✓", (str(out), "bold"), f"  event {number} of {run}, {decimal(len(proof.file))}")
    shell.say("", (f"    {shlex.join(('killick', 'store', 'verify', '--proof', str(out), '--key'))} PUB", "green"))


# verify -------------------------------------------------------------------------------------------


def verify_file(shell: Shell, path: Path, key: Path | None, kept: Path | None) -> Exit:
    """Verify a proof, for which no store is needed."""
    if key is None:
        raise CommandFailed("--proof: needs --key PUB, the public key of the seals")
    public, known = found_in(key), None if kept is None else found_in(kept)
    broken, proved = None, None
    try:
        proved = verify_proof(found_in(path), public, known)
    except ProofBroken as error:
        if error.subject == "key":
            raise CommandFailed(f"{key}: {error.reason}") from None
        broken = error.reason if error.subject == "proof" else str(error)
    fields = {} if proved is None else msgspec.structs.asdict(proved) | {"sealed_at": timestamp(proved.sealed_at)}
    shell.emit({"holds": broken is None, "broken": broken, **fields})
    if proved is None:
        shell.say("✗", (str(path), "bold"), f"  {broken}")
    else:
        _print_proved(shell, proved)
    return Exit.DONE if broken is None else Exit.BAD


def _print_proved(shell: Shell, proved: Proved) -> None:
    event = dict(proved.event)
    kind, at = event.pop("kind"), event.pop("at")
    event.pop("data", None)
    shell.say("✓", "proved: event ", (f"{proved.seq} of {proved.run}", "bold"), f"  {kind}, {style.moment(at)}")
    shown: dict[str, Any] = {**event, **(proved.values or {})}
    for name, value in shown.items():
        if value is not None:
            shell.say("", (f"  {name}: ", "dim"), style.brief(value, 110))
    shell.say("", (f"  in {proved.store}, under a checkpoint of {counted(proved.size, 'entry', 'entries')}", "dim"))


# files --------------------------------------------------------------------------------------------


def found_in(path: Path) -> bytes:
    """The content of a file, or one line that says why it cannot be read."""
    with unreadable(path):
        return read_input(path)


@contextlib.contextmanager
def unreadable(path: Path) -> Generator[None]:
    """Says in one line why a file cannot be read."""
    try:
        yield
    except OSError as error:
        raise CommandFailed(f"{path}: cannot be read ({error.strerror}); name another file") from None


def written(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    refuse_database(path)
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        with create_private(part) as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise CommandFailed(f"{path}: cannot be written ({error.strerror}); name another file") from None
