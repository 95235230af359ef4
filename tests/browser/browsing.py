"""A browser on pages of a real server, for tests that do what a person does, and looks at what they could trip over."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import uvicorn
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Error,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

from killick.client.client import Client
from killick.web.app import asgi
from killick.web.auth.access import Identified
from killick.web.middleware import Limits

FLAGS: Final = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS: Final = 60_000
START_SECONDS: Final = 300
SHOTS: Final = Path(__file__).resolve().parents[2] / "docs" / "images"


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """Debian's chromium."""
    found = shutil.which("chromium")
    assert found is not None, "no chromium here, which these tests look with; apt install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """An ASGI app on a port of its own, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="on")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        late = time.monotonic() + START_SECONDS
        while not server.started:
            assert time.monotonic() < late, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(300)


@contextlib.contextmanager
def bridge(kd: Client, name: str = "ann", scope: str = "admin") -> Iterator[str]:
    """The bridge over a store, for somebody whom it knows. A test is quicker than any person: no rate is kept."""
    app = asgi(kd, access=Identified(kd, lambda request: (name, scope)), limits=Limits(rate=1e6, burst=1_000_000))
    with serving(app) as server:
        yield server


class Watch(Protocol):
    """Opens a page that is watched."""

    def __call__(self, server: str, *, viewport: ViewportSize = ..., dark: bool = ..., zone: str = ...) -> Watched: ...


class Watched:
    """A page in a window of its own, and everything that went wrong on it. `expected` are statuses of answers that a
    test provokes, which a browser puts on its console."""

    def __init__(self, browser: Browser, server: str, *, viewport: ViewportSize, dark: bool, zone: str = "UTC") -> None:
        self.server = server
        self.wrong: list[str] = []
        self.expected: set[int] = set()
        self.context = browser.new_context(
            viewport=viewport, color_scheme="dark" if dark else "light", locale="en-GB", timezone_id=zone,
            reduced_motion="reduce",
        )  # fmt: skip
        self.context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        self.context.on("page", self._watch)
        self.page: Page = self.context.new_page()

    def _watch(self, page: Page) -> None:
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.wrong.append(f"{page.url}: a script failed: {error}"))
        page.on("dialog", self._asked)
        page.on("request", self._requested)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if str(message.location.get("url", "")).endswith("/favicon.ico"):
            return  # asked for by the browser itself, where a part of a page is looked at alone
        if any(f"status of {status}" in message.text for status in self.expected):
            return
        self.wrong.append(f"{message.location.get('url')}: on the console: {message.text}")

    def _asked(self, dialog: Dialog) -> None:
        self.wrong.append(f"a dialog came up: {dialog.message}")
        dialog.dismiss()

    def _requested(self, request: Request) -> None:
        if not request.url.startswith((self.server, "data:", "blob:")):
            self.wrong.append(f"a request to elsewhere: {request.url}")

    def goto(self, path: str) -> Page:
        """Go to a page of the server, as it is when it has come."""
        try:
            self.page.goto(self.server + path, wait_until="load")
        except Error as error:
            if "ERR_ABORTED" not in error.message:
                raise
            # The page before was about to navigate too: a search goes to its results as it is typed.
            self.page.goto(self.server + path, wait_until="load")
        return self.page

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the window, while its server is still there."""
        self.context.close()
