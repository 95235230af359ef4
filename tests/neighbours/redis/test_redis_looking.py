"""What a store on Redis says of itself: what its server's settings promise, and what was changed behind its back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from killick.cli.main import main
from killick.errors import RunBroken
from killick.store.protocol import Store
from killick.store.records import Condition, RunQuery
from killick.store.redis.store import RedisStore
from killick.store.slots import ROOT_SLOT, Slot
from neighbours.redis import valkeys
from store_contract.builders import TOKEN, blob, cached, following, indexed, letter
from store_contract.probes import commit, created, deliver, refused
from store_contract.search_terms import RED, batch


def condition(store: Store, name: str) -> Condition:
    [found] = [each for each in store.conditions() if each.name == name]
    return found


# what its server promises -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says", "warns"),
    [
        ({"appendfsync": "always"}, "survives power loss", None),
        ({"appendfsync": "everysec"}, "survives power loss", None),
        ({"appendfsync": "no"}, "survives a killed process", "half a minute"),
        ({"appendonly": "no", "save": "900 1"}, "only if a snapshot comes after it", "takes minutes"),
        ({"appendonly": "no"}, "nothing survives", "promises nothing"),
    ],
    ids=["always", "everysec", "no", "snapshots", "none"],
)
def test_what_the_server_is_set_to_promise_is_said_and_warned_of(
    settings: dict[str, str], says: str, warns: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with valkeys.Server(**settings) as server:
        store = RedisStore(server.url)
        found = condition(store, "durability")
        assert says in found.value
        assert (found.wrong is None) if warns is None else (warns in str(found.wrong))
        store.close()
        wrong = 0 if warns is None else 1
        assert main(["store", "doctor", "--store", server.url, "--json"]) == wrong
        assert json.loads(capsys.readouterr().out)["wrong"] == wrong


def test_where_the_server_flushes_now_and_then_a_commit_waits_for_it_unless_it_need_not() -> None:
    with valkeys.Server(appendfsync="everysec") as server, server.client() as client:
        for durability, commits in (("power", 3), ("process", 0)):
            client.config_resetstat()
            store = RedisStore(server.url, durability=durability)  # type: ignore[arg-type]
            head = created(store, durability)
            deliver(store, letter(durability, "m"))
            commit(store, following(head, "two"))
            said = condition(store, "durability").value
            store.close()
            stats: dict[str, Any] = client.info("commandstats")  # type: ignore[assignment]
            asked = stats.get("cmdstat_waitaof", {"calls": 0})["calls"]
            # One that wants to wait asks first whether it can, and once more where a script was not known.
            assert (asked > commits) if commits else (asked == 0)
            assert ("power loss takes" in said) == (not commits)


def test_a_server_that_would_throw_runs_away_is_warned_of() -> None:
    with valkeys.Server(maxmemory="100mb", maxmemory_policy="allkeys-lru") as server:
        store = RedisStore(server.url)
        assert "noeviction" in str(condition(store, "memory").wrong)
        with server.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
        assert condition(store, "memory").wrong is None
        store.close()


def test_a_server_that_tells_nothing_of_its_settings_is_used_all_the_same() -> None:
    with valkeys.Server() as server, server.client() as client:
        client.execute_command("ACL", "SETUSER", "clerk", "on", ">pw", "~*", "&*", "+@all", "-config", "-waitaof")
        store = RedisStore(server.url.replace("//", "//clerk:pw@"))
        assert commit(store, following(created(store, "a"), "two")).seq == 2
        assert "appendfsync unknown" in condition(store, "durability").value
        store.close()


# what was changed behind its back -----------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[RedisStore]:
    """A store with something of every kind."""
    made = RedisStore(valkeys.emptied())
    slots = (Slot("wait:1", "2", 1), Slot(ROOT_SLOT, "r"))
    head = created(made, "a", "one", "two", pieces=(blob("v"),), claims=(TOKEN,), slots=slots)
    deliver(made, letter("a", "m1"), letter("a", "m2"))
    index = indexed("waiting", tags=("t",), wake_at_us=7)
    commit(made, following(head, "three", takes=(1,), snapshot=cached(2), index=index))
    made.index_terms([batch("a", 0, 3, (RED, 10, 1))])
    assert made.inspect() == []
    yield made
    made.close()


Change = Callable[[redis.Redis], object]
TRUTH: dict[str, tuple[Change, str]] = {
    "a head": (lambda r: r.hset("{killick}:run:a", "epoch", 9), "heads"),
    "a holder": (lambda r: r.hset("{killick}:run:a", "holder", "me"), "heads"),
    "a message": (lambda r: _flip(r, "{killick}:mail:a", "1"), "inbox"),
    "a message gone": (lambda r: r.hdel("{killick}:mail:a", "1"), "inbox"),
    "a slot": (lambda r: _flip(r, "{killick}:slots:a", "wait:1"), "slots"),
    "slots of nobody": (lambda r: r.hset("{killick}:slots:b", "wait:1", ""), "slots"),
    "a chain": (lambda r: r.hdel("{killick}:chain:r", "m1"), "inbox"),
    "a claim": (lambda r: _flip(r, "{killick}:claims", r.hkeys("{killick}:claims")[0]), "claims"),  # type: ignore[index]
    "a claim gone": (lambda r: r.delete("{killick}:claims"), "claims"),
    "a value": (lambda r: _flip(r, "{killick}:pieces", blob("v").hash), "pieces"),
    "an end": (lambda r: r.xdel("{killick}:log:a", "3-0"), "log"),
    "a run gone": (lambda r: r.delete("{killick}:run:a"), "log"),
}
DERIVED: dict[str, tuple[Change, str]] = {
    "a place": (lambda r: r.zrem("{killick}:line:0:0:clerk", "0000000000000001:a"), "places"),
    "another place": (lambda r: r.zadd("{killick}:line:9:clerk", {"0000000000000001:a": 1}), "line:9:clerk"),
    "a status": (lambda r: r.zrem("{killick}:stand:waiting:clerk", "0000000000000001:a"), "places"),
    "nobody": (lambda r: r.zadd("{killick}:held", {"0000000000000009:b": 1}), "held"),
    "a tag": (lambda r: r.zrem("{killick}:tag:t", "0000000000000001:a"), "tags"),
    "a mark": (lambda r: r.delete(f"{{killick}}:mark:{RED}"), "marks"),
    "a count": (lambda r: r.hset("{killick}:refs", blob("v").hash, 7), "uses"),
    "uses of nobody": (lambda r: r.sadd("{killick}:uses:b", blob("v").hash), "uses"),
}


def _flip(r: redis.Redis, key: str, field: Any) -> None:
    kept = r.hget(key, field)
    assert isinstance(kept, bytes)
    r.hset(key, field, kept[:-1] + bytes([kept[-1] ^ 1]))


@pytest.mark.parametrize("what", TRUTH)
def test_what_was_changed_is_found_and_never_made_good(store: RedisStore, what: str) -> None:
    change, where = TRUTH[what]
    with valkeys.server().client() as client:
        change(client)
    for heal in (False, True):
        found = [problem for problem in store.inspect(heal=heal) if problem.where == where]
        assert found
        assert not any(problem.healed for problem in found)


@pytest.mark.parametrize("what", DERIVED)
def test_what_is_derived_and_was_changed_is_found_and_put_right(store: RedisStore, what: str) -> None:
    change, where = DERIVED[what]
    before = (store.due(10), store.runs(RunQuery(tag="t")), store.references("a"))
    with valkeys.server().client() as client:
        change(client)
    assert where in [problem.where for problem in store.inspect()]
    assert all(problem.healed for problem in store.inspect(heal=True))
    assert store.inspect() == []
    assert (store.due(10), store.runs(RunQuery(tag="t")), store.references("a")) == before


def test_an_event_that_somebody_put_beyond_the_head_is_never_written_over(store: RedisStore) -> None:
    head = store.head("a")
    assert head is not None
    with valkeys.server().client() as client:
        client.xadd("{killick}:log:a", {"b": b"forged", "h": b"?" * 32}, id="4-0")
    assert refused(store, following(head, "four"), RunBroken).seq == 4
    assert [row.body for row in store.read("a", after=3)] == [b"forged"]


def test_a_count_of_messages_that_was_changed_is_shown_as_such(store: RedisStore) -> None:
    with valkeys.server().client() as client:
        client.hset("{killick}:run:a", "delivered", 1)
    row = store.index("a")
    assert row is not None
    assert row.delivered == -1
