"""The Transformers family: its settings, what it builds, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.config.part import decode, plain
from fullshard.contracts.model import Family
from fullshard.errors import RecipeError, SetupError
from fullshard.families.language.models.hf import Hf
from tests.unit.hf.architectures import build


def section(value: Any) -> Hf:
    family = decode(Family, value, where="model")
    assert isinstance(family, Hf)
    return family


def test_short_forms() -> None:
    assert section("some/model") == Hf(path="some/model")
    full = section({"path": "m", "lora": 8, "tokenizer": "tok"})
    assert (full.lora and full.lora.r, full.lora and full.lora.alpha) == (8, 32)
    assert full.tokenizer
    assert full.tokenizer.path == "tok"
    assert section({"path": "m", "lora": True}).lora is not None
    trained = section({"architecture": "qwen3", "size": "tiny", "tokenizer": {"train": {"vocab_size": 400}}})
    assert trained.tokenizer
    assert trained.tokenizer.train
    assert trained.tokenizer.train.vocab_size == 400
    assert section(plain(full)) == full


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "exactly one of model.path"),
        ({"path": "m", "architecture": "llama"}, "model.path and model.architecture exclude each other"),
        ({"path": "m", "size": "1B"}, "model.path and model.size exclude each other"),
        ({"architecture": "llama"}, "give model.size"),
        ({"path": "m", "attention": "spda"}, r"did you mean 'sdpa'\?.*allowed: auto"),
        ({"path": "m", "lora": {"rank": 3}}, r"model.lora.rank is not a known key"),
        ({"path": "m", "tokenizer": {}}, "exactly one of tokenizer.path and tokenizer.train"),
        ({"path": "m", "pth": "x"}, r"model.pth is not a known key \(did you mean 'path'\?\)"),
    ],
)
def test_contradictions_are_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        section(value)


def test_model_from_goes_with_settings_of_a_lower_layer() -> None:
    from fullshard.commands.schema import schema
    from fullshard.config.merge import Settings
    from fullshard.recipe import Recipe

    settings = Settings(Family)
    settings.lay({"architecture": "llama", "size": "tiny"}, "preset")
    settings.lay({"from": "state.pt"}, "recipe")
    assert section(settings.values).start == "state.pt"
    settings.lay({"path": "adapter", "base": "model"}, "command line")
    assert settings.values == {"from": "state.pt", "path": "adapter", "base": "model"}, "no size, no architecture"
    found = section(settings.values)
    assert plain(found)["from"] == "state.pt"
    assert section(plain(found)) == found
    keys = next(kind for kind in schema(Recipe)["$defs"]["Family"]["anyOf"] if "tokenizer" in kind["properties"])
    assert "start" not in keys["properties"]
    assert "a fullshard checkpoint" in keys["properties"]["from"]["description"]


def test_unknown_architecture_and_size() -> None:
    with pytest.raises(RecipeError, match="did you mean 'mistral'"):
        Hf(architecture="mistrall", size="7B").build(processor=None)
    with pytest.raises(
        RecipeError, match=r"'1.7B' is not a known size of llama \(did you mean '.*'\?\). Known: tiny, 89M"
    ):
        Hf(architecture="llama", size="1.7B").build(processor=None)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "gpt_neox", "phi", "opt"])
def test_parameters_are_on_meta_and_buffers_are_real(architecture: str) -> None:
    module = Hf(architecture=architecture, size="tiny").build(processor=None)
    assert all(p.is_meta and p.dtype == torch.float32 for p in module.parameters())
    expected = dict(build(architecture).named_buffers())
    found = dict(module.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert torch.equal(buffer, expected[name]), name
    assert not module.config.use_cache  # type: ignore[union-attr]
    assert type(module) is type(build(architecture))


def test_ties_survive_the_meta_build() -> None:
    module: Any = Hf(architecture="gpt2", size="tiny").build(processor=None)
    assert module.lm_head.weight is module.transformer.wte.weight
    untied: Any = Hf(architecture="gpt2", size="tiny", overrides={"tie_word_embeddings": False}).build(processor=None)
    assert untied.lm_head.weight is not untied.transformer.wte.weight


def test_a_large_model_costs_no_memory_to_build() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = Hf(architecture="qwen3", size="8B").build(processor=None)
    assert sum(p.numel() for p in module.parameters()) > 8e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kB"


def test_lora_freezes_all_but_its_adapters() -> None:
    module = Hf(architecture="llama", size="tiny", lora={"r": 4}).build(processor=None)  # type: ignore[arg-type]
    trainable = {n for n, p in module.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 7 * 2, "two matrices for each of the seven linear layers of two blocks"
    assert all(".lora_" in n for n in trainable)
    assert not any("lm_head" in n for n in trainable)
    assert type(module).__name__ == "LlamaForCausalLM"


def test_lora_targets_by_name_and_pattern() -> None:
    named = Hf(architecture="llama", size="tiny", lora={"targets": ["q_proj"]}).build(processor=None)  # type: ignore[arg-type]
    assert {n.split(".")[4] for n, p in named.named_parameters() if p.requires_grad} == {"q_proj"}
    pattern = {"targets": r".*\.1\..*(q|v)_proj"}
    matched = Hf(architecture="llama", size="tiny", lora=pattern).build(processor=None)  # type: ignore[arg-type]
    assert {n.split(".")[2] for n, p in matched.named_parameters() if p.requires_grad} == {"1"}
    with pytest.raises(RecipeError, match=r"model.lora.targets = \['q_prj'\].*did you mean 'q_proj'.*Use all-linear"):
        Hf(architecture="llama", size="tiny", lora={"targets": ["q_prj"]}).build(processor=None)  # type: ignore[arg-type]


def test_freeze_patterns() -> None:
    module = Hf(architecture="llama", size="tiny", freeze=["model.embed_tokens.*", "*.norm.weight"]).build(
        processor=None
    )
    frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight", "model.norm.weight"}
    with pytest.raises(
        RecipeError,
        match=r"model.freeze\[0\] = 'model.embed_token.weight' matches no parameter .did you mean 'model.embed_tokens",
    ):
        Hf(architecture="llama", size="tiny", freeze=["model.embed_token.weight"]).build(processor=None)


class Tokens:
    """What a tokenizer is to the model: a length and three ids."""

    bos_token_id, eos_token_id, pad_token_id = None, 2, 1

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number


@pytest.mark.parametrize(
    ("resize", "tokens", "rows"),
    [(None, 1100, 1100), (None, 900, 1024), (True, 900, 900), (True, 1100, 1100), (False, 900, 1024)],
)
def test_embedding_rows_follow_the_tokenizer(resize: bool | None, tokens: int, rows: int, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    family = Hf(path=str(tmp_path), resize_embedding=resize)
    module: Any = family.build(processor=Tokens(tokens))
    assert module.get_input_embeddings().weight.shape[0] == module.get_output_embeddings().weight.shape[0] == rows
    weights = family.weights(module)
    assert weights is not None
    assert weights.read("lm_head.weight", rows - 3, rows).shape == (3, 128)


def test_a_tokenizer_that_does_not_fit_is_refused_where_nothing_may_change() -> None:
    with pytest.raises(RecipeError, match="the tokenizer has 1100 tokens and the model 1024 rows"):
        Hf(architecture="llama", size="tiny", overrides={"vocab_size": 1024}, resize_embedding=False).build(
            processor=Tokens(1100)
        )


def test_from_scratch_takes_special_tokens_from_the_tokenizer() -> None:
    module: Any = Hf(architecture="llama", size="tiny").build(processor=Tokens(500))
    assert (module.config.eos_token_id, module.config.pad_token_id, module.config.vocab_size) == (2, 1, 500)
    assert module.get_input_embeddings().padding_idx == 1


def test_storage_is_fp32_for_what_is_trained_and_low_for_what_is_frozen(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[operator]
    family = Hf(path=str(tmp_path), lora={"r": 2})  # type: ignore[arg-type]
    module = family.build(processor=None)
    dtypes = {p.requires_grad: family.storage_dtype(n, p) for n, p in module.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    scratch = Hf(architecture="llama", size="tiny", freeze=["*"])
    assert {scratch.storage_dtype(n, p) for n, p in scratch.build(processor=None).named_parameters()} == {torch.float32}


def test_flops_per_token() -> None:
    family = Hf(architecture="llama", size="tiny")
    module = family.build(processor=None)
    number = sum(p.numel() for p in module.parameters())
    assert family.flops_per_token(module, length=100) == 6 * number + 6 * 2 * 128 * 100
    adapted = Hf(architecture="llama", size="tiny", lora={"r": 2})  # type: ignore[arg-type]
    module = adapted.build(processor=None)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert adapted.flops_per_token(module, length=100) == 4 * number + 6 * trained + 6 * 2 * 128 * 100
    mixture = Hf(architecture="qwen3_moe", size="tiny")
    module = mixture.build(processor=None)
    assert mixture.flops_per_token(module, length=0) < 5 * sum(p.numel() for p in module.parameters())


def test_overrides_change_the_config_beside_the_weights(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    module: Any = Hf(path=str(tmp_path), overrides={"attention_dropout": 0.1}).build(processor=None)
    assert module.config.attention_dropout == 0.1
    with pytest.raises(RecipeError, match=r"model.overrides.atention_dropout.*did you mean 'attention_dropout'"):
        Hf(path=str(tmp_path), overrides={"atention_dropout": 0.1}).build(processor=None)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no such folder"):
        Hf(path=str(tmp_path / "absent")).prepare([], cache=tmp_path)
    with pytest.raises(
        SetupError, match=r"model.path = 'nobody/nothing' is not a folder here and could not be downloaded.*hf download"
    ):
        Hf(path="nobody/nothing").prepare([], cache=tmp_path)
    with pytest.raises(SetupError, match="not in the hub's cache"):
        Hf(path="nobody/nothing").build(processor=None)
    with pytest.raises(RecipeError, match=r"holds no config.json that Transformers can read"):
        Hf(path=str(tmp_path)).build(processor=None)


def test_code_of_a_model_does_not_run_without_permission(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "c.C"}, "model_type": "unheard_of"}))
    (tmp_path / "c.py").write_text("raise SystemExit('ran')")
    with pytest.raises(RecipeError, match="needs its own Python code.*trust_remote_code: true"):
        Hf(path=str(tmp_path)).build(processor=None)


def test_a_folder_without_a_tokenizer_says_how_to_name_one(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(RecipeError, match=r"model.tokenizer: .* holds no tokenizer.*or train one"):
        section({"path": str(tmp_path), "tokenizer": str(tmp_path)}).processor(cache=tmp_path)
    assert Hf(path=str(tmp_path)).processor(cache=tmp_path) is None, "enough for tokenised data"
    assert Hf(architecture="llama", size="tiny").processor(cache=tmp_path) is None


def test_a_tokenizer_is_trained_once_per_content(tmp_path: Path) -> None:
    family = section({"architecture": "llama", "size": "tiny", "tokenizer": {"train": {"vocab_size": 320}}})
    family.prepare(["aaaa bbbb " * 50] * 10, cache=tmp_path)
    first = family.processor(cache=tmp_path)
    made = {p.name for p in (tmp_path / "tokenizers").iterdir() if p.is_dir()}
    assert len(made) == 1
    family.prepare(["aaaa bbbb " * 50] * 10, cache=tmp_path)
    assert {p.name for p in (tmp_path / "tokenizers").iterdir() if p.is_dir()} == made
    family.prepare(["cccc dddd " * 50] * 10, cache=tmp_path)
    second = family.processor(cache=tmp_path)
    assert second.get_vocab() != first.get_vocab()
    assert first.decode(first("naïve ☃ text").input_ids) == "naïve ☃ text"
    assert first.eos_token_id is not None
    assert first.pad_token_id not in (None, first.eos_token_id)


def test_a_fingerprint_replaces_the_texts(tmp_path: Path) -> None:
    family = section({"architecture": "llama", "size": "tiny", "tokenizer": {"train": 320}})
    family.prepare(["some text " * 50], cache=tmp_path, fingerprint="one")

    def unread() -> Any:
        raise AssertionError("the texts were read again")
        yield ""

    other = section({"architecture": "llama", "size": "tiny", "tokenizer": {"train": 320}})
    other.prepare(unread(), cache=tmp_path, fingerprint="one")
    assert (
        other.processor(cache=tmp_path, fingerprint="one").get_vocab() == family.processor(cache=tmp_path).get_vocab()
    )


def test_attention_is_chosen_and_reported() -> None:
    family = Hf(architecture="llama", size="tiny", attention="eager")
    module: Any = family.build(processor=None)
    assert module.config._attn_implementation == "eager"
    assert family.choose_kernels(module, device="cpu", compute=torch.float32, packed=True) == "eager"
    wanted = Hf(architecture="llama", size="tiny", attention="varlen")
    with pytest.raises(RecipeError, match="'varlen' needs a GPU"):
        wanted.choose_kernels(wanted.build(processor=None), device="cpu", compute=torch.float32, packed=True)
