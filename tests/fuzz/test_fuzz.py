"""Fuzzing: what failed once is tried again in the gate; new inputs are drawn among the slow tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.fuzzing import Target, bounded, hunt, known, tried
from fuzz.targets import TARGETS
from killick.errors import ContractRefused
from seeds import repeats

targets = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@targets
def test_a_target_takes_its_own_inputs_and_stands_what_failed_once(target: Target) -> None:
    for data in target.seeds():
        target.run(data)
    for path in known(target.name):
        assert tried(target, path.read_bytes()) is None, path


@pytest.mark.slow
@targets
def test_a_target_stands_what_a_seed_makes_of_its_inputs(target: Target) -> None:
    hunt(target, repeats(150, 3_000))


def test_the_fuzzer_finds_an_error_work_without_end_and_a_difference_and_keeps_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzz.fuzzing.CORPUS", tmp_path)
    monkeypatch.setattr("fuzz.fuzzing.CALLS_MAX", 10_000)

    def fragile(data: bytes) -> None:
        if b"\xff" in data:
            raise IndexError
        if b"\x00" in data:
            while True:
                len(data)
        if not data.isascii():
            raise ContractRefused("data", "is not ASCII")

    target = Target("fragile", fragile, lambda: [b'{"n": 1}'])
    assert tried(target, "é".encode()) is None
    assert isinstance(tried(target, b"\xff"), IndexError)
    assert "calls" in str(tried(target, b"\x00"))
    with pytest.raises(AssertionError, match="seed"):
        hunt(target, 2_000)
    [kept] = known("fragile")
    assert kept.read_bytes() in (b"\xff", b"\x00")


def test_memory_beyond_its_bound_is_found() -> None:
    with pytest.raises(BaseException, match="bytes of memory"), bounded():
        bytearray(65 << 20)
