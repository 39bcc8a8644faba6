"""Pictures of screens: files, bytes and frames of videos, compared with a plain decoding of the whole video."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from fullshard.errors import DataError, SetupError
from fullshard.families.vision.desktop import screens
from fullshard.families.vision.desktop.screens import given, load
from fullshard.images.reading import Picture, Unreadable, look_at

RATE, FRAMES = 30, 90
POSITIONS = [round(index * 10**9 / RATE) for index in range(FRAMES)]


def grey(level: int) -> Image.Image:
    return Image.new("RGB", (32, 16), (level, level, level))


def png(level: int) -> bytes:
    file = io.BytesIO()
    grey(level).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture(scope="module", params=["mp4", "mkv"])
def video(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 s in which frame i has the shade 2 i, with a key frame each second. The clock of mkv is coarse: 1 ms."""
    path = tmp_path_factory.mktemp("video") / f"clip.{request.param}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 32, 16, "yuv420p", RATE
        for index in range(FRAMES):
            for packet in stream.encode(av.VideoFrame.from_image(grey(2 * index))):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def decoded(video: Path) -> list[np.ndarray]:
    """All frames, by PyAV alone."""
    with av.open(str(video)) as container:
        return [np.asarray(frame.to_image()) for frame in container.decode(video=0)]


def pixels(ref: tuple[str, int]) -> np.ndarray:
    return np.asarray(load(ref, root=None))


def test_files_and_bytes_are_read_as_all_images_are(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(70))
    for ref in ("one.png", png(70)):
        assert np.array_equal(np.asarray(load(ref, root=tmp_path)), np.asarray(grey(70)))
        (found,) = look_at([given(ref, root=tmp_path)], root=tmp_path, num_tokens=lambda width, height: width + height)
        assert isinstance(found, Picture)
        assert (found.is_file, found.tokens) == (isinstance(ref, str), 48)


def test_a_damaged_screen_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(70)[:-30])
    for ref in ("one.png", png(70)[:-30], b"no image"):
        (found,) = look_at([given(ref, root=tmp_path)], root=tmp_path, num_tokens=lambda width, height: 1)
        assert isinstance(found, Unreadable)
        assert "screen" in str(found)


def test_frames_are_those_of_the_whole_video(video: Path) -> None:
    frames = decoded(video)
    assert len(frames) == FRAMES
    assert not np.array_equal(frames[0], frames[1])
    order = list(range(FRAMES))
    random.Random(0).shuffle(order)
    for index in [*range(FRAMES), *reversed(range(FRAMES)), *order]:  # forwards, backwards and anywhere
        assert np.array_equal(pixels((str(video), POSITIONS[index])), frames[index]), index


def test_a_frame_is_shown_until_the_next(video: Path) -> None:
    frames = decoded(video)
    for index in (0, 1, 29, 30, 31, 88, 89):
        for later in (2_000_000, 20_000_000, 30_000_000):
            assert np.array_equal(pixels((str(video), POSITIONS[index] + later)), frames[index])


def test_a_position_past_the_end(video: Path) -> None:
    for position in (3_001_000_000, 3_500_000_000, 10**12):
        with pytest.raises(DataError) as caught:
            load((str(video), position), root=None)
        said = (
            f"the video {video} ends at 3.000 s, but a screen is at {position / 1e9:.3f} s (pts_ns = {position}). Check"
        )
        assert str(caught.value).startswith(said)
    # And the video can be used afterwards.
    assert np.array_equal(pixels((str(video), 0)), decoded(video)[0])


def test_a_frame_becomes_a_picture(video: Path) -> None:
    ref = (video.name, POSITIONS[40])
    (found,) = look_at(
        [given(ref, root=video.parent)], root=video.parent, num_tokens=lambda width, height: width * height
    )
    assert isinstance(found, Picture)
    assert not found.is_file
    assert found.tokens == 512
    with Image.open(io.BytesIO(found.data)) as image:
        assert np.array_equal(np.asarray(image), decoded(video)[40])


@pytest.mark.parametrize("content", [b"", b"no video at all" * 100])
def test_a_broken_video(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.mp4").write_bytes(content)
    with pytest.raises(Unreadable, match=r"the video .*bad.mp4 cannot be read: .*\. Give a complete video file"):
        load(("bad.mp4", 0), root=tmp_path)
    with pytest.raises(Unreadable, match=r"the video .*gone.mp4 cannot be read: No such file or directory\. "):
        load(("gone.mp4", 0), root=tmp_path)


def test_a_video_without_pictures(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    with pytest.raises(Unreadable, match=r"sound.mp4 cannot be read: it has no pictures"):
        load(("sound.mp4", 0), root=tmp_path)


def test_a_child_process_opens_its_own_video(video: Path) -> None:
    frames = decoded(video)
    pixels((str(video), POSITIONS[10]))
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # what a fork breaks may hang
        signal.alarm(60)
        right = all(np.array_equal(pixels((str(video), POSITIONS[at])), frames[at]) for at in (80, 3, 50))
        os._exit(0 if right else 1)
    for index in (11, 45, 2, 60):
        assert np.array_equal(pixels((str(video), POSITIONS[index])), frames[index])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_pyav(video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screens._video.cache_clear()
    monkeypatch.setitem(sys.modules, "av", None)
    said = r"a screen in a video \(.*clip\..*\) needs the package av.* pip install 'fullshard\[video\]'"
    with pytest.raises(SetupError, match=said):
        load((str(video), 0), root=None)
