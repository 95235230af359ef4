"""What Prometheus is shown: at the address it looks at, to who may look, and nothing of anybody's values."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

import killick
from killick.web import asgi
from killick.workers.metrics import MEDIA
from killick.workers.tokens import Person


@killick.agent
async def visitor(run: killick.Run, name: str) -> None:
    await run.ask(f"let {name} in?", to="people")


@pytest.mark.parametrize("path", ["/metrics", "/api/v1/metrics"])
def test_the_meters_are_shown_as_text(tmp_path: Path, path: str) -> None:
    with killick.open(tmp_path / "killick.db") as kd:
        app = asgi(kd, lambda request: Person("pam"))
        with pytest.raises(killick.RunWaiting):
            kd.run(visitor, "ann", id="visit-of-ann")
        shown = TestClient(app).get(path)
    assert shown.status_code == 200
    assert shown.headers["content-type"] == MEDIA
    lines = shown.text.splitlines()
    assert 'killick_store_runs{status="waiting"} 1' in lines
    assert "killick_store_runs_asking 1" in lines
    assert 'killick_waits_opened_total{agent="visitor",for="answer"}' in shown.text, "what this process does is counted"
    assert "ann" not in shown.text


def test_who_may_not_look_is_shown_nothing(tmp_path: Path) -> None:
    with killick.open(tmp_path / "killick.db") as kd:
        refused = TestClient(asgi(kd, lambda request: None)).get("/metrics")
    assert refused.status_code == 401
    assert "killick_store" not in refused.text
