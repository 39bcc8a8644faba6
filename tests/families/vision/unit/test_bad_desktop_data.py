"""Bad recordings through the command line: each ends with its message and exit code 2, without a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from fullshard.cli import app
from tests.families.vision.desktop.samples import KEY, row
from tests.families.vision.small import model_folder, settings

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    model_folder(folder / "model", "smolvlm")
    Image.new("RGB", (32, 32), "red").save(folder / "one.png")
    with av.open(str(folder / "clip.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=10, width=32, height=32, pix_fmt="yuv420p")
        for shade in range(20):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (32, 32), (shade, 0, 0)))))
        container.mux(stream.encode())
    return folder


def screen(time: int = 0, **media: Any) -> dict[str, Any]:
    return row("ScreenCaptured", {"media_ref": {"uri": "one.png", **media}}, time)


def recording(*extra: dict[str, Any]) -> Rows:
    return [screen(), row("KeyboardEvent", KEY, 10), *extra]


def unknown_type(folder: Path, recipe: dict[str, Any]) -> Rows:
    return recording(row("KeyboardEvents", KEY, 20))


def out_of_order(folder: Path, recipe: dict[str, Any]) -> Rows:
    return recording(row("KeyboardEvent", KEY, 5))


def empty_episode(folder: Path, recipe: dict[str, Any]) -> Rows:
    return recording(row("WindowInfo", {"title": "x"}, episode="b.mcap"))


def past_the_end(folder: Path, recipe: dict[str, Any]) -> Rows:
    return recording(screen(20, uri="clip.mkv", pts_ns=2_000_000_000))


def no_screen_file(folder: Path, recipe: dict[str, Any]) -> Rows:
    return recording(screen(20, uri="two.png"))


def no_processor(folder: Path, recipe: dict[str, Any]) -> Rows:
    shutil.copytree(folder / "model", folder / "bare")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / "bare" / name).unlink(missing_ok=True)
    recipe["model"]["path"] = str(folder / "bare")
    return recording()


def screens_too_long(folder: Path, recipe: dict[str, Any]) -> Rows:
    recipe["data"]["sequence_length"] = 10
    return recording()


def window_too_long(folder: Path, recipe: dict[str, Any]) -> Rows:
    recipe["data"]["sequence_length"] = 10
    return [window([5] * 11, [])]


def images_without_tokens(folder: Path, recipe: dict[str, Any]) -> Rows:
    return [window([5] * 11, [{"media_ref": {"uri": "one.png"}}])]


def window(ids: list[int], images: list[dict[str, Any]]) -> dict[str, Any]:
    return {"episode_path": "a", "input_ids": ids, "attention_mask": [1] * len(ids), "images": images}


CASES: list[tuple[Callable[[Path, dict[str, Any]], Rows], str]] = [
    (unknown_type, "'message_type' = 'desktop/KeyboardEvents' is not known (did you mean 'KeyboardEvent'?). Known: "),
    (out_of_order, "'timestamp_ns' = 5 comes after 10 in the episode 'a.mcap'"),
    (empty_episode, "the episode 'b.mcap' is empty: it has 1 message about windows and state, but no screen"),
    (past_the_end, "ends at 2.000 s, but a screen is at 2.000 s (pts_ns = 2000000000)"),
    (no_screen_file, "the screen 'two.png' of the episode 'a.mcap' does not exist. Looked for: "),
    (no_processor, "has no image processor (no preprocessor_config.json or processor_config.json)"),
    (
        screens_too_long,
        "no sample is left of 1 record: 1 without a screen, 1 with an event too long for a window. To ",
    ),
    (window_too_long, "'input_ids' has 11 tokens, but data.sequence_length = 10. Raise it."),
    (images_without_tokens, "'input_ids' has 0 image tokens, but the model needs 4 for 1 image."),
]


@pytest.mark.parametrize(("make", "says"), CASES, ids=lambda case: getattr(case, "__name__", "says"))
def test_bad_data(
    make: Callable[[Path, dict[str, Any]], Rows],
    says: str,
    healthy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shutil.copytree(healthy, tmp_path / "case")
    data = {"train": str(folder / "rows.jsonl"), "encode": {"kind": "desktop", "image_root": str(folder)}}
    recipe = settings(folder, "bad", data=data)
    rows = make(folder, recipe)
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "bad.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["train", "bad.yaml", "--devices", "1"], catch_exceptions=False)
    said = " ".join(result.output.split())
    assert result.exit_code == 2
    assert says in said
    assert "Traceback" not in said
