"""The resume contract: six properties that hold whenever a run goes on after a crash, a rewind or a fork.

Prefix continuation, effects exactly once, fork determinism, checkpoint validity, consume-once, recovery determinism:
a class each, named and told to users in docs/resume-contract.md. Where that is cheap, a process dies at every point
there is; the far side is a world that counts, and that no death undoes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import killick
from engine.delivering import DELIVERED, FAR, Asked, Lineage, asked, deliverer, letters
from folded import fold_ledger, fold_timeline
from killick.check.crashes import RUN, Saved, Story, simulate
from killick.ids import SeededIds
from killick.log import Log
from killick.log.log import FOLD
from killick.model import event_codec
from killick.model import events as e
from killick.model.chunks import Blob
from killick.model.fold import timeline
from killick.store import MemoryStore
from killick.store.records import Append, Snapshot
from processes import Processes
from seeds import repeats
from simulation.around import answering, book, mail, pay, price, redeem, redeem_at_the_second_try, reserve
from simulation.crash_stories import Scenario, World, differences, killed_everywhere, tick

SEED: Final = 11

# the agent and its world --------------------------------------------------------------------------


@killick.agent(name="errands")
async def errands(run: killick.Run, name: str) -> list[Any]:
    """Something of everything: a read, effects of every class, branches, a decision, a person, a right."""
    cost = await run.call(price, name)
    tick()
    paid = await run.call(pay, name)
    tick()
    both = await run.gather(run.call(book, name), run.call(mail, name))
    how = await run.decided("How?", "by train", options=["by train", "by car"], because="it is far")
    await run.update(how=how)
    redeemed = await run.call(redeem, name, f"voucher of {name}")
    answer = await run.ask("Is that all?")
    tick()
    return [cost, paid, both, how, redeemed, answer.value, await run.call(reserve, name)]


EFFECTS: Final = {"pay x", "book x", "mail x", "redeem x", "reserve x"}


def scenario(*, taken_back_to: Sequence[str] = ()) -> Scenario:
    """The agent and the people around it. They take it back so often, as soon as it asks, before they answer."""
    answers = answering(ask="yes")

    def outside(client: killick.Client, waits: Sequence[killick.Wait], around: World) -> bool:
        asks = [wait for wait in waits if wait.waits_for == "answer" and wait.name == "ask"]
        times = client.state(RUN).fold.facts.generation
        if asks and times < len(taken_back_to):
            client.rewind(RUN, taken_back_to[times], by="person")
            return True
        return answers(client, waits, around)

    return Scenario(agent=errands, input="x", outside=outside)


def left_behind(told: Scenario) -> tuple[Story, list[Saved]]:
    """The run as it goes undisturbed; and what its process would leave, dying at any point where that is new."""
    saved: list[Saved] = []
    story = simulate(told, seed=SEED, saving=saved)
    assert (story.status, set(story.world.effects.values())) == ("completed", {1}), story.troubles
    assert set(story.world.effects) == EFFECTS
    return story, saved


def rows(store: MemoryStore, run: str = RUN) -> list[tuple[int, bytes, bytes]]:
    """A run's log as it is stored."""
    if store.head(run) is None:
        return []
    return [(row.seq, row.hash, row.body) for row in Log(store).rows(run)]


# 1 ------------------------------------------------------------------------------------------------


class TestPrefixContinuation:
    """After any crash the log goes on from where it was: nothing of it is changed, left out or done over, and the
    first thing that happens is the step that the run was on."""

    def test_the_log_of_the_dead_is_a_prefix_of_the_log_of_the_living(self) -> None:
        told = scenario()
        _, everywhere = left_behind(told)
        assert len(everywhere) > 20
        for saved in everywhere:
            before, after = rows(saved.store), rows(simulate(told, saved=saved, seed=SEED).store)
            assert after[: len(before)] == before, f"killed at {saved.point} ({saved.place})"

    def test_it_goes_on_at_the_step_that_it_was_on(self) -> None:
        told = scenario()
        _, everywhere = left_behind(told)
        for saved in everywhere:
            before = rows(saved.store)
            if not before:
                continue
            fold = Log(saved.store).state(RUN).fold
            over = {step.id for step in fold.steps if step.ended}
            begun = {step.id for step in fold.steps} - over
            later = [
                event_codec.decode(body)
                for _, _, body in rows(simulate(told, saved=saved, seed=SEED).store)[len(before) :]
            ]
            steps = [event.step for event in later if getattr(event, "step", None)]
            where = f"killed at {saved.point} ({saved.place})"
            assert not over & set(steps), f"{where}: {over & set(steps)} had ended, and were gone on with"
            first = steps[0].split(".") if steps else []
            on = begun & {".".join(first[: depth + 1]) for depth in range(len(first))}
            assert on or not begun, f"{where}: on {begun}, and went on at {steps[:1]}"

    def test_a_rewind_too_only_adds_to_the_log(self) -> None:
        told = scenario(taken_back_to=["2:before", "3:after"])
        story, everywhere = left_behind(told)
        whole = rows(story.store)
        for saved in everywhere:
            before = rows(saved.store)
            assert whole[: len(before)] == before


