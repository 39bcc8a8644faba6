"""Bad records, images and folders through the command line: a message, exit code 2 and no traceback."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.families.vision import record_images
from fullshard.log.console import Console
from fullshard.recipes.read import read
from fullshard.setup.run_inputs import prepare_inputs
from tests.families.vision.small import model_folder, settings

TEXT = {"type": "text", "text": "What colour?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    model_folder(path / "model", "smolvlm")
    shutil.copytree(path / "model", path / "bare")
    for name in ("processor_config.json", "preprocessor_config.json"):
        (path / "bare" / name).unlink(missing_ok=True)
    (path / "images").mkdir()
    Image.effect_noise((64, 64), 50).convert("RGB").save(path / "images" / "good.png")
    whole = (path / "images" / "good.png").read_bytes()
    (path / "images" / "half.png").write_bytes(whole[: len(whole) // 2])
    return path


def record(*images: str, text: str = "What colour?") -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    question = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "red"}]}


def chosen(folder: Path, records: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    (folder / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    encode = sections.pop("encode", {})
    found = settings(folder, "run", **{"duration": {"steps": 1}, **sections})
    found["data"]["encode"] |= encode
    return found


def outcome(folder: Path, records: list[dict[str, Any]], **sections: Any) -> str:
    """What `fullshard train` prints, in one line."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(chosen(folder, records, **sections)))
    result = CliRunner().invoke(app, ["train", str(folder / "recipe.yaml")])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return "".join(result.output.split())


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (record("none.png"), ["images/none.png", "No such file", "data.encode.image_root"]),
        (record("half.png"), ["images/half.png", "cannot be read", "data.encode.unreadable = skip"]),
        (record("https://example.org/a.png"), ["image 1 is a URL (https://example.org/a.png)", "allow_urls: true"]),
        (
            {**record(text="<image> and <image>"), "images": ["good.png"]},
            ["2 places for images", "1 image", "one image for each place"],
        ),
        (record(*["good.png"] * 40), ["40 images", "data.sequence_length = 64", "data.encode.too_long = skip"]),
    ],
)
def test_a_bad_record_is_named(folder: Path, bad: dict[str, Any], expected: list[str]) -> None:
    said = outcome(folder, [record("good.png"), bad], data={"sequence_length": 64})
    for words in ["chats.jsonl:2", *expected]:
        assert words.replace(" ", "") in said


def test_a_folder_without_a_processor(folder: Path) -> None:
    said = outcome(folder, [record("good.png")], model={"path": str(folder / "bare")})
    assert "has no image processor (no preprocessor_config.json or processor_config.json)".replace(" ", "") in said


def test_what_is_skipped_is_counted_in_the_report(folder: Path) -> None:
    records = [record("good.png"), record("none.png"), record("half.png"), record(*["good.png"] * 40), record()]
    skipping = {"unreadable": "skip", "too_long": "skip"}
    reading = read(chosen(folder, records, encode=skipping, data={"sequence_length": 64}))
    report = "\n".join(prepare_inputs(reading.recipe, world_size=1, console=Console(silent=True)).data.report)
    assert "5 records gave 2 samples" in report
    assert "3 samples were dropped; 2 with an image that cannot be read, 1 with images that need more than" in report


class Server(BaseHTTPRequestHandler):
    """Answers that a download may meet; a path is `/KIND/NAME`."""

    folder: Path

    def do_GET(self) -> None:
        kind, content = self.path.split("/")[1], (self.folder / "images" / "good.png").read_bytes()
        self.send_response(404 if kind == "missing" else 200)
        if kind == "cut":
            self.send_header("Content-Length", str(2 * len(content)))
        self.end_headers()
        if kind == "page":
            content = b"<html>Please log in.</html>"
        if kind == "missing":
            content = b""
        with contextlib.suppress(OSError):  # the other side may give up
            for at in range(0, len(content), 1000):
                if kind == "slow":
                    time.sleep(0.2)
                self.wfile.write(content[at : at + 1000])

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    Server.folder = folder
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("missing", "cannot be downloaded from URL: HTTP Error 404"),
        ("page", "'image 1, URL' cannot be read as an image: unknown image format"),
        ("slow", "cannot be downloaded from URL: it takes more than 0.3 s"),
        ("huge", "cannot be downloaded from URL: it has more than 0.00195312 MiB"),
        ("cut", "bytes before the end"),
    ],
)
def test_a_download_that_fails_names_record_and_url(
    folder: Path, address: str, monkeypatch: pytest.MonkeyPatch, kind: str, expected: str
) -> None:
    if kind == "slow":
        monkeypatch.setattr(record_images, "MOST_S", 0.3)
    if kind == "huge":
        monkeypatch.setattr(record_images, "MOST_BYTES", 2048)
    url = f"{address}/{kind}/a.png"
    said = outcome(folder, [record("good.png"), record(url)], encode={"allow_urls": True})
    assert "chats.jsonl:2" in said
    assert expected.replace("URL", url).replace(" ", "") in said


def test_a_silent_server_is_given_up(folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_images, "WAIT_S", 0.05)
    said = outcome(folder, [record(f"{address}/slow/a.png")], encode={"allow_urls": True})
    assert "timedout" in said


def test_no_server_at_all(folder: Path) -> None:
    said = outcome(folder, [record("http://127.0.0.1:9/a.png")], encode={"allow_urls": True})
    assert "cannotbedownloadedfromhttp://127.0.0.1:9/a.png:Connectionrefused." in said


def test_a_url_is_downloaded_once_where_it_is_allowed(folder: Path, address: str) -> None:
    records = [record(f"{address}/good/a.png"), record(f"{address}/missing/b.png")]
    encode = {"allow_urls": True, "unreadable": "skip"}
    data = prepare_inputs(
        read(chosen(folder, records, encode=encode)).recipe, world_size=1, console=Console(silent=True)
    ).data
    assert data.train[0]["image_data"].tobytes() == (folder / "images" / "good.png").read_bytes()
    assert "1 sample was dropped; 1 with an image that cannot be read" in "\n".join(data.report)
