"""Records of speechocean762 become a prompt with a clip and a JSON answer; mistakes in a record are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.config.part import decode
from fullshard.contracts.data import IGNORE, Encoder
from fullshard.errors import DataError
from fullshard.families.audio.encoders.speechocean762 import PROMPT, Speechocean762
from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.families.audio.pronunciation import read_rating
from tests.families.audio.small import model_folder, tone

RECORD: dict[str, Any] = {
    "accuracy": 8,
    "completeness": 10.0,
    "fluency": 9.5,
    "prosodic": 9,
    "text": "MARK IS GOING",
    "total": 9,
    "words": [
        {"accuracy": 10, "phones": ["M", "AA0", "R", "K"], "phones-accuracy": [2.0, 2.0, 1.8, 2.0], "text": "MARK"},
        {"accuracy": 10, "phones": ["IH0", "Z"], "text": "IS"},
        {"accuracy": 9, "phones": ["G", "OW0", "IH0", "NG"], "text": "GOING"},
    ],
    "speaker": "0003",
    "gender": "m",
    "age": 6,
    "audio": {"array": tone(1).tolist(), "sampling_rate": 16000, "path": "000030012.wav"},
}
ANSWER = (
    '{"accuracy": 8, "prosodic": 9, "fluency": 9.5, "total": 9, "word transcript": "MARK IS GOING", '
    '"phoneme transcript": "M AA0 R K IH0 Z G OW0 IH0 NG"}'
)


def test_a_record_becomes_prompt_and_answer() -> None:
    prepared = Speechocean762().prepared(RECORD)
    assert prepared == {"audio": RECORD["audio"], "prompt": PROMPT, "completion": ANSWER}
    found = read_rating(ANSWER)
    assert found is not None
    assert found.scores == {"accuracy": 8, "prosodic": 9, "fluency": 9.5, "total": 9}
    columns = {key: [word.get(key) for word in RECORD["words"]] for key in ("text", "phones")}
    assert Speechocean762().prepared({**RECORD, "words": columns}) == prepared
    spaced = [{**word, "phones": " ".join(word["phones"])} for word in RECORD["words"]]
    assert Speechocean762().prepared({**RECORD, "words": spaced}) == prepared


def test_only_the_answer_is_learned(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "phi4_multimodal")
    processor = AudioLM(path=str(folder)).load_processor(folder, where="model.path")
    settings = decode(Encoder, {"kind": "speechocean762", "prompt": "Rate this."}, where="data.encode")
    [sample] = settings.open(processor, length=4096).encode(RECORD).samples
    tokenizer = processor.tokenizer
    assert tokenizer.decode(sample["labels"][sample["labels"] != IGNORE]).strip() == ANSWER + tokenizer.eos_token
    text = tokenizer.decode(sample["input_ids"])
    assert re.sub(r"(<\|audio\|>)+", "<clip>", text).strip() == (
        f"User: <clip>Rate this.\nAssistant: {ANSWER}{tokenizer.eos_token}"
    )
    np.testing.assert_allclose(sample["audio_seconds"], [0.5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio": None}, r"the record has no 'audio'\. Keys found: .*data.encode: audio_chat"),
        ({"words": None, "total": None}, r"the record has no 'total' and no 'words'\."),
        ({"accuracy": 11}, r"'accuracy' must be a score from 0 to 10, found 11"),
        ({"prosodic": -1}, r"'prosodic' must be a score from 0 to 10, found -1"),
        ({"total": "nine"}, r"'total' must be a score from 0 to 10, found 'nine'"),
        ({"words": 5}, r"'words' must be a list of words, each with its phones; found 5"),
        ({"words": "MARK IS"}, r"'words' must be a list of words, each with its phones; found 'MARK IS'"),
        ({"fluency": float("nan")}, r"'fluency' must be a score from 0 to 10, found .nan"),
        ({"text": " "}, r"'text' must be the words of the clip, found ' '"),
        ({"words": []}, r"'words' must be a list of words, each with its phones"),
        ({"words": [{"phones": ["M"]}, {"text": "IS"}]}, r"word 2: 'phones' must be a list of phones"),
    ],
)
def test_a_mistake_in_a_record(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Speechocean762().prepared({**RECORD, **change})


def test_a_csv_file_holds_scores_and_words_as_text() -> None:
    changed = {name: str(RECORD[name]) for name in ("accuracy", "fluency", "prosodic", "total", "words")}
    assert Speechocean762().prepared({**RECORD, **changed}) == Speechocean762().prepared(RECORD)


def test_a_record_chooses_its_encoder() -> None:
    assert Speechocean762.accepts(RECORD)
    assert not Speechocean762.accepts({**RECORD, "words": None})
