"""What is learned of conversations with audio, token by token; features; and what happens to bad records."""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from datasets import Audio, Dataset
from transformers import (
    AutoFeatureExtractor,
    Phi4MultimodalFeatureExtractor,
    VoxtralConfig,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)

from fullshard.contracts.data import IGNORE
from fullshard.data.prepare import prepare
from fullshard.data.sources.files import Files
from fullshard.errors import DataError, RecipeError, SetupError
from fullshard.families.audio.encoders.audio_chat import AudioChat
from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.families.audio.processor import ChunkProcessor
from fullshard.multimodal.balance import balanced
from tests.families.audio.small import RATE, model_folder, tone

SECONDS = 0.08
CLIP = tone(1, seconds=SECONDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio")
    for name in ("qwen2_audio", "phi4_multimodal"):
        model_folder(path / name, name)
    soundfile.write(path / "one.wav", CLIP, RATE, "FLOAT")
    soundfile.write(path / "one.flac", CLIP, RATE)
    soundfile.write(path / "long.ogg", tone(2, seconds=3.0, rate=24000), 24000)
    soundfile.write(path / "slow.wav", tone(3, seconds=SECONDS, rate=8000), 8000, "FLOAT")
    soundfile.write(path / "stereo.wav", np.stack([CLIP, -CLIP / 2], axis=1), RATE, "FLOAT")
    soundfile.write(path / "nan.wav", np.array([0.1, np.nan, 0.2], dtype=np.float32), RATE, "FLOAT")
    soundfile.write(path / "empty.wav", np.zeros(0, dtype=np.float32), RATE)
    (path / "broken.flac").write_bytes((path / "one.flac").read_bytes()[:30])
    return path


def opened(folder: Path, name: str = "qwen2_audio", *, length: int = 256, **settings: Any) -> Any:
    processor = AudioLM(path=str(folder / name)).load_processor(folder / name, where="model.path")
    return AudioChat(audio_root=folder, **settings).open(processor, length=length)


def wav(clip: np.ndarray = CLIP) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, clip, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def asked(content: Any, answer: str = "one", **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def shown(encoder: Any, sample: Any) -> str:
    """The sample as text, with what is learned in brackets and # for a token of audio."""
    tokenizer, audio = encoder.processor.tokenizer, encoder.processor.audio_token_id
    text, learned = "", False
    targets = np.concatenate([[IGNORE], sample["labels"][:-1]]) != IGNORE
    for token, counts in zip(sample["input_ids"].tolist(), targets.tolist(), strict=True):
        text += ("[" if counts else "]") * (counts != learned)
        text += "#" if token == audio else tokenizer.decode([token])
        learned = counts
    return text + "]" * learned


PART = {"type": "audio", "audio": "one.wav"}
TEXT = {"type": "text", "text": "Which number?"}
ONE = "<|audio_bos|>##<|audio_eos|>"
ENDED = "User: {}Which number?\nAssistant:[ one<|endoftext|>]\n"
PAIR = {"prompt": "Which number?", "response": "one"}
ASKED, SAID = "<|user|><|audio_1|>Which number?<|end|><|assistant|>", '{"total": 9}<|endoftext|>'


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (asked([PART, TEXT]), ENDED.format(ONE)),
        (asked([TEXT, PART]), f"User: Which number?{ONE}\nAssistant:[ one<|endoftext|>]\n"),
        (asked([PART, PART, TEXT]), ENDED.format(ONE + ONE)),
        (asked([{"type": "audio", "path": "one.wav"}, TEXT]), ENDED.format(ONE)),
        (asked([{"type": "audio_url", "audio_url": {"url": "one.wav"}}, TEXT]), ENDED.format(ONE)),
        (
            asked([{"type": "input_audio", "input_audio": {"data": base64.b64encode(wav()).decode()}}, TEXT]),
            ENDED.format(ONE),
        ),
        (asked([{"type": "audio"}, TEXT], audio_path="one.wav"), ENDED.format(ONE)),
        (asked("<audio>Which number?", audio="one.wav"), ENDED.format(ONE)),
        ({**PAIR, "audio_path": "one.flac"}, ENDED.format(ONE)),
        ({**PAIR, "audio_path": ["one.wav", "one.wav"]}, ENDED.format(ONE + ONE)),
        ({**PAIR, "audio_array": CLIP.tolist(), "sampling_rate": RATE}, ENDED.format(ONE)),
        ({**PAIR, "audio": {"array": CLIP, "sampling_rate": RATE, "path": None}}, ENDED.format(ONE)),
        ({**PAIR, "audio": {"bytes": wav(), "path": "gone.wav"}}, ENDED.format(ONE)),
        ({**PAIR, "audio": {"bytes": None, "path": "one.wav"}}, ENDED.format(ONE)),
        ({**PAIR, "audio_path": "slow.wav"}, ENDED.format(ONE)),
        (asked("Which number?"), ENDED.format("")),
        ({**PAIR, "audio_path": None}, ENDED.format("")),
        ({**PAIR, "audio_path": ""}, ENDED.format("")),
        ({**PAIR, "audio_path": float("nan")}, ENDED.format("")),
        (
            {"text_input": ASKED + SAID, "prompt_only": ASKED, "audio_path": "one.wav"},
            '<|user|>##Which number?<|end|><|assistant|>[{"total": 9}<|endoftext|>]',
        ),
    ],
)
def test_what_is_learned_of_each_form(folder: Path, record: dict[str, Any], expected: str) -> None:
    encoder = opened(folder)
    [sample] = encoder.encode(record).samples
    assert shown(encoder, sample) == expected


