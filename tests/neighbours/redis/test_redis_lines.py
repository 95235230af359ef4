"""Lost answers, servers that die, fill up or are emptied: what was acknowledged is there, once, or one is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

import pytest
import redis
from msgspec.structs import replace

from killick.errors import StoreBroken, StoreError, StoreFormat, StoreFull, StoreReadOnly, StoreUnavailable
from killick.store import namespaces, open_store
from killick.store.records import Append, Delivered, Head
from killick.store.redis.rows import check, packed
from killick.store.redis.store import RedisStore
from neighbours.redis import valkeys
from store_contract.builders import TOKEN, blob, creation, following, indexed, letter
from store_contract.probes import chained, commit, created, deliver, found
from store_contract.slots import ONE, renewal, vote


@pytest.fixture
def proxy() -> Iterator[valkeys.Proxy]:
    valkeys.emptied()
    with valkeys.Proxy(valkeys.server().port) as made:
        yield made


@pytest.fixture
def store(proxy: valkeys.Proxy) -> Iterator[RedisStore]:
    made = RedisStore(proxy.url)
    yield made
    made.close()


def lose(proxy: valkeys.Proxy) -> None:
    """The answer to what is asked next is lost."""
    proxy.cut_next_answer_to = b"EVAL"


# answers that are lost ----------------------------------------------------------------------------


def test_an_append_whose_answer_was_lost_is_acknowledged_and_there_once(
    proxy: valkeys.Proxy, store: RedisStore
) -> None:
    head = commit(store, following(created(store, "a"), "two"))
    makes: list[Callable[[Head], Append]] = [
        lambda head: following(head, "three"),
        lambda head: following(head, "four", claims=(TOKEN,), pieces=(blob("v"),), index=indexed()),
        lambda head: following(head, *"56789"),
    ]
    for make in makes:
        lose(proxy)
        wanted = make(head)
        head = commit(store, wanted)
        assert not proxy.cut_next_answer_to
        assert (head.seq, head.hash) == wanted.last
    chained(store, "a")


def test_a_batch_to_one_run_whose_answer_was_lost_is_acknowledged_whole(
    proxy: valkeys.Proxy, store: RedisStore
) -> None:
    head = created(store, "a")
    first = following(head, "two")
    second = following(replace(head, seq=2, hash=first.rows[0].hash), "three")
    lose(proxy)
    results = store.append([first, second, following(head, "another two")])
    assert [type(result).__name__ for result in results] == ["Head", "Head", "HeadMoved"]
    assert found(store, "a") == results[1]
    chained(store, "a")


def test_a_delivery_whose_answer_was_lost_is_its_senders_even_if_it_took_the_last_place_and_was_moved(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = created(store, "a", slots=(ONE,), index=indexed())
    once = store._server.once  # pyright: ignore[reportPrivateUsage]

    def lost(script: str, *args: object, **options: object) -> object:
        once(script, *args, **options)  # type: ignore[arg-type]
        monkeypatch.undo()
        commit(store, renewal(store, head, "a+2"))
        raise redis.ConnectionError("the answer was lost")

    monkeypatch.setattr(store._server, "once", lost)  # pyright: ignore[reportPrivateUsage]
    [told] = store.deliver([vote("a", "ann")])
    assert isinstance(told, Delivered)
    assert (told.fresh, told.message.run) == (True, "a+2")
    [other] = store.deliver([vote("a", "ann", by="bob")])
    assert isinstance(other, Delivered)
    assert not other.fresh


def test_a_lease_or_a_claim_whose_answer_was_lost_is_taken_once(proxy: valkeys.Proxy, store: RedisStore) -> None:
    created(store, "a", holder="gone", index=indexed("waiting", wake_at_us=1))
    store.release("a", epoch=1, left=True)
    lose(proxy)
    [claimed] = store.claim("w1", now_us=2, seconds=30, limit=5)
    assert (claimed.head, claimed.left) == (found(store, "a"), "gone")
    assert claimed.head.epoch == 2
    store.release("a", epoch=2)
    lose(proxy)
    assert store.lease("a", "w1", seconds=30).epoch == found(store, "a").epoch == 3


def test_a_message_whose_answer_was_lost_is_still_fresh(proxy: valkeys.Proxy, store: RedisStore) -> None:
    created(store, "a")
    for by, fresh in (("ann", True), ("bob", False)):
        lose(proxy)
        [told] = store.deliver([letter("a", "m", by=by)])
        assert isinstance(told, Delivered)
        assert (told.fresh, told.message.by) == (fresh, "ann")
    assert len(store.messages("a")) == 1


def test_a_removal_or_a_repair_whose_answer_was_lost_is_done(proxy: valkeys.Proxy, store: RedisStore) -> None:
    head = created(store, "a", "one", "two")
    repaired = following(replace(head, seq=2), "three").rows
    lose(proxy)
    store.repair(replace(head, seq=3, hash=repaired[0].hash), keep=1, rows=repaired)
    assert (found(store, "a").seq, len(store.displaced("a"))) == (3, 1)
    lose(proxy)
    store.remove("a")
    assert store.head("a") is None


# servers that die ---------------------------------------------------------------------------------


def test_work_goes_on_across_deaths_of_the_server_and_nothing_acknowledged_is_lost() -> None:
    with valkeys.Server() as server:
        store = RedisStore(server.url)
        rung: Queue[str] = Queue()
        store.watch(rung.put)
        heads = {run: created(store, run) for run in "abc"}
        stop, done = threading.Event(), list[str]()

        def work(run: str) -> None:
            while not stop.is_set():
                heads[run] = commit(store, following(heads[run], "more", index=indexed()))
                done.append(run)

        threads = [threading.Thread(target=work, args=(run,)) for run in heads]
        for thread in threads:
            thread.start()
        for again in (True, True, False):
            many = len(done) + 20
            while len(done) < many:
                stop.wait(0.01)
            if again:
                server.kill()
                server.start()
        stop.set()
        for thread in threads:
            thread.join()
        for run, head in heads.items():
            assert store.head(run) == head
            chained(store, run)
        assert len(done) == sum(head.seq - 1 for head in heads.values())
        assert store.inspect() == []
        # Whoever listens again is told to look at everything, and hears of what comes after that.
        heard, number = "", 0
        while heard != "a":
            number += 1
            assert number < 1_000, "nobody is told any more"
            deliver(store, letter("a", f"after {number}"))
            with suppress(Empty):
                while (heard := rung.get(timeout=0.5)) != "a":
                    pass
        store.close()


def test_a_server_that_stays_away_is_told_of_after_a_while_and_who_watched_hears_when_it_is_back() -> None:
    with valkeys.Server() as server:
        store = RedisStore(server.url, busy_seconds=0.3)
        head = created(store, "a")
        server.kill()
        rung: Queue[str] = Queue()
        store.watch(rung.put)
        with pytest.raises(StoreUnavailable):
            store.append([following(head, "two")])
        with pytest.raises(StoreUnavailable):
            store.head("a")
        server.start()
        assert commit(store, following(head, "two")).seq == 2
        assert rung.get(timeout=600) == ""
        store.close()


def test_a_server_that_forgot_everything_is_told_of_and_nothing_is_written_there(store: RedisStore) -> None:
    head = created(store, "a")
    with valkeys.server().client() as client:
        client.flushall()
        for item in (following(head, "two"), creation(store, "b", "one")):
            with pytest.raises(StoreBroken, match="is gone"):
                store.append([item])
        assert client.keys("*") == []


def test_a_full_server_is_a_clear_error_and_appending_works_again_when_there_is_room() -> None:
    with valkeys.Server() as server:
        store = RedisStore(server.url, busy_seconds=1)
        head = created(store, "a")
        with server.client() as client:
            client.config_set("maxmemory", 1)
            with pytest.raises(StoreFull):
                store.append([following(head, "two", pieces=(blob("v"),), index=indexed())])
            assert (store.head("a"), store.index("a")) == (head, None)
            client.config_set("maxmemory", 0)
        assert commit(store, following(head, "two")).seq == 2
        store.close()


def test_a_replica_is_a_clear_error() -> None:
    with valkeys.Server() as server:
        store = RedisStore(server.url, busy_seconds=0.1)
        head = created(store, "a")
        with server.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            with pytest.raises((StoreReadOnly, StoreUnavailable)):
                store.append([following(head, "two")])
            client.execute_command("REPLICAOF", "NO", "ONE")
        assert commit(store, following(head, "two")).seq == 2
        store.close()


# opening ------------------------------------------------------------------------------------------


def test_a_store_is_opened_by_url_and_namespaces_are_stores_of_their_own() -> None:
    url, socket = valkeys.emptied(), valkeys.server().socket_url
    valkey = url.replace("redis:", "valkey:")
    places = [url, f"{socket}&namespace=claims", url.replace("/0", "/1"), f"{valkey}?namespace=x"]
    stores = [open_store(place) for place in places]
    for number, store in enumerate(stores):
        created(store, f"run-{number}")
    assert len({store.id for store in stores}) == len(stores)
    for number, store in enumerate(stores):
        assert [head.run for _, head in store.heads()] == [f"run-{number}"]
        assert store.inspect() == []
        store.close()
    again = open_store(socket)
    assert again.id == stores[0].id
    again.close()
    assert namespaces(url) == {"": None, "claims": None, "x": None}


def test_a_user_with_the_keys_and_channels_of_a_namespace_works_there_and_is_locked_out_of_others() -> None:
    url = valkeys.emptied()
    open_store(f"{url}?namespace=globex").close()
    with valkeys.server().client() as admin:
        admin.execute_command(
            "ACL", "SETUSER", "acme", "on", ">hush", "~{killick_acme}:*", "&{killick_acme}:*", "+@all", "-@admin",
            "+config|get", "+info",
        )  # fmt: skip
        base = url.replace("redis://", "redis://acme:hush@")
        store = open_store(f"{base}?namespace=acme")
        assert store.place == f"{url}?namespace=acme"
        rung: Queue[str] = Queue()
        stop = store.watch(rung.put)
        created(store, "a", index=indexed("waiting", wake_at_us=1))
        assert rung.get(timeout=600) == "a"
        assert [each.head.run for each in store.claim("w", now_us=5, seconds=9, limit=1)] == ["a"]
        stop()
        store.close()
        for other in ("?namespace=globex", "?namespace=new", ""):
            with pytest.raises(StoreUnavailable, match=r"(?i)permission"):
                open_store(f"{base}{other}", busy_seconds=0.1)
        admin.execute_command("ACL", "DELUSER", "acme")


def test_a_store_is_opened_through_tls_if_the_server_is_the_one_that_was_meant(tmp_path: Path) -> None:
    valkeys.emptied()
    with valkeys.encrypted(valkeys.server().port, tmp_path) as url:
        store = open_store(url)
        assert commit(store, following(created(store, "a"), "two")).seq == 2
        assert store.place.startswith("rediss://127.0.0.1")
        store.close()
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            open_store(url.partition("?")[0], busy_seconds=0.1)


def test_who_watches_hears_only_of_the_own_store_whatever_the_database() -> None:
    url = valkeys.emptied()
    store, other = open_store(url), open_store(url.replace("/0", "/1"))
    rung: Queue[str] = Queue()
    stop = store.watch(rung.put)
    for each in (other, store):
        created(each, "a", index=indexed("waiting", wake_at_us=1))
        deliver(each, letter("a", "m"))
    assert {rung.get(timeout=600), rung.get(timeout=600)} == {"a"}
    assert rung.empty()
    stop()
    store.close()
    other.close()


def test_what_cannot_be_opened_says_what_to_do_and_shows_no_password() -> None:
    url = valkeys.emptied()
    with pytest.raises(StoreUnavailable, match="no store is under this prefix"):
        open_store(url, create=False)
    with valkeys.server().client() as client:
        assert client.keys("*") == []
    port = valkeys.server().port
    for wrong in (
        f"redis://:hush@127.0.0.1:{port}/0",
        "redis://:hush@127.0.0.1:1/0",
        f"{url}?namespace=a{{b",
        f"{url}?namespace=",
        f"{url}?x=y",
    ):
        with pytest.raises(StoreUnavailable) as info:
            open_store(wrong, busy_seconds=0.1)
        assert "hush" not in str(info.value)
        assert "\n" not in str(info.value)


def test_a_store_whose_own_key_was_changed_or_that_is_newer_is_refused() -> None:
    url = valkeys.emptied()
    open_store(url).close()
    with valkeys.server().client() as client:
        kept = client.hget("{killick}:meta", "secret_key")
        assert isinstance(kept, bytes)
        client.hset("{killick}:meta", "secret_key", kept[:-1] + b"?")
        with pytest.raises(StoreBroken):
            open_store(url)
        client.hset("{killick}:meta", "secret_key", kept)
        client.hset("{killick}:meta", "format", check(b"format" + packed(b"99")) + packed(b"99"))
        with pytest.raises(StoreFormat, match="upgrade killick"):
            open_store(url)


def test_a_connection_of_a_parent_process_is_not_used_by_its_child(store: RedisStore) -> None:
    store.heads()
    child = os.fork()
    if not child:
        code = 1
        try:
            store.heads()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.heads() == []


def test_scripts_that_the_server_forgot_are_given_to_it_again(store: RedisStore) -> None:
    head = created(store, "a")
    with valkeys.server().client() as client:
        client.script_flush()
    assert commit(store, following(head, "two")).seq == 2


def test_there_are_no_transactions_of_others_and_that_is_said(store: RedisStore) -> None:
    with pytest.raises(StoreError, match="SQLite file or PostgreSQL"):
        store.transaction()