# 2 ------------------------------------------------------------------------------------------------


class TestEffectsExactlyOnce:
    """An action that an agent takes once happens once, as the far side counts it: wherever processes die, and however
    often the run is taken back to before it."""

    def test_killed_at_any_point_each_effect_happens_once(self) -> None:
        told = scenario()
        expected, _ = left_behind(told)
        for story in killed_everywhere(told, seed=SEED):
            assert not (wrong := differences(expected, story)), f"{story}: {wrong}"

    @pytest.mark.slow
    @pytest.mark.parametrize("to", ["start", "2:before", "3:before", "5:before"])
    def test_taken_back_and_killed_at_any_point_each_effect_happens_once(self, to: str) -> None:
        told = scenario(taken_back_to=[to])
        expected, _ = left_behind(told)
        for story in killed_everywhere(told, seed=SEED):
            assert not (wrong := differences(expected, story)), f"{story}: {wrong}"

    @pytest.mark.slow
    @settings(max_examples=repeats(15, 40))
    @given(
        to=st.lists(st.sampled_from(["1:before", "2:before", "2:after", "3:before", "3:after", "5:after"]), max_size=3),
        kills=st.lists(st.integers(1, 60), max_size=4),
    )
    def test_taken_back_and_killed_over_and_over_each_effect_happens_once(
        self, to: list[str], kills: list[int]
    ) -> None:
        story = simulate(scenario(taken_back_to=to), *kills, seed=SEED)
        assert not story.troubles
        assert story.status == "completed", story.outcome
        assert story.world.effects == Counter(EFFECTS)

    @pytest.mark.slow
    @settings(max_examples=repeats(15, 60))
    @given(moves=st.lists(st.tuples(st.sampled_from(["goes on", "rewound", "forked"]), st.integers(0, 99)), max_size=7))
    @example([("goes on", 24), ("goes on", 75), ("rewound", 20), ("goes on", 87), ("forked", 13)])
    @example([("goes on", 57), ("rewound", 93), ("forked", 41), ("forked", 47)])
    def test_a_lineage_that_is_forked_and_taken_back_and_dies_does_what_one_run_would(self, moves: Any) -> None:
        DELIVERED.clear()
        with Processes() as processes:
            lineage = Lineage(processes, deliverer)
            for move, number in moves:
                lineage.go(move, number)
            lineage.to_its_end()
        assert Counter(what for _, what in DELIVERED) == {"a letter": 2, "a parcel": 1}, moves


# 3 ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_happened_yet() -> None:
    FAR.requests.clear()


def opened(store: MemoryStore, clock: killick.clock.LeapingClock, seed: int = SEED) -> killick.Client:
    return killick.Client(store, clock=clock, ids=SeededIds(seed), behind=False)


def lasting(store: MemoryStore) -> dict[str, dict[str, Any]]:
    """Every run's state, less its times."""
    return Story(kills=(), status="completed", store=store).states


def places(store: MemoryStore, run: str) -> list[str]:
    """Every boundary of a run."""
    return [f"{step.id}:{side}" for step in Log(store).state(run).fold.steps for side in ("before", "after")]


