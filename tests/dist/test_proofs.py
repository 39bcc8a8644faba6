"""What is proven before step 1 of real architectures: no position sees what it predicts, documents stay apart."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from fullshard.contracts.objective import Batch, Objective, Terms
from fullshard.errors import SetupError
from fullshard.families.language.objectives.causal_lm import CausalLM
from tests.ranks import RankPool
from tests.small import curve, recipe, train
from tests.unit.architecture_proofs import proofs_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
APART = ("llama", "gpt2", "qwen3_moe", "gemma3_text")
"""Decoders that tell documents apart by their positions."""
TOGETHER = ("bloom", "mamba")
"""Decoders that do not: by attention with a bias for distance, and by a state that goes through the row."""
MADE_DECODERS = ("bert", "electra", "roformer", "xlm-roberta")
"""Encoders with a switch that makes them decoders."""
ENCODERS = ("cpmant", "xlm", "xlnet")
"""What sees both ways, and has no `is_decoder`."""


def outcome(architecture: str, precision: str, **settings: Any) -> str:
    """What is proven, or why it is refused."""
    try:
        return "\n".join(proofs_of(architecture, DTYPES[precision], **settings))
    except SetupError as error:
        return f"refused: {error}"


def outcomes(cases: list[tuple[str, str, bool]]) -> list[str]:
    """Several on one rank: starting one costs more."""
    return [outcome(name, precision, packed=packed) for name, precision, packed in cases]


@functools.cache
def _cases() -> list[tuple[str, str, bool]]:
    names = [*APART, *TOGETHER, *MADE_DECODERS, *ENCODERS]
    cases = [(name, "fp32", packed) for name in names for packed in (False, True)]
    return cases + [(name, word, False) for name in ("llama", "bert", "xlnet") for word in ("bf16", "fp16")]


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> dict[tuple[str, str, bool], str]:
    return dict(zip(_cases(), ranks.run(outcomes, _cases(), world=1)[0], strict=True))


@pytest.mark.parametrize("case", _cases(), ids=lambda case: "-".join(map(str, case)))
def test_an_architecture_is_proven_or_refused(
    found: dict[tuple[str, str, bool], str], case: tuple[str, str, bool]
) -> None:
    name, _, packed = case
    said = found[case]
    if name in ENCODERS:
        assert said.startswith("refused: model: a position that carries a loss sees later tokens"), said
        assert "pack" not in said  # that advice would lead into the leak
    elif packed and name not in APART:
        assert said.startswith("refused: data.pack: a document in a packed row changes the next one"), said
        assert "Set data.pack: false." in said
    else:
        assert "positions do not see later tokens" in said, said
        assert "padding changes nothing" in said
        assert ("documents in a packed row do not see each other" in said) == packed


def without_the_switch(precision: str) -> str:
    """BERT as it was before: a decoder by name that looks both ways."""

    def look_both_ways(module: Any) -> None:
        module.config.is_decoder = False
        for part in module.modules():
            if hasattr(part, "is_causal"):
                part.is_causal = False
            if hasattr(part, "is_decoder"):
                part.is_decoder = False

    return outcome("bert", precision, packed=False, change=look_both_ways)


@pytest.mark.parametrize("precision", DTYPES)
def test_bidirectional_bert_is_refused_in_every_precision(ranks: RankPool, precision: str) -> None:
    said = ranks.run(without_the_switch, precision, world=1)[0]
    assert "sees later tokens" in said


def zeroed(architecture: str, scale: float) -> str:
    """A model whose attention has no effect at first, or next to none."""

    def quiet(module: Any) -> None:
        for name, parameter in module.named_parameters():
            if name.endswith(("o_proj.weight", "output_attn.o.weight", "rel_attn.o", "out_lin.weight")):
                parameter.data.mul_(scale)

    return outcome(architecture, "fp32", packed=False, change=quiet)


@pytest.mark.parametrize("scale", [0.0, 1e-4])
def test_attention_that_has_no_effect_at_first(ranks: RankPool, scale: float) -> None:
    """Zero weights hide a leak for now; later training would find it."""
    decoder, encoder = (ranks.run(zeroed, name, scale, world=2)[0] for name in ("llama", "xlm"))
    assert "positions do not see later tokens" in decoder
    assert "sees later tokens" in encoder


def test_weights_changed_for_a_proof_are_restored(ranks: RankPool) -> None:
    assert ranks.run(norm_after_waking, world=2) == [(True, 0.0)] * 2


def norm_after_waking() -> tuple[bool, float]:
    """Whether the zero weights of a model had values meanwhile, and what they have afterwards."""
    from torch.distributed.fsdp import fully_shard

    from fullshard.dist.values import local
    from fullshard.proofs.nonzero_weights import nonzero_weights

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(module[1].weight)
    kept = fully_shard(module[0])
    fully_shard(module)
    before = [local(p.detach()).clone() for p in kept.parameters()]  # type: ignore[attr-defined]
    with nonzero_weights(module):
        had = bool(local(module[1].weight.detach()).any())
    assert all(torch.equal(local(p.detach()), old) for p, old in zip(kept.parameters(), before, strict=True))  # type: ignore[attr-defined]
    return had, float(local(module[1].weight.detach()).norm())


class Masked(Objective):
    """A loss of the user's own on tokens of both sides."""

    needs: ClassVar[tuple[str, ...]] = ("input_ids", "position_ids", "labels")
    bidirectional: ClassVar[bool] = True

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
        labels = batch["labels"].flatten()
        return Terms(nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))


