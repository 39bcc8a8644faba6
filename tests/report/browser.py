"""A real Chromium that opens pages and remembers what went wrong: messages in its console, and every request."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Browser:
    """An open Chromium."""

    context: Any
    problems: list[str] = field(default_factory=list)
    """Errors and warnings of the open page since it was opened."""
    requests: list[str] = field(default_factory=list)
    """Addresses that it asked for, itself included; not what is in the page."""

    def open(self, address: str, *, width: int = 1280, dark: bool = False) -> Any:
        """A page at an address, in place of the one before."""
        for page in self.context.pages[1:]:
            page.close()
        self.problems.clear()
        self.requests.clear()
        page = self.context.new_page()
        page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith("data:") else self.requests.append(asked.url))
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.goto(address)
        return page


@contextmanager
def started() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=str(CHROMIUM), args=list(FLAGS), headless=True, offline=False
        )
        context.set_default_timeout(180_000)  # a machine that is busy with other tests
        try:
            yield Browser(context)
        finally:
            context.close()


def address(path: Path) -> str:
    return path.resolve().as_uri()