def test_the_encoder_is_chosen_by_the_keys_of_a_record() -> None:
    assert AudioChat.accepts({**PAIR, "audio_path": "one.wav"})
    assert AudioChat.accepts(asked([PART, TEXT]))
    assert AudioChat.accepts({"text_input": ASKED + SAID, "prompt_only": ASKED, "audio_array": [0.1]})
    assert not AudioChat.accepts(PAIR)


def test_clips_become_mono_at_the_rate_of_the_model(folder: Path) -> None:
    """As soundfile reads and soxr resamples them, whatever form they had."""
    encoder = opened(folder)

    def clip(**record: Any) -> np.ndarray:
        [sample] = encoder.encode({**PAIR, **record}).samples
        [found] = encoder.collator(None).clips(sample)
        assert float(sample["audio_seconds"][0]) == pytest.approx(len(found) / RATE)
        return np.asarray(found)

    slow, rate = soundfile.read(folder / "slow.wav", dtype="float32")
    np.testing.assert_array_equal(clip(audio_path="slow.wav"), soxr.resample(slow, rate, RATE))
    np.testing.assert_array_equal(clip(audio_path="stereo.wav"), (CLIP - CLIP / 2) / 2)
    np.testing.assert_array_equal(clip(audio_array=[CLIP.tolist(), CLIP.tolist()], sampling_rate=RATE), CLIP)
    whole = (CLIP * 32768).astype(np.int16)
    np.testing.assert_array_equal(clip(audio_array=whole.tolist(), sampling_rate=RATE), whole / np.float32(32768))
    assert len(clip(audio_array=CLIP.tolist(), sampling_rate=8000)) == 2 * len(CLIP)


