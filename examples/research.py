"""One agent asks several at once: a child researches each topic, side by side, and a model sums up what they found.

A child is a run of its own, with an id, a record and effects; it can be looked at, and it dies and goes on by itself.
One of them fails here for good. Its parent is told what went wrong, says so in the report, and goes on.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import killick

LIBRARY = {
    "tides": ["The moon pulls twice a day.", "Spring tides come with a full or a new moon."],
    "anchors": ["A killick is rowed ahead and dropped.", "The ship hauls itself up to it."],
    "currents": ["Warm water goes north.", "Cold water comes back below."],
}


class NoSuchShelf(Exception):
    """The library has nothing on it, and will not have it tomorrow: no attempt is made again."""


@dataclass
class Finding:
    topic: str
    text: str


# Two tools, and two calls of a model that is played by scripts.


@killick.tool(effect="reads")
async def search(topic: str) -> list[str]:
    if topic not in LIBRARY:
        raise NoSuchShelf(f"nothing on {topic!r}; there is {', '.join(LIBRARY)}")
    return [f"{topic}/{page}" for page in range(len(LIBRARY[topic]))]


@killick.tool(effect="reads")
async def read_page(page: str) -> str:
    topic, _, number = page.partition("/")
    return LIBRARY[topic][int(number)]


@killick.tool(effect="reads")
async def condense(topic: str, pages: list[str]) -> str:
    return " ".join(pages)


@killick.tool(effect="reads")
async def sum_up(question: str, findings: list[Finding]) -> str:
    return "\n".join([f"On {question}:", *(f"  {found.topic}: {found.text}" for found in findings)])


@killick.agent
async def research(run: killick.Run, topic: str) -> Finding:
    pages = await run.call(search, topic)
    texts = await run.gather(run.call(read_page, page) for page in pages)
    return Finding(topic, await run.model(condense, topic, list(texts)))


@dataclass
class Question:
    text: str
    topics: list[str]


@killick.agent
async def report(run: killick.Run, question: Question) -> str:
    async def one(number: int, topic: str) -> Finding:
        """A branch: a child, and what to do when it fails."""
        child = await run.spawn(research, topic, id=f"{run.id}.{number}")
        try:
            return await child.result()
        except killick.errors.ChildFailed as failed:
            await run.note(f"{topic} was left out: {failed.failure.message}")
            return Finding(topic, "(nothing found)")

    findings = await run.gather(one(number, topic) for number, topic in enumerate(question.topics, 1))
    return await run.model(sum_up, question.text, list(findings))


def main() -> None:
    question = Question("how ships move", ["tides", "anchors", "sails", "currents"])
    with tempfile.TemporaryDirectory(prefix="killick-") as folder, killick.open(str(Path(folder) / "killick.db")) as kd:
        print(kd.run(report, question, id="report"))
        print("\nThe runs, each with a record of its own:")
        runs = sorted(kd.list(), key=lambda listed: listed.id)
        for listed in runs:
            state = kd.state(listed.id)
            why = f"  {state.failures[0].error['message']}" if state.failures else ""
            print(f"  {listed.id:<9} {listed.agent:<9} {listed.status:<10} {len(state.fold.steps):>2} steps{why}")
        assert [listed.status for listed in runs] == ["completed", "completed", "completed", "failed", "completed"]


if __name__ == "__main__":
    main()
