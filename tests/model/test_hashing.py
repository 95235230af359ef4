"""The chain's hashes are part of the format: they may never change."""

from hashlib import sha256

from killick.model import hashing


def test_the_hashes_are_the_documented_ones() -> None:
    body = b'{"kind":"note.made","at":1}'
    before = hashing.genesis("store_1", "run_1")
    assert before == sha256(b"\x03killick\x001\x00store_1\x00run_1").digest()
    assert hashing.leaf(body) == sha256(b"\x00" + body).digest()
    assert hashing.link(before, body) == sha256(b"\x04" + before + body).digest()
    assert hashing.value_hash("json", b"{}") == sha256(b"\x02json\x00{}").digest()


def test_the_genesis_binds_store_run_and_format() -> None:
    assert len({hashing.genesis(store, run) for store in ("a", "b") for run in ("x", "y")}) == 4