def test_features_are_those_of_the_models_own_extractor(folder: Path) -> None:
    clips = [tone(1, seconds=0.3), tone(2, seconds=0.5)]
    qwen = opened(folder).processor
    own = WhisperFeatureExtractor.from_pretrained(folder / "qwen2_audio")
    made = own(clips, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    found = qwen.features(clips)
    torch.testing.assert_close(found["input_features"], made["input_features"], rtol=0, atol=0)
    torch.testing.assert_close(found["feature_attention_mask"], made["attention_mask"], rtol=0, atol=0)
    phi = opened(folder, "phi4_multimodal").processor
    expected = Phi4MultimodalFeatureExtractor.from_pretrained(folder / "phi4_multimodal")
    made = expected(clips, sampling_rate=RATE, return_tensors="pt")
    found = phi.features(clips)
    assert set(found) == set(made) == {"audio_input_features", "audio_embed_sizes", "audio_attention_mask"}
    for name in ("audio_embed_sizes", "audio_attention_mask"):
        torch.testing.assert_close(found[name], made[name], rtol=0, atol=0)
    # Behind a shorter clip Transformers leaves two frames of it, which the mask hides; here there is silence.
    heard = made["audio_attention_mask"]
    name = "audio_input_features"
    torch.testing.assert_close(found[name][heard], made[name][heard], rtol=0, atol=0)
    assert not found[name][~heard].any()


def test_clips_whose_lengths_transformers_cannot_extract_together(folder: Path) -> None:
    clips = [tone(1, seconds=1.1)[:length] for length in (8000, 16000, 16079)]
    extractor = Phi4MultimodalFeatureExtractor.from_pretrained(folder / "phi4_multimodal")
    with pytest.raises(RuntimeError, match="must match the size"):
        extractor(clips, sampling_rate=RATE, return_tensors="pt")
    found = opened(folder, "phi4_multimodal").processor.features(clips)["audio_input_features"]
    for row, clip in zip(found, clips, strict=True):
        [alone] = extractor(clip, sampling_rate=RATE, return_tensors="pt")["audio_input_features"]
        torch.testing.assert_close(row[: len(alone)], alone, rtol=0, atol=0)


def test_voxtral_takes_chunks_of_thirty_seconds(folder: Path) -> None:
    """As its own processor in full size: 375 tokens for each begun half minute."""
    tokenizer = opened(folder).processor.tokenizer
    extractor = WhisperFeatureExtractor(feature_size=128)
    processor = ChunkProcessor(extractor, tokenizer, VoxtralConfig(), class_name="VoxtralProcessor")
    clips = [tone(1, seconds=1.0), tone(2, seconds=31.0)]
    own = VoxtralProcessor(extractor, tokenizer)
    padding = {"padding": True, "truncation": False, "pad_to_multiple_of": 480000, "return_tensors": "pt"}
    made = own._retrieve_input_features(clips, 3000, sampling_rate=RATE, **padding)
    torch.testing.assert_close(processor.features(clips)["input_features"], made, rtol=0, atol=0)
    assert [processor.clip_text(len(clip)).count("[AUDIO]") for clip in clips] == [375, 750]
    assert processor.longest is None


def test_voxtral_reads_the_tokenizer_of_mistral(folder: Path, tmp_path: Path) -> None:
    """As it is published: tekken.json, the audio token as number 24, and no chat template."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", *(f"<SPECIAL_{n}>" for n in range(6, 24))]
    special += ["[AUDIO]", "[BEGIN_AUDIO]"]
    vocabulary = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    size = {"default_vocab_size": 282, "default_num_special_tokens": 26}
    tekken = {
        "config": {"pattern": r"\w+|\W", **size},
        "vocab": vocabulary,
        "special_tokens": [{"rank": n, "token_str": token, "is_control": True} for n, token in enumerate(special)],
    }
    place = model_folder(tmp_path / "model", "voxtral")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (place / name).unlink()
    (place / "tekken.json").write_text(json.dumps(tekken))
    processor = AudioLM(path=str(place)).processor(cache=tmp_path)
    encoder = AudioChat(audio_root=folder).open(processor, length=256)
    assert processor.audio_token_id == 24
    [sample] = encoder.encode(asked([PART, TEXT])).samples
    assert shown(encoder, sample) == f"<s>[INST][BEGIN_AUDIO]{'#' * 25}Which number?[/INST][one</s>]"
    (place / "tekken.json").write_text(json.dumps({**tekken, "special_tokens": None}))
    with pytest.raises(RecipeError, match="pip install mistral-common"):
        AudioLM(path=str(place)).processor(cache=tmp_path)


def error_of(folder: Path, record: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(folder, **settings).encode(record)
    return str(caught.value)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"audio_path": "none.wav"}, ["none.wav", "No such file", "audio_root"]),
        ({"audio_path": "broken.flac"}, ["broken.flac", "cannot be read"]),
        ({"audio_path": "nan.wav"}, ["nan.wav", "NaN or infinite"]),
        ({"audio_path": "empty.wav"}, ["empty.wav", "no samples"]),
        ({"audio_path": "one.wav", "sampling_rate": 8000}, ["one.wav", "sampling_rate = 8000", "16000"]),
        ({"audio_array": [0.1, 0.2]}, ["no sampling_rate"]),
        ({"audio_array": [0.1, 0.2], "sampling_rate": "fast"}, ["such as 16000", "'fast'"]),
        ({"audio_array": ["a", "b"], "sampling_rate": RATE}, ["list of numbers", "string"]),
        ({"audio_array": [0.1, None, 0.2], "sampling_rate": RATE}, ["list of numbers", "null (sample 2)"]),
        ({"audio_array": "one.wav", "sampling_rate": RATE}, ["'audio_array' must be a list", "audio_path"]),
        ({"audio_array": [[[0.1]]], "sampling_rate": RATE}, ["list of numbers", "3 dimensions"]),
        ({"audio_path": 3}, ["the clip must be a path", "found 3"]),
        ({"audio_array": [1e4, 2e4], "sampling_rate": RATE}, ["20,000", "between -1 and 1"]),
        ({"audio_array": [0.1, float("nan")], "sampling_rate": RATE}, ["NaN or infinite"]),
        ({"audio_array": [], "sampling_rate": RATE}, ["no samples", "data.encode.unreadable = skip"]),
        ({"audio": "https://example.org/a.wav"}, ["URL", "Download"]),
        ({"audio_path": ["one.wav"], "prompt": "<audio><audio>"}, ["2 places", "1 clip"]),
        ({"audio_path": "one.wav", "audio": "one.wav"}, ["both 'audio_path' and 'audio'"]),
    ],
)
def test_bad_audio_is_named(folder: Path, record: dict[str, Any], words: list[str]) -> None:
    message = error_of(folder, {**PAIR, **record})
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "kind", [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]
)
def test_a_file_that_was_cut_off_is_damaged(folder: Path, kind: tuple[str, str | None]) -> None:
    """Its first part could be read: nobody would notice that the rest is missing."""
    file = io.BytesIO()
    soundfile.write(file, tone(1, seconds=1.9), RATE, format=kind[0], subtype=kind[1])
    whole, encoder = file.getvalue(), opened(folder)
    assert encoder.encode({**PAIR, "audio": {"bytes": whole}}).samples
    for share in (0.9, 0.6):
        with pytest.raises(DataError, match=r"cut off|damaged|no samples"):
            encoder.encode({**PAIR, "audio": {"bytes": whole[: int(share * len(whole))]}})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"audio_path": "one.wav", "prompt": "Which?"}, ["prompt/response", "kind: audio_chat, question"]),
        ({"audio_path": "one.wav", "text": "one"}, ["add a column prompt", "data.encode: transcripts"]),
        (
            {"audio_path": "one.wav", "text": "A", "accuracy": 1, "total": 2, "words": []},
            ["data.encode: speechocean762"],
        ),
    ],
)
def test_a_record_without_a_conversation_is_told_what_fits(
    folder: Path, record: dict[str, Any], words: list[str]
) -> None:
    message = error_of(folder, record)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_missing_package_is_no_fault_of_a_clip(folder: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `unreadable: skip` every record would be left out."""
    encoder = opened(folder, unreadable="skip")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SetupError, match=rf"{package}, which is not installed.*pip install 'fullshard\[audio\]'"):
        encoder.encode({**PAIR, "audio_path": "slow.wav"})


