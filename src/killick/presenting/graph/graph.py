"""A run with its forks, its children and its rewound timelines, as the lanes of a graph. Read-only.

A lane is one timeline without the prefix shared with its parent lane. So each step is on one lane, and a lane branches
off after a step. If the graph is too large, `kept` selects the steps; of a long timeline only those are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from killick.clock import timestamp
from killick.history.compare_runs import Condition, changed_in, place_of
from killick.history.timeline_parts import Step
from killick.log.log import Log
from killick.log.paging import pages
from killick.model import event_codec
from killick.model import events as e
from killick.model.facts import StepStatus
from killick.model.fold import Fold
from killick.model.ledger import EffectStatus, Ledger
from killick.presenting.graph.truncation import LaneSteps

RUNS_MAX: Final = 40
"""The maximum number of runs in a graph; the others are counted."""

LEFT_MAX: Final = 20
"""The maximum number of rewound parts of each run, the latest; the others are counted."""

CHILDREN_MAX: Final = 60
"""The maximum number of children of each run, the last; the others are counted."""

NOTABLE_MAX: Final = 24
"""The maximum number of notable steps that stay on a folded lane."""

GRAPH_VERSION: Final = 1
"""The version of the JSON form, which docs/file-formats.md describes."""

LaneSort = Literal["run", "fork", "child", "left"]
_TIMES: Final = ("at", "started_at", "ended_at")
_KEY: Final = re.compile(r":step_(?P<step>\d+(?:\.\d+)*)(?:~(?P<generation>\d+))?:")


class Source(msgspec.Struct, frozen=True):
    """The run and the step whose effect a step reused."""

    run: str
    step: str
    key: str


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A step on its lane. `stands` is its effect's current status in the ledger; `inside` are the steps of a scope.

    A `folded` node replaces that many unread steps of a long lane.
    """

    number: str
    sort: e.Sort
    name: str
    status: StepStatus
    effect: e.EffectClass | None
    stands: EffectStatus | None
    adopted: Source | None
    undoes: str | None
    undone: bool
    given_by: str | None
    attempts: int
    seq: int
    at: int
    ended_at: int | None
    child: str | None
    inside: tuple[Node, ...]
    step: Step
    folded: int = 0

    @property
    def in_doubt(self) -> bool:
        """Whether its outcome is unknown."""
        return self.status == "in_doubt" or self.stands == "in_doubt"

    @property
    def notable(self) -> bool:
        """Whether it deserves more than "done"."""
        remarkable = self.undone or self.adopted or self.undoes or self.given_by or self.in_doubt
        return bool(remarkable) or self.status != "done" or any(each.notable for each in self.inside)


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One timeline. It branches off `parent` after node `after` (-1: before its first), at position `cut`."""

    run: str
    sort: LaneSort
    agent: str
    generation: int
    status: str
    asked: bool = False
    parent: int | None = None
    after: int = -1
    cut: str | None = None
    child_of: str | None = None
    conditions: tuple[Condition, ...] = ()
    by: str | None = None
    because: str | None = None
    started_at: int = 0
    ended_at: int | None = None
    failed: str | None = None
    renewed_as: str | None = None
    nodes: tuple[Node, ...] = ()

    @property
    def steps(self) -> int:
        """The number of its steps, with the unread ones."""
        return sum(node.folded or 1 for node in self.nodes)


class Graph(msgspec.Struct, frozen=True):
    """A run tree: its lanes, each after its parent. `left_out`: the number of omitted lanes."""

    run: str
    root: str
    lanes: tuple[Lane, ...]
    left_out: int = 0

    def branches(self, lane: int) -> dict[int, list[int]]:
        """Returns the lanes that branch off a lane, by node."""
        found: dict[int, list[int]] = {}
        for index, each in enumerate(self.lanes):
            if each.parent == lane:
                found.setdefault(each.after, []).append(index)
        return found

    @property
    def here(self) -> tuple[int, int] | None:
        """The requested run's lane, and its open step, or its last."""
        for index, lane in enumerate(self.lanes):
            if lane.asked and lane.nodes:
                live = (place for place, node in enumerate(lane.nodes) if not node.folded and not node.step.is_over)
                return index, next(live, len(lane.nodes) - 1)
        return None

    def document(self) -> dict[str, Any]:
        """Returns the graph as JSON, without values, which `show --json` has."""
        return {"version": GRAPH_VERSION, **_document(self)}


