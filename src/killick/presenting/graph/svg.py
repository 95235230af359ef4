"""Renders a graph as SVG, for a page that supplies the style: runs and steps are links. A pure function of a graph.

Lanes run downwards; steps with one number are in one row. A lane branches off in the gap before its first step, where
only headings are, so that no line crosses text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from killick.history.phrasing import brief, counted
from killick.presenting.graph.graph import Graph, Lane, Layout, Node, layout
from killick.presenting.graph.text import cells, cut, ending, heading, notes, outcome, what

CHAR: Final = 7.3
"""The maximum character width in the named fonts."""

LINE: Final = 17
MARGIN: Final = 20
INDENT: Final = 18
RADIUS: Final = 7
TURN: Final = 9
TEXT_MAX: Final = 38
TEXT_MIN: Final = 16
TIP_CHARS: Final = 300

INSIDE_MAX: Final = 8
"""The maximum number of drawn steps of a scope; the others are counted."""

_HUES: Final = ("blue", "teal", "violet", "rust", "olive", "rose")
_SIGNS: Final = {
    "done": "M-3 .3-.8 2.6 3.2-2.4",
    "failed": "M-2.5-2.5 2.5 2.5M2.5-2.5-2.5 2.5",
    "waiting": "M-3 0h.01M0 0h.01M3 0h.01",
    "in_doubt": "M-2-1.6a2 2 0 1 1 2.9 1.8q-.9.5-.9 1.4M0 3.8h.01",
    "running": "M-1.6-2.8 2.8 0-1.6 2.8Z",
    "delayed": "M2.8-1.2A3 3 0 1 0 3 1M3-3.4v2.4H.8",
    "cancelled": "M-2.6 2.6 2.6-2.6",
    "intended": "M0 0h.01",
    "adopted": "M3.2 2.6V1.2a2 2 0 0 0-2-2H-3M-.8-3-3-.8-.8 1.4",
}
_STATUS: Final = {"completed": "done", "queued": "intended", "paused": "waiting"}
_WORDS: Final = {
    "done": "done", "failed": "failed", "waiting": "waiting", "in_doubt": "in doubt", "running": "running",
    "delayed": "retried later", "cancelled": "cancelled", "intended": "about to begin",
    "adopted": "reused from the record, not repeated",
}  # fmt: skip

LinkTo = Callable[[Lane, str | None], str]
"""Returns the link of a step, or of a lane's run."""


def svg(graph: Graph, link_to: LinkTo, *, whole: bool = False) -> str:
    """Returns the graph as one SVG document; `whole` folds no steps."""
    return "\n".join(_Svg(graph, layout(graph, whole=whole), link_to).document())


class _Words(NamedTuple):
    """A line of text at a position: its spans, each with a class, and its indent."""

    pieces: tuple[tuple[str, str], ...]
    indent: int = 0

    @property
    def wide(self) -> int:
        return sum(cells(piece) for piece, _ in self.pieces) + round(self.indent / CHAR + 0.5)


