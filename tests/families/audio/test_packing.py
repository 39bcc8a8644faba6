"""Several conversations with clips in one row train as each in a row of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.families.audio.small import MODELS, model_folder, plain_loop, settings, write_records
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import curve, train


@pytest.mark.parametrize("architecture", only_first(MODELS))
def test_packed_rows_train_as_in_a_plain_loop(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """All records fit into the rows of one step."""
    model_folder(tmp_path / "model", architecture)
    write_records(tmp_path, [1, 2, 0, 1, 1, 0, 3, 1])
    data = {"pack": True, "sequence_length": 192}
    chosen = settings(tmp_path, "run", data=data, batch={"per_device": 2, "global": 8}, duration={"steps": 1})
    records = ranks.run(train, chosen, world=2)[0]
    np.testing.assert_allclose(curve(records, "loss", "grad_norm"), plain_loop(tmp_path, steps=1), rtol=2e-6)
    assert "documents in a packed row do not see each other" in (tmp_path / "runs" / "run" / "log.txt").read_text()
