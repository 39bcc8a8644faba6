"""Small audio language models in folders, conversations with tones, and a plain loop to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMultimodalLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedTokenizerFast,
)

from fullshard.families.audio.fresh_processor import fit_tokens, fresh_processor
from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.families.audio.sizes import tiny_audio
from fullshard.hf.tokenizers.tokenizer import TokenizerTraining, train_tokenizer
from tests.families.plain_loop import trained_plainly

MODELS = ["qwen2_audio", "voxtral", "phi4_multimodal"]
WORDS = ["one", "two", "three", "four"]
RATE = 16000


def loaded(folder: Path) -> Any:
    """Transformers' model of a folder."""
    speech = json.loads((folder / "config.json").read_text()).get("is_encoder_decoder")
    return (AutoModelForSpeechSeq2Seq if speech else AutoModelForMultimodalLM).from_pretrained(folder)


def model_folder(path: Path, architecture: str) -> Path:
    """A model with random weights and its processor, as Transformers saves them."""
    words = path.parent / "words"
    train_tokenizer(
        ["Which number is this? User: Assistant: one two three four and " * 9],
        TokenizerTraining(vocab_size=330),
        folder=words,
    )
    config_class = CONFIG_MAPPING[architecture]
    config = config_class(**tiny_audio(config_class()))
    processor = fresh_processor(config, PreTrainedTokenizerFast.from_pretrained(words))
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    text.vocab_size = len(processor.tokenizer)
    fit_tokens(config, processor)
    torch.manual_seed(0)
    auto = AutoModelForSpeechSeq2Seq if config.is_encoder_decoder else AutoModelForMultimodalLM
    model = auto.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or not parameter.any():
            # Norms of one and biases of zero would hide mistakes.
            torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.1)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def tone(number: int, *, seconds: float = 0.5, rate: int = RATE) -> np.ndarray:
    """A clip that differs from all others."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(number).normal(size=len(time))
    return (0.3 * np.sin(2 * np.pi * (200 + 90 * number) * time) + 0.02 * noise).astype(np.float32)


def write_records(
    folder: Path, clips_of_each: Sequence[int], *, seconds: Sequence[float] = (0.5,), numbered: bool = True
) -> Path:
    """Conversations, each with this number of clips; without a number in the question only the clips tell them
    apart."""
    lines = []
    (folder / "clips").mkdir(exist_ok=True)
    for number, clips in enumerate(clips_of_each):
        names = []
        for which in range(clips):
            names.append(f"{number}-{which}.wav")
            length = seconds[(number + which) % len(seconds)]
            soundfile.write(folder / "clips" / names[-1], tone(7 * number + which, seconds=length), RATE, "FLOAT")
        question = [{"type": "audio", "audio": name} for name in names]
        question += [{"type": "text", "text": f"Which number is this? {number if numbered else ''}"}]
        answer = " and ".join(WORDS[(number + which) % 4] for which in range(clips)) or "four"
        lines.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """A recipe over the records in their own order."""
    base: dict[str, Any] = {
        "name": name,
        "output": str(folder / "runs"),
        "model": {"kind": "audio_lm", "path": str(folder / "model")},
        "objective": {"kind": "audio_lm"},
        "data": {
            "train": str(folder / "chats.jsonl"),
            "encode": {"kind": "audio_chat", "audio_root": str(folder / "clips")},
            "sequence_length": 256,
            "shuffle": False,
            "pack": False,
            "cache": str(folder / "cache"),
            "holdout": 0,
        },
        "batch": {"per_device": 2, "global": 8},
        "duration": {"steps": 2},
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"},
        "precision": "fp32",
        "topology": {"device": "cpu"},
        "evaluate": {"every_epochs": None, "parts": []},
        "checkpoint": {"every_steps": None, "best": None},
        "log": {"every_steps": 1, "sinks": []},
    }
    return {k: {**v, **sections.get(k, {})} if isinstance(v, dict) else v for k, v in base.items()} | {
        k: v for k, v in sections.items() if k not in base
    }


def plain_loop(
    folder: Path,
    *,
    steps: int = 2,
    batch: int = 8,
    frozen: tuple[str, ...] = (),
    rates: Mapping[str, float] | None = None,
    model: Any = None,
    inputs: Sequence[dict[str, Any]] | None = None,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a plain loop in one process, one record at a time."""
    if inputs is None:
        records = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
        inputs = [processed(folder, record) for record in records]
    # Sinusoids, which Transformers freezes when it builds a model but not when it loads one.
    frozen = (*frozen, "model.audio_tower.embed_positions", "model.encoder.embed_positions")
    model = model or loaded(folder / "model")
    return trained_plainly(model, inputs, steps=steps, batch=batch, frozen=frozen, rates=rates)


def clips_of(folder: Path, record: dict[str, Any]) -> list[np.ndarray]:
    """The samples of a record's clips, read without fullshard."""
    parts = [
        part for message in record["messages"] if isinstance(message["content"], list) for part in message["content"]
    ]
    names = [part["audio"] for part in parts if part["type"] == "audio"]
    return [soundfile.read(folder / "clips" / name, dtype="float32")[0] for name in names]


def processed(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """One record as Transformers' own processor makes it, with the answer as labels."""
    place = folder / "model"
    processor = AudioLM(path=str(place)).load_processor(place, where="model.path")
    tokenizer, clips = processor.tokenizer, clips_of(folder, record)
    texts = [
        tokenizer.apply_chat_template(record["messages"][:until], tokenize=False, add_generation_prompt=until == 1)
        for until in (1, 2)
    ]
    if hasattr(processor, "whole"):
        audio = {"audio": clips, "sampling_rate": RATE} if clips else {}
        asked, whole = (dict(processor.whole(text=[text], **audio, return_tensors="pt")) for text in texts)
    else:
        # Voxtral's processor writes text only with a tokenizer of mistral-common: one token for four frames of 100.
        texts = [text.replace("[AUDIO]", "[BEGIN_AUDIO]" + "[AUDIO]" * 25) for text in texts]
        asked, whole = (dict(tokenizer([text], add_special_tokens=False, return_tensors="pt")) for text in texts)
        if clips:
            features = [processor.extractor(clip, sampling_rate=RATE, return_tensors="pt") for clip in clips]
            whole["input_features"] = torch.cat([each["input_features"] for each in features])
    labels = whole["input_ids"].clone()
    labels[:, : asked["input_ids"].shape[1]] = -100
    # What the template writes after the end of the answer is not learned.
    end = int((whole["input_ids"][0] == tokenizer.eos_token_id).nonzero()[-1])
    labels[:, end + 1 :] = -100
    return {**whole, "labels": labels}