class _Svg:
    """Lays out one graph, then writes it."""

    def __init__(self, graph: Graph, grid: Layout, link_to: LinkTo) -> None:
        self.graph = graph
        self.link_to = link_to
        self.grid = grid
        self.count = max(grid.columns, default=0) + 1
        # One or two lanes may use a page's full width.
        self.room = {1: 110, 2: 60}.get(self.count, TEXT_MAX if self.count <= 6 else 30)
        self.headings = [self._heading(lane) for lane in graph.lanes]
        self.nodes: dict[tuple[int, int], list[_Words]] = {}
        shown = [row for row in grid.rows if isinstance(row, int)]
        for index, lane in enumerate(graph.lanes):
            for row in shown:
                place = row - grid.starts[index]
                if 0 <= place < len(lane.nodes):
                    self.nodes[index, row] = list(self._node(lane.nodes[place], lane))
        self.x = self._columns()
        self.gaps: dict[int, float] = {}
        self.rows: dict[int, float] = {}
        self.folds: dict[range, float] = {}
        self.words: dict[int, float] = {}
        self.bottom = self._down()
        self.width = max(self.x[-1] + MARGIN, 520)

    # texts ------------------------------------------------------------------------------------

    def _heading(self, lane: Lane) -> list[_Words]:
        first, *others = heading(lane)
        style = "left" if lane.sort == "left" else "run"
        return [
            _Words(((cut(first, self.room), style),)),
            *(_Words(((cut(each, self.room), "quiet"),)) for each in others),
        ]

    def _node(self, node: Node, lane: Lane, depth: int = 0) -> Iterator[_Words]:
        if node.folded:
            yield _Words(((f"… {counted(node.folded, 'step')} …", "quiet"),))
            return
        room = self.room - 3 * depth
        called = cut(what(node), max(room - cells(node.number) - 1, 8))
        pieces = [(f"{node.number} ", "number"), (called, "undone" if node.undone else "name")]
        left = room - cells(node.number) - 1 - cells(called) - 3
        output = outcome(node.step)
        if output and left >= 6:
            pieces.append((f" → {cut(output, left)}", "bad" if node.status == "failed" else "quiet"))
        yield _Words(tuple(pieces), INDENT * depth)
        for note in notes(node, lane):
            yield _Words(((cut(note, room), "note"),), INDENT * depth)
        for each in node.inside[:INSIDE_MAX]:
            yield from self._node(each, lane, depth + 1)
        if len(node.inside) > INSIDE_MAX:
            more = f"… {counted(len(node.inside) - INSIDE_MAX, 'step')} inside …"
            yield _Words(((more, "quiet"),), INDENT * (depth + 1))

    def _tip(self, node: Node, lane: Lane) -> str:
        step = node.step
        at = datetime.fromtimestamp(node.at / 1_000_000, UTC).isoformat(" ", "seconds")
        given = brief(step.arguments, TIP_CHARS) if step.arguments else ""
        output = outcome(step)
        lines = [f"step {node.number}: {what(node)}", f"{node.status.replace('_', ' ')}, {at}", *notes(node, lane)]
        lines += [f"with {given}"] if given else []
        lines += [f"→ {cut(output, TIP_CHARS)}"] if output else []
        return "\n".join(lines)

    # positions --------------------------------------------------------------------------------

    def _columns(self) -> list[float]:
        """Returns the left edge of each column, and the right edge of the last."""
        widths = [TEXT_MIN] * self.count
        for index, lane in enumerate(self.graph.lanes):
            said = [*self.headings[index], _Words(((cut(ending(lane), self.room), ""),))]
            said += [line for (at, _), lines in self.nodes.items() if at == index for line in lines]
            column = self.grid.columns[index]
            widths[column] = max(widths[column], *(line.wide for line in said))
        edges = [float(MARGIN)]
        for width in widths:
            edges.append(edges[-1] + INDENT + width * CHAR + 24)
        return edges

    def _down(self) -> float:
        """Positions every gap, row and fold; the last is the bottom of the drawing."""
        y = float(MARGIN)
        starts, lanes = self._starts(), zip(self.grid.starts, self.graph.lanes, strict=True)
        ends = {start + len(lane.nodes) for start, lane in lanes if lane.nodes}
        for row in self.grid.rows:
            if isinstance(row, range):
                self.folds[row] = y
                y += LINE * 1.6
                continue
            begun = starts.get(row, [])
            self.gaps[row] = y
            edges = len({self.graph.lanes[lane].parent for lane in begun if self.graph.lanes[lane].parent is not None})
            y += 8 * edges + 10 if edges else 0
            self.words[row] = y
            said = [len(self.headings[lane]) for lane in begun] + [1] * (row in ends)
            y += max(said, default=0) * LINE + (8 if said else 0)
            self.rows[row] = y
            lines = [len(found) for (_, at), found in self.nodes.items() if at == row]
            lines += [1 for lane in begun if not self.graph.lanes[lane].nodes]
            y += max(lines, default=0) * LINE + (7 if lines else 0)
        return y

    def _starts(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for lane, start in enumerate(self.grid.starts):
            found.setdefault(start, []).append(lane)
        return found

    def _end(self, lane: int) -> float:
        """Returns where a lane ends: in the gap after its last step, or in its own row if it has none."""
        row = self.grid.starts[lane] + len(self.graph.lanes[lane].nodes)
        return (self.words if self.graph.lanes[lane].nodes else self.rows)[row] + LINE / 2

    def _line(self, lane: int) -> float:
        return self.x[self.grid.columns[lane]] + RADIUS

    # writing ----------------------------------------------------------------------------------

    def document(self) -> Iterator[str]:
        legend, bottom = self._legend()
        height = bottom + MARGIN
        title = f"{self.graph.run}: its forks, children and rewinds"
        size = f'width="{self.width:.0f}" height="{height:.0f}" viewBox="0 0 {self.width:.0f} {height:.0f}"'
        labels = 'aria-labelledby="killick-title killick-desc"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="group" {labels}>'
        yield f'<title id="killick-title">{_text(title)}</title>'
        yield f'<desc id="killick-desc">{_text(self._described())}</desc>'
        for index in range(len(self.graph.lanes)):
            yield from self._rails(index)
        for index, lane in enumerate(self.graph.lanes):
            yield f'<g class="lane{" past" if lane.sort == "left" else ""}">'
            yield from self._lane(index, lane)
            yield "</g>"
        yield from legend
        yield "</svg>\n"

    def _described(self) -> str:
        sentences: list[str] = []
        for lane in self.graph.lanes:
            where = f", leaving at {lane.cut}" if lane.cut is not None else ""
            name = f"{lane.run}, a rewound part" if lane.sort == "left" else lane.run
            sentences.append(f"{name} ({lane.sort}{where}): {counted(lane.steps, 'step')}, {ending(lane)}.")
        return " ".join(sentences)

    def _rails(self, index: int) -> Iterator[str]:
        lane, start, x = self.graph.lanes[index], self.grid.starts[index], self._line(index)
        hue = "past" if lane.sort == "left" else _HUES[self.grid.columns[index] % len(_HUES)]
        top = self.words[start]
        if lane.parent is not None:
            parents = sorted({self.graph.lanes[each].parent or 0 for each in self._starts()[start] if each})
            y = self.gaps[start] + 6 + 8 * parents.index(lane.parent)
            child = " child" if lane.sort == "child" else ""
            from_x = self._line(lane.parent)
            yield f'<path class="rail {hue}{child}" d="M{from_x:.1f} {y:.1f}H{x - TURN:.1f}q{TURN} 0 {TURN} {TURN}"/>'
            top = y + TURN
        end, path = self._end(index), f"M{x:.1f} {top:.1f}"
        breaks = [
            (y + 2, y + LINE * 1.6 - 2)
            for hidden, y in self.folds.items()
            if start <= hidden.start and hidden.stop <= start + len(lane.nodes)
        ]
        folded = {start + place for place, node in enumerate(lane.nodes) if node.folded}
        breaks += [(y - 1, y + LINE + 1) for place, y in self.rows.items() if place in folded]
        for above, below in sorted(breaks):
            path += f"V{above:.1f}M{x:.1f} {below:.1f}"
        asked = " asked" if lane.asked else ""
        yield f'<path class="rail {hue}{asked}" d="{path}V{end:.1f}"/>'

    def _lane(self, index: int, lane: Lane) -> Iterator[str]:
        start, x = self.grid.starts[index], self._line(index)
        y = self.words[start]
        if lane.asked:
            wide = self.headings[index][0].wide * CHAR * 1.03 + 8
            at = f'x="{x + INDENT - RADIUS - 4:.1f}" y="{y + 1:.1f}"'
            yield f'<rect class="halo" {at} width="{wide:.1f}" height="{LINE}" rx="4"/>'
        for number, line in enumerate(self.headings[index]):
            words = self._words(line, x, y + number * LINE)
            yield words if number or lane.asked or lane.sort == "left" else self._linked(words, lane)
        for place, node in enumerate(lane.nodes):
            if (index, start + place) in self.nodes and node.folded:
                words = self._words(self.nodes[index, start + place][0], x, top := self.rows[start + place])
                after = next((int(each.number.partition(".")[0]) for each in lane.nodes[place + 1 :]), node.folded + 1)
                yield _dots(x, top - 4) + self._linked(words, lane, str(max(after - node.folded, 1)))
            elif (index, start + place) in self.nodes:
                if self.graph.here == (index, place):
                    at = f'cx="{x:.1f}" cy="{self.rows[start + place] + LINE / 2:.1f}"'
                    yield f'<circle class="here {_sign(node)}" {at} r="{RADIUS + 3}"/>'
                yield from self._step(node, lane, x, self.rows[start + place], self.nodes[index, start + place])
        for hidden, y in self.folds.items():
            if (first := hidden.start - start) >= 0 and hidden.stop <= start + len(lane.nodes):
                label = _Words(((f"… {counted(len(hidden), 'step')} …", "quiet"),))
                yield _dots(x, y) + self._linked(self._words(label, x, y + 4), lane, lane.nodes[first].number)
        end = self._end(index)
        status = "left" if lane.sort == "left" else _STATUS.get(lane.status, lane.status)
        yield f'<path class="end {status}" d="M{x - 6:.1f} {end:.1f}h12"/>'
        label = _Words(((cut(ending(lane), self.room), f"ends {status}"),))
        yield self._words(label, x, end - LINE / 2)

    def _step(self, node: Node, lane: Lane, x: float, y: float, lines: Sequence[_Words]) -> Iterator[str]:
        drawn = [f"<g><title>{_text(self._tip(node, lane))}</title>", _mark(_sign(node), x, y + LINE / 2)]
        inner = _flat(node)
        for number, line in enumerate(lines):
            top = y + number * LINE
            if line.indent and line.pieces[0][1] == "number":
                drawn.append(_mark(_sign(inner.pop(0)), x + line.indent, top + LINE / 2, small=True))
            drawn.append(self._words(line, x, top))
        yield self._linked("\n".join([*drawn, "</g>"]), lane, node.number)

    def _linked(self, drawn: str, lane: Lane, step: str | None = None) -> str:
        """Wraps a run's or a step's drawing in a link; folded steps link to the first of them."""
        if lane.sort == "left" and step is not None:
            return drawn
        named = f" data-run={quoteattr(lane.run)}" + (f" data-step={quoteattr(step)}" if step else "")
        return f"<a href={quoteattr(self.link_to(lane, step))}{named}>{drawn}</a>"

    def _words(self, line: _Words, x: float, y: float) -> str:
        pieces = "".join(f"<tspan class={quoteattr(style)}>{_text(piece)}</tspan>" for piece, style in line.pieces)
        return f'<text x="{x + INDENT - RADIUS + line.indent:.1f}" y="{y + LINE * 0.74:.1f}">{pieces}</text>'

    def _legend(self) -> tuple[list[str], float]:
        """Draws the legend of the used signs; returns its end."""
        made: list[str] = []
        nodes = [node for lane in self.graph.lanes for node in lane.nodes if not node.folded]
        found = {_sign(each) for node in nodes for each in (node, *_flat(node))}
        x, y = float(MARGIN + RADIUS), self.bottom + LINE
        for sign in (sign for sign in _SIGNS if sign in found):
            wide = cells(_WORDS[sign]) * CHAR + INDENT + 22
            if x + wide > self.width and x > MARGIN + RADIUS:
                x, y = float(MARGIN + RADIUS), y + LINE + 3
            made.append(_mark(sign, x, y + LINE / 2) + self._words(_Words(((_WORDS[sign], "quiet"),)), x, y))
            x += wide
        if self.graph.left_out:
            more = f"{counted(self.graph.left_out, 'more lane')} left out"
            y += LINE + 3
            made.append(self._words(_Words(((more, "quiet"),)), MARGIN, y))
        return made, y + LINE


def _flat(node: Node) -> list[Node]:
    """Returns the drawn parts of a step, in line order."""
    return [each for inner in node.inside[:INSIDE_MAX] for each in (inner, *_flat(inner))]


def _sign(node: Node) -> str:
    return "in_doubt" if node.in_doubt else "adopted" if node.adopted is not None else node.status


def _mark(sign: str, x: float, y: float, *, small: bool = False) -> str:
    scale = " scale(.78)" if small else ""
    return (
        f'<g class="mark {sign}" transform="translate({x:.1f} {y:.1f}){scale}">'
        f'<circle r="{RADIUS}"/><path d="{_SIGNS[sign]}"/></g>'
    )


def _dots(x: float, y: float) -> str:
    return f'<path class="dots" d="M{x:.1f} {y + 7:.1f}v.01m0 6v.01m0 6v.01"/>'


def _text(text: str) -> str:
    """Escapes a text for XML; forbidden characters become a placeholder."""
    return escape("".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text))
