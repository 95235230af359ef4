"""Credentials are found by name and by shape, and text without any stays as it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import killick
from killick.credentials import find, named, without, without_credentials
from killick.history.credential_scan import scan

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nab+/\n-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.s5f-_Qx"
HELD = {
    "sk-ant-ARGKEY0001": "401 for key sk-ant-ARGKEY0001",
    "hunter2": 'connect failed: {"user": "u", "password": "hunter2"}',
    "s3cr3t-value": "POST /x?client_secret=s3cr3t-value&n=1",
    "dXNlcjpwYXNz": "headers: Authorization: Basic dXNlcjpwYXNz, x: y",
    "HDRTOKEN0002": "<Request headers={'Authorization': 'Bearer HDRTOKEN0002'}>",
    "sid=abc": "Set-Cookie: sid=abc; Path=/",
    "ghp_" + "a1" * 18: "remote refused ghp_" + "a1" * 18,
    "AKIAIOSFODNN7EXAMPLE": "no such key AKIAIOSFODNN7EXAMPLE.",
    "URLPW0003": "GET https://u:URLPW0003@127.0.0.1:1/x",
    "QRYKEY0004": "GET https://127.0.0.1:1/x?api_key=QRYKEY0004",
    "AIzaSyA": "x-goog-api-key: AIzaSyA-1234567890abcdefghijklmnopqrstu",
    "MIIEow": f"cannot read {PEM}",
    "MIIEcut": "cut off: -----BEGIN PRIVATE KEY-----\nMIIEcut",
    JWT: f"bad token {JWT}",
    "xoxb-1234": "slack said no to xoxb-1234567890-abcdef",
    "pw-in-dsn": "postgresql://app:pw-in-dsn@db/prod is down",
}
PLAIN = [
    "unexpected token: identifier", "password: must have eight letters", "the bearer of bad news", "max_tokens=5",
    "basic authentication failed", "PWD=/root", "token=None", "next_page_token=abc", "risk-adjusted-return-2024",
    'WWW-Authenticate: Bearer realm="api"', "http://127.0.0.1:8080/a@b", "step 6: send_email(to='mia@example.com')",
    "task_abc123:step_6:send_email:f3a9b12c", "the secret of success", "a cookie: chocolate",
]  # fmt: skip
WORDS = st.sampled_from(
    [*HELD.values(), *PLAIN, "token=", 'secret="', "cookie: ", "://", "@", "\\", "[removed:", "]", "\n"]
)
TEXTS = st.lists(WORDS | st.text(max_size=8), max_size=8).map("".join)


@pytest.mark.parametrize("secret", HELD)
def test_a_credential_is_taken_out_of_text_and_the_rest_stays(secret: str) -> None:
    after = without(HELD[secret])
    assert secret not in after
    assert "[removed:" in after
    assert after.split("[removed:")[0] == HELD[secret][: len(after.split("[removed:")[0])]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_is_left_alone(text: str) -> None:
    assert without(text) == text
    assert not list(find(text))


@given(TEXTS)
def test_taking_out_twice_changes_nothing_more(text: str) -> None:
    once = without(text)
    assert without(once) == once


@given(
    st.recursive(
        st.none() | st.integers() | st.binary() | TEXTS, lambda each: st.lists(each) | st.dictionaries(TEXTS, each)
    )
)
def test_a_value_without_credentials_has_none_that_are_found(value: Any) -> None:
    after = without_credentials(value)
    assert without_credentials(after) == after
    assert not list(find(after))


@pytest.mark.parametrize(
    "unit",
    ["token=", 'token="', 'token=\\"', "token:", "eyJ", "-----BEGIN PRIVATE KEY-----", "://a:", "bearer ", "cookie: a",
     "authorization: digest ", "a", "secret   ", "://a:@", "sk-", "://a:b"],
)  # fmt: skip
def test_no_text_takes_more_than_linear_time(unit: str) -> None:
    begun = time.process_time()
    without(unit * (200_000 // len(unit)))
    assert time.process_time() - begun < 20, "quadratic time would be minutes"


def test_names_of_credentials_are_known_in_every_spelling() -> None:
    for name in ("Authorization", "proxy-authorization", "api_key", "X-API-Key", "openaiApiKey", "x-goog-api-key",
                 "password", "DB_PASSWD", "client_secret", "secret", "token", "accessToken", "Set-Cookie",
                 "privateKey"):  # fmt: skip
        assert named(name), name
    for name in ("tokens", "max_tokens", "next_page_token", "author", "secretary", "keyboard", "task", "cookiecutter"):
        assert named(name) is None, name


def test_a_very_deep_value_is_searched_and_nothing_raises() -> None:
    deep: Any = "sk-live-0123456789abc"
    for _ in range(5_000):
        deep = [deep]
    assert [each.kind for each in find(deep)] == ["api_key"]
    assert "0123456789abc" not in repr(without_credentials(deep))


# on record ----------------------------------------------------------------------------------------

GIVEN = {
    "argument": "sk-ant-ARGKEY0001", "header": "Bearer HDRTOKEN0002", "url": "URLPW0003", "query": "QRYKEY0004",
    "result": "RETKEY0010",
}  # fmt: skip
RAISED = {
    "message": "sk-proj-EXCKEY0005", "cause": "ghp_CAUSEKEY0007aaaaaaaaaaaa", "note": "Bearer NOTEKEY0008",
    "local": "LOCALKEY0006", "argument of the error": "password=ARGSKEY0013", "member": "token=MEMBERKEY0014",
}  # fmt: skip


@killick.tool(name="credentials_call", effect="reads")
async def call(api_key: str, headers: dict[str, str], url: str) -> dict[str, str]:
    return {"token": GIVEN["result"]}


@killick.tool(name="credentials_fail", effect="reads")
async def fail(_: int) -> None:
    password = RAISED["local"]  # noqa: F841  # pyright: ignore[reportUnusedVariable]
    try:
        try:
            raise KeyError(RAISED["cause"])
        except KeyError as cause:
            raise RuntimeError(f"401 for {RAISED['message']}", RAISED["argument of the error"]) from cause
    except RuntimeError as error:
        error.add_note(f"sent with {RAISED['note']}")
        raise ExceptionGroup("both", [error, ValueError(RAISED["member"])]) from None


@killick.agent
async def credentials_agent(run: killick.Run) -> None:
    url = f"https://u:{GIVEN['url']}@127.0.0.1:1/x?api_key={GIVEN['query']}"
    returned = await run.call(call, GIVEN["argument"], {"Authorization": GIVEN["header"]}, url)
    assert returned == {"token": GIVEN["result"]}
    await run.call(fail, 1)


def test_a_failure_on_record_has_no_credential_and_arguments_and_results_stay_verbatim(tmp_path: Path) -> None:
    file = tmp_path / "killick.db"
    with killick.open(str(file)) as kd, pytest.raises(killick.RunFailed):
        kd.run(credentials_agent, id="r")
    written = b"".join(each.read_bytes() for each in tmp_path.iterdir() if each.is_file())
    assert [name for name, secret in RAISED.items() if secret.split()[-1].encode() in written] == []
    assert [name for name, secret in GIVEN.items() if secret.encode() not in written] == []
    assert b"[removed:" in written


def test_the_scan_names_run_step_field_and_kind_and_no_value(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        with pytest.raises(killick.RunFailed):
            kd.run(credentials_agent, id="r")
        kd.start(credentials_agent, id="s")
        kd.send("s", "login", {"password": "hunter2"})
        found = list(scan(kd.log))
    assert [(each.run, each.step, each.field, each.kind) for each in found] == [
        ("r", "1", "arguments.api_key", "api_key"),
        ("r", "1", "arguments.headers.Authorization", "authorization"),
        ("r", "1", "arguments.url", "api_key"),
        ("r", "1", "arguments.url", "url_password"),
        ("r", "1", "output.token", "token"),
        ("s", None, "message login.password", "password"),
    ]
    assert not any(secret in repr(found) for secret in (*GIVEN.values(), "hunter2"))


def test_a_result_without_credentials_is_what_the_code_and_the_record_have() -> None:
    @killick.tool(name="credentials_login", effect="reads")
    async def login() -> dict[str, Any]:
        return without_credentials({"token": GIVEN["result"], "user": "mia", "roles": ["a"]})

    @killick.agent(name="credentials_logging_in")
    async def logging_in(run: killick.Run) -> dict[str, Any]:
        return await run.call(login)

    with killick.open("memory:") as kd:
        assert kd.run(logging_in, id="r") == {"token": "[removed:token]", "user": "mia", "roles": ["a"]}
        assert not list(scan(kd.log))