class TestForkDeterminism:
    """Two forks of the same run at the same place, under the same conditions and in the same world, do the same; and
    what a fork does changes nothing in the run that it left."""

    CONDITIONS: Final[tuple[dict[str, Any], ...]] = (
        {"effects": "live"},
        {"effects": "live", "set": {"town": "Rome"}},
        {"effects": "live", "input": ["cleo", "dan"]},
        {"effects": "none"},
    )

    @pytest.fixture
    def parent(self) -> MemoryStore:
        clock = killick.clock.LeapingClock()
        store = MemoryStore(clock=clock, ids=SeededIds(SEED))
        opened(store, clock).run(letters, ["ann", "bob"], id=RUN)
        FAR.requests.clear()
        return store

    @pytest.mark.gate(1)
    @pytest.mark.parametrize("conditions", CONDITIONS, ids=str)
    def test_forks_at_the_same_place_do_the_same(self, parent: MemoryStore, conditions: dict[str, Any]) -> None:
        for at in places(parent, RUN):
            one, two = (self._forked(parent, at, conditions, seed) for seed in (SEED, SEED + 1))
            assert one == two, at

    def _forked(self, parent: MemoryStore, at: str, conditions: dict[str, Any], seed: int) -> Any:
        """What a fork comes to, and what it asks of the world, in a copy of everything that is its own."""
        FAR.requests.clear()
        clock = killick.clock.LeapingClock()
        store = parent.copied(clock)
        kd = opened(store, clock, seed)
        made = kd.fork(RUN, at, **conditions)
        ended = kd.advance(made.id)
        return made.id, ended.status, ended.result, list(FAR.requests), lasting(store)

    @pytest.mark.gate(1)
    @pytest.mark.parametrize("conditions", CONDITIONS, ids=str)
    def test_a_fork_changes_nothing_in_its_parent(self, parent: MemoryStore, conditions: dict[str, Any]) -> None:
        clock = killick.clock.LeapingClock()
        before, state = rows(parent), lasting(parent)[RUN]
        for at in places(parent, RUN):
            store = parent.copied(clock)
            kd = opened(store, clock)
            kd.advance(kd.fork(RUN, at, **conditions).id)
            after = rows(store)
            assert after[: len(before)] == before, at
            added = [type(event_codec.decode(body)) for _, _, body in after[len(before) :]]
            assert added == [e.ForkMade], at
            assert lasting(store)[RUN] == state, at
            assert kd.store.verify().problems == []

    def test_a_fork_with_nothing_changed_does_nothing_to_the_world(self, parent: MemoryStore) -> None:
        for at in places(parent, RUN):
            *_, status, result, requests, _ = self._forked(parent, at, {"effects": "none"}, SEED)
            assert (status, result) == ("completed", Log(parent).data(RUN, rows(parent)[-1][0])["result"]), at
            assert [each.tool for each in requests if each.tool == "send"] == [], at


# 4 ------------------------------------------------------------------------------------------------


def folded(fold: Any) -> bytes:
    saved: bytes = fold.save([])
    return saved