class Unmasked(Masked):
    bidirectional: ClassVar[bool] = False


class Random(Masked):
    """Draws from a generator that nobody seeds again."""

    bidirectional: ClassVar[bool] = False

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        return Terms(super().loss(model, batch, aux).loss_sum * torch.rand((), generator=GENERATOR))


GENERATOR = torch.Generator().manual_seed(0)


class Unlabelled(Masked):
    """Takes its targets from the tokens, as code for Transformers does: also across documents."""

    needs: ClassVar[tuple[str, ...]] = ("input_ids",)

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        targets = batch["input_ids"][:, 1:].flatten()
        return Terms(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum"))


def of_objectives() -> dict[str, str]:
    plain = {
        kind.__name__: outcome("xlnet" if kind is not Random else "llama", "fp32", packed=False, objective=kind())
        for kind in (Masked, Unmasked, Random)
    }
    packed = {kind.__name__: outcome("llama", "fp32", packed=True, objective=kind()) for kind in (Random, Unlabelled)}
    return {**plain, **{f"{name} packed": said for name, said in packed.items()}}


def test_a_users_objectives_are_proven_or_refused(ranks: RankPool) -> None:
    said = ranks.run(of_objectives, world=1)[0]
    assert "sees later tokens" in said["Unmasked"]
    assert "bidirectional: ClassVar[bool] = True" in said["Unmasked"]
    # It may look ahead; that padding changes it without a mask is an error.
    assert "Padding after a row moves its loss" in said["Masked"]
    assert said["Random"].startswith(
        "nothing about objective.kind = tests.dist.test_proofs.Random: its loss differs by"
    )
    assert "nothing shows that objective.kind = tests.dist.test_proofs.Random keeps" in said["Random packed"]
    assert said["Unlabelled packed"].startswith("refused: data.pack: a document in a packed row changes")


class PrefixModel(nn.Module):
    """Attention over everything before the answer both ways, and causal from there on."""

    def __init__(self, *, honest: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.honest = honest
        self.embed, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, token_type_ids: torch.Tensor) -> Any:
        hidden = self.embed(input_ids) + position_ids[..., None] / 50
        size = input_ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        prefix = (
            (token_type_ids == 0)[:, None, :] if self.honest else torch.ones_like(token_type_ids)[:, None, :].bool()
        )
        attended = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=causal | prefix)
        return self.head(attended)


class Prefixed(CausalLM):
    needs: ClassVar[tuple[str, ...]] = ("input_ids", "position_ids", "labels", "token_type_ids")

    def _run(self, model: Any, reduce: Any, batch: Batch) -> Any:
        return reduce(model(batch["input_ids"], batch["position_ids"], batch["token_type_ids"]), None)


def of_prefix_model(honest: bool) -> str:
    import numpy as np

    from fullshard.dist.world import join
    from fullshard.proofs.before_step_one import Probe, prove
    from fullshard.text.tokens import collate_tokens

    join(device="cpu", backend="gloo", timeout_s=60)
    ids = np.random.default_rng(0).integers(3, 97, 60).astype(np.int32)
    types = (np.arange(60) >= 41).astype(np.int32)
    labels = np.where(np.append(types[1:], 0) == 1, np.append(ids[1:], -100), -100).astype(np.int32)

    def collate(rows: Any, *, length: int | None) -> Batch:
        batch = collate_tokens(rows, length=length)
        width = batch["input_ids"].shape[1]
        padded = [np.pad(row["token_type_ids"], (0, width - len(row["input_ids"])), constant_values=1) for row in rows]
        return {**batch, "token_type_ids": torch.from_numpy(np.stack(padded))}

    probe = Probe(Prefixed(), PrefixModel(honest=honest), {}, torch.float32, torch.device("cpu"), collate)
    sample = {"input_ids": ids, "labels": labels, "token_type_ids": types}
    try:
        return "\n".join(prove(probe, lambda: sample, packed=False, longest=64))
    except SetupError as error:
        return str(error)


def test_a_prefix_without_a_loss_may_be_seen_both_ways(ranks: RankPool) -> None:
    assert "positions do not see later tokens" in ranks.run(of_prefix_model, True, world=1)[0]
    assert "sees later tokens" in ranks.run(of_prefix_model, False, world=1)[0]


def test_bert_learns_nothing_from_random_tokens(ranks: RankPool, tmp_path: Path) -> None:
    """Eight symbols at random: whoever does not look ahead cannot do better than ln 8."""
    import json
    import random

    draw = random.Random(0)
    rows = [[draw.randrange(3, 11) for _ in range(32)] for _ in range(256)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    settings = recipe(
        tmp_path,
        name="random",
        model={"path": None, "architecture": "bert", "size": "tiny", "overrides": {"vocab_size": 97}},
        duration={"steps": 20},
    )
    losses = [loss for (loss,) in curve(ranks.run(train, settings, world=2)[0], "loss")]
    assert min(losses) > math.log(8) * 0.97
    assert AutoConfig.from_pretrained(tmp_path / "runs" / "random" / "model").is_decoder is True
    log = (tmp_path / "runs" / "random" / "log.txt").read_text()
    assert "is_decoder = true is set" in log
    assert "up to 0.1: another number of ranks or another micro-batch draws other noise" in " ".join(log.split())
