"""An offline oracle: knows every reference to come, and pays the same prices under the same rules.

The same window renders for it: the same tombstones, the last three turns whole, turns folded
only when the budget forces it and the oldest first, a fault for whatever is needed and out. Who decides is another.

1. From the script it learns when each result is needed, or asked for again, for the last time.
2. A dynamic program over the times of batches, O(T²): between two batches everything stays; at a batch every result
   that nothing to come refers to leaves, at the price of writing anew what stands after the first of them.
3. That plan is improved while the cost falls, in order and then by chance, by an exact simulation of the whole session:
   batches are dropped, added and moved, each may spare the front of the window (a cut, so that a long cached prefix
   need not be written anew), and the depth to which a forced batch goes and the price of a fault are tried. A result
   that is still needed leaves too, where keeping it until then costs more than fetching it again; and when the budget
   forces it, the one that is needed last leaves first (Belady).
4. The plan is then played like any other strategy, and metered by the same meter.

This is a strong bound, not a proven optimum. `floor` is a trivial one that nothing can reach.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from bench.session.desk import FETCH_OUTPUT, FETCH_TOKENS, RECENT_TURNS, SAVES_MIN, Desk, Future, Plan, Turn
from bench.session.meter import ANTHROPIC, encoded
from bench.session.play import Outcome, Player
from bench.session.script import Move, Session
from killick.model.page_events import PageEvicted
from killick.window import Rates, Window, estimate
from killick.window.compaction import LOW
from killick.window.tombstones import for_page

STUB_TOKENS: Final = 28
FRAME_TOKENS: Final = 18
"""What a result's message takes besides its text."""

ROUNDS: Final = 4
TRIALS: Final = 1_500