class TestCheckpointValidity:
    """The state at any boundary, opened from what was cached, is the fold of its timeline from the first event; and
    what was cached and does not hold is not believed."""

    @pytest.fixture
    def travelled(self) -> killick.Client:
        """A run that was taken back twice and forked, with a snapshot every few events."""
        clock = killick.clock.LeapingClock()
        kd = opened(MemoryStore(clock=clock, ids=SeededIds(SEED)), clock)
        kd.runtime.log = kd.runtime.engine.log = Log(kd.runtime.store, clock=clock, behind=False, snapshot_every=5)
        kd.run(letters, ["ann", "bob", "cleo"], id=RUN)
        for to in ("5:before", "2:after"):
            kd.rewind(RUN, to)
            kd.advance(RUN)
        kd.advance(kd.fork(RUN, "4:after", effects="live", set={"town": "Rome"}).id)
        return kd

    @pytest.mark.parametrize("run", [RUN, f"{RUN}-fork"])
    def test_the_state_at_every_event_is_the_fold_from_the_first(self, travelled: killick.Client, run: str) -> None:
        log = travelled.runtime.log
        told = [(recorded.seq, recorded.event) for recorded in log.read(run)]
        assert any(isinstance(event, e.RunRewound) for _, event in told)
        taken = [log.store.snapshot(run, fold=FOLD, at=seq) for seq, _ in told if seq > log.head(run).base]
        assert len({shot.seq for shot in taken if shot is not None}) > 2
        for place, (seq, _) in enumerate(told):
            assert folded(log.state(run, seq).fold) == folded(fold_timeline(timeline(told[: place + 1]))), seq
            assert folded(log.ledger(run, seq)) == folded(fold_ledger(told[: place + 1])), seq

    def test_every_boundary_opens_the_same_with_snapshots_and_without(self, travelled: killick.Client) -> None:
        for run in (RUN, f"{RUN}-fork"):
            for at in places(travelled.runtime.store, run):  # type: ignore[arg-type]
                fast = travelled.state(run, self._seq(travelled, run, at))
                scratch = fold_timeline(timeline([(each.seq, each.event) for each in self._up_to(travelled, run, at)]))
                assert folded(fast.fold) == folded(scratch), (run, at)

    def _seq(self, kd: killick.Client, run: str, at: str) -> int:
        from killick.log.boundaries import at as place

        return place(kd.runtime.log, run, at).seq

    def _up_to(self, kd: killick.Client, run: str, at: str) -> list[Any]:
        seq = self._seq(kd, run, at)
        return [recorded for recorded in kd.runtime.log.read(run) if recorded.seq <= seq]

    @pytest.mark.parametrize("damage", ["another fold", "another chain", "no pieces", "other pieces"])
    def test_a_damaged_snapshot_is_not_believed(self, travelled: killick.Client, damage: str) -> None:
        log = travelled.runtime.log
        expected = folded(log.state(RUN).fold)
        head = log.head(RUN)
        blob = Blob(b"\x02" * 32, "json", b'{"fold": {}}')
        shot = {
            "another fold": Snapshot(seq=head.seq, fold=FOLD + 1, hash=head.hash, root=blob.hash, pieces=(blob,)),
            "another chain": Snapshot(seq=head.seq, fold=FOLD, hash=b"\x00" * 32, root=blob.hash, pieces=(blob,)),
            "no pieces": Snapshot(seq=head.seq, fold=FOLD, hash=head.hash, root=b"\x03" * 32),
            "other pieces": Snapshot(seq=head.seq, fold=FOLD, hash=head.hash, root=blob.hash, pieces=(blob,)),
        }[damage]
        log.store.append([Append(run=RUN, after=head.seq, before=head.hash, epoch=head.epoch, snapshot=shot)])
        assert folded(Log(log.store).state(RUN).fold) == expected
        assert folded(Log(log.store).open(RUN).fold) == expected


# 5 ------------------------------------------------------------------------------------------------


PAYEE: Final = {"to": "ann", "how": "pays"}
"""Whom the model wants to pay, and what the far side makes of it."""


@killick.tool(consumes=("token",), identity=("to",))
async def spend(to: str, token: str) -> str:
    """Pays on a token; or says that it did nothing; or does not know."""
    if PAYEE["how"] == "refuses":
        raise killick.NotDone("closed")
    if PAYEE["how"] == "fails":
        FAR.requests.append(Asked("spend", to))
        raise ConnectionResetError("no reply")
    return asked("spend", to)


def _payee() -> str:
    return PAYEE["to"]


@killick.agent(name="spender")
async def spender(run: killick.Run, token: str) -> str:
    to = await run.model(_payee)
    return await run.call(spend, to, token)


Move = Callable[[killick.Client, str], str]


def _again(kd: killick.Client, run: str) -> str:
    return run


def _rewound(kd: killick.Client, run: str) -> str:
    kd.rewind(run, "1:before")
    return run


def _forked(kd: killick.Client, run: str) -> str:
    return kd.fork(run, "1:before", effects="live").id


def _another(kd: killick.Client, run: str) -> str:
    return kd.start(spender, "T1").id


