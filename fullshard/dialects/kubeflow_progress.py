"""Tells Kubeflow Trainer how far a run is: percentage, remaining seconds and the newest numbers, for `kubectl`.

Its controller sets three variables in the pods of a TrainJob. A thread sends the newest status at most every 5 s, and
once more at the end; a server that is slow or gone costs one warning and no step. Rank 0 only. Must not know what the
numbers mean.
"""

from __future__ import annotations

import json
import math
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from numbers import Real
from pathlib import Path
from typing import Any

URL, CA, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
EVERY_S, TIMEOUT_S = 5.0, 5.0
_MOST, _LONGEST = 256, 64
"""Metrics of a status, and characters of a name or value, that the server takes."""
Write = Callable[[dict[str, Any]], None]


@contextmanager
def told(
    write: Write,
    status: Status,
    *,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    every_s: float = EVERY_S,
) -> Iterator[Write]:
    """A `write` that also tells the server, where Kubeflow Trainer has named one; the same `write` elsewhere."""
    if not all(environ.get(name) for name in (URL, CA, TOKEN)):
        yield write
        return
    sender = _Sender(environ[URL], Path(environ[CA]), Path(environ[TOKEN]), every_s)
    warned = False

    def both(record: dict[str, Any]) -> None:
        nonlocal warned
        write(record)
        sender.put(status.after(record))
        if sender.failed and not warned:
            warned = True
            warn(f"Kubeflow Trainer was not told the progress of this run: {sender.failed}. The run continues.")

    try:
        yield both
    finally:
        sender.close()


class Status:
    """The status of a run after the records so far; `stage` is the number of a stage, and of how many."""

    def __init__(self, total_steps: int, *, stage: tuple[int, int] = (1, 1)) -> None:
        self._total, self._stage = total_steps, stage
        self._first: tuple[int, float] | None = None
        self._metrics: dict[str, str] = {}
        self._found: dict[str, Any] = {}

    def after(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """What the server takes."""
        step, seconds = record.get("step"), record.get("seconds")
        if isinstance(step, int) and self._total:
            number, of = self._stage
            done = (number - 1) * self._total + min(step, self._total)
            self._found["progressPercentage"] = 100 * done // (of * self._total)
            if isinstance(seconds, Real) and number == of:  # how long later stages take is not known
                self._remaining(step, float(seconds))
        kind = record.get("kind")
        if kind != "event":
            numbers = {name: value for name, value in record.items() if _is_number(value) and name != "step"}
            self._metrics |= {f"{kind}/{name}"[:_LONGEST]: _text(value) for name, value in numbers.items()}
        metrics = [{"name": name, "value": value} for name, value in self._metrics.items()][:_MOST]
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return {"trainerStatus": {**self._found, "metrics": metrics, "lastUpdatedTime": now}}

    def _remaining(self, step: int, seconds: float) -> None:
        """By the mean speed since this process began; a resumed run may be on other machines than before."""
        begun = self._first = self._first or (step, seconds)
        steps, spent = (step - begun[0], seconds - begun[1]) if step > begun[0] else (step, seconds)
        if steps > 0 and math.isfinite(spent):
            self._found["estimatedRemainingSeconds"] = max(0, round((self._total - step) * spent / steps))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{float(value):.8g}"


class _Sender:
    """Sends the newest status from a thread of its own; older ones that were not sent yet are dropped."""

    def __init__(self, url: str, ca: Path, token: Path, every_s: float) -> None:
        self.failed = ""
        self._url, self._ca, self._token, self._every_s = url, ca, token, every_s
        self._newest: dict[str, Any] | None = None
        self._something, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubeflow-progress", daemon=True)
        self._thread.start()

    def put(self, status: dict[str, Any]) -> None:
        self._newest = status
        self._something.set()

    def close(self) -> None:
        """Sends what is left. A server that gives no answer does not hold up the end for long."""
        self._closing.set()
        self._something.set()
        self._thread.join(TIMEOUT_S + 1)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._something.wait()
            self._send()
            self._closing.wait(self._every_s)
        self._send()

    def _send(self) -> None:
        self._something.clear()
        status, self._newest = self._newest, None
        if status is None:
            return
        try:
            # Both files are replaced while a long run goes on.
            token = self._token.read_text(encoding="utf-8").strip()
            context = ssl.create_default_context(cafile=str(self._ca))
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = urllib.request.Request(self._url, json.dumps(status).encode(), headers, method="POST")
            # Never through a proxy: the server is inside the cluster.
            plain, safe = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
            with urllib.request.build_opener(plain, safe).open(request, timeout=TIMEOUT_S) as answer:
                answer.read()
        except Exception as error:  # whatever it is, the run goes on
            self.failed = f"{type(error).__name__}: {error}"