def _document(part: Any) -> Any:
    if isinstance(part, msgspec.Struct):
        fields = {name: getattr(part, name) for name in part.__struct_fields__}
        return {
            name: timestamp(value) if name in _TIMES and isinstance(value, int) else _document(value)
            for name, value in fields.items()
            if not isinstance(value, Step)
        }
    if isinstance(part, tuple):
        return [_document(each) for each in part]  # pyright: ignore[reportUnknownVariableType]
    return part


# making one ---------------------------------------------------------------------------------------


def run_graph(log: Log, run: str, *, runs_max: int = RUNS_MAX) -> Graph:
    """Returns the run tree of a run, from its root, with all children."""
    lineage = [head.run for head, _ in log.ancestry(run)]
    root = lineage[-1]
    making = _GraphBuilder(log, run)
    waiting, seen, left_out = [root], {root}, 0
    while waiting:
        name = waiting.pop(0)
        ledger = making.take(name, lineage)
        wanted = [each for each in lineage if log.head(each).parent == name]
        wanted += [*ledger.facts.forks, *_children(ledger)]
        left_out += max(len(ledger.children) - CHILDREN_MAX, 0)
        for each in wanted:
            if each in seen:
                continue
            if len(seen) >= runs_max and each not in lineage:
                left_out += 1
            elif log.store.head(each) is not None:
                seen.add(each)
                waiting.append(each)
    return Graph(run, root, tuple(making.finished()), left_out + making.left_out)


def _children(ledger: Ledger) -> list[str]:
    """Returns a run's children; of very many the last."""
    return list(dict.fromkeys(child.run for child in ledger.children[-CHILDREN_MAX:]))


def _rewinds(log: Log, run: str) -> Iterator[tuple[int, e.RunRewound]]:
    """Yields a run's own rewinds."""
    for rows in pages(log.store, run, after=log.head(run).base, data=False):
        for row in rows:
            if row.body.startswith(b'{"kind":"run.rewound"'):
                event = event_codec.decode(row.body)
                assert isinstance(event, e.RunRewound)
                yield row.seq, event