class Oracle:
    """Plays a plan through a real window."""

    def __init__(self, session: Session, budget: int, plan: Plan, *, rates: Rates = ANTHROPIC) -> None:
        self.name = "oracle"
        self.player: Player | None = None
        self.window = Window(budget, rates=rates)
        self._desk: Desk | None = None
        self._make: Callable[[int], Desk] = lambda fixed: Desk(Future(session), plan, budget, fixed, rates)
        self._places: list[tuple[int, int]] = []
        """The first and the last message of each turn."""

    def fit(self, history: list[Any], tools: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        assert self.player is not None
        if self._desk is None:
            self._desk = self._make(self.window.render(history[:1], tools).tokens)
            self._places = []
        desk = self._desk
        before = len(desk.turns)
        self._take(history, tools)
        same = tuple(self._handle(at) for at in range(before, len(desk.turns)) if desk.turns[at].is_same)
        if same:
            self.window.apply([PageEvicted(at=0, pages=same, tokens=0, because="duplicate", turn=0)])
        left = {at for at, turn in enumerate(desk.turns) if turn.is_out}
        if desk.decide(self.player.at):
            new = [self._handle(at) for at, turn in enumerate(desk.turns) if turn.is_out and at not in left]
            handles = (*new, *self._folds())
            self.window.apply([PageEvicted(at=0, pages=handles, tokens=0, because="pays", turn=0)])
        sent = self.window.render(history, tools)
        desk.total = sent.tokens
        return sent.messages, sent.tools

    def answer(self, tool: str, arguments: dict[str, Any]) -> str | None:
        answer = self.window.answer(tool, arguments)
        return None if answer is None else answer.text

    def _handle(self, at: int) -> str:
        return f"m{self._places[at][1]}"

    def _folds(self) -> Iterator[str]:
        assert self._desk is not None
        first: int | None = None
        for at, turn in enumerate([*self._desk.turns, None]):
            if turn is not None and turn.is_folded:
                first = at if first is None else first
            elif first is not None:
                yield f"m{self._places[first][0]}-m{self._places[at - 1][1]}"
                first = None

    def _take(self, history: list[Any], tools: list[Any]) -> None:
        """What was said since, as turns."""
        assert self.player is not None
        assert self._desk is not None
        self.window.render(history, tools)
        at = self._places[-1][1] + 1 if self._places else 1
        while at < len(history):
            message = history[at]
            words = estimate(encoded(message))
            if message["role"] != "assistant" or not message.get("tool_calls"):
                turn = Turn(self.player.at, "", "", words, 0, 0, can_fold=message["role"] == "assistant")
                last = at
            else:
                last = at + 1
                turn = self._turn(message, history[last], self.player.keys[last], last, words)
            self._places.append((at, last))
            self._desk.add(turn)
            at = last + 1

    def _turn(self, said: Any, result: Any, key: str, place: int, words: int) -> Turn:
        assert self.player is not None
        page = self.window.page(f"m{place}")
        tokens = estimate(encoded(result))
        stub = tokens
        if page is not None:
            empty = {**result, "content": for_page(page.source, page.tokens, page.handle)}
            stub = estimate(encoded(empty))
        function = said["tool_calls"][0]["function"]
        path = msgspec.json.decode(function["arguments"]).get("path") if function["name"] == "edit_file" else None
        moved = self.player.moved.get(place, self.player.at)
        return Turn(moved, key, result["content"], words, tokens, stub, can_fold=True, path=path)


def played(session: Session, budget: int, rates: Rates = ANTHROPIC, deepest: float = LOW) -> Outcome:
    """The best plan found, played."""
    plan = Search(session, budget, rates, deepest).best()
    oracle = Oracle(session, budget, plan, rates=rates)
    player = Player(session, oracle, budget)
    oracle.player = player
    return player.play()


class Search:
    """Looks for a plan."""

    def __init__(self, session: Session, budget: int, rates: Rates = ANTHROPIC, deepest: float = LOW) -> None:
        self.session = session
        self.deepest = deepest
        """Turns are folded no further than down to this part of the budget."""
        self.budget = budget
        self.rates = rates
        self.future = Future(session)
        system = [{"role": "system", "content": session.system}]
        self.fixed = Window(budget).render(system, session.tools).tokens
        self.turns = [self._turn(at, move) for at, move in enumerate(session.moves)]
        self.said = [
            estimate(encoded({"role": "user", "content": move.said})) if move.said else 0 for move in session.moves
        ]

    def best(self) -> Plan:
        """The dynamic program's, improved."""
        times = self.program()
        plans = [Plan(dict.fromkeys(times, 0), low, dear) for low in self._lows() for dear in (1.0, 2.0)]
        plan = min(plans, key=self.cost)
        cost = self.cost(plan)
        for _ in range(ROUNDS):
            before = cost
            for other in self._variants(plan):
                if (price := self.cost(other)) < cost - 1:
                    plan, cost = other, price
            if cost > before * 0.999:
                break
        return self._shaken(plan, cost)

    def _shaken(self, plan: Plan, cost: float) -> Plan:
        """Several changes at once, by chance, each kept if it is for the better."""
        chance, last = random.Random(self.session.seed), len(self.session.moves) - 1
        for _ in range(TRIALS):
            batches = dict(plan.batches)
            for _ in range(chance.choice((1, 1, 2, 3))):
                what = chance.randrange(4)
                if what == 0 or not batches:
                    batches[chance.randint(0, last)] = chance.choice((0, 0, chance.randint(0, last)))
                    continue
                at = chance.choice(sorted(batches))
                cut = batches.pop(at)
                if what == 1:
                    batches[min(last, max(0, at + chance.randint(-6, 6)))] = cut
                elif what == 2:
                    batches[at] = chance.randint(0, at)
            dear = chance.choice((0.7, 1.0, 1.3, 2.0, 4.0)) if chance.random() < 0.1 else plan.dear
            other = Plan(batches, plan.low, dear)
            if (price := self.cost(other)) < cost:
                plan, cost = other, price
        return plan

    def _lows(self) -> list[float]:
        steps = 6
        return [self.deepest + (0.99 - self.deepest) * step / steps for step in range(steps + 1)]

    def _variants(self, plan: Plan) -> Iterator[Plan]:
        """Plans near a plan, as it was when asked; those that no longer fit are still plans."""
        for low in self._lows():
            yield msgspec.structs.replace(plan, low=low)
        for at in sorted(plan.batches):
            rest = {time: cut for time, cut in plan.batches.items() if time != at}
            yield msgspec.structs.replace(plan, batches=rest)
            for shift in (-4, -2, -1, 1, 2, 4):
                if 0 <= at + shift < len(self.session.moves):
                    yield msgspec.structs.replace(plan, batches={**rest, at + shift: plan.batches[at]})
            for back in (5, 10, 20, 40, 80):
                yield msgspec.structs.replace(plan, batches={**rest, at: max(0, at - back)})
        for at in range(4, len(self.session.moves), 5):
            if at not in plan.batches:
                for back in (10, 30):
                    yield msgspec.structs.replace(plan, batches={**plan.batches, at: max(0, at - back)})

    # The dynamic program -----------------------------------------------------------------------------

    def program(self) -> list[int]:
        """When batches leave, if nothing but results without a reference to come does, and there is no budget."""
        count = len(self.turns)
        dies: dict[int, list[int]] = defaultdict(list)
        for at, turn in enumerate(self.turns):
            if turn.saves >= SAVES_MIN:
                dies[max(at + RECENT_TURNS + 1, self._last(at, turn) + 1)].append(at)
        death = {at: time for time, turns in dies.items() for at in turns}
        suffixes = [self._suffix(time, death) for time in range(count)]
        best, came = [0.0] * (count + 1), [-1] * (count + 1)
        for end in range(1, count + 1):
            best[end] = float("inf")
        for start in range(count):
            held, rate, first = 0.0, 0.0, count
            for end in range(start + 1, count + 1):
                held += rate
                for at in dies.get(end, ()):
                    rate += self.turns[at].saves * self.rates.cached
                    first = min(first, at)
                anew = suffixes[end][first] * (self.rates.written - self.rates.cached) if end < count else 0.0
                if best[start] + held + anew < best[end]:
                    best[end], came[end] = best[start] + held + anew, start
        times, at = list[int](), came[count]
        while at > 0:
            times.append(at)
            at = came[at]
        return sorted(times)

    def _last(self, at: int, turn: Turn) -> int:
        """The last move at which a result is wanted."""
        last, now = at, at + 1
        while (wanted := self.future.next(turn.key, turn.text, now)) is not None:
            last, now = wanted[0], wanted[0] + 1
        return last

    def _suffix(self, time: int, death: dict[int, int]) -> list[int]:
        """What stands from each turn on, at a time at which all that is dead has left."""
        sums = [0] * (len(self.turns) + 1)
        for at in range(len(self.turns) - 1, -1, -1):
            turn = self.turns[at]
            size = 0 if at >= time else turn.words + (turn.stub if death.get(at, 1 << 40) <= time else turn.tokens)
            sums[at] = sums[at + 1] + size
        return sums

    # The simulation ----------------------------------------------------------------------------------

    def cost(self, plan: Plan) -> float:
        """What a session costs under a plan: every request, as the meter would count it."""
        desk = Desk(self.future, plan, self.budget, self.fixed, self.rates)
        run = _Run(desk, self.rates)
        for at, move in enumerate(self.session.moves):
            if self.said[at]:
                desk.add(Turn(at, "", "", self.said[at], 0, 0, can_fold=False))
            run.request(at)
            for need in move.needs:
                if not run.is_there(need.key, need.arguments.get("path", "")):
                    tokens = estimate(need.now)
                    turn = Turn(at, need.key, need.now, FETCH_TOKENS, tokens, min(STUB_TOKENS, tokens), can_fold=True)
                    run.take(turn, FETCH_OUTPUT)
                    run.request(at)
            made = self.turns[at]
            run.take(msgspec.structs.replace(made), made.words)
        return run.spent

    def _turn(self, at: int, move: Move) -> Turn:
        said = {"role": "assistant", "content": move.words}
        if move.tool is None:
            return Turn(at, "", "", estimate(encoded(said)), 0, 0, can_fold=True)
        function = {"name": move.tool, "arguments": encoded(move.arguments)}
        call = {**said, "tool_calls": [{"id": "call_000", "type": "function", "function": function}]}
        tokens = estimate(encoded(move.result)) + FRAME_TOKENS
        stub = min(tokens, STUB_TOKENS + FRAME_TOKENS)
        return Turn(at, move.key, move.result, estimate(encoded(call)), tokens, stub, can_fold=True, path=move.writes)


class _Run:
    """A simulated session: what it has cost so far."""

    def __init__(self, desk: Desk, rates: Rates) -> None:
        self.spent = 0.0
        self._desk = desk
        self._rates = rates
        self._sent = 0
        self._copies: dict[str, list[int]] = defaultdict(list)
        self._edits: dict[str, list[int]] = defaultdict(list)

    def request(self, now: int) -> None:
        desk = self._desk
        first = self._sent
        if desk.decide(now):
            assert desk.changed is not None
            first = min(first, desk.changed)
        written = sum(turn.size for turn in desk.turns[first:])
        self._sent = len(desk.turns)
        self.spent += (desk.total - written) * self._rates.cached + written * self._rates.written

    def take(self, turn: Turn, output: int) -> None:
        self.spent += output * self._rates.output
        place = len(self._desk.turns)
        self._desk.add(turn)
        self._copies[turn.key].append(place)
        if turn.path:
            self._edits[turn.path].append(place)

    def is_there(self, key: str, path: str) -> bool:
        turns = self._desk.turns
        return any(
            self._desk.holds(turns[place].text)
            and not any(turns[edit].is_folded for edit in self._edits[path] if edit > place)
            for place in reversed(self._copies[key])
        )


def floor(session: Session, rates: Rates = ANTHROPIC) -> float:
    """Less than anything can cost: each call reads, from the cache, only what this very move needs, what a person said,
    and the last turns; nothing is ever written twice, and nothing stands for what left."""
    search = Search(session, 1 << 40, rates)
    stays, spent = search.fixed, search.fixed * (rates.written - rates.cached)
    for at, move in enumerate(session.moves):
        made = search.turns[at]
        stays += search.said[at]
        recent = sum(turn.words + turn.tokens for turn in search.turns[max(0, at - RECENT_TURNS) : at])
        needed = sum(estimate(need.now) for need in move.needs)
        spent += (stays + max(recent, needed)) * rates.cached + made.words * rates.output
        spent += (made.words + made.tokens + search.said[at]) * (rates.written - rates.cached)
    return spent
