"""killick.durable in processes that die, its example, and its page."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from neighbours.trying import try_example, try_page
from provider import Provider, Says, Serving


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def url(provider: Provider) -> Iterator[str]:
    with Serving(provider) as serving:
        yield serving.url


def test_a_killed_process_asks_again_alone_and_not_with_killick(tmp_path: Path, provider: Provider, url: str) -> None:
    program = [sys.executable, str(Path(__file__).parent / "killed_durable.py"), str(tmp_path / "k.db"), url]
    ran = subprocess.run(program, timeout=150, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-2:] == ["hellohello", "hellohello"]
    asked = Counter(body["model"] for body in provider.bodies)
    print(
        f"requests to the model, two of which are needed: "
        f"alone {asked['alone']}, with killick.durable {asked['killick']}"
    )
    assert asked == {"alone": 3, "killick": 2}


def test_the_example_runs(tmp_path: Path) -> None:
    try_example("durable_client", tmp_path)


def test_the_page_is_so(tmp_path: Path, provider: Provider, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    provider.script = lambda body: Says("tea at four")
    try_page("durable", tmp_path)
    assert len(provider.requests) == 2  # the resumed run asks nothing
