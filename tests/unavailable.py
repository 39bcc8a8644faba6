"""What a test needs and this machine does not have: there the test is skipped, but CI runs every test."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def unavailable(what: str) -> NoReturn:
    """Skips a test, or fails it in CI. `what` says what is not there and how to get it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} With CI=true no test is skipped.", pytrace=False)
    pytest.skip(what)
