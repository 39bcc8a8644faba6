"""Progress for Kubeflow Trainer, sent to a real HTTPS server whose certificate only its own CA vouches for."""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.dialects.kubeflow_progress import Status, told
from tests.small import model_folder, recipe, token_file
from tests.unit.submit.published import FOLDER

ROOT = Path(__file__).parents[3]
PLACE = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/a/status"


class Server:
    """What the controller's server received: path, token and status of each request."""

    def __init__(self, folder: Path) -> None:
        self.received: list[tuple[str, str, dict[str, Any]]] = []
        self.answering, self.code = threading.Event(), 200
        self.answering.set()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.received.append((self.path, self.headers["Authorization"], body))
                server.answering.wait(60)
                self.send_response(server.code)
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        (folder / "token").write_text("first\n")
        self.environ = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self._http.server_address[1]}{PLACE}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "cert.pem"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
            "HTTPS_PROXY": "http://127.0.0.1:9",  # of the user, for the world outside the cluster
        }

    def statuses(self) -> list[dict[str, Any]]:
        return [body["trainerStatus"] for _, _, body in self.received]

    def close(self) -> None:
        self.answering.set()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-keyout", "key.pem", "-out", "cert.pem", "-days", "1", "-subj", "/CN=test"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    made = Server(tmp_path)
    monkeypatch.setenv("HTTPS_PROXY", made.environ["HTTPS_PROXY"])
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    """Waits, for as long as a test may take."""
    while not true():
        time.sleep(0.01)


def record(step: int, **numbers: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 2.5, "seconds": 10.0 * step, "time": {"data": 1.0}, **numbers}


def test_the_status_is_what_the_api_takes() -> None:
    import jsonschema

    status = Status(200)
    status.after({"kind": "validation", "step": 40, "loss": 3.25})
    found = status.after(record(50, lr=1e-5, tokens=12, flag=True, **{"n" * 80: float("nan")}))["trainerStatus"]
    assert found["progressPercentage"] == 25
    assert found["estimatedRemainingSeconds"] == 1500
    values = {metric["name"]: metric["value"] for metric in found["metrics"]}
    assert values["train/loss"] == "2.5"
    assert values["validation/loss"] == "3.25"
    assert (values["train/lr"], values["train/tokens"]) == ("1e-05", "12")
    assert not any("flag" in name or "step" in name or "time" in name for name in values)
    schema = json.loads((FOLDER / "trainjob.json").read_text())["properties"]["status"]["properties"]["trainerStatus"]
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(found)
    assert all(len(name) <= 64 for name in values)


def test_remaining_time_is_by_the_speed_of_this_process() -> None:
    status = Status(100)
    status.after({**record(50), "seconds": 5_000.0})  # resumed: the first 50 steps took 100 s each
    found = status.after({**record(60), "seconds": 5_010.0})["trainerStatus"]
    assert found["estimatedRemainingSeconds"] == 40
    done = status.after({"kind": "event", "event": "finished", "step": 100, "seconds": 5_050.0})["trainerStatus"]
    assert (done["progressPercentage"], done["estimatedRemainingSeconds"]) == (100, 0)


def test_a_stage_is_a_part_of_the_run() -> None:
    found = Status(10, stage=(2, 4)).after(record(5))["trainerStatus"]
    assert found["progressPercentage"] == 37
    assert "estimatedRemainingSeconds" not in found


def test_only_the_newest_is_sent_and_the_last_at_the_end(server: Server) -> None:
    written: list[dict[str, Any]] = []
    with told(written.append, Status(100), environ=server.environ, warn=pytest.fail, every_s=3600) as write:
        write(record(1))
        until(lambda: len(server.received) == 1)
        for step in range(2, 101):
            write(record(step))
    assert [each["progressPercentage"] for each in server.statuses()] == [1, 100]
    assert {(path, token) for path, token, _ in server.received} == {(PLACE, "Bearer first")}
    assert [each["step"] for each in written] == list(range(1, 101))


def test_a_token_that_was_replaced_is_read_again(server: Server, tmp_path: Path) -> None:
    with told(lambda _: None, Status(100), environ=server.environ, warn=pytest.fail, every_s=0.01) as write:
        write(record(1))
        until(lambda: len(server.received) == 1)
        (tmp_path / "token").write_text("second")
        write(record(2))
    assert [token for _, token, _ in server.received] == ["Bearer first", "Bearer second"]


def test_a_server_that_hangs_holds_up_no_step(server: Server) -> None:
    server.answering.clear()
    written: list[dict[str, Any]] = []
    with told(written.append, Status(100), environ=server.environ, warn=pytest.fail, every_s=0.01) as write:
        write(record(1))
        until(lambda: len(server.received) == 1)
        for step in range(2, 50):  # with the first request still unanswered
            write(record(step))
        assert len(written) == 49
        assert len(server.received) == 1
        server.answering.set()
    assert server.statuses()[-1]["progressPercentage"] == 49


@pytest.mark.parametrize("fault", ["refuses", "unknown certificate", "no token", "gone"])
def test_a_failure_is_one_warning(server: Server, tmp_path: Path, fault: str) -> None:
    if fault == "refuses":
        server.code = 403
    elif fault == "unknown certificate":
        server.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = ssl.get_default_verify_paths().cafile or "/dev/null"
    elif fault == "no token":
        (tmp_path / "token").unlink()
    else:
        server.close()
    said: list[str] = []
    written: list[dict[str, Any]] = []
    with told(written.append, Status(100), environ=server.environ, warn=said.append, every_s=0.01) as write:
        while not said:
            write(record(1))
            time.sleep(0.01)
        write(record(2))
    assert len(said) == 1
    assert said[0].startswith("Kubeflow Trainer was not told the progress of this run: ")
    assert said[0].endswith(". The run continues.")


def test_elsewhere_nothing_changes() -> None:
    def write(record: dict[str, Any]) -> None:
        """Nothing."""

    with told(write, Status(1), environ={}, warn=pytest.fail) as found:
        assert found is write


def test_a_run_tells_the_server(server: Server, tmp_path: Path) -> None:
    model_folder(tmp_path / "model", num_hidden_layers=1)
    token_file(tmp_path / "train.jsonl", records=32)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(tmp_path, name="a", duration={"steps": 2})))
    command = [sys.executable, "-m", "fullshard", "train", str(tmp_path / "recipe.yaml"), "--devices", "1"]
    environ = {**os.environ, **server.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = server.statuses()[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert "train/loss" in {metric["name"] for metric in last["metrics"]}
    assert "was not told" not in done.stdout + done.stderr
