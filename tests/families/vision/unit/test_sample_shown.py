"""What `check --sample` prints of conversations with images and of desktop windows: each token, and what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fullshard.contracts.data import OpenEncoder, Record
from fullshard.families.vision.desktop.episodes import Episodes
from fullshard.families.vision.desktop.formats import FormatName
from fullshard.families.vision.encoders.desktop import Desktop
from fullshard.families.vision.encoders.image_chat import ImageChat
from fullshard.families.vision.models.vlm import Vlm
from fullshard.multimodal.transcript import tokens_of, transcript
from tests.families.vision.desktop.samples import listed, row
from tests.families.vision.small import model_folder

CHAT = """\
39 tokens, 4 trained on (marked T); · is a space

    Us er : · <fake_token_around_image> <global-img>

[image 64x48 from one.png]
    <image> <image> <image> <image>

    <fake_token_around_image> What ·colour ? \\n As sistan t : ·red <|endoftext|> \\n Us er : · A n d ·this ?
                                                              T    T
    \\n As sistan t : ·blue <|endoftext|> \\n
                     T     T"""
FACTORIZED = """\
42 tokens, 27 trained on (marked T); · is a space

start of the episode
    <EPISODE_START>

0.000 s  [screen 64x48 from one.png]
    <EVENT_START> <SCREEN> <9> <9> <8> <fake_token_around_image> <global-img> <image> <image> <image> <image>
    <fake_token_around_image> <EVENT_END>

0.020 s  press A
    <EVENT_START> <KEYBOARD> <0> <0> <0> <VK_65> <press> <EVENT_END>
    T             T          T   T   T   T       T       T

0.170 s  mouse: move 5 right, 3 up; left button down
    <EVENT_START> <MOUSE> <0> <1> <5> <SIGN_PLUS> <0> <0> <0> <5> <SIGN_MINUS> <0> <0> <0> <3> <MB_0> <MB_0>
    T             T       T   T   T   T           T   T   T   T   T            T   T   T   T   T      T
    <MB_1> <EVENT_END>
    T      T

end of the episode
    <EPISODE_END>"""
HIERARCHICAL = """\
40 tokens, 25 trained on (marked T); · is a space

start of the episode
    <EPISODE_START>

0.000 s  [screen 64x48 from one.png]
    <EVENT_START> <SCREEN> <9> <9> <8> <fake_token_around_image> <global-img> <image> <image> <image> <image>
    <fake_token_around_image> <EVENT_END>

0.020 s  press A
    <EVENT_START> <KEYBOARD> <10> <0> <0> <65> <press> <EVENT_END>
    T             T          T    T   T   T    T       T

0.170 s  mouse: move 5 right, 3 up; left button down
    <EVENT_START> <MOUSE> <10> <1> <5> <0> <1> <0> <19> <0> <9> <5> <7> <0> <0> <1> <EVENT_END>
    T             T       T    T   T   T   T   T   T    T   T   T   T   T   T   T   T

end of the episode
    <EPISODE_END>"""
JSON = """\
293 tokens, 226 trained on (marked T); · is a space

start of the episode
    <EPISODE_START>

0.000 s  [screen 64x48 from one.png]
    <EVENT_START> { " m e s s a g e _ t y p e " : " S c re en C a p t u re d " , " t i m e s t a m p _ n s "
    : 9 9 8 0 0 0 0 0 0 0 } <fake_token_around_image> <global-img> <image> <image> <image> <image>
    <fake_token_around_image> <EVENT_END>

0.020 s  press A
    <EVENT_START> { " m e s s a g e _ t y p e " : " K e y b o a r d E v en t " , " t i m e s t a m p _ n s "
    T             T T T T T T T T T T T T T T T T T T T T T T T T T T T T  T T T T T T T T T T T T T T T T T
    : 1 0 0 0 0 0 0 0 0 0 0 , " m e s s a g e " : { " e v en t _ t y p e " : " p re s s " , " v k " : 6 5 } }
    T T T T T T T T T T T T T T T T T T T T T T T T T T T T  T T T T T T T T T T T  T T T T T T T T T T T T T
    <EVENT_END>
    T

