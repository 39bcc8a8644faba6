"""Fixtures of the tests of `fullshard check`: a healthy folder, and a copy of it for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.check.healthy_recipe import Workspace, healthy_folder, workspace_in


@pytest.fixture(scope="session")
def healthy_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy_folder(tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def workspace(healthy_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    workspace = workspace_in(tmp_path, healthy_files, monkeypatch)
    with workspace.cleanup:
        yield workspace
