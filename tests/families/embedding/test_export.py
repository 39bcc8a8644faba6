"""What a run leaves: a folder that sentence-transformers loads, and that encodes as the trained model does.

The trained vectors are made without it, from the tensors of the checkpoint, Transformers, and pooling written out here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, scaled_dot_product_attention
from typer.testing import CliRunner

from fullshard.checkpoint.reader import open_tensors
from fullshard.cli import app
from fullshard.families.embedding.batching.chunks import Chunk, Texts, inputs
from fullshard.log.metrics import FILE, read
from tests.cards import card, run_code
from tests.families.embedding import texts
from tests.near import assert_near
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import curve, train

TEXTS = ["ban", "kis kit kis dot lux mem", "bar bas dor", "luk " * 11]
PROMPTS = {"query": "query : ", "document": "doc : "}
POOL = {"mean": lambda hidden: hidden.mean(0), "cls": lambda hidden: hidden[0], "last": lambda hidden: hidden[-1]}
SHORT: dict[str, Any] = {"duration": {"steps": 2}, "optimizer": {"lr": 2e-2}, "batch": {"per_device": 4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    texts.encoder(path / "bert", num_hidden_layers=1)
    for side in ("left", "right"):
        texts.decoder(path / f"qwen-{side}", padding_side=side, num_hidden_layers=1)
    near = {"global_attn_every_n_layers": 2, "local_attention": 4, "initializer_cutoff_factor": 20.0}
    special = {f"{name}_token_id": texts.SPECIAL.index(word) for name, word in (("cls", "[CLS]"), ("sep", "[SEP]"))}
    texts.encoder(path / "modern", "ModernBertModel", **near, **special)
    texts.encoder(path / "roberta", "RobertaModel", num_hidden_layers=1)
    texts.pairs(path / "train.jsonl")
    return path


def run(ranks: RankPool, folder: Path, name: str, start: str, *, world: int = 1, **sections: Any) -> Path:
    """A run of two steps; gives its folder."""
    settings = {"path": str(folder / start), **sections.pop("model", {})}
    ranks.run(train, texts.recipe(folder, name=name, model=settings, **SHORT | sections), world=world)
    return folder / "runs" / name


@torch.no_grad()
def vectors(model: Any, tokenizer: Any, pooling: str, *, prompt: str = "", unit: bool = True) -> torch.Tensor:
    """One text at a time, so that nothing is padded."""
    model.eval()
    rows = [tokenizer(prompt + text)["input_ids"] for text in TEXTS]
    found = [POOL[pooling](model(input_ids=torch.tensor([row])).last_hidden_state[0]) for row in rows]
    return normalize(torch.stack(found), dim=-1) if unit else torch.stack(found)


def trained(run: Path, start: Path) -> Any:
    """The backbone by Transformers, with the tensors of the last checkpoint."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(start)
    saved = open_tensors(run / "last").section("model")
    found = {name: saved.whole(name) for name in saved.names() if not name.startswith("learned_by_objective")}
    left = model.load_state_dict(found, strict=False)
    assert left.unexpected_keys == []
    assert all(name.startswith("pooler.") for name in left.missing_keys), left.missing_keys
    return model


def load(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def encoded(folder: Path, **settings: Any) -> torch.Tensor:
    """All texts at once, padded as the exported tokenizer does it."""
    return load(folder).encode(TEXTS, convert_to_tensor=True, **settings)  # type: ignore[no-any-return]


def export(*words: Any) -> None:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("model", "pooling", "ends"),
    [
        ("bert", "mean", True),
        ("bert", "cls", True),
        ("bert", "last", True),
        ("qwen-left", "last", False),
        ("qwen-left", "mean", False),
        ("qwen-right", "last", False),
    ],
)
def test_encodes_as_trained(ranks: RankPool, folder: Path, model: str, pooling: str, ends: bool) -> None:
    out = run(
        ranks, folder, f"{model}-{pooling}", model, world=2 if pooling == "mean" else 1, model={"pooling": pooling}
    )
    expected = vectors(trained(out, folder / model), texts.tokenizer(ends=ends), pooling)
    assert not torch.allclose(
        expected, vectors(untrained(folder / model), texts.tokenizer(ends=ends), pooling), atol=1e-2
    )
    assert_near(encoded(out / "model"), expected)


