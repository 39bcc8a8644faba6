"""What the tests of rows share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shrunk_recipes import local_inputs


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models and data, as a user would bring them."""
    return local_inputs(tmp_path_factory.mktemp("local") / "inputs")