class TestConsumeOnce:
    """A right that an action consumes is used once in a store, by whichever run, however it is rewound, forked or
    killed; it is given back only where it is known that nothing happened."""

    @pytest.fixture(autouse=True)
    def _ann_is_paid(self) -> Iterator[None]:
        PAYEE.update(to="ann", how="pays")
        yield
        PAYEE.update(to="ann", how="pays")

    @pytest.mark.slow
    @settings(max_examples=repeats(15, 60))
    @given(
        moves=st.lists(
            st.tuples(
                st.sampled_from([_again, _rewound, _forked, _another]), st.sampled_from(["ann", "bob", "mallory"])
            ),
            min_size=1,
            max_size=6,
        ),
        approves=st.booleans(),
    )
    def test_whatever_is_rewound_forked_or_begun_anew_it_is_used_once(
        self, moves: list[tuple[Move, str]], approves: bool
    ) -> None:
        FAR.requests.clear()
        PAYEE.update(to="ann", how="pays")
        clock = killick.clock.LeapingClock()
        with opened(MemoryStore(clock=clock, ids=SeededIds(SEED)), clock) as kd:
            kd.run(spender, "T1", id=RUN)
            run, ours = RUN, True
            for move, to in moves:
                PAYEE["to"] = to
                run = move(kd, run)
                while kd.advance(run).status == "waiting":
                    kd.answer(run, "approve" if approves else "reject")
                assert FAR.done("spend") == ["ann"]
                ours = ours and move is not _another
                if ours and to == "ann" and move is not _again:
                    assert kd.advance(run).result == "spend ann: 3"

    @pytest.mark.parametrize("tool", [redeem, redeem_at_the_second_try])
    def test_killed_at_any_point_it_is_used_once(self, tool: killick.Tool[Any, Any]) -> None:
        told = Scenario(agent=voucher, input=tool.name, outside=answering())
        expected = simulate(told, seed=SEED)
        assert expected.world.effects.total() == 1
        for story in killed_everywhere(told, seed=SEED):
            assert not (wrong := differences(expected, story)), f"{story}: {wrong}"

    def test_it_is_given_back_when_nothing_happened(self) -> None:
        with killick.open("memory:") as kd:
            PAYEE["how"] = "refuses"
            with pytest.raises(killick.RunFailed, match="closed"):
                kd.run(spender, "T1", id="first")
            PAYEE.update(to="bob", how="pays")
            assert kd.run(spender, "T1", id="second") == "spend bob: 3"

    @pytest.mark.parametrize(("verb", "free"), [("not", True), ("happened", False)])
    def test_in_doubt_it_stays_used_until_somebody_knows(self, verb: Any, free: bool) -> None:
        with killick.open("memory:") as kd:
            PAYEE["how"] = "fails"
            with pytest.raises(killick.RunWaiting):
                kd.run(spender, "T1", id="first")
            PAYEE.update(to="bob", how="pays")
            with pytest.raises(killick.RunFailed, match="token was claimed by first"):
                kd.run(spender, "T1", id="second")
            PAYEE["how"] = "refuses"  # whatever the first one now tries does nothing
            kd.answer("first", verb, value="receipt")
            kd.advance("first")
            PAYEE["how"] = "pays"
            if free:
                assert kd.run(spender, "T1", id="third") == "spend bob: 3"
            else:
                with pytest.raises(killick.RunFailed, match="token was claimed by first"):
                    kd.run(spender, "T1", id="third")


@killick.agent(name="voucher")
async def voucher(run: killick.Run, name: str) -> list[Any]:
    """Uses a right, and tries to use it once more."""
    tool = {tool.name: tool for tool in (redeem, redeem_at_the_second_try)}[name]
    used = [await run.call(tool, "x", "T1")]
    tick()
    try:
        used.append(await run.call(tool, "y", "T1"))
    except killick.StepFailed as failed:
        used.append(failed.failure.type)
    return used


# 6 ------------------------------------------------------------------------------------------------


class TestRecoveryDeterminism:
    """Recovering twice from the same crash gives the same state, less times and ids, and asks the same of the world."""

    @pytest.mark.gate("()")
    @pytest.mark.parametrize("to", [(), ("2:before",), ("3:after", "1:before")], ids=str)
    def test_two_recoveries_from_the_same_crash_are_the_same(self, to: tuple[str, ...]) -> None:
        told = scenario(taken_back_to=to)
        _, everywhere = left_behind(told)
        for saved in everywhere:
            one, two = (simulate(told, saved=saved, seed=seed) for seed in (SEED, SEED + 1))
            assert (one.status, one.outcome, one.troubles) == (two.status, two.outcome, two.troubles)
            assert one.states == two.states, f"killed at {saved.point} ({saved.place})"
            assert (one.world.effects, one.world.visits) == (two.world.effects, two.world.visits), saved.place
            assert self._told(one) == self._told(two), saved.place

    def _told(self, story: Story) -> list[tuple[str, str | None]]:
        events = [event_codec.decode(body) for _, _, body in rows(story.store)]
        return [(str(event.__struct_config__.tag), getattr(event, "step", None)) for event in events]
