"""Fixtures for every test: the rank pool, and a guard that no test leaves anything behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from fullshard.kernels.amx import avoid_broken_amx
from tests.ranks import RankPool
from tests.tiny_tokenizers import chatml, tokenizer, tokenizer_with

__all__ = ["chatml", "tokenizer", "tokenizer_with"]

avoid_broken_amx()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks, started once."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FULLSHARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    import torch
    import torch.distributed as dist

    assert not dist.is_initialized(), "the test left a process group behind"
    assert torch.get_default_dtype() == torch.float32, "the test changed the default dtype"
