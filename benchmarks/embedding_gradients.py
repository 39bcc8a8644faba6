"""Every way to the gradients of one contrastive step, against one plain process: the largest distances.

    python benchmarks/embedding_gradients.py

Losses x {plain, Matryoshka} x {no cache, chunks of 1, 3 and 64} x {1, 2, 4 ranks} x {full, LoRA} x {dropout on, off} x
{packed, padded}, on real gloo ranks, in fp32. The tests run a part of this product.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.families.embedding import cases  # noqa: E402
from tests.families.embedding.test_gradients import LOSSES, TOLERANCE  # noqa: E402
from tests.ranks import RankPool  # noqa: E402

CACHES = [None, 1, 3, 64]


def main() -> None:
    pool, worst, number = RankPool(), 0.0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folders = [cases.encoder_folder(Path(temporary) / str(drop), dropout=drop) for drop in (0.0, 0.3)]
        print("| ranks | adapters | dropout | rows | cases | largest distance |\n|---|---|---|---|---|---|")
        for world in (1, 2, 4):
            for lora in (False, True):
                for folder in folders:
                    for packed in (True, False):
                        found = pool.run(cases.apart, folder, LOSSES, CACHES, lora=lora, packed=packed, world=world)[0]
                        number, worst = number + len(found), max(worst, *found.values())
                        facts = "LoRA" if lora else "none", folder.name, "packed" if packed else "padded"
                        print(
                            f"| {world} | {' | '.join(facts)} | {len(found)} | {max(found.values()):.1e} |", flush=True
                        )
    pool.close()
    print(f"{number} cases, largest distance {worst:.1e} (allowed {TOLERANCE:g})")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
