"""R35: one event's proof shows that event alone, grows with log n, and needs nothing but the public key."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import killick
from families import fork_of
from killick.audit.checkpoint import new_key
from killick.audit.proof import ConsistencyProof, Piece, Proof, verify_proof
from killick.errors import KillickError, ProofBroken, RunUnknown, SealRefused
from killick.log import Entry, Log
from killick.model import events as e

KEY, PUB = new_key()
OTHER_KEY, OTHER_PUB = new_key()
LONG = "a long text that is stored apart " * 100


def note(text: Any) -> Entry:
    return Entry(e.NoteMade(at=2), {"note": text})


def started(log: Log, run: str, notes: int) -> None:
    handle = log.create(e.RunStarted(at=1, run=run, agent="claims"), {"input": run})
    for first in range(0, notes, 1_000):
        handle.append(*(note(f"{run} says {number}") for number in range(first, min(notes, first + 1_000))))


@pytest.fixture(params=["sqlite", "memory"])
def kd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open("memory:" if request.param == "memory" else str(tmp_path / "killick.db")) as kd:
        for run, notes in (("a", 5), ("b", 9), ("c", 1)):
            started(kd.runtime.log, run, notes)
        yield kd


def test_every_event_of_every_run_is_proved_with_the_public_key_alone(kd: killick.Client) -> None:
    kd.store.seal(KEY)
    kd.runtime.log.open("a").append(note("more"), note("and more"))
    fork_of(kd.runtime.log, e.RunForked(at=3, run="b-fork", parent="b", cut=4, generation=1)).append(
        note("another way")
    )
    done = kd.store.seal(KEY)
    rows = {run: kd.events(run) for run in ("a", "b", "c", "b-fork")}
    proofs = {(run, each.seq): kd.store.prove(run, each.seq).file for run, events in rows.items() for each in events}
    place = kd.runtime.store.id
    kd.close()
    for (run, seq), proof in proofs.items():
        proved = verify_proof(proof, PUB, done.file)
        assert (proved.store, proved.run, proved.seq, proved.size) == (place, run, seq, done.size)
        assert msgspec.json.encode(proved.event) == rows[run][seq - 1].row.body
        assert proved.values is None
    assert len(proofs) == 8 + 10 + 2 + 6


def test_with_values_it_shows_them_and_without_only_their_hash(kd: killick.Client) -> None:
    kd.runtime.log.open("a").append(note({"text": LONG, "more": [LONG + "!", 7]}))
    kd.store.seal(KEY)
    proof = kd.store.prove("a", 7, values=True)
    assert verify_proof(proof.file, PUB).values == {"note": {"text": LONG, "more": [LONG + "!", 7]}}
    assert len(proof.pieces) > 1
    assert b"stored apart" not in kd.store.prove("a", 7).file
    assert verify_proof(kd.store.prove("a", 2, values=True).file, PUB).values == {"note": "a says 0"}


def test_values_that_were_erased_cannot_be_shown_and_the_event_still_can(kd: killick.Client) -> None:
    kd.runtime.log.open("a").append(note(LONG))
    log = kd.runtime.log.open("a")
    kd.runtime.log.erase(log, at=4, reason="asked for it", seqs=[3], pieces=list(kd.runtime.log.pieces_of("a", 7)))
    kd.store.seal(KEY)
    for seq in (3, 7):
        with pytest.raises(SealRefused, match=f"values of event {seq} were erased; prove it without them"):
            kd.store.prove("a", seq, values=True)
        assert verify_proof(kd.store.prove("a", seq).file, PUB).seq == seq


def test_what_is_not_sealed_or_not_there_is_refused_with_the_next_move(kd: killick.Client) -> None:
    with pytest.raises(
        SealRefused, match="event 1 is not sealed yet, nor is any other of the run; run `killick store seal`"
    ):
        kd.store.prove("a", 1)
    kd.store.seal(KEY)
    kd.runtime.log.open("a").append(note("later"))
    with pytest.raises(
        SealRefused, match="event 7 is not sealed yet, only events up to 6 are; run `killick store seal`"
    ):
        kd.store.prove("a", 7)
    for seq in (0, 8):
        with pytest.raises(SealRefused, match=f"has no event {seq}; it has 1 to 7"):
            kd.store.prove("a", seq)
    with pytest.raises(RunUnknown):
        kd.store.prove("nobody", 1)


@pytest.mark.slow
def test_any_flipped_byte_fails() -> None:
    with killick.open("memory:") as kd:
        started(kd.runtime.log, "a", 5)
        first = kd.store.seal(KEY).file
        kd.runtime.log.open("a").append(note({"text": LONG[:700]}))
        kd.store.seal(KEY)
        proof = kd.store.prove("a", 7, values=True, since=first).file
    assert verify_proof(proof, PUB, first).run == "a"
    chance = random.Random(35)
    flips = [(at, 1 << chance.randrange(8)) for at in range(len(proof))]
    flips += [(at, flip) for at in range(0, len(proof), 7) for flip in (1, 2, 4, 32)]
    for at, flip in flips:
        changed = bytearray(proof)
        changed[at] ^= flip
        with pytest.raises(ProofBroken):
            verify_proof(bytes(changed), PUB)


def test_bytes_more_or_less_fail_and_so_does_another_order(kd: killick.Client) -> None:
    kd.store.seal(KEY)
    proof = kd.store.prove("b", 4).file
    fields = msgspec.json.decode(proof, type=dict[str, Any])
    for changed in (proof + b"\n", proof[:-1], b" " + proof, msgspec.json.encode(fields), b"{}", b"", b"[1]", b"\xff"):
        with pytest.raises(ProofBroken):
            verify_proof(changed, PUB)
    turned = msgspec.json.format(msgspec.json.encode(dict(reversed(fields.items()))), indent=2) + b"\n"
    with pytest.raises(ProofBroken, match="is not in the form of a proof"):
        verify_proof(turned, PUB)
    with pytest.raises(ProofBroken, match="version 2, this build of Killick reads 1"):
        verify_proof(proof.replace(b'"version": 1', b'"version": 2'), PUB)


def test_parts_of_two_proofs_make_no_third(kd: killick.Client) -> None:
    kd.runtime.log.open("a").append(note({"text": LONG}))
    kd.store.seal(KEY)
    one, two = kd.store.prove("a", 3, values=True), kd.store.prove("b", 5)
    for name in ("seq", "body", "path", "entry", "index", "entry_path"):
        mixed = msgspec.structs.replace(one, **{name: getattr(two, name)})
        with pytest.raises(ProofBroken):
            verify_proof(mixed.file, PUB)
    extra = msgspec.structs.replace(one, pieces=(Piece("text", b"nothing refers to this"),))
    with pytest.raises(ProofBroken, match="it has values that the event does not refer to"):
        verify_proof(extra.file, PUB)
    whole = kd.store.prove("a", 7, values=True)
    with pytest.raises(ProofBroken, match="some of the values are missing or were changed"):
        verify_proof(msgspec.structs.replace(whole, pieces=whole.pieces[1:]).file, PUB)


def test_another_key_proves_nothing(kd: killick.Client) -> None:
    kd.store.seal(KEY)
    proof = kd.store.prove("a", 1).file
    with pytest.raises(ProofBroken, match="is not signed with this key"):
        verify_proof(proof, OTHER_PUB)
    with pytest.raises(ProofBroken, match="is a private key"):
        verify_proof(proof, KEY)
    with pytest.raises(ProofBroken, match="is not a public key in PEM"):
        verify_proof(proof, "nonsense")


# checkpoints that somebody kept -------------------------------------------------------------------


def test_a_proof_fits_the_checkpoint_it_was_made_under_the_next_and_an_older_one_it_was_made_for(
    kd: killick.Client,
) -> None:
    files: list[str] = []
    for number in range(5):
        kd.runtime.log.open("a").append(note(f"day {number}"))
        files.append(kd.store.seal(KEY).file)
    for since, kept in itertools.product([None, *range(5)], range(5)):
        given = None if since is None else files[since]
        proof = kd.store.prove("a", 3, since=given).file
        if kept in (4, since):
            assert verify_proof(proof, PUB, files[kept]).since is not None
        else:
            with pytest.raises(ProofBroken, match=r"extends the one of .*; `killick store prove --since CHECKPOINT"):
                verify_proof(proof, PUB, files[kept])


def test_a_newer_checkpoint_shows_that_it_came_right_after_or_the_proof_has_to_be_made_anew(kd: killick.Client) -> None:
    kd.store.seal(KEY)
    proof = kd.store.prove("a", 3).file
    kd.runtime.log.open("a").append(note("tuesday"))
    tuesday = kd.store.seal(KEY).file
    kd.runtime.log.open("a").append(note("wednesday"))
    wednesday = kd.store.seal(KEY).file
    assert verify_proof(proof, PUB, tuesday).run == "a"
    for kept in (wednesday, tuesday.partition("\n{")[0] + "\n"):
        with pytest.raises(ProofBroken, match="make a new proof, under the newer one"):
            verify_proof(proof, PUB, kept)


def test_a_checkpoint_of_other_seals_or_another_store_does_not_fit(kd: killick.Client, tmp_path: Path) -> None:
    kd.store.seal(KEY)
    proof = kd.store.prove("a", 3)
    with killick.open(str(tmp_path / "other.db")) as other:
        started(other.runtime.log, "a", 5)
        elsewhere = other.store.seal(KEY).file
        with pytest.raises(SealRefused, match="these seals do not extend it"):
            other.store.prove("a", 1, since=kd.store.seal(KEY).file)
    with pytest.raises(ProofBroken, match=r"is of store store_.*, the checkpoint of store_"):
        verify_proof(proof.file, PUB, elsewhere)
    forged = msgspec.structs.replace(proof, since=ConsistencyProof(1, proof.path[0], ()))
    with pytest.raises(ProofBroken, match="does not prove that its seals extend the older checkpoint"):
        verify_proof(forged.file, PUB)


def test_a_run_that_is_not_what_was_sealed_gives_no_proof() -> None:
    with killick.open("memory:") as kd:
        started(kd.runtime.log, "a", 3)
        kd.store.seal(KEY)
        kept: Any = kd.runtime.store
        rows, number = kept._runs["a"].rows, 2
        rows[number] = msgspec.structs.replace(rows[number], body=rows[number].body.replace(b'"at":2', b'"at":1'))
        with pytest.raises(KillickError, match="do not fit the chain; killick store verify a says more"):
            kd.store.prove("a", 3)


@pytest.mark.parametrize(("events", "bytes_max"), [(10, 1_200), (1_000, 1_600), (10_000, 1_900)])
def test_a_proof_grows_with_log_n(events: int, bytes_max: int) -> None:
    with killick.open("memory:") as kd:
        started(kd.runtime.log, "long", events - 1)
        kd.store.seal(KEY)
        proof = kd.store.prove("long", events // 2)
        assert len(proof.file) < bytes_max
        assert len(proof.path) <= (events - 1).bit_length()
        assert verify_proof(proof.file, PUB).run == "long"


def test_a_proof_is_the_file_that_is_documented() -> None:
    fields = {field.name for field in msgspec.structs.fields(Proof)}
    page = (Path(__file__).parents[2] / "docs" / "file-formats.md").read_text(encoding="utf-8")
    assert {name for name in fields if f"`{name}`" not in page} == set()