def untrained(folder: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder)


def varlen_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, *_: Any, window_size: Any, **settings: Any
) -> torch.Tensor:
    """What torch's variable-length kernel does, one text after the other; the kernel needs a GPU."""
    found = torch.empty_like(q)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        apart = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = (window_size[0] < 0) | (apart <= window_size[0])
        seen = seen & ((window_size[1] < 0) | (-apart <= window_size[1]))
        query, key, value = (part[start:stop].transpose(0, 1) for part in (q, k, v))
        scale = settings["scale"]
        out = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
        found[start:stop] = out.transpose(0, 1)
    return found


@pytest.mark.parametrize("pooling", POOL)
@pytest.mark.parametrize("start", only_first(["bert", "qwen-left", "modern"]))
def test_rows_are_pooled_as_single_texts_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: str, pooling: str
) -> None:
    """By a mask, and by a kernel that is given bounds; packed and padded."""
    from fullshard.families.embedding.embedder.embed import bind
    from fullshard.kernels import varlen_attention

    monkeypatch.setattr(varlen_attention, "varlen_attn", varlen_on_cpu)
    tokenizer, model = texts.tokenizer(ends=start != "qwen-left"), untrained(folder / start).eval()
    model.config.use_cache = False
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    lengths, count = np.array([len(row) for row in rows]), len(rows)
    tokens, marks = torch.tensor(sum(rows, [])), torch.zeros(count)
    step = Texts(tokens, lengths, np.array([count]), [count], marks, marks[:1], marks[:1] == 0)
    for unit in (True, False):
        model.set_attn_implementation("sdpa")
        model.takes_bounds = False
        bind(model, pooling=pooling, normalize=unit)
        expected = vectors(model, tokenizer, pooling, unit=unit)
        for kernel in ("sdpa", varlen_attention.register()):
            model.set_attn_implementation(kernel)
            model.takes_bounds = kernel != "sdpa"
            for packed in (True, False):
                given = inputs(step, Chunk(np.arange(count)[::-1]), packed=packed, pad=0)
                with torch.no_grad():
                    assert_near(model.embed(**given)[0].flip(0), expected)


@pytest.fixture(scope="module")
def prompted(ranks: RankPool, folder: Path) -> Path:
    """Prompts, and a learned temperature; on two ranks."""
    data = {"encode": {"kind": "pairs", "prompts": PROMPTS}}
    objective = {"loss": {"kind": "infonce", "learn_temperature": True}}
    return run(ranks, folder, "prompted", "bert", world=2, data=data, objective=objective)


def test_prompts_of_the_run_are_those_of_the_model(folder: Path, prompted: Path) -> None:
    model = trained(prompted, folder / "bert")
    for name, prompt in PROMPTS.items():
        expected = vectors(model, texts.tokenizer(), "mean", prompt=prompt)
        assert_near(encoded(prompted / "model", prompt_name=name), expected)
    assert_near(encoded(prompted / "model"), vectors(model, texts.tokenizer(), "mean"))


