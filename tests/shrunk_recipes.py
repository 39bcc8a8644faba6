"""Every built-in recipe made small and local: the inputs a user would bring, and the overrides that point at them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.families.audio import small as audio
from tests.families.audio.readings import write_readings
from tests.families.embedding import vision
from tests.families.vision import small as vlm
from tests.small import model_folder

SMALL = (
    "duration.steps=3",
    "data.sequence_length=64",
    "batch.per_device=2",
    "batch.global=4",
    "log.every_steps=1",
    "topology.device=cpu",
)
LICENSE = Path(__file__).parents[1] / "LICENSE"


def local_inputs(folder: Path) -> Path:
    """Texts, question-answer pairs, pictures, and two model folders. The texts are the same on every machine."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    (folder / "texts").mkdir(parents=True)
    texts = [" ".join(text.split()) for text in LICENSE.read_text().split("\n\n")]
    texts = [text for text in texts if len(text) > 200]
    for index, text in enumerate(texts):
        (folder / "texts" / f"{index:02}.txt").write_text(text)
    pairs = [
        {"question": f"What does part {index} say?", "answer": " ".join(text.split()[:20])}
        for index, text in enumerate(texts)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=400, special_tokens=["<|end|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>")
    model_folder(folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    vision.vision_folder(folder / "vision", kind="qwen3_vl")
    vision.pictures(folder / "seen")
    vlm.model_folder(folder / "smolvlm", "smolvlm")
    vlm.write_recordings(folder / "desktop.jsonl", episodes=8)
    audio.model_folder(folder / "phi4", "phi4_multimodal")
    write_readings(folder, 32)
    return folder


def shrunk(name: str, local: Path) -> list[str]:
    """The overrides that make a built-in recipe small and local; a new recipe needs an entry here."""
    own = {
        "audio": ["data.train.records=64", "data.validation.records=16", "data.sequence_length=128"],
        "desktop": ["data.train.episodes=12", "data.validation.episodes=3", "data.sequence_length=192"],
        "desktop-smolvlm": [
            f"model.path={local}/smolvlm",
            f"data.train={local}/desktop.jsonl",
            "data.sequence_length=128",
            "data.holdout=0.3",
            "precision=fp32",
        ],
        "diffusion": ["data.train={kind: digits, part: train}", "evaluate.parts=[loss]", "evaluate.per_device=64"],
        "embedding": [
            f"data.train={local}/pairs.jsonl",
            "data.validation=null",
            "data.holdout=0.25",
            "evaluate.parts=[loss, retrieval]",
        ],
        "embedding-8b": [
            f"model.path={local}/vision",
            "model.max_pixels=3136",
            "objective.matryoshka=[64, 16]",
            "objective.cache=4",
            f"data.train={local}/seen/pairs.jsonl",
            "data.validation=null",
            "data.holdout=0.25",
            f"data.encode.image_root={local}/seen/images",
            "evaluate.parts=[loss, retrieval]",
        ],
        "llm": ["model.size=tiny", f"model.tokenizer={local}/model", f"data.train={local}/texts"],
        "paper_r64": [
            f"model.path={local}/phi4",
            "model.revision=null",
            f"data.train={local}/readings.jsonl",
            "data.validation=null",
            "data.holdout=0.25",
            "data.sequence_length=512",
            "batch.accumulate=null",
            "evaluate.parts=[loss]",
        ],
        "quickstart": ["model.tokenizer.train.vocab_size=400", "evaluate.parts=[loss]"],
        "sft": [f"model={local}/model", f"data.train={local}/pairs.jsonl"],
        "sft-lora": [f"model.path={local}/model", f"data.train={local}/pairs.jsonl"],
        "staged": ["model.tokenizer.train.vocab_size=400", "stages.reasoning.data.sequence_length=512"],
        "vision": ["data.train.records=64", "data.validation.records=16"],
    }
    return [*SMALL, *own[name]]
