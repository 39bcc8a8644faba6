"""The page at an address of this machine: made anew for each visit, and followed while runs go on.

Only 127.0.0.1 listens, and a request that names another host is refused, so that no web site can read the page through
a name that points here. Must not change a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fullshard.errors import SetupError
from fullshard.report.folders import Run, changed_files
from fullshard.report.page import page
from fullshard.runs.folder import is_alive

HOST = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Serves the page of some runs, and `/state`, which changes when the page would."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Run], *, port: int) -> None:
        self.runs = runs
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def page(self) -> str:
        # The state comes first: what is written while the page is made is news to it.
        state = self.state()
        return page([Run(run.folder, run.label) for run in self.runs], live=state)

    def state(self) -> str:
        """A short text that is the same as long as nothing has changed."""
        found: list[Any] = []
        for run in self.runs:
            with contextlib.suppress(OSError):  # a file that just went away
                found.append([is_alive(run.folder), *changed_files(run)])
        return hashlib.sha256(repr(found).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:  # noqa: N802
        answers: dict[str, tuple[Callable[[], str], str]] = {
            "/": (self.server.page, "text/html"),
            "/state": (self.server.state, "text/plain"),
        }
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif self.path.partition("?")[0] not in answers:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            answer, kind = answers[self.path.partition("?")[0]]
            self._send(answer().encode(), kind)

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the browser has gone on
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal stays readable."""


def serve_until_interrupted(runs: Sequence[Run], *, port: int, say: Callable[[str], None]) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    try:
        server = Server(runs, port=port)
    except OSError as error:
        raise SetupError(f"--port {port} cannot be used ({error.strerror}). Choose another, or leave it out.") from None
    with server, contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        say(f"Serving {server.address} on this machine only. Ctrl-C ends it.")
        server.serve_forever(poll_interval=0.2)
    say("Ended.")
