"""Dense modules after pooling: trained, saved, resumed, searched with and exported, against sentence-transformers' own
modules and a loss that is written out here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import open_tensors
from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.contracts.objective import Objective
from fullshard.errors import CheckpointError, RecipeError
from fullshard.families.embedding.batching.chunks import Chunk, Texts, inputs
from tests.families.embedding import cases, texts
from tests.families.embedding.test_export import TEXTS, encoded, export, load
from tests.families.embedding.test_mine import mine, plainly
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import curve, train

NAMES = {  # in a SentenceTransformer, and here
    "2.linear.weight": "after_pooling.0.weight",
    "2.linear.bias": "after_pooling.0.bias",
    "3.linear.weight": "after_pooling.1.weight",
    "3.residual.weight": "after_pooling.1.residual",
}
DENSE = set(NAMES.values())
SHORT: dict[str, Any] = {"duration": {"steps": 2}, "optimizer": {"lr": 2e-2}, "batch": {"per_device": 4}}
PLAIN = {"kind": "infonce", "temperature": 0.2, "mask_labels": False, "mask_equal": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 numbers to 24 to 8, each of length 1; saved by sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    path = tmp_path_factory.mktemp("dense")
    texts.encoder(path / "bert", num_hidden_layers=1, vocab_size=cases.VOCABULARY)
    torch.manual_seed(9)
    layers = [Dense(16, 24), Dense(24, 8, bias=False, activation_function=None, use_residual=True)]
    modules = [Transformer(str(path / "bert")), Pooling(16, "mean"), *layers, Normalize()]
    SentenceTransformer(modules=modules, prompts={"query": "query : "}, device="cpu").save(str(path / "model"))
    texts.pairs(path / "train.jsonl")
    texts.pairs(path / "held_out.jsonl", records=11, seed=4)
    return path


def run(ranks: RankPool, folder: Path, name: str, *, world: int = 2, **sections: Any) -> Path:
    ranks.run(train, texts.recipe(folder, name=name, **SHORT | sections), world=world)
    return folder / "runs" / name


def family(path: Path | None = None, **settings: Any) -> Family:
    named = {"path": str(path)} if path is not None else {}
    return decode(Family, {"kind": "sentence_transformer", **named, **settings}, where="model")


def dense_files(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = {name: load_file(folder / name / "model.safetensors") for name in ("2_Dense", "3_Dense")}
    return {f"{place[0]}.{name}": tensor for place, tensors in found.items() for name, tensor in tensors.items()}


def started(family: Family) -> Any:
    """The module as it is built, with the values that it starts with, in one process."""
    module = family.build(processor=None)
    weights = family.weights(module)
    assert weights is not None
    for name, parameter in list(module.named_parameters()):
        owner, _, key = name.rpartition(".")
        stored = weights.read(name, 0, len(parameter)) if name in weights.names() else torch.zeros(parameter.shape)
        setattr(module.get_submodule(owner), key, torch.nn.Parameter(stored.float()))
    return module.eval()


@torch.no_grad()
def embedded(family: Family, *, packed: bool, **settings: Any) -> torch.Tensor:
    rows = [texts.tokenizer()(text)["input_ids"] for text in TEXTS]
    count, tokens = len(rows), torch.tensor(sum(rows, []))
    marks = torch.zeros(count)
    step = Texts(tokens, np.array([len(row) for row in rows]), np.array([count]), [count], marks, marks[:1], marks > 0)
    given = inputs(step, Chunk(np.arange(count)), packed=packed, pad=0)
    return started(family).embed(**given, **settings)[0]  # type: ignore[no-any-return]


def edited(source: Path, target: Path, place: str, **changes: Any) -> Path:
    """A copy with other settings of one Dense module; None: the key is taken out."""
    shutil.copytree(source, target)
    path = target / place / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return target


def test_untrained_it_embeds_as_sentence_transformers_does(folder: Path) -> None:
    for packed in (True, False):
        found = embedded(family(folder / "model"), packed=packed)
        assert_near(found, encoded(folder / "model"))


def test_folders_of_old_versions(folder: Path, tmp_path: Path) -> None:
    """Pickled tensors, and settings without the keys of later versions; without an activation it is Tanh."""
    old = edited(
        *(folder / "model", tmp_path / "old", "2_Dense"),
        **dict.fromkeys(("module_input_name", "module_output_name", "activation_function")),
    )
    tensors = {n[2:]: t for n, t in dense_files(old).items() if n.startswith("2.")}
    torch.save(tensors, old / "2_Dense" / "pytorch_model.bin")
    (old / "2_Dense" / "model.safetensors").unlink()
    found = embedded(family(old), packed=True)
    assert_near(found, encoded(folder / "model"))


def one_step(folder: Path, settings: list[dict[str, Any]], per_device: int) -> list[tuple[float, Any]]:
    """Loss and gradients of one sharded step for each objective. Sent to the ranks by name."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for each in settings:
        objective: Any = decode(Objective, {"kind": "contrastive", "loss": PLAIN, **each}, where="objective")
        sharded, _ = cases.build({"kind": "sentence_transformer", "path": str(folder)}, objective, packed=True)
        found.append(cases.step(sharded, objective, rank, world, per_device))
    return found