def test_features_of_gemma_and_whisper_are_those_of_their_extractors(tmp_path: Path) -> None:
    importlib.import_module("tests.families.audio.gemma")  # a stand-in for the vision tower
    clips = [tone(1, seconds=0.3), tone(2, seconds=0.5)]
    for name in ("gemma3n", "whisper"):
        folder = model_folder(tmp_path / name, name)
        processor = AudioLM(path=str(folder)).load_processor(folder, where="model.path")
        own, found = AutoFeatureExtractor.from_pretrained(folder), processor.features(clips)
        for number, clip in enumerate(clips):
            made = own([clip], sampling_rate=RATE, return_tensors="pt")
            features = made["input_features"][0]
            size = features.shape[0] if name == "gemma3n" else None
            torch.testing.assert_close(found["input_features"][number][:size], features, rtol=0, atol=0)
            if name == "gemma3n":
                assert torch.equal(found["input_features_mask"][number][:size], made["input_features_mask"][0])
                assert not found["input_features_mask"][number][size:].any()


def test_records_with_bad_audio_can_be_left_out(folder: Path) -> None:
    for file in ("none.wav", "broken.flac", "nan.wav", "empty.wav"):
        found = opened(folder, unreadable="skip").encode({**PAIR, "audio_path": file})
        assert not found.samples
        assert "cannot be read" in found.dropped[0].reason


@pytest.mark.parametrize("samples", [1, 399])
def test_a_clip_that_is_too_short_for_the_extractor_is_named(folder: Path, samples: int) -> None:
    """Phi-4's extractor needs a window of 400 samples; that of Qwen2-Audio pads."""
    record = {**PAIR, "audio_array": [0.1] * samples, "sampling_rate": RATE}
    assert opened(folder).encode(record).samples
    with pytest.raises(DataError, match=f"the clip is too short: {samples} samples? at 16,000 Hz.*unreadable = skip"):
        opened(folder, "phi4_multimodal").encode(record)
    assert opened(folder, "phi4_multimodal", unreadable="skip").encode(record).dropped
    assert opened(folder, "phi4_multimodal").encode({**record, "audio_array": [0.1] * 400}).samples


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["long.ogg", "3.0 seconds", "the model takes 2"]),
        ({"max_seconds": 1.5}, ["long.ogg", "max_seconds = 1.5"]),
    ],
)
def test_a_long_clip_is_an_error_or_a_counted_skip(folder: Path, settings: dict[str, Any], words: list[str]) -> None:
    record = {**PAIR, "audio_path": "long.ogg"}
    message = error_of(folder, record, **settings)
    assert all(word in message for word in words), message
    assert not opened(folder, too_long="skip", **settings).encode(record).samples


