"""What `check --sample` prints of conversations and transcripts with audio: each clip, each token, what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from fullshard.families.audio.encoders.audio_chat import AudioChat
from fullshard.families.audio.encoders.transcripts import Transcripts
from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.multimodal.transcript import tokens_of, transcript
from tests.families.audio.small import RATE, model_folder, tone

QWEN2_AUDIO = """\
43 tokens, 4 trained on (marked T); · is a space

    Us er : · <|audio_bos|>

[clip 1: 0.50 s, 44,100 Hz resampled to 16,000 Hz, 2 channels mixed to one, from stereo.wav, 12 tokens]
    <|AUDIO|> x 12

    <|audio_eos|> <|audio_bos|>

[clip 2: 0.25 s, 8,000 Hz resampled to 16,000 Hz, from slow.flac, 6 tokens]
    <|AUDIO|> <|AUDIO|> <|AUDIO|> <|AUDIO|> <|AUDIO|> <|AUDIO|>

    <|audio_eos|> Which ·number ? <|audio_bos|>

[clip 3: 0.10 s, 16,000 Hz, from 6,480 bytes in the record, 2 tokens]
    <|AUDIO|> <|AUDIO|>

    <|audio_eos|> \\n As sistan t : ·one ·and ·two <|endoftext|> \\n
                                   T    T    T    T"""
VOXTRAL = """\
95 tokens, 4 trained on (marked T); · is a space

    Us er : · [BEGIN_AUDIO]

[clip 1: 0.50 s, 44,100 Hz resampled to 16,000 Hz, 2 channels mixed to one, from stereo.wav, 25 tokens]
    [AUDIO] x 25

    [BEGIN_AUDIO]

[clip 2: 0.25 s, 8,000 Hz resampled to 16,000 Hz, from slow.flac, 25 tokens]
    [AUDIO] x 25

    Which ·number ? [BEGIN_AUDIO]

[clip 3: 0.10 s, 16,000 Hz, from 6,480 bytes in the record, 25 tokens]
    [AUDIO] x 25

    \\n As sistan t : ·one ·and ·two <|endoftext|> \\n
                     T    T    T    T"""
PHI4_MULTIMODAL = """\
27 tokens, 4 trained on (marked T); · is a space

    Us er : ·

[clip 1: 0.50 s, 44,100 Hz resampled to 16,000 Hz, 2 channels mixed to one, from stereo.wav, 6 tokens]
    <|audio|> <|audio|> <|audio|> <|audio|> <|audio|> <|audio|>

[clip 2: 0.25 s, 8,000 Hz resampled to 16,000 Hz, from slow.flac, 3 tokens]
    <|audio|> <|audio|> <|audio|>

    Which ·number ?

[clip 3: 0.10 s, 16,000 Hz, from 6,480 bytes in the record, 1 token]
    <|audio|>

    \\n As sistan t : ·one ·and ·two <|endoftext|> \\n
                     T    T    T    T"""
WHISPER = """\
7 tokens, 3 trained on (marked T); · is a space

[clip 1: 0.25 s, 8,000 Hz resampled to 16,000 Hz, from slow.flac]

    <|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|> one ·two <|endoftext|>
                                                                 T   T    T"""


def read(folder: Path, name: str, encoder: Any, record: dict[str, Any]) -> str:
    model_folder(folder / name, name)
    processor = AudioLM(path=str(folder / name)).load_processor(folder / name, where="model.path")
    opened = encoder.open(processor, length=512)
    [sample] = opened.encode(record).samples
    return "\n".join(transcript(tokens_of(sample, opened), opened.passages(sample), width=110))


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    stereo = np.stack([tone(1, seconds=0.5, rate=44100)] * 2, axis=1)
    soundfile.write(tmp_path / "stereo.wav", stereo, 44100)
    soundfile.write(tmp_path / "slow.flac", tone(2, seconds=0.25, rate=8000), 8000)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen2_audio", QWEN2_AUDIO), ("voxtral", VOXTRAL), ("phi4_multimodal", PHI4_MULTIMODAL)]
)
def test_a_conversation(clips: Path, name: str, expected: str) -> None:
    record = {
        "prompt": "<audio><audio>Which number?<audio>",
        "response": "one and two",
        "audio": ["stereo.wav", "slow.flac", {"array": tone(3, seconds=0.1).tolist(), "sampling_rate": RATE}],
    }
    assert read(clips, name, AudioChat(audio_root=clips), record) == expected


def test_a_transcript(clips: Path) -> None:
    record = {"audio_path": "slow.flac", "text": "one two"}
    assert read(clips, "whisper", Transcripts(audio_root=clips), record) == WHISPER