def plain_step(folder: Path, dims: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """One process and the modules of sentence-transformers: every query against all positives and negatives."""
    model = load(folder).train()
    columns: list[list[torch.Tensor]] = [[], [], []]
    for sample in cases.samples():
        rows = torch.from_numpy(sample["tokens"]).long().split(sample["lengths"].tolist())
        for place, row in enumerate(rows):
            found = model({"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]})["sentence_embedding"]
            columns[min(place, 2)].append(found[0])
    queries, documents = torch.stack(columns[0]), torch.stack(columns[1] + columns[2])
    loss = torch.zeros(())
    for dim in dims:
        scores = normalize(queries[:, :dim], dim=-1) @ normalize(documents[:, :dim], dim=-1).T / PLAIN["temperature"]
        loss = loss + cross_entropy(scores, torch.arange(len(queries)))
    loss.backward()
    named = {NAMES.get(n, n.partition("model.")[2]): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), {name: gradient for name, gradient in named.items() if "pooler." not in name}


@pytest.mark.parametrize(("world", "per_device"), [(1, 5), (2, 3), (2, 1)])
def test_gradients_are_those_of_one_plain_process(ranks: RankPool, folder: Path, world: int, per_device: int) -> None:
    """Without a cache in all but the last, and with one; at some Matryoshka dimensions, and whole."""
    ways: list[dict[str, Any]] = [{}, {"cache": 3}, {"cache": 3, "matryoshka": [8, 4]}]
    right = [plain_step(folder / "model", way.get("matryoshka") or [8]) for way in ways]
    for found in ranks.run(one_step, folder / "model", ways, per_device, world=world):
        for way, (value, gradients), (loss, expected) in zip(ways, found, right, strict=True):
            assert value == pytest.approx(loss, rel=1e-6), way
            assert gradients.keys() == expected.keys() > DENSE
            largest = max(float(gradient.abs().max()) for gradient in expected.values())
            for name, gradient in expected.items():
                # The bias of keys has no gradient but what fp32 rounds, and that follows from the size of the others.
                assert float(gradient.abs().max()) > 1e-6 * largest or "key.bias" in name, name
                assert float((gradients[name] - gradient).abs().max()) < 1e-5 * largest, (way, name)


def rebuilt(run: Path, start: Path, *, scale: float = 0.0) -> Any:
    """The model that the run started with, by sentence-transformers, given the tensors of the last checkpoint; adapters
    are added to their weights, times `scale`."""
    model = load(start)
    saved = open_tensors(run / "last").section("model")
    ours = {NAMES.get(name, name.partition("model.")[2]): p for name, p in model.named_parameters()}
    plain = {name for name in saved.names() if ".lora_" not in name}
    assert plain <= ours.keys()
    with torch.no_grad():
        for name in plain:
            ours[name].copy_(saved.whole(name))
        for name in saved.names():
            if ".lora_A." in name:
                up = saved.whole(name.replace(".lora_A.", ".lora_B."))
                ours[f"{name.partition('.lora_A.')[0]}.weight"].add_(up @ saved.whole(name), alpha=scale)
    return model


def vectors(model: Any) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def trained(ranks: RankPool, folder: Path) -> Path:
    """Two ranks, several micro-batches, searched at two dimensions."""
    return run(
        *(ranks, folder, "trained"),
        data={"validation": str(folder / "held_out.jsonl")},
        objective={"matryoshka": [8, 4]},
        evaluate={"parts": [{"kind": "retrieval", "at": [3]}]},
        batch={"per_device": 2, "global": 8},
    )


def test_the_export_encodes_as_trained(folder: Path, trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    expected = vectors(rebuilt(trained, folder / "model"))
    assert not torch.allclose(expected, encoded(folder / "model"), atol=1e-2)
    export(trained, tmp_path / "hf")
    before, backbone = load(folder / "model"), load_file(folder / "bert" / "model.safetensors").keys()
    for out in (trained / "model", tmp_path / "hf"):
        assert_near(encoded(out), expected)
        after = load(out)
        assert [type(part).__name__ for part in after] == ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
        assert [after[at].get_config_dict() for at in (2, 3)] == [before[at].get_config_dict() for at in (2, 3)]
        assert (after[1].embedding_dimension, after.get_embedding_dimension()) == (16, 8)
        assert load_file(out / "model.safetensors").keys() == backbone
        start, end = dense_files(folder / "model"), dense_files(out)
        assert not any(torch.allclose(start[name], end[name], atol=1e-3) for name in NAMES), "each was trained"
        assert after.prompts == {"query": "query : ", "document": ""}


def test_the_search_is_that_of_the_exported_model(folder: Path, trained: Path) -> None:
    from fullshard.log.metrics import FILE, read

    numbers = [record for record in read(trained / FILE) if record["kind"] == "validation"][-1]
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    documents = list(dict.fromkeys(t for row in rows for t in [row["positive"], *row.get("negatives", [])]))
    model = load(trained / "model")
    for dim, suffix in ((8, ""), (4, "/4")):
        found = [
            model.encode(lines, prompt=prompt, convert_to_tensor=True)[:, :dim]
            for lines, prompt in (([row["query"] for row in rows], "query : "), (documents, ""))
        ]
        best = (normalize(found[0], dim=-1) @ normalize(found[1], dim=-1).T).topk(3).indices
        hits = [documents.index(row["positive"]) in near for row, near in zip(rows, best.tolist(), strict=True)]
        assert numbers[f"recall@3{suffix}"] == pytest.approx(sum(hits) / len(rows))


def test_another_run_starts_with_a_checkpoint_an_export_or_a_state(folder: Path, trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "all.safetensors", "--as", "state")
    expected = vectors(rebuilt(trained, folder / "model"))
    state = {"from": str(tmp_path / "all.safetensors")}
    for model in (family(**{"from": str(trained)}), family(trained / "model"), family(folder / "model", **state)):
        assert_near(embedded(model, packed=True), expected)


@pytest.mark.parametrize("lora", [None, 2])
def test_a_resumed_run_equals_the_straight_one_bit_by_bit(ranks: RankPool, folder: Path, lora: int | None) -> None:
    sections: dict[str, Any] = {
        "model": {"lora": lora},
        "objective": {"matryoshka": [8, 4], "cache": 3},
        "data": {"shuffle": True},
        "duration": {"steps": 4},
        "checkpoint": {"every_steps": 2, "keep": None},
    }
    straight, resumed = (texts.recipe(folder, name=f"{end}-{lora}", **sections) for end in ("straight", "resumed"))
    expected = curve(ranks.run(train, straight, world=2)[0], "step", "loss", "grad_norm")
    start = str(folder / "runs" / f"straight-{lora}" / "checkpoint-2")
    assert curve(ranks.run(train, resumed, resume=start, world=2)[0], "step", "loss", "grad_norm") == expected[2:]
    ends = [open_tensors(folder / "runs" / f"{end}-{lora}" / files.name_of(4)) for end in ("straight", "resumed")]
    assert ends[0].names() == ends[1].names()
    held = {name.removeprefix("model/") for name in ends[0].names()}
    assert held & DENSE == (set() if lora else DENSE)
    for name in ends[0].names():
        assert torch.equal(ends[0].whole(name), ends[1].whole(name)), name


def test_half_precision_and_other_layouts_stay_close(ranks: RankPool, folder: Path) -> None:
    """The layers compute in bf16 with the rest, and fp32 comes out."""
    ways: dict[str, Any] = {"one": {}, "two": {"sharding": {"strategy": "none"}}, "bf16": {"precision": "bf16"}}
    losses = {}
    for name, way in ways.items():
        recipe = texts.recipe(folder, name=f"near-{name}", objective={"loss": PLAIN}, **SHORT | way)
        losses[name] = torch.tensor(curve(ranks.run(train, recipe, world=1 if name == "one" else 2)[0], "loss"))
    torch.testing.assert_close(losses["two"], losses["one"], rtol=1e-6, atol=0)
    assert 1e-6 < float((losses["bf16"] / losses["one"] - 1).abs().max()) < 0.03


@pytest.fixture(scope="module")
def adapted(ranks: RankPool, folder: Path) -> Path:
    return run(ranks, folder, "adapted", model={"lora": {"r": 3, "alpha": 9}}, objective={"cache": 3})


@pytest.mark.parametrize("form", ["at the end", "adapter", "merged"])
def test_adapters_leave_the_layers_as_they_are(folder: Path, adapted: Path, tmp_path: Path, form: str) -> None:
    out = adapted / "model"
    if form != "at the end":
        out = tmp_path / "out"
        export(adapted, out, "--as", form)
    assert (out / "adapter_config.json").is_file() == (form != "merged")
    saved = open_tensors(adapted / "last").section("model").names()
    assert all(".lora_" in name and "after_pooling" not in name for name in saved)
    start, end = dense_files(folder / "model"), dense_files(out)
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name], end[name]) for name in start)
    expected = vectors(rebuilt(adapted, folder / "model", scale=3.0))
    assert not torch.allclose(expected, encoded(folder / "model"), atol=1e-2)
    assert_near(encoded(out), expected)


def test_adapters_on_a_trained_model_keep_its_layers(
    ranks: RankPool, folder: Path, trained: Path, tmp_path: Path
) -> None:
    """The layers are those of the checkpoint that the run began with, and no longer those of the folder."""
    settings = {"path": str(folder / "model"), "from": str(trained), "lora": 2}
    out = run(ranks, folder, "adapted-later", model=settings)
    export(out, tmp_path / "adapter", "--as", "adapter")
    right = dense_files(trained / "model")
    for place in (out / "model", tmp_path / "adapter"):
        found = dense_files(place)
        assert all(torch.equal(found[name], right[name]) for name in right)


def test_an_adapter_brings_its_own_layers(folder: Path, adapted: Path, tmp_path: Path) -> None:
    """sentence-transformers trains them beside an adapter: those in its folder count, not those of the base."""
    from safetensors.torch import save_file

    expected = vectors(rebuilt(adapted, folder / "model", scale=3.0))
    shutil.copytree(adapted / "model", tmp_path / "adapter")
    for model in (family(**{"from": str(adapted)}), family(tmp_path / "adapter")):
        assert_near(embedded(model, packed=True), expected)
    tensors = {n[2:]: t * 2 for n, t in dense_files(adapted / "model").items() if n.startswith("3.")}
    tensors["residual.weight"] *= -1
    save_file(tensors, tmp_path / "adapter" / "3_Dense" / "model.safetensors")
    found = embedded(family(tmp_path / "adapter"), packed=True)
    assert_near(found, encoded(tmp_path / "adapter"))
    assert not torch.allclose(found, expected, atol=1e-2)


def test_frozen_layers_are_not_rounded_with_a_backbone_in_half_precision(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    shutil.copytree(folder / "model", tmp_path / "model")
    AutoModel.from_pretrained(folder / "bert").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = family(tmp_path / "model", lora=2)
    module = model.build(processor=None)
    kept = {name: model.storage_dtype(name, p) for name, p in module.named_parameters() if not p.requires_grad}
    assert {name for name, dtype in kept.items() if dtype == torch.float32} == DENSE
    assert set(kept.values()) == {torch.float32, torch.bfloat16}
    assert all(model.exports(module, name) for name in DENSE), "the export has them, although they are frozen"


def test_one_layer_can_be_frozen(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    out = run(ranks, folder, "frozen", world=1, model={"freeze": ["after_pooling.0.*"]})
    saved = open_tensors(out / "last").section("model").names()
    assert saved & DENSE == {name for name in DENSE if ".1." in name}
    export(out, tmp_path / "hf")
    expected = vectors(rebuilt(out, folder / "model"))
    for place in (out / "model", tmp_path / "hf"):
        start, end = dense_files(folder / "model"), dense_files(place)
        assert {name for name in start if torch.equal(start[name], end[name])} == {"2.linear.weight", "2.linear.bias"}
        assert_near(encoded(place), expected)
    assert_near(embedded(family(**{"from": str(out)}), packed=True), expected)


def test_mines_what_the_model_itself_finds(folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    mine(folder / "model", folder / "train.jsonl", tmp_path / "out.jsonl", "--negatives", 2, "--ranks", "2:6")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    right, *_ = plainly(folder / "model", rows, [], negatives=2, ranks=(2, 6), prompts=("query : ", ""))
    assert [row["negatives"] for row in written] == right


def test_an_export_without_the_trained_layers_is_refused(folder: Path, tmp_path: Path) -> None:
    model = family(folder / "model")
    module = model.build(processor=None)
    tensors = ((name, torch.zeros(p.shape)) for name, p in module.named_parameters() if name not in DENSE)
    with pytest.raises(CheckpointError, match="incomplete, after_pooling.0.bias, after_pooling.0.weight"):
        model.export(module, tensors, tmp_path / "out", processor=None)


def test_tokens_are_not_compared_past_layers_after_pooling(folder: Path) -> None:
    with pytest.raises(RecipeError, match="Dense modules come after it, so they would not be trained"):
        embedded(family(folder / "model"), packed=True, tokens=True)


@pytest.mark.parametrize("place", ["matryoshka", "retrieval"])
def test_dimensions_are_those_of_the_last_layer(folder: Path, tmp_path: Path, place: str) -> None:
    from fullshard.contracts.evaluation import Evaluation

    wide = edited(folder / "model", tmp_path / "wide", "3_Dense", in_features=24, out_features=40)
    for path, width in ((folder / "model", 8), (wide, 40), (folder / "bert", 16)):
        module = family(path).build(processor=None)
        for dim in (width, width + 1):
            dims = {"matryoshka": [dim, 4]} if place == "matryoshka" else {}
            objective: Any = decode(Objective, {"kind": "contrastive", **dims}, where="objective")
            search: Any = decode(Evaluation, {"kind": "retrieval", "dims": [dim]}, where="evaluate")
            words = f"has {dim}, but the model's embeddings have {width} dimensions"
            refused = pytest.raises(RecipeError, match=words) if dim > width else contextlib.nullcontext()
            with refused:
                objective.extend(module) if place == "matryoshka" else search.check(objective, module, None)
