"""What opens something is not on record."""

from __future__ import annotations

from killick.model.failure import Failure
from killick.proxy.credentials import without, without_secrets


def test_what_opens_a_server_that_the_provider_calls_is_not_on_record() -> None:
    body = {
        "mcp_servers": [{"url": "https://ann:pin@far.example/x", "authorization_token": "SECRET", "name": "far"}],
        "tools": [{"type": "mcp", "headers": {"k": "SECRET"}, "authorization": "SECRET"}, {"name": "headers"}],
    }
    told = without_secrets(body)
    assert "SECRET" not in str(told)
    assert "pin" not in str(told)
    assert told["tools"][1] == {"name": "headers"}
    assert body["mcp_servers"][0]["authorization_token"] == "SECRET"


def test_a_key_that_a_provider_repeats_is_not_on_record() -> None:
    failure = Failure.of("api", "Incorrect API key provided: sk-very-secret-key.")
    for header in ((b"Authorization", b"Bearer sk-very-secret-key"), (b"X-Goog-Api-Key", b"sk-very-secret-key")):
        told = without(failure, [header, (b"accept", b"Incorrect")])
        assert "sk-very" not in str(told)
        assert "Incorrect API key" in str(told)
