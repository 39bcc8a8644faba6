"""docs/faults.md lists the faults that tests make, and every test that it names exists."""

from __future__ import annotations

import pytest

from tests.drills.page import ELSEWHERE, PAGE, ROOT, page


def test_the_page_is_made_from_the_tests() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.drills.page"


@pytest.mark.parametrize("test", [test for test, _ in ELSEWHERE.values()])
def test_the_tests_that_it_names_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
