"""Steps with encrypted values: beside the same steps in clear."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import killick
from bench.measure import Measure, interleaved, ratio, seconds

STEPS: Final = 1_000
WARM_STEPS: Final = 100
ROUNDS: Final = 7

sent: list[int] = []


@killick.tool
async def send(number: int, to: str, subject: str, body: str) -> dict[str, str]:
    """An effect that nobody may repeat, with arguments and a result of the usual size."""
    sent.append(number)
    return {"id": f"message-{number}", "status": "queued", "to": to}


@killick.agent
async def sends(run: killick.Run, count: int) -> int:
    for number in range(count):
        text = "We have looked at your claim and will come back to you within three days."
        await run.call(send, number, f"customer-{number}@example.com", f"Your claim {number}", text)
    return count


def measure(folder: Path) -> Iterator[Measure]:
    """The speed of one run with keys, to the speed without."""
    ids = count()
    clear, encrypted = str(folder / "clear.db"), str(folder / "encrypted.db")
    with killick.open(clear) as without, killick.open(encrypted, keys=bytes(range(32))) as keyed:

        def rate(kd: killick.Client, steps: int = STEPS) -> float:
            run = f"steps-{next(ids)}"
            return steps / seconds(lambda: kd.run(sends, steps, id=run))

        for kd in (without, keyed):
            rate(kd, WARM_STEPS)
        ours, theirs = interleaved(ROUNDS, lambda: rate(keyed), lambda: rate(without))
        yield Measure(
            name="encryption",
            what="effectful steps/s of one run with encrypted values, to the same steps in clear",
            figure=ratio(ours, theirs),
            at_least=0.9,
            beside=f"{median(ours):,.0f}/s to {median(theirs):,.0f}/s",
        )
