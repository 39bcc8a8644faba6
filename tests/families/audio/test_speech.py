"""Whisper trains under the same objective, with the numbers of a plain loop; its prompt is not learned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from peft import PeftModel
from transformers import GenerationConfig, GenerationMixin
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.contracts.data import IGNORE
from fullshard.errors import DataError, RecipeError
from fullshard.families.audio.encoders.transcripts import Transcripts
from fullshard.families.audio.models.audio_lm import AudioLM
from tests.families.audio.small import RATE, WORDS, loaded, model_folder, plain_loop, settings, tone
from tests.ranks import RankPool
from tests.small import curve, train

WITHIN = 2e-6
PREFIX = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speech")
    model_folder(path / "model", "whisper")
    (path / "clips").mkdir()
    lines = []
    for number in range(12):
        soundfile.write(path / "clips" / f"{number}.wav", tone(number, seconds=0.3 + 0.1 * (number % 4)), RATE, "FLOAT")
        lines.append({"audio_path": f"{number}.wav", "text": " ".join(WORDS[: 1 + number % 4])})
    (path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def opened(folder: Path, **more: Any) -> Any:
    processor = AudioLM(path=str(folder / "model")).load_processor(folder / "model", where="model.path")
    return Transcripts(audio_root=folder / "clips", **more).open(processor, length=64)


def plain_inputs(folder: Path) -> list[dict[str, Any]]:
    """What Transformers' model takes for each record: the loss begins after the prompt."""
    processor = opened(folder).processor
    tokenizer, found = processor.tokenizer, []
    for line in (folder / "chats.jsonl").read_text().splitlines():
        record = json.loads(line)
        clip = soundfile.read(folder / "clips" / record["audio_path"], dtype="float32")[0]
        ids = tokenizer(PREFIX + record["text"] + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, :4] = -100
        made = processor.extractor(clip, sampling_rate=RATE, return_tensors="pt")
        found.append({"decoder_input_ids": ids, "input_features": made["input_features"], "labels": labels})
    return found


def run(ranks: RankPool, folder: Path, name: str, *, world: int = 1, pack: bool = False, **sections: Any) -> Any:
    encode = {"kind": "transcripts", "audio_root": str(folder / "clips")}
    data = {"encode": encode, "sequence_length": 64, "pack": pack}
    return curve(ranks.run(train, settings(folder, name, data=data, **sections), world=world)[0], "loss", "grad_norm")


def test_the_prompt_is_not_learned(folder: Path) -> None:
    encoder = opened(folder)
    [sample] = encoder.encode({"audio_path": "1.wav", "text": "one two"}).samples
    tokenizer = encoder.processor.tokenizer
    assert tokenizer.decode(sample["input_ids"]) == f"{PREFIX}one two{tokenizer.eos_token}"
    learned = sample["labels"][sample["labels"] != IGNORE]
    assert tokenizer.decode(learned) == f"one two{tokenizer.eos_token}"
    assert (sample["labels"][:3] == IGNORE).all()
    assert encoder.encode({"audio_path": "1.wav", "text": " "}).dropped


def test_bad_transcripts_are_named(folder: Path) -> None:
    encoder = opened(folder)
    for record, message in [
        ({"audio_path": "1.wav"}, "no transcript"),
        ({"text": "one"}, "one clip, found 0 clips"),
        ({"audio_path": ["1.wav", "2.wav"], "text": "one"}, "one clip, found 2 clips"),
        ({"audio_path": "1.wav", "text": 3}, "must be a string"),
    ]:
        with pytest.raises(DataError, match=message):
            encoder.encode(record)
    with pytest.raises(RecipeError, match="no <|fr|>"):
        opened(folder, language="fr")


def test_a_decoder_has_no_more_positions(ranks: RankPool, folder: Path) -> None:
    """The default of data.sequence_length is longer; a table of learned positions cannot grow."""
    data = {"encode": {"kind": "transcripts", "audio_root": str(folder / "clips")}, "sequence_length": 1024}
    with pytest.raises(AssertionError, match=r"the model has 448 positions\. Shorten it\.\s"):
        ranks.run(train, settings(folder, "long", data=data), world=1)


def test_it_trains_as_in_a_plain_loop(ranks: RankPool, folder: Path) -> None:
    """12 records in steps of 8: the second step is filled up with rows of no weight on some ranks."""
    inputs = plain_inputs(folder)
    # Packing is on by default; each row keeps its own clip all the same.
    runs = {world: run(ranks, folder, f"full{world}", world=world, pack=world == 4) for world in (1, 4)}
    np.testing.assert_allclose(runs[1][:1], plain_loop(folder, steps=1, inputs=inputs), rtol=WITHIN)
    np.testing.assert_allclose(runs[4], runs[1], rtol=WITHIN)
    frozen = run(ranks, folder, "frozen", world=2, model={"towers": {"audio": {"freeze": True}}})
    np.testing.assert_allclose(
        frozen[:1], plain_loop(folder, steps=1, inputs=inputs, frozen=("model.encoder",)), rtol=WITHIN
    )