def test_a_checkpoint_is_exported_with_prompts_and_without_the_temperature(
    folder: Path, prompted: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file
    from transformers import BertModel

    saved = open_tensors(prompted / "last").section("model")
    assert "learned_by_objective.moved" in saved.names()
    export(prompted, tmp_path / "out")
    expected = vectors(trained(prompted, folder / "bert"), texts.tokenizer(), "mean", prompt=PROMPTS["query"])
    assert_near(encoded(tmp_path / "out", prompt_name="query"), expected)
    names = set(BertModel.from_pretrained(folder / "bert").state_dict())
    for out in (tmp_path / "out", prompted / "model"):
        assert set(load_file(out / "model.safetensors")) == names
    export(prompted, tmp_path / "all.safetensors", "--as", "state")
    assert set(load_file(tmp_path / "all.safetensors")) == names


@pytest.fixture(scope="module")
def adapted(ranks: RankPool, folder: Path) -> Path:
    data = {"encode": {"kind": "pairs", "prompts": PROMPTS}}
    model = {"lora": {"r": 3, "alpha": 9}, "pooling": "cls", "normalize": False}
    objective = {"loss": {"kind": "sigmoid"}}
    return run(ranks, folder, "adapted", "bert", world=2, data=data, model=model, objective=objective)


@pytest.fixture(scope="module")
def by_peft(folder: Path, adapted: Path) -> dict[str, torch.Tensor]:
    """Vectors of the adapted model by peft alone, for each prompt."""
    from peft import LoraConfig, get_peft_model

    targets = r"encoder\..*(query|key|value|dense)"
    model = get_peft_model(untrained(folder / "bert"), LoraConfig(r=3, lora_alpha=9, target_modules=targets))
    saved = open_tensors(adapted / "last").section("model")
    names = {name for name in saved.names() if ".lora_" in name}
    left = model.base_model.model.load_state_dict({name: saved.whole(name) for name in names}, strict=False)
    assert left.unexpected_keys == []
    assert [name for name in left.missing_keys if ".lora_" in name] == []
    prompts = {"none": "", **PROMPTS}
    return {n: vectors(model, texts.tokenizer(), "cls", prompt=p, unit=False) for n, p in prompts.items()}


@pytest.mark.parametrize("form", ["at the end", "adapter", "merged"])
def test_adapters(adapted: Path, by_peft: dict[str, torch.Tensor], tmp_path: Path, form: str) -> None:
    out = adapted / "model"
    if form != "at the end":
        out = tmp_path / "out"
        export(adapted, out, "--as", form)
    assert (out / "adapter_config.json").is_file() == (form != "merged")
    assert_near(encoded(out), by_peft["none"])
    assert_near(encoded(out, prompt_name="query"), by_peft["query"])
    assert_near(encoded(out, prompt_name="document"), by_peft["document"])
    assert by_peft["none"].norm(dim=-1).max() > 1.1, "not normalised"
    assert card(out).data.library_name == "sentence-transformers"
    assert type(run_code(out)["model"]).__name__ == "SentenceTransformer"


def sentence_folder(folder: Path, backbone: Path, inside: str, *, prompts: dict[str, str]) -> Path:
    """What sentence-transformers saved in its early days: the backbone in a folder of its own."""
    shutil.copytree(backbone, folder / inside)
    kinds = {inside: "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    contents: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": 16,
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
        },
        f"{inside}/sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": prompts},
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_folder_of_sentence_transformers_is_trained_as_it_is(ranks: RankPool, folder: Path) -> None:
    """Its backbone is in a subfolder; pooling, missing normalisation, case and prompts are its own, and stay. Texts are
    cut where the run cut them."""
    prompts = {"query": "query : ", "passage": "doc : ", "topic": "ban : "}
    start = sentence_folder(folder / "sentence", folder / "bert", "0_Transformer", prompts=prompts)
    before = load(start)
    out = run(ranks, folder, "subfolder", "sentence", data={"sequence_length": 10})
    after = load(out / "model")
    assert after.prompts == {**prompts, "document": "doc : "}
    assert (after.max_seq_length, after[1].pooling_mode, len(after)) == (10, "cls", 2)
    model = trained(out, start / "0_Transformer")
    tokenizer = texts.tokenizer()
    tokens = tokenizer("doc : " + TEXTS[3], truncation=True, max_length=10)["input_ids"]
    expected = model.eval()(input_ids=torch.tensor([tokens])).last_hidden_state[0, 0]
    found = [m.encode(TEXTS[3].upper(), prompt_name="passage", convert_to_tensor=True) for m in (before, after)]
    assert_near(found[1], expected.detach())
    assert not torch.allclose(found[0], expected, atol=1e-2)