class _GraphBuilder:
    """Builds lanes, run by run, each after its parent."""

    def __init__(self, log: Log, asked: str) -> None:
        self.log = log
        self.asked = asked
        self.lanes: list[Lane] = []
        self.left_out = 0
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._first: dict[str, int] = {}
        self._children: dict[str, tuple[int, int]] = {}
        self._stands: dict[tuple[str, str], EffectStatus] = {}

    def take(self, run: str, lineage: Sequence[str] = ()) -> Ledger:
        """Adds a run's lanes: its current timeline, then its rewound parts, the latest first."""
        log, head = self.log, self.log.head(run)
        fold, ledger = log.state(run).fold, log.ledger(run)
        stands: dict[int, EffectStatus] = {effect.intended: effect.status for effect in ledger.effects}
        self._stands |= {(run, each.key): each.status for each in ledger.effects if each.started > head.base}
        born = log.event(run, head.base + 1)
        rewinds = list(_rewinds(log, run))[::-1] if fold.facts.generation else []
        near = self._branch_points(run, ledger, lineage, rewinds[:LEFT_MAX])
        since = born.cut if isinstance(born, e.RunForked) else 0
        line = LaneSteps(log, run, fold, since=since, near=near)
        self._first[run] = len(self.lanes)
        self._add(self._of_run(run, line, born), line, run, stands)
        self.left_out += len(rewinds[LEFT_MAX:])
        for seq, event in rewinds[:LEFT_MAX]:
            self._take_left(run, seq, event, stands)
        return ledger

    def _take_left(self, run: str, seq: int, event: e.RunRewound, stands: Mapping[int, EffectStatus]) -> None:
        fold: Fold = self.log.state(run, seq - 1).fold
        left = LaneSteps(self.log, run, fold, seq - 1, since=event.cut)
        if any(not isinstance(each, int) and left.key(each.number) not in self._known for each in left.steps):
            self._add(self._of_rewind(run, left, seq, event), left, run, stands)

    def _branch_points(
        self, run: str, ledger: Ledger, lineage: Sequence[str], rewinds: Sequence[tuple[int, e.RunRewound]]
    ) -> Iterator[int]:
        """Returns the events of a run at which others branch off."""
        log = self.log
        forks = [*(each for each in lineage if log.head(each).parent == run), *ledger.facts.forks[:RUNS_MAX]]
        for fork in forks:
            head = log.store.head(fork)
            born = log.event(fork, head.base + 1) if head is not None else None
            if isinstance(born, e.RunForked):
                yield born.cut
        yield from (child.spawned for child in ledger.children[-CHILDREN_MAX:])
        yield from (event.cut for _, event in rewinds)

    def finished(self) -> Iterator[Lane]:
        """Returns the lanes once all runs are added, because only then the reused effects are resolved."""
        for lane in self.lanes:
            yield replace(lane, nodes=tuple(map(self._settled, lane.nodes)))

    def _settled(self, node: Node) -> Node:
        inside = tuple(map(self._settled, node.inside))
        if node.adopted is None:
            return replace(node, inside=inside) if inside else node
        stands = self._stands.get((node.adopted.run, node.adopted.key))
        return replace(node, stands=stands, undone=node.undone or stands == "undone", inside=inside)

    def _of_run(self, run: str, line: LaneSteps, born: e.Event) -> Lane:
        facts = line.fold.facts
        lane = Lane(
            run=run, sort="run", agent=facts.agent, generation=facts.generation, status=facts.status,
            asked=run == self.asked, started_at=facts.started_at, ended_at=line.ended_at, renewed_as=facts.renewed_as,
            failed=line.failed,
        )  # fmt: skip
        if isinstance(born, e.RunForked):
            forked, because = born, self.log.data(run, self.log.head(run).base + 1).get("because")
            conditions = changed_in(self.log, run)
            return replace(
                lane, sort="fork", conditions=conditions, by=forked.by, because=because,
                parent=self._first.get(forked.parent, 0), cut=self._cut(forked, conditions),
            )  # fmt: skip
        if facts.parent is None:
            return lane
        lane = replace(lane, child_of=f"{facts.parent}:{facts.parent_step}")
        if facts.parent not in self._first:
            return lane
        parent, after = self._children.get(run, (self._first[facts.parent], -1))
        return replace(lane, sort="child", cut=f"{facts.parent_step}:after", parent=parent, after=after)

    def _of_rewind(self, run: str, line: LaneSteps, seq: int, event: e.RunRewound) -> Lane:
        because = self.log.data(run, seq).get("because")
        return Lane(
            run=run, sort="left", agent=line.fold.facts.agent, generation=line.fold.facts.generation, status="left",
            parent=self._first[run], cut=place_of(self.log, run, event.cut, "before"), by=event.by,
            because=because, ended_at=event.at,
        )  # fmt: skip

    def _cut(self, forked: e.RunForked, conditions: Sequence[Condition]) -> str:
        """Returns where a fork branches off: after the step whose output it replaced, or at its cut."""
        given = [condition.step for condition in conditions if condition.what == "output"]
        if given:
            return f"{given[-1]}:after"
        return place_of(self.log, forked.parent, forked.cut, "after")

    def _add(self, lane: Lane, path: LaneSteps, run: str, stands: Mapping[int, EffectStatus]) -> None:
        """Adds a lane with the steps of its path that no other lane has."""
        index, nodes = len(self.lanes), list[Node]()
        for step in path.steps:
            if isinstance(step, int):
                nodes.append(_folded(step))
                continue
            known = self._known.get(path.key(step.number))
            if known is not None and not nodes and lane.sort != "child":
                lane = replace(lane, parent=known[0], after=known[1])
            if known is not None:
                continue
            node = _node(step, run, stands, lambda number: path.key(number) not in self._known)
            for each in (node, *_inside(node)):
                self._known[path.key(each.number)] = (index, len(nodes))
                if each.child is not None and each.sort == "child":
                    self._children.setdefault(each.child, (index, len(nodes)))
            nodes.append(node)
        self.lanes.append(replace(lane, nodes=tuple(nodes)))


def _folded(count: int) -> Node:
    """Returns a node for that many unread steps."""
    step = Step(number="", sort="tool", name="", status="done", seq=0, intended_at=0)
    return replace(_node(step, "", {}, lambda _: True), folded=count)


