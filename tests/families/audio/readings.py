"""Records with the columns of speechocean762, and short clips."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile

from tests.families.audio.small import RATE, tone

WORDS = {"MARK": "M AA0 R K", "IS": "IH0 Z", "GOING": "G OW0 IH0 NG", "TO": "T UW0", "SEE": "S IY0"}


def write_readings(folder: Path, records: int) -> Path:
    """A file of records; eight clips of 0.2 seconds are read again and again."""
    (folder / "read").mkdir(parents=True, exist_ok=True)
    for number in range(8):
        soundfile.write(folder / "read" / f"{number}.wav", tone(number, seconds=0.2), RATE, "FLOAT")
    lines = []
    for number in range(records):
        draw = np.random.default_rng(number)
        words = [str(word) for word in draw.choice(list(WORDS), 2)]
        scores = {name: int(draw.integers(0, 11)) for name in ("accuracy", "fluency", "prosodic", "total")}
        said = [{"text": word, "phones": WORDS[word].split(), "accuracy": 10} for word in words]
        clip = str(folder / "read" / f"{number % 8}.wav")
        lines.append({**scores, "completeness": 10.0, "text": " ".join(words), "words": said, "audio": {"path": clip}})
    file = folder / "readings.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
