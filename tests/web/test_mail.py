"""E-mail to people: each gets their own link, over an encrypted connection, and a repeat is known by its Message-ID."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.testclient import TestClient

import killick
from killick.errors import DeclarationRefused
from killick.workers.hooks import ensure
from web import desk as at
from web.desk import Desk, desk
from web.elsewhere import PUBLIC, Smtp, attended, configured, smtp

PEOPLE = {"mia": "mia@example.org", "max": "max@example.org", "lea": "lea@example.org"}


@pytest.fixture(autouse=True)
def environment() -> Iterator[pytest.MonkeyPatch]:
    with configured() as made:
        yield made


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        yield made


@pytest.fixture
def post() -> Iterator[Smtp]:
    with smtp() as made:
        yield made


def mailing(office: Desk, post: Smtp, people: Any = PEOPLE, **options: Any) -> None:
    options = {"sender": "Killick <killick@example.org>", **options}
    killick.email(f"smtp://127.0.0.1:{post.port}", people=people, **options)
    ensure(office.kd.runtime.engine)


def claim(office: Desk, run: str = "claim", name: str = "bob") -> str:
    return office.at(at.claim, at.Claim(name=name, amount=2400), run=run)


def link_in(text: str) -> str:
    [token] = re.findall(rf"{re.escape(PUBLIC)}/answer#(\S+)", text)
    return str(token)


def recorded(office: Desk) -> list[str]:
    return [str(each.event.__struct_config__.tag) for each in office.kd.events("hook:email", after=2)]


def test_everyone_who_is_asked_gets_the_question_and_their_own_link(office: Desk, post: Smtp) -> None:
    mailing(office, post)
    claim(office)
    attended(office.kd, "email")
    assert {str(each["to"]): str(each["subject"]) for each in post.mail} == {
        "mia@example.org": 'Approve desk_pay(to="bob", amount=2400)?',
        "max@example.org": 'Approve desk_pay(to="bob", amount=2400)?',
    }
    for text in ("the storm is on record", "large sums are put to people", "max, mia", "claim, step 1"):
        assert text in post.text()
    web = TestClient(office.web.app)
    said = [web.post("/api/v1/answer/question", json={"link": link_in(post.text(n))}).json()["by"] for n in (0, 1)]
    assert [f"{name}@example.org" for name in said] == [each["to"] for each in post.mail]
    assert post.mail[0]["auto-submitted"] == "auto-generated"
    assert str(post.mail[0]["from"]) == "Killick <killick@example.org>"


def test_the_link_of_the_mail_answers_the_question(office: Desk, post: Smtp) -> None:
    mailing(office, post, {"mia": "mia@example.org"})
    claim(office)
    attended(office.kd, "email")
    web = TestClient(office.web.app)
    web.post("/api/v1/answer", json={"link": link_in(post.text()), "verb": "approve"}).raise_for_status()
    office.kd.advance("claim")
    assert office.kd.state("claim").result == "paid 2400 to bob"


def test_a_repeated_mail_has_the_same_message_id_and_others_have_their_own(office: Desk, post: Smtp) -> None:
    mailing(office, post)
    claim(office)
    post.refuses["max@example.org"] = "451 later"
    attended(office.kd, "email", rests=2)
    post.refuses.clear()
    attended(office.kd, "email", rests=2)
    mia = [each["message-id"] for each in post.mail if each["to"] == "mia@example.org"]
    assert len(mia) > 1
    assert len(set(mia)) == 1
    assert {each["message-id"] for each in post.mail if each["to"] == "max@example.org"}.isdisjoint(mia)
    assert recorded(office)[0] == "hook.failed"
    assert recorded(office)[-1] == "hook.called"


def test_an_address_that_is_refused_for_good_keeps_no_mail_from_the_others(
    office: Desk, post: Smtp, caplog: pytest.LogCaptureFixture
) -> None:
    mailing(office, post)
    post.refuses["mia@example.org"] = "550 nobody here"
    claim(office)
    attended(office.kd, "email", rests=3)
    assert [each["to"] for each in post.mail] == ["max@example.org"]
    assert recorded(office) == ["hook.called"]
    assert "mia@example.org was refused" in caplog.text


@pytest.mark.parametrize("refused", ["RCPT", "DATA"])
def test_mail_that_is_refused_for_good_delays_no_other_question(office: Desk, post: Smtp, refused: str) -> None:
    mailing(office, post, {"mia": "mia@example.org", "max": "max@example.org"})
    if refused == "RCPT":
        post.refuses |= {"mia@example.org": "550 nobody here", "max@example.org": "550 nobody here"}
    else:
        post.refuses["DATA"] = "554 spam"
    claim(office)
    attended(office.kd, "email")
    assert recorded(office) == ["hook.dropped"]
    post.refuses.clear()
    claim(office, "other")
    attended(office.kd, "email")
    assert len(post.mail) == 2
    assert recorded(office) == ["hook.dropped", "hook.called"]


def test_a_question_that_was_answered_meanwhile_is_not_mailed(office: Desk, post: Smtp) -> None:
    mailing(office, post)
    claim(office)
    office.kd.answer("claim", "approve", by="mia")
    attended(office.kd, "email")
    assert post.mail == []
    assert recorded(office) == ["hook.called"]


def test_a_function_gives_the_addresses(office: Desk, post: Smtp) -> None:
    asked: list[str] = []

    def address(name: str) -> str | None:
        asked.append(name)
        return f"{name}@elsewhere.example" if name == "max" else None

    mailing(office, post, address)
    claim(office)
    attended(office.kd, "email")
    assert sorted(asked) == ["max", "mia"]
    assert [each["to"] for each in post.mail] == ["max@elsewhere.example"]


def test_a_question_to_any_person_goes_to_everyone(office: Desk, post: Smtp) -> None:
    mailing(office, post)
    office.at(at.checkout, "4242")
    attended(office.kd, "email")
    assert sorted(str(each["to"]) for each in post.mail) == sorted(PEOPLE.values())
    assert str(post.mail[0]["subject"]).startswith("Did desk_charge(")


def test_a_prompt_adds_no_header_and_no_markup(office: Desk, post: Smtp) -> None:
    mailing(office, post)
    office.at(at.asks, "Now?\r\nBcc: eve@example.org\r\n\r\n<b onload=x>\u202e" + "long " * 100)
    attended(office.kd, "email")
    [mail] = post.mail
    assert mail["bcc"] is None
    assert len(str(mail["subject"])) <= 150
    html = mail.get_body(("html",))
    assert html is not None
    assert "<b onload" not in html.get_content()
    assert "&lt;b onload=x&gt;" in html.get_content()
    assert "\u202e" not in post.text()


# the connection -----------------------------------------------------------------------------------


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's certificate for this machine, which clients trust."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(7).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    return context


@pytest.mark.parametrize("scheme", ["smtp", "smtps"])
def test_mail_goes_over_tls_and_the_password_is_read_when_it_is_needed(
    office: Desk, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with smtp(tls, immediately=scheme == "smtps") as post:
        killick.email(
            f"{scheme}://mailer%40example.org@127.0.0.1:{post.port}", sender="killick@example.org", people=PEOPLE,
            password="env:SMTP_PASSWORD",
        )  # fmt: skip
        assert ensure(office.kd.runtime.engine) == []  # this worker has no password
        monkeypatch.setenv("SMTP_PASSWORD", "s3cret")
        assert ensure(office.kd.runtime.engine) == ["killick.hook:email"]
        claim(office)
        attended(office.kd, "email")
        assert post.users == [("mailer@example.org", "s3cret")]
        assert post.is_encrypted == [True, True]


def test_a_server_whose_certificate_is_not_trusted_gets_nothing(
    office: Desk, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with smtp(tls) as post:
        mailing(office, post)
        claim(office)
        attended(office.kd, "email")
        assert post.mail == []
        assert recorded(office) == ["hook.failed"]


def test_another_machine_without_starttls_gets_nothing(
    office: Desk, post: Smtp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("killick.workers.mail.is_loopback", lambda host: False)
    mailing(office, post)
    claim(office)
    attended(office.kd, "email")
    assert post.mail == []
    assert recorded(office) == ["hook.failed"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"server": "smtp.example.org"}, "is not the address of a service"),
        ({"server": "https://smtp.example.org"}, "is not the address of a service"),
        ({"sender": "Killick"}, "is not an address"),
        ({"password": "x"}, "a user and a password go together"),
        ({"server": "smtp://me@smtp.example.org"}, "a user and a password go together"),
    ],
)
def test_a_declaration_that_cannot_hold_is_refused(options: dict[str, Any], said: str) -> None:
    given = {"server": "smtp://smtp.example.org", "sender": "k@example.org", "people": PEOPLE, **options}
    with pytest.raises(DeclarationRefused, match=said):
        killick.email(given.pop("server"), **given)


def test_a_worker_without_links_leaves_the_mail_to_others_and_says_what_it_lacks(
    office: Desk, post: Smtp, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.delenv("KILLICK_LINK_SECRET")
    killick.email(f"smtp://127.0.0.1:{post.port}", sender="k@example.org", people=PEOPLE)
    assert ensure(office.kd.runtime.engine) == []
    assert "KILLICK_LINK_SECRET: is empty" in caplog.text
    environment.delenv("KILLICK_PUBLIC_URL")
    assert ensure(office.kd.runtime.engine) == []
    assert "messages to people need links; KILLICK_PUBLIC_URL: is not the address of a service" in caplog.text


def test_two_people_with_one_mailbox_are_one_approval_by_link(office: Desk, post: Smtp) -> None:
    mailing(office, post, people={"lea": "team@example.org", "leo": "team@example.org"})
    office.at(at.rollout, 3)
    attended(office.kd, "email")
    web = TestClient(office.web.app)
    given = [{"link": link_in(post.text(n)), "verb": "approve"} for n in (0, 1)]
    assert [web.post("/api/v1/answer", json=each).status_code for each in given] == [200, 409]