0.170 s  mouse: move 5 right, 3 up; left button down
    <EVENT_START> { " m e s s a g e _ t y p e " : " R a w M o u s e E v en t " , " t i m e s t a m p _ n s "
    T             T T T T T T T T T T T T T T T T T T T T T T T T T T T T  T T T T T T T T T T T T T T T T T
    : 1 0 1 5 0 0 0 0 0 0 0 , " m e s s a g e " : { " l a s t _ x " : 5 , " l a s t _ y " : - 3 , " b u t t o
    T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T T
    n _ f l a g s " : 1 , " b u t t o n _ d at a " : 0 } } <EVENT_END>
    T T T T T T T T T T T T T T T T T T T T T  T T T T T T T

end of the episode
    <EPISODE_END>"""
EVENTS = {"factorized": FACTORIZED, "hierarchical": HIERARCHICAL, "json": JSON}
BINNED = """\
23 tokens, 8 trained on (marked T); · is a space

start of the episode
    <EPISODE_START>

0.000 s  [screen 64x48 from one.png]
    <EVENT_START> <SCREEN> <0> <0> <0> <fake_token_around_image> <global-img> <image> <image> <image> <image>
    <fake_token_around_image> <EVENT_END>

0.030 s  press Enter
    <EVENT_START> <KEYBOARD> <0> <0> <3> <VK_13> <press> <EVENT_END>
    T             T          T   T   T   T       T       T

end of the episode
    <EPISODE_END>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    Image.new("RGB", (64, 48), "red").save(folder / "one.png")
    model_folder(folder / "model", "smolvlm")
    return folder


def processor(folder: Path) -> Any:
    return Vlm(path=str(folder / "model")).load_processor(folder / "model", where="model.path")


def shown(encoder: OpenEncoder, record: Record) -> str:
    [sample] = encoder.encode(record).samples
    return "\n".join(transcript(tokens_of(sample, encoder), encoder.passages(sample), width=110))


def test_a_conversation_with_an_image(folder: Path) -> None:
    question = [{"type": "image", "image": "one.png"}, {"type": "text", "text": "What colour?"}]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "And this?"},
        {"role": "assistant", "content": "blue"},
    ]
    encoder = ImageChat(image_root=folder).open(processor(folder), length=256)
    assert shown(encoder, {"messages": messages}) == CHAT


@pytest.mark.parametrize("name", ["factorized", "hierarchical", "json"])
def test_desktop_events(folder: Path, name: FormatName) -> None:
    rows = [
        row("ScreenCaptured", {"media_ref": {"uri": "one.png"}}, 9_980_000_000),
        row("KeyboardEvent", {"event_type": "press", "vk": 65}, 10_000_000_000),
        row("RawMouseEvent", {"last_x": 5, "last_y": -3, "button_flags": 1}, 10_150_000_000),
    ]
    assert desktop(folder, rows, name) == EVENTS[name]


def test_time_bins(folder: Path) -> None:
    pressed = {"message_type": "KeyboardEvent", "timestamp": 30_000_000, "message": {"event_type": "press", "vk": 13}}
    rows = [
        {
            "episode_path": "a.mcap",
            "bin_idx": 0,
            "timestamp_ns": 0,
            "state": [json.dumps({"media_ref": {"uri": "one.png"}})],
            "actions": [json.dumps(pressed)],
        }
    ]
    assert desktop(folder, rows, "factorized") == BINNED


def desktop(folder: Path, rows: list[dict[str, Any]], name: FormatName) -> str:
    settings, found = Desktop(format=name, image_root=folder), processor(folder)
    found.tokenizer.add_tokens(settings.added_tokens(), special_tokens=True)
    [record] = [Episodes(listed(rows))[0]]
    return shown(settings.open(found, length=512), record)