def test_more_clips_than_fit_are_an_error_or_a_counted_skip(folder: Path) -> None:
    record = asked([PART] * 9 + [TEXT])
    assert "data.sequence_length = 20" in error_of(folder, record, length=20)
    assert not opened(folder, length=20, too_long="skip").encode(record).samples


def test_a_laid_out_text_must_start_with_its_prompt(folder: Path) -> None:
    record = {"text_input": "other", "prompt_only": ASKED, "audio_path": "one.wav"}
    assert "must start with 'prompt_only'" in error_of(folder, record)
    record = {"text_input": "no place", "prompt_only": "no", "audio_path": "one.wav"}
    assert "0 places" in error_of(folder, record)


def test_the_placeholder_in_a_text_is_no_clip(folder: Path) -> None:
    assert "more often than it has clips" in error_of(folder, asked("What does <|AUDIO|> mean?"))


def test_the_row_that_touches_the_tower_has_no_loss(folder: Path) -> None:
    encoder = opened(folder)
    [sample] = encoder.encode(asked([PART, TEXT])).samples
    collator = encoder.collator(None)
    text = collator.without_media(sample)
    assert encoder.processor.audio_token_id not in text["input_ids"]
    assert (collator.blank(sample)["labels"] == IGNORE).all()
    rows = collator.touching([text])
    assert len(rows) == 2
    assert (rows[1]["labels"] == IGNORE).all()
    assert "media.input_features" in collator.collate(rows, length=None)
    assert collator.touching([sample]) == [sample]


def test_clips_and_seconds_are_counted_and_clips_of_similar_length_share_a_batch(folder: Path, tmp_path: Path) -> None:
    lines = [
        {**PAIR, "audio_array": tone(n, seconds=0.1 * (1 + n % 4)).tolist(), "sampling_rate": RATE} for n in range(8)
    ]
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = prepare(
        train=Files(path=str(tmp_path / "clips.jsonl")).open(),
        validation=None,
        encode=AudioChat(),
        processor=opened(folder).processor,
        length=256,
        pack=False,
        holdout=0,
        seed=0,
        cache=tmp_path / "cache",
        say=lambda _: None,
    )
    found = {each.name: each.amounts for each in data.quantities}
    assert found["clips"].tolist() == [1] * 8
    np.testing.assert_allclose(found["audio_seconds"], [0.1 * (1 + n % 4) for n in range(8)], rtol=1e-6)
    order = balanced(None, data, per_device=2, world=1)["even"](np.arange(8))
    seconds = found["audio_seconds"][order].reshape(4, 2)
    assert (seconds[:, 0] == seconds[:, 1]).all()


def test_records_of_every_kind_of_file(folder: Path, tmp_path: Path) -> None:
    """A data set of the `datasets` library comes undecoded, so that its decoder is not needed."""
    stored = Dataset.from_dict(
        {"prompt": ["Which number?"], "response": ["one"], "audio": [{"bytes": wav(), "path": None}]}
    )
    stored.cast_column("audio", Audio()).save_to_disk(tmp_path / "saved")
    stored.to_parquet(tmp_path / "clips.parquet")
    (tmp_path / "clips.csv").write_text("audio_path,prompt,response\none.wav,Which number?,one\n")
    numbers = json.dumps(CLIP.tolist())
    (tmp_path / "arrays.csv").write_text(
        f'audio_array,sampling_rate,prompt,response\n"{numbers}",16000,Which number?,one\n'
    )
    (tmp_path / "clips.jsonl").write_text(json.dumps({**PAIR, "audio_path": "one.wav"}) + "\n")
    encoder = opened(folder)
    for name in ("saved", "clips.parquet", "clips.csv", "arrays.csv", "clips.jsonl"):
        record = Files(path=str(tmp_path / name)).open()[0]
        assert AudioChat.accepts(record)
        [sample] = encoder.encode(record).samples
        assert shown(encoder, sample) == ENDED.format(ONE)
        np.testing.assert_array_equal(encoder.collator(None).clips(sample)[0], CLIP)