def _node(step: Step, run: str, stands: Mapping[int, EffectStatus], wanted: Callable[[str], bool]) -> Node:
    known = stands.get(step.seq)
    return Node(
        number=step.number, sort=step.sort, name=step.name, status=step.status, effect=step.effect, stands=known,
        adopted=_source(step, run), undoes=step.undoes, undone=step.undone_by is not None or known == "undone",
        given_by=step.overridden_by, attempts=len(step.attempts), seq=step.seq, at=step.intended_at,
        ended_at=step.ended_at, child=step.child.run if step.child is not None else None, step=step,
        inside=tuple(_node(each, run, stands, wanted) for each in _inner(step) if wanted(each.number)),
    )  # fmt: skip


def _source(step: Step, run: str) -> Source | None:
    """Returns the source of a reused effect. In the step's own run it is an earlier generation, so it is named."""
    if step.adopted is None:
        return None
    found = _KEY.search(step.adopted.key)
    if found is None:
        return Source(step.adopted.run, f"@{step.adopted.seq}", step.adopted.key)
    generation = found["generation"] or ("0" if step.adopted.run == run else "")
    return Source(step.adopted.run, f"{found['step']}{'~' * bool(generation)}{generation}", step.adopted.key)


def _inner(step: Step) -> list[Step]:
    """Returns the steps of a scope, branch by branch."""
    found = (entry for entry in step.entries if isinstance(entry, Step))
    return sorted(found, key=lambda each: [int(part) for part in each.number.split(".")])


def _inside(node: Node) -> Iterator[Node]:
    for each in node.inside:
        yield each
        yield from _inside(each)


# layout -------------------------------------------------------------------------------------------


class Layout(msgspec.Struct, frozen=True):
    """A grid: the column and the first row of each lane, and the displayed rows.

    Steps with one number share a row while their lanes share ancestors; a range of rows is folded into one.
    """

    columns: tuple[int, ...]
    starts: tuple[int, ...]
    rows: tuple[int | range, ...]


def layout(graph: Graph, *, whole: bool = False) -> Layout:
    """Returns a grid without overlapping lanes and with few crossings; `whole` folds no rows."""
    starts: list[int] = []
    for lane in graph.lanes:
        starts.append(0 if lane.parent is None else starts[lane.parent] + lane.after + 1)
    spans = [(start, start + len(lane.nodes)) for start, lane in zip(starts, graph.lanes, strict=True)]
    columns = [0] * len(starts)
    taken: list[list[tuple[int, int]]] = []

    def put(lane: int, first: int) -> None:
        start, end = spans[lane]
        column = first
        while column < len(taken) and any(start <= last and end >= begun for begun, last in taken[column]):
            column += 1
        taken.extend([] for _ in range(len(taken), column + 1))
        taken[column].append((start, end))
        columns[lane] = column
        # The latest branch is nearest, so that no earlier one crosses it.
        for _, branches in sorted(graph.branches(lane).items(), reverse=True):
            for branch in branches:
                put(branch, column + 1)

    for index, lane in enumerate(graph.lanes):
        if lane.parent is None:
            put(index, 0)
    count = max((end for _, end in spans), default=0) + 1
    anchors = {place for start, end in spans for place in (start - 1, start, end - 1, end)}
    lanes = zip(starts, graph.lanes, strict=True)
    nodes = [(start + place, node) for start, lane in lanes for place, node in enumerate(lane.nodes)]
    anchors |= {row for row, node in nodes if node.folded}
    notable = {row for row, node in nodes if node.notable}
    return Layout(tuple(columns), tuple(starts), tuple(range(count) if whole else kept(count, notable, anchors)))


# folding ------------------------------------------------------------------------------------------


def kept(count: int, notable: Collection[int], anchors: Collection[int]) -> list[int | range]:
    """Selects the displayed positions of a row: those next to the ends and the anchors, and some notable ones.

    Omitted ranges are folded; one shorter than its label is displayed.
    """
    near = {place + by for place in (0, count - 1, *anchors) for by in (-1, 0, 1)}
    others = [place for place in sorted(notable) if place not in near]
    if len(others) > NOTABLE_MAX:
        others = others[: NOTABLE_MAX // 2] + others[-(NOTABLE_MAX // 2) :]
    shown = {place for place in (*near, *others) if 0 <= place < count}
    found: list[int | range] = []
    start = 0
    for place in (*sorted(shown), count):
        hidden = range(start, place)
        found += list(hidden) if len(hidden) <= 2 else [hidden]
        found += [place] if place < count else []
        start = place + 1
    return found