def test_what_sentence_transformers_saves_today_comes_back(ranks: RankPool, folder: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    modules = [Transformer(str(folder / "bert"), max_seq_length=20), Pooling(16, "lasttoken"), Normalize()]
    SentenceTransformer(modules=modules, prompts={"query": "query : "}, device="cpu").save(str(folder / "today"))
    out = run(ranks, folder, "today", "today")
    after = load(out / "model")
    assert (after.max_seq_length, after[1].pooling_mode, len(after)) == (24, "lasttoken", 3), "20 before it was trained"
    assert after.prompts == {"query": "query : ", "document": ""}
    assert_near(encoded(out / "model"), vectors(trained(out, folder / "today"), texts.tokenizer(), "last"))


HEADS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {},
    "BertForSequenceClassification": {},
    "RobertaForMaskedLM": {},
    "DistilBertForMaskedLM": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
    "tied": {"tied": True},
    "untied": {"tied": False},
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_model_with_a_head_starts_with_its_backbone(tmp_path: Path, kind: str) -> None:
    """Exactly its values; a pooler, which no embedding passes, may be new."""
    from fullshard.config.part import decode
    from fullshard.contracts.model import Family

    if "tied" in kind:
        texts.decoder(tmp_path / "model", **HEADS[kind])
    else:
        texts.encoder(tmp_path / "model", kind, **HEADS[kind])
    family = decode(Family, {"kind": "sentence_transformer", "path": str(tmp_path / "model")}, where="model")
    module = family.build(processor=None)
    weights = family.weights(module)
    assert weights
    expected = untrained(tmp_path / "model").state_dict()
    missing = expected.keys() - weights.names()
    assert all(name.startswith("pooler.") for name in missing), missing
    assert weights.names() <= expected.keys()
    for name in weights.names():
        assert torch.equal(weights.read(name, 0, len(expected[name])), expected[name]), name


def test_packed_equals_padded_where_positions_begin_elsewhere(ranks: RankPool, folder: Path) -> None:
    """RoBERTa counts positions from the number after its padding token."""
    runs = {}
    for pack in (True, False):
        out = run(ranks, folder, f"roberta-{pack}", "roberta", data={"pack": pack}, optimizer={"lr": 1e-3})
        runs[pack] = curve(read(out / FILE), "loss", "padding")
    losses = torch.tensor([[loss for loss, _ in runs[pack]] for pack in (True, False)]).double()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    assert runs[True][0][1] < 0.15 < 0.3 < runs[False][0][1], "rows were shared, and were not"
    expected = vectors(trained(out, folder / "roberta"), texts.tokenizer(), "mean")
    assert_near(encoded(out / "model"), expected)


def test_another_run_starts_from_a_checkpoint_or_an_export(
    ranks: RankPool, folder: Path, prompted: Path, adapted: Path
) -> None:
    """With the weights and the prompts of the first; a learned temperature starts anew."""
    first = {}
    for name, model in {
        "checkpoint": {"path": None, "from": str(prompted)},
        "export": {"path": str(prompted / "model")},
        "adapters": {"path": None, "from": str(adapted)},
        "adapter folder": {"path": str(adapted / "model")},
    }.items():
        settings = texts.recipe(folder, name=f"on-{name.replace(' ', '-')}", model=model, **SHORT)
        settings["model"] = {key: value for key, value in settings["model"].items() if value is not None}
        first[name] = curve(ranks.run(train, settings, world=1)[0], "loss")
    assert first["checkpoint"] == first["export"]
    assert first["adapters"] == first["adapter folder"]
    for name in ("on-checkpoint", "on-adapters"):
        after = load(folder / "runs" / name / "model")
        assert after.prompts == PROMPTS
        assert after[1].pooling_mode == ("cls" if name == "on-adapters" else "mean")
