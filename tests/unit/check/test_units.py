"""The table of units: alike ones share a line, and everything fits a screen."""

from __future__ import annotations

import re
from typing import Any

from fullshard.check.units import dtype_line, units_table
from fullshard.dist.shard import Unit

TIE = ["model.embed_tokens.weight", "lm_head.weight"]


def unit(name: str, class_name: str, parameters: int, **changes: Any) -> Unit:
    facts: dict[str, Any] = {
        "trainable": parameters,
        "storage": ["float32"],
        "compute": "bfloat16",
        "reduce": "float32",
        "tied": [],
    }
    return Unit(name, class_name, parameters, **facts | changes)


def cells(table: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in table.splitlines()]


def test_blocks_fold_into_one_line() -> None:
    units = [unit(f"model.layers.{i}", "Qwen3DecoderLayer", 15_730_000) for i in range(28)]
    units.append(unit("(root)", "Qwen3ForCausalLM", 155_600_000, tied=[TIE]))
    table = units_table(units)
    rows = cells(table)
    assert rows[0] == ["unit", "class", "parameters", "trained", "storage", "compute", "reduce", "tied"]
    blocks = ["model.layers.0-27 (28 units)", "Qwen3DecoderLayer", "15.7M", "100%", "fp32", "bf16", "fp32", "-"]
    assert rows[2] == blocks
    assert rows[3] == ["(root)", "Qwen3ForCausalLM", "156M", "100%", "fp32", "bf16", "fp32", "1"]
    assert "29 units, 596,040,000 parameters, 596,040,000 trained (100%)" in table
    assert table.endswith("tied 1: model.embed_tokens.weight = lm_head.weight")
    assert max(map(len, table.splitlines())) <= 100


def test_units_that_differ_keep_separate_lines() -> None:
    units = [unit(f"model.layers.{i}", "Layer", 1000 if i % 4 == 3 else 2000) for i in range(8)]
    units += [unit(f"model.layers.{i}.mlp.gate", "Router", 64, compute="float32") for i in range(8)]
    units += [unit(f"towers.{i}.blocks.{j}", "Block", 10) for i in range(2) for j in range(3)]
    units += [unit("(root)", "Model", 5, trainable=1, storage=["bfloat16", "float32"])]
    rows = cells(units_table(units))
    assert [row[0] for row in rows[2:7]] == [
        "model.layers.0-2,4-6 (6 units)",
        "model.layers.3,7 (2 units)",
        "model.layers.0-7.mlp.gate (8 units)",
        "towers.*.blocks.* (6 units)",
        "(root)",
    ]
    assert rows[4][5] == "fp32"
    assert rows[6][3:5] == ["20.00%", "bf16+fp32"]


def test_dtypes_in_one_line() -> None:
    whole = [unit("a", "Block", 1), unit("(root)", "Model", 1)]
    expected = "all parameters are stored in torch.float32; compute torch.bfloat16, reduce torch.float32"
    assert dtype_line(whole) == expected
    adapted = [unit("a", "Block", 1, storage=["bfloat16", "float32"]), unit("r", "Router", 1, compute="float32")]
    assert dtype_line(adapted) == (
        "parameters are stored in torch.bfloat16 and torch.float32; compute torch.bfloat16 and torch.float32, "
        "reduce torch.float32"
    )
