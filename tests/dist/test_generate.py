"""`fullshard generate`: greedy output is that of Transformers on the exported model, on any ranks and in any batches;
stop tokens, chat templates, adapters; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fullshard.cli import app
from tests.families.embedding import texts
from tests.ranks import RankPool
from tests.small import recipe, train

PROMPTS = ["ban bar bas", "kis", "dor dot dok dop dox lux mem", "met lun ban dor kis bat"]
TOKENS = 12


def command(*words: str) -> tuple[int, str, str]:
    """The command on one rank of the pool, which was started by a launcher."""
    done = CliRunner().invoke(app, [*words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def generate(ranks: RankPool, *words: Any, world: int = 1, prompts: list[str] = PROMPTS) -> list[dict[str, Any]]:
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    given += ["--json"] + ([] if "--max-new-tokens" in words else ["--max-new-tokens", str(TOKENS)])
    (code, said, printed), *others = ranks.run(command, "generate", *map(str, words), *given, world=world)
    assert code == 0, printed
    assert [other[:2] for other in others] == [(0, "")] * (world - 1)
    return [json.loads(line) for line in said.splitlines()]


def refused(ranks: RankPool, *words: Any) -> str:
    [(code, _, printed)] = ranks.run(command, "generate", *map(str, words), world=1)
    assert code == 2
    return printed  # type: ignore[no-any-return]


@torch.no_grad()
def by_transformers(model: Any, tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """One prompt at a time, greedily, with the tokenizer beside the model."""
    found = []
    for prompt in prompts:
        # This tokenizer ends every text, but a prompt continues.
        row = [token for token in tokenizer(prompt)["input_ids"] if token != texts.SPECIAL.index("[SEP]")]
        ids = torch.tensor([row])
        given = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        found.append(
            model.eval().generate(ids, attention_mask=torch.ones_like(ids), **given)[0, ids.shape[1] :].tolist()
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends texts with [SEP], and texts of words to train it on."""
    path = tmp_path_factory.mktemp("generate")
    texts.decoder(path / "model", eos_token_id=texts.SPECIAL.index("[SEP]"))
    tokenizer = texts.tokenizer(ends=False)
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(path / "model")
    rows = texts.pairs(path / "pairs.jsonl", records=24)
    write(path / "train.jsonl", [{"text": f"{row['query']} {row['positive']}"} for row in rows])
    write(path / "chat.jsonl", [{"question": row["query"], "answer": row["positive"]} for row in rows])
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(ranks: RankPool, folder: Path, name: str, *, world: int = 1, **sections: Any) -> Path:
    ranks.run(train, recipe(folder, name=name, duration={"steps": 3}, **sections), world=world)
    return folder / "runs" / name


def test_greedy_is_what_transformers_generates(ranks: RankPool, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = run(ranks, folder, "whole", world=2)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    free = by_transformers(AutoModelForCausalLM.from_pretrained(out / "model"), tokenizer, PROMPTS)
    ends = {texts.SPECIAL.index("[SEP]"), free[2][3]}  # a stop token that the model does say
    for place in (folder / "model", out / "model"):
        stored = json.loads((place / "generation_config.json").read_text())
        (place / "generation_config.json").write_text(json.dumps(stored | {"eos_token_id": sorted(ends)}))
    expected = by_transformers(AutoModelForCausalLM.from_pretrained(out / "model"), tokenizer, PROMPTS)
    assert len(expected[2]) <= 4 < TOKENS, "it stops there"
    stopped = ["stop token" if row[-1] in ends else "length" for row in expected]
    for world, batch in ((1, 4), (2, 1), (3, 2)):
        found = generate(ranks, out, "--batch-size", batch, world=world)
        assert [record["tokens"] for record in found] == expected, (world, batch)
    assert [record["stopped"] for record in found] == stopped
    assert [r["text"] for r in found] == [tokenizer.decode(row, skip_special_tokens=True) for row in expected]
    assert [record["tokens"] for record in generate(ranks, out / "model", world=1)] == expected
    [cut] = generate(ranks, out, "--max-new-tokens", 1, prompts=PROMPTS[:1])
    assert cut["tokens"] == expected[0][:1]


def test_adapters_and_a_conversation(ranks: RankPool, folder: Path) -> None:
    """A prompt is a message where conversations were trained on, and goes through the template that training used."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    data = {"train": str(folder / "chat.jsonl")}
    out = run(ranks, folder, "adapted", model={"lora": 2}, data=data, optimizer={"lr": 5e-2})
    model = AutoPeftModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    messages = [{"role": "user", "content": PROMPTS[0]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text != PROMPTS[0]
    expected = by_transformers(model, lambda row: tokenizer(row, add_special_tokens=False), [text])
    [found] = generate(ranks, out, prompts=PROMPTS[:1], world=2)
    assert found["tokens"] == expected[0]
    [given] = generate(ranks, out, "--messages", json.dumps(messages), prompts=[])
    assert given["tokens"] == expected[0]
    [plain] = generate(ranks, out, "--raw", prompts=PROMPTS[:1])
    assert [plain["tokens"]] == by_transformers(model, tokenizer, PROMPTS[:1])
    assert plain["prompt_tokens"] < found["prompt_tokens"]


def test_what_is_drawn_follows_from_seed_and_prompt(ranks: RankPool, folder: Path) -> None:
    out = run(ranks, folder, "drawn")
    drawn = ["--temperature", 1.5, "--top-p", 0.9]
    first = [record["tokens"] for record in generate(ranks, out, *drawn, "--seed", 3)]
    assert [record["tokens"] for record in generate(ranks, out, *drawn, "--seed", 3, world=2)] == first
    assert [record["tokens"] for record in generate(ranks, out, *drawn, "--seed", 4)] != first
    least = [record["tokens"] for record in generate(ranks, out, "--temperature", 1.5, "--top-p", 1e-6)]
    assert least == [record["tokens"] for record in generate(ranks, out)]


def test_mistakes_are_user_errors(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    assert "there is no prompt" in refused(ranks, folder / "model")
    assert "the text is empty" in refused(ranks, folder / "model", "--prompt", "")
    printed = refused(ranks, folder / "model", "--prompt", "ban", "--max-new-tokens", "200")
    assert "more than the 128 positions" in printed
    assert "no chat template" in refused(ranks, folder / "model", "--messages", '[{"role": "user", "content": "ban"}]')
    assert "a conversation is a list" in refused(ranks, folder / "model", "--messages", '{"role": "user"}')
    assert "--prompts nowhere.txt cannot be read" in refused(ranks, folder / "model", "--prompts", "nowhere.txt")
    assert "neither a run" in refused(ranks, tmp_path, "--prompt", "ban")
    texts.encoder(tmp_path / "model", num_hidden_layers=1)
    texts.pairs(tmp_path / "train.jsonl", records=8)
    ranks.run(train, texts.recipe(tmp_path, name="embedder", duration={"steps": 1}), world=1)
    printed = refused(ranks, tmp_path / "runs" / "embedder", "--prompt", "ban")
    assert "its objective is contrastive, which predicts no tokens" in printed
