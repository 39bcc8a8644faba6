"""One Dense module, as sentence-transformers stores it: the same numbers, the same files again, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.errors import CheckpointError, RecipeError
from fullshard.families.embedding.embedder.dense import AfterPooling, dense_weights, write_layers
from fullshard.families.embedding.embedder.sentence_folder import (
    ACTIVATIONS,
    check_widths,
    read_sentence,
    write_sentence,
)
from tests.near import assert_near

PLACES = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
DENSE: dict[str, Any] = {"in_features": 5, "out_features": 6, "bias": True}


def sentence_folder(folder: Path, places: list[str], *, first: Any = DENSE, second: Any = DENSE) -> Path:
    """Settings alone."""
    modules = [
        {"path": place, "type": f"sentence_transformers.models.{place[2:] or 'Transformer'}"} for place in places
    ]
    contents = {
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "2_Dense/config.json": first,
        "3_Dense/config.json": second,
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_theirs_and_survives_export(activation: str, tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense

    for bias, residual, width in ((True, False, 6), (False, True, 6), (True, True, 5)):
        theirs = Dense(5, width, bias=bias, activation_function=getattr(torch.nn, activation)(), use_residual=residual)
        start = sentence_folder(tmp_path / f"{bias}-{residual}-{width}", PLACES[:3])
        theirs.save(str(start / "2_Dense"))
        found = read_sentence(start)
        assert found is not None
        weights, module = dense_weights(found.dense), AfterPooling(found.dense)
        tensors = {name: weights.read(name, 0, width) for name in weights.names()}
        module.load_state_dict({n.removeprefix("after_pooling."): t for n, t in tensors.items()}, assign=True)
        given = torch.randn(4, 5)
        right = theirs({"sentence_embedding": given})["sentence_embedding"]
        assert_near(module(given), right)
        (tmp_path / "again").mkdir(exist_ok=True)
        rest: dict[str, Any] = {"pooling": "mean", "normalize": True, "prompts": {}, "template": {}, "longest": 9}
        folders = write_sentence(tmp_path / "again", width=5, dense=found.dense, **rest)
        write_layers(folders, found.dense, tensors, None)
        again = Dense.load(str(tmp_path / "again" / "2_Dense"))
        assert again.get_config_dict() == theirs.get_config_dict()
        assert torch.equal(again({"sentence_embedding": given})["sentence_embedding"], right)
        assert module.to(torch.bfloat16)(given).dtype == torch.float32


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another activation": (
        {"activation_function": "my_lab.Swish"},
        ["2_Dense/config.json", "activation_function = 'my_lab.Swish'", "torch.nn.modules.activation.Tanh"],
    ),
    "an activation that is not known here": (
        {"activation_function": "torch.nn.modules.activation.PReLU"},
        ["activation_function = 'torch.nn.modules.activation.PReLU'"],
    ),
    "an input of its own": (
        {"module_input_name": "token_embeddings"},
        ["module_input_name = 'token_embeddings'", "allowed: 'sentence_embedding'"],
    ),
    "a setting of tomorrow": ({"dropout": 0.1}, ["2_Dense/config.json has dropout = 0.1"]),
    "no width": ({"out_features": None}, ["in_features, out_features = 5, None"]),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_that_cannot_be_trained(tmp_path: Path, name: str) -> None:
    changes, words = BAD[name]
    with pytest.raises(RecipeError) as caught:
        read_sentence(sentence_folder(tmp_path, PLACES[:3], first=DENSE | changes))
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_widths_that_do_not_fit(tmp_path: Path) -> None:
    found = read_sentence(sentence_folder(tmp_path, PLACES, second=DENSE | {"in_features": 6}))
    assert found is not None
    check_widths(found.dense, 5)
    with pytest.raises(RecipeError, match=r"2_Dense/config.json has in_features = 5, but its input has width 7"):
        check_widths(found.dense, 7)
    found = read_sentence(sentence_folder(tmp_path, PLACES))
    assert found is not None
    with pytest.raises(RecipeError, match=r"3_Dense/config.json has in_features = 5, but its input has width 6"):
        check_widths(found.dense, 5)


@pytest.mark.parametrize("order", ["01423", "01243", "02134", "012344", "104", "04", "0112", "0"])
def test_modules_in_another_order(tmp_path: Path, order: str) -> None:
    """A Normalize before a Dense would else be moved behind it in silence."""
    with pytest.raises(RecipeError, match="Pooling, any number of Dense, at most one Normalize"):
        read_sentence(sentence_folder(tmp_path, [PLACES[int(place)] for place in order]))


@pytest.mark.parametrize("order", ["01", "014", "012", "0123", "01234", "0124"])
def test_modules_in_this_order(tmp_path: Path, order: str) -> None:
    found = read_sentence(sentence_folder(tmp_path, [PLACES[int(place)] for place in order]))
    assert found is not None
    assert [layer.folder.name[0] for layer in found.dense] == [place for place in order if place in "23"]
    assert found.normalize == ("4" in order)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    found = read_sentence(sentence_folder(tmp_path, PLACES[:3]))
    assert found is not None
    with pytest.raises(CheckpointError, match=r"2_Dense holds neither model.safetensors nor pytorch_model.bin"):
        dense_weights(found.dense)
    tensors = {"linear.weight": torch.zeros(5, 6), "residual.weight": torch.zeros(6, 5)}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        dense_weights(found.dense)
    words = ["1 missing: linear.bias", "1 not part of the model: residual.weight", "linear.weight [5, 6]", "[6, 5]"]
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
