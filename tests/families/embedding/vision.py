"""A tiny real vision-language model of the Qwen2-VL kind: one token a byte, images of at most four patch squares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
COLOURS = ["red", "green", "blue", "white", "black", "grey", "pink", "brown"]
SIDE = 28
"""Pixels to a side of the square that becomes one token."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pictures(folder: Path, *, records: int = 20) -> Path:
    """Records of every retrieval mode, in turn, with pictures in `images/`."""
    import numpy as np
    from PIL import Image

    (folder / "images").mkdir(parents=True)
    draw, rows = np.random.default_rng(3), []
    for index in range(records):
        height, width = draw.integers(20, 90, 2)
        for side in "ab":
            made = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
            made.save(folder / "images" / f"{index}{side}.png")
        word = f"{COLOURS[index % 8]} {index}"
        query = {"t": {"query": word}, "i": {"query_image": f"{index}a.png"}}
        query["m"] = query["t"] | query["i"]
        positive = {"t": {"positive": f"the {word}"}, "i": {"positive_image": f"{index}b.png"}}
        asked, answered = ("t2t", "t2i", "i2t", "i2i", "m2t", "m2i")[index % 6].split("2")
        rows.append({**query[asked], **positive[answered]})
    rows[3]["negative_images"] = ["4a.png", "5a.png"]  # type: ignore[assignment]
    rows[4]["negatives"] = ["nothing / of the kind"]  # type: ignore[assignment]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def vision_folder(folder: Path, *, weights: bool = True, kind: str = "qwen2_vl") -> Path:
    """Tokenizer, image settings and chat template; with `weights` also the configuration and fixed random weights."""
    tokenizer().save_pretrained(folder)
    image_processor().save_pretrained(folder)
    if weights:
        _model(kind).save_pretrained(folder)
    return folder


def own_processor(folder: Path) -> Any:
    """Transformers' own processor of the folder; its constructor asks for torchvision, for videos alone."""
    from transformers import AutoTokenizer, Qwen2VLProcessor

    made = object.__new__(Qwen2VLProcessor)
    made.image_processor, made.tokenizer = image_processor(), AutoTokenizer.from_pretrained(folder)
    made.video_processor, made.chat_template = None, made.tokenizer.chat_template
    for kind in ("image", "video"):
        token = f"<|{kind}_pad|>"
        number = made.tokenizer.convert_tokens_to_ids(token)
        made.__dict__ |= {f"{kind}_token": token, f"{kind}_token_id": number, f"{kind}_ids": [number]}
    return made


def tokenizer() -> Any:
    """One token a byte, and the special tokens of Qwen2-VL; adds none by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(SPECIAL + alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    names = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "additional_special_tokens": SPECIAL[3:]}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    found.chat_template = TEMPLATE
    return found


def image_processor() -> Any:
    """An image is made to fit into one to four squares."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2 * 4})


def _model(kind: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModel

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(SPECIAL) + 256,
        "rope_parameters": rope,
        "max_position_embeddings": 2048,
    }
    vision: dict[str, Any] = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    if kind == "qwen3_vl":
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"patch_size": SIDE // 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    names = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, text_config=text, vision_config=vision, **names))
