"""The thread that commits ends loudly: whatever error ends it, no caller waits for ever, and nothing more is taken."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from killick.clock import SystemClock
from killick.errors import LogError
from killick.log import Entry, Log, group_commit
from killick.log.group_commit import Committer
from killick.model import events as e
from killick.store import MemoryStore

CALLS = ("time.sleep", "monotonic", "oldest", "lead", "hurry", "wake.wait", "append")


class Planted(BaseException):
    pass


def plant(monkeypatch: pytest.MonkeyPatch, committer: Committer, store: MemoryStore, call: str) -> None:
    """Makes one call of the thread fail, and only there."""

    def failing(real: Any) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            if threading.current_thread().name == "killick-committer":
                raise Planted(call)
            return real(*given, **named)

        return called

    match call:
        case "time.sleep":
            monkeypatch.setattr(group_commit, "time", SimpleNamespace(sleep=failing(lambda _: None)))
        case "monotonic":
            monkeypatch.setattr(group_commit, "SystemClock", SimpleNamespace(monotonic=failing(SystemClock.monotonic)))
        case "oldest":
            monkeypatch.setattr(committer, "_oldest", failing(committer._oldest))
        case "lead":
            monkeypatch.setattr(committer, "_lead_if_free", failing(committer._lead_if_free))
        case "hurry":
            count = iter(range(100))
            real = group_commit.hurry
            monkeypatch.setattr(
                group_commit, "hurry", lambda change: failing(real)(change) if next(count) == 1 else real(change)
            )
        case "wake.wait":
            monkeypatch.setattr(committer._wake, "wait", failing(committer._wake.wait))
        case "append":
            monkeypatch.setattr(store, "append", failing(store.append))


@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_the_thread_refuses_what_waits_and_what_comes(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    log = Log(store)
    run = log.create(e.RunStarted(at=1, run="r", agent="a"), {})
    plant(monkeypatch, log.committer, store, call)
    run.append_behind(Entry(e.NoteMade(at=1), {"note": 1}))
    thread = log.committer._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    refused: list[BaseException] = []

    def write() -> None:
        try:
            run.append(Entry(e.NoteMade(at=1), {"note": 2}))
            run.barrier()
        except BaseException as error:
            refused.append(error)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(60)
    assert not writing.is_alive(), "a caller waits for a thread that has ended"
    assert [type(each) for each in refused] == [LogError] or isinstance(refused[0], (LogError, Planted))
    with pytest.raises(LogError, match="restart"):
        log.committer.refuse_broken()
    assert "killick-committer" in caplog.text
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
