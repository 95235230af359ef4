"""The walk from a fork to its ancestors."""

from __future__ import annotations

from killick.log.ancestry import Segment, ancestry, owner_of, segments
from killick.store.records import Head

HEADS = {
    head.run: head
    for head in (
        Head(run="root", seq=10, hash=b"", epoch=1),
        Head(run="fork", seq=12, hash=b"", epoch=1, base=8, parent="root"),
        Head(run="early", seq=5, hash=b"", epoch=1, base=3, parent="fork"),
    )
}
head_of = HEADS.__getitem__


def test_each_ancestor_ends_where_the_fork_leaves_it() -> None:
    assert [(head.run, up_to) for head, up_to in ancestry(HEADS["fork"], head_of)] == [("fork", 12), ("root", 8)]


def test_a_fork_that_leaves_a_fork_before_its_first_own_event_shares_only_the_root_up_to_its_own_cut() -> None:
    assert segments(HEADS["early"], 0, head_of) == [
        Segment("root", 0, 3), Segment("fork", 8, 3), Segment("early", 3, 5),
    ]  # fmt: skip
    assert [owner_of(HEADS["early"], seq, head_of).run for seq in (1, 3, 4)] == ["root", "root", "early"]


def test_segments_after_a_seq_of_the_fork_itself_read_no_ancestor() -> None:
    def unknown(run: str) -> Head:
        raise AssertionError(run)

    assert segments(HEADS["fork"], 8, unknown) == [Segment("fork", 8, 12)]
