"""What is fuzzed in the environment of the gate."""

from __future__ import annotations

import re
import tempfile
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import killick
from fuzz.fuzzing import Target
from killick.archive import bundle
from killick.archive import export as exports
from killick.audit.checkpoint import checkpoint
from killick.audit.proof import verify_proof
from killick.contracts.contract import Contract, Intention, PolicyInput
from killick.contracts.regex import compiled
from killick.model import codec
from killick.store import MemoryStore
from pages import ROOT

# Fixed, so that the signatures of the corpus stay good.
SIGNER: Final = Ed25519PrivateKey.from_private_bytes(b"fuzz" * 8)
KEY: Final = SIGNER.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
PUB: Final = SIGNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
TEXT_CHARS_MAX: Final = 10
"""Python's own engine backtracks: on longer texts a pattern could take it for ever."""


# Contracts ----------------------------------------------------------------------------------------


def text_rules(data: bytes) -> None:
    """The first line is a pattern, the rest a text. What `matches` accepts, `re` matches; what `excludes` accepts, it
    does not find."""
    try:
        pattern, _, text = data.decode("utf-8", "surrogatepass").partition("\n")
    except UnicodeDecodeError:
        pattern, _, text = data.decode("latin-1").partition("\n")
    pattern, text = pattern[:40], text[:TEXT_CHARS_MAX]
    matches, excludes = compiled(pattern, "matches"), compiled(pattern, "excludes")
    if matches(text) and not (r"\B" in pattern and not text):
        assert re.fullmatch(pattern, text, re.ASCII), (pattern, text)
    if excludes(text):
        text.encode()
        assert not re.search(pattern, text, re.ASCII), (pattern, text)
        assert not re.search(pattern, text), (pattern, text)


def documents(data: bytes) -> None:
    """A contract as TOML. It is refused, or it judges every intention and comes back from its own data."""
    text = data.decode("utf-8", "replace")
    if "check" in text:
        return  # a function that it names would be imported
    contract = Contract.parse(text)
    assert Contract.from_spec(contract.spec).digest == contract.digest
    arguments = {"amount": 5, "to": "x\ud83d", "path": "../x", "lines": [{"amount": 1}], "text": "é"}
    for name in ("pay", "write_report", "send", "update", "model:gpt-4o"):
        for kept in (arguments, {"amount": -1, "to": "ann"}, {}):
            ruling = contract.judge(Intention(name=name, arguments=kept), PolicyInput())
            codec.canonical([ruling.message, ruling.allowed])


PATTERNS: Final = [
    ("(?i)drop table", "DROP table"), (r"\bpush\b", "push\u0301"), (r"[\w.]+@[a-z]{2,3}", "jü@x.de"),
    ("(a|b)*?c{2}$", "abcc\n"), (r"(?u:\w)\B[^\d]", "½x"), ("(?im:^k)|s", "\u212aſ"), ("a(?#x)b|(?P<n>[^a-c])", "abd"),
    (r"\d{4}", "١٢٣٤"),
]  # fmt: skip


def toml_blocks() -> list[bytes]:
    page = (ROOT / "docs/contract-rules.md").read_text()
    found = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    whole = [text for text in found if 'check = "' in text]
    kept = [re.sub(r"\[\[rules\]\]\ntools = \"pay\"\ncheck = [^\n]*\n", "", text) for text in whole]
    for text in kept:
        tomllib.loads(text)
    return [text.encode() for text in (*kept, (ROOT / "examples/claim_review.toml").read_text())]


# Files that others send ---------------------------------------------------------------------------


@killick.tool(effect="idempotent")
async def fuzz_note(text: str, n: int) -> str:
    return f"{n}: {text}"


@killick.agent
async def fuzz_agent(run: killick.Run, n: int) -> str:
    await run.call(fuzz_note, "long enough to be stored apart " * 40, n)
    await run.update(said={"n": n, "é": [None, 0.5]})
    return "done"


@cache
def files() -> dict[str, bytes]:
    """One file of each kind, of a small store."""
    clock = killick.clock.LeapingClock()
    with killick.Client(MemoryStore(clock=clock), clock=clock) as kd, tempfile.TemporaryDirectory() as folder:
        for n in range(3):
            kd.run(fuzz_agent, n, id=f"r{n}")
        sealed = kd.store.seal(KEY)
        proof = kd.store.prove("r1", 3, values=True).file
        exported = exports.export(kd.runtime.log, "r2")
        archive = Path(folder) / "archive.gz"
        clock.advance(86_400)
        kd.store.prune(older="1h", to=archive)
        return {"archive": archive.read_bytes(), "export": exported, "proof": proof, "checkpoint": sealed.file.encode()}


def export(data: bytes) -> None:
    exports.read(data).loaded()


def archive(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        if bundle.is_archive(file.name):
            bundle.verify(file.name)


def proof(data: bytes) -> None:
    verify_proof(data, PUB)


def notes(data: bytes) -> None:
    checkpoint(data)


def of(kind: str) -> Sequence[bytes]:
    return [files()[kind]]


TARGETS: Final = (
    Target("contract_rules", text_rules, lambda: [f"{pattern}\n{text}".encode() for pattern, text in PATTERNS]),
    Target("contract_documents", documents, toml_blocks),
    Target("export", export, lambda: of("export")),
    Target("archive", archive, lambda: of("archive")),
    Target("proof", proof, lambda: of("proof")),
    Target("checkpoint", notes, lambda: of("checkpoint")),
)