def command(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def loud(folder: Path) -> Path:
    """A model whose answer depends on the clip: with larger weights."""
    model = loaded(folder / "model")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("layers" in name or "conv" in name):
                parameter *= 15
    # As in the models of Whisper's authors: tokens that are never written, and never first.
    model.generation_config.suppress_tokens, model.generation_config.begin_suppress_tokens = [31, 122, 265], [224, 143]
    shutil.copytree(folder / "model", folder / "loud")
    model.save_pretrained(folder / "loud")
    return folder / "loud"


@torch.no_grad()
def transcribed(model: Any, folder: Path) -> list[int]:
    """What Transformers' generate adds to the prompt for the second clip."""
    row, other = plain_inputs(folder)[1:3]
    given = {"decoder_input_ids": row["decoder_input_ids"][:, :4], "max_new_tokens": 8, "do_sample": False}
    found, heard = (
        model.eval().generate(**given, input_features=each["input_features"])[0].tolist() for each in (row, other)
    )
    assert found != heard
    assert len(set(found)) > 1
    return [token for token in found if token not in row["decoder_input_ids"][0, :4]]


@pytest.mark.parametrize("adapted", [False, True])
def test_generate_writes_down_a_clip_as_transformers_does(
    ranks: RankPool, folder: Path, loud: Path, adapted: bool
) -> None:
    name = f"written{adapted}"
    # Hardly trained, so that it writes more than the end of the text.
    model = {"path": str(loud), **({"lora": {"r": 4}} if adapted else {})}
    run(ranks, folder, name, world=2, optimizer={"lr": 1e-4}, model=model)
    place, clip = folder / "runs" / name, str(folder / "clips" / "1.wav")
    base = loaded(loud if adapted else place / "model")
    expected = transcribed(PeftModel.from_pretrained(base, place / "model") if adapted else base, folder)
    words = ["--audio", clip, "--json", "--max-new-tokens", "8"]
    for world in (1, 2):
        (code, said, told), *_ = ranks.run(command, "generate", str(place), *words, world=world)
        assert code == 0, told
        assert json.loads(said)["tokens"] == expected
    if not adapted:
        # The export keeps the first tokens; the model that the run began with does not know them.
        (code, said, told), *_ = ranks.run(command, "generate", str(place / "model"), *words, world=1)
        assert (code, json.loads(said)["tokens"]) == (0, expected), told
        (code, _, told), *_ = ranks.run(command, "generate", str(folder / "model"), *words, world=1)
        assert code == 2
        assert f"--prompt '{PREFIX}'" in told
        (code, said, told), *_ = ranks.run(
            command, "generate", str(place / "model"), *words, "--prompt", PREFIX, world=1
        )
        assert (code, json.loads(said)["tokens"]) == (0, expected), told


@torch.no_grad()
def test_error_rates_are_those_of_the_transcripts_of_transformers(ranks: RankPool, folder: Path, loud: Path) -> None:
    encode = {"kind": "transcripts", "audio_root": str(folder / "clips")}
    chosen = settings(
        folder,
        "scored",
        model={"path": str(loud)},
        data={"encode": encode, "sequence_length": 64, "validation": str(folder / "chats.jsonl")},
        optimizer={"lr": 1e-5},
        evaluate={"parts": [{"kind": "wer", "samples": 5, "tokens": 6}]},
    )
    [found] = [record for record in ranks.run(train, chosen, world=2)[0] if record["kind"] == "validation"]
    model, tokenizer = loaded(folder / "runs" / "scored" / "model").eval(), opened(folder).processor.tokenizer
    # An evaluation takes the likeliest token, whatever is stored for generating.
    plain = GenerationConfig(max_new_tokens=6, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, do_sample=False)
    plain.decoder_start_token_id = model.config.decoder_start_token_id
    model.generation_config, texts = plain, list[list[str]]()
    for row in plain_inputs(folder)[:5]:
        ids = GenerationMixin.generate(
            model,
            row["input_features"],
            decoder_input_ids=row["decoder_input_ids"][:, :4],
            generation_config=plain,
        )
        rows = (row["decoder_input_ids"][0, 4:], ids[0, 4:])
        texts.append([tokenizer.decode(each, skip_special_tokens=True).strip() for each in rows])
    expected, written = map(list, zip(*texts, strict=True))
    assert [found["wer"], found["cer"]] == [jiwer.wer(expected, written), jiwer.cer(expected, written)]
    assert len(set(written)) > 2


def test_exports_load_and_give_the_same_logits(ranks: RankPool, folder: Path) -> None:
    run(ranks, folder, "exported", world=2)
    run(ranks, folder, "adapted", world=2, model={"lora": {"r": 4}, "towers": {"audio": {"lora": True}}})
    model = loaded(folder / "runs" / "exported" / "model")
    adapted = PeftModel.from_pretrained(loaded(folder / "model"), folder / "runs" / "adapted" / "model")
    assert any("encoder" in name and "lora" in name for name, _ in adapted.named_parameters())
    row = {key: value for key, value in plain_inputs(folder)[0].items() if key != "labels"}
    with torch.no_grad():
        first = loaded(folder / "model")(**row).logits
        assert not torch.allclose(model(**row).logits, first)
        assert not torch.allclose(adapted(**row).logits, first)
