"""The platforms' own instrumentations with ours: their exporters send real spans, and every token counts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from neighbours.observability.collector import Collector
from neighbours.trying import try_page
from pages import ROOT, run_page
from provider import Provider, Says, Serving

PAGE = ROOT / "docs" / "neighbours" / "observability.md"
SCOPES = {
    "langfuse": "langfuse-sdk",
    "phoenix": "openinference.instrumentation.openai",
    "logfire": "logfire.openai",
}
ONE_CALL, TWO_CALLS = (20, 10), (40, 20)
"""Input and output tokens."""

Platforms = dict[str, Collector]


@pytest.fixture
def provider() -> Provider:
    made = Provider()
    made.script = lambda body: Says("tea at four")
    return made


@pytest.fixture
def platforms(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platforms]:
    made = {name: Collector() for name in SCOPES}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(Serving(each)).url for name, each in made.items()}
        settings = {
            "OPENAI_BASE_URL": f"{stack.enter_context(Serving(provider)).url}/v1", "OPENAI_API_KEY": "sk",
            "LANGFUSE_BASE_URL": urls["langfuse"], "LANGFUSE_PUBLIC_KEY": "pk-lf-1", "LANGFUSE_SECRET_KEY": "sk-lf-1",
            "PHOENIX_COLLECTOR_ENDPOINT": urls["phoenix"],
            "LOGFIRE_BASE_URL": urls["logfire"], "LOGFIRE_TOKEN": "t",
        }  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield made


def counted(platform: Collector) -> tuple[int, int]:
    """What a platform shows for the trace: the sum over its spans."""
    return sum(span.tokens[0] for span in platform.spans), sum(span.tokens[1] for span in platform.spans)


def test_with_their_instrumentation_and_ours_each_platform_counts_every_token_once(
    tmp_path: Path, provider: Provider, platforms: Platforms
) -> None:
    try_page("observability", tmp_path)

    assert len(provider.requests) == 3, "one for each platform: a resumed run asks nothing"
    for name, scope in SCOPES.items():
        spans = platforms[name].spans
        assert [span.tokens for span in spans if span.scope == scope] == [ONE_CALL], name
        assert counted(platforms[name]) == ONE_CALL, name
        ours = sorted(span.name for span in spans if span.scope == "killick")
        assert ours == ["chat gpt-5-mini", "invoke_agent greeter", "invoke_agent greeter", "wait answer"]
        assert len({span.trace for span in spans}) == 1, "both processes and both instrumentations are one trace"


def test_without_the_option_each_platform_counts_them_twice(tmp_path: Path, platforms: Platforms) -> None:
    page = PAGE.read_text(encoding="utf-8").replace("instrument(usage=False)", "instrument()")
    assert not list(run_page(page, tmp_path))
    assert [*map(counted, platforms.values())] == [TWO_CALLS] * 3


def test_around_a_durable_client_theirs_count_again_on_replay_and_ours_alone_count_once(
    tmp_path: Path, provider: Provider, platforms: Platforms
) -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## Phoenix")[0]
    for shown, instead in (
        ("run.model(gpt.chat.completions.create, ", "killick.durable(gpt).chat.completions.create("),
        ("from langfuse.openai import", "from openai import"),
        ("instrument(usage=False)", "instrument()"),
    ):
        assert shown in page
        page = page.replace(shown, instead)
        if "durable" in instead:
            assert not list(run_page(page, tmp_path / "theirs"))
            assert counted(platforms["langfuse"]) == TWO_CALLS
            platforms["langfuse"].spans.clear()
    assert not list(run_page(page, tmp_path / "ours"))
    assert counted(platforms["langfuse"]) == ONE_CALL
    assert len(provider.requests) == 2
