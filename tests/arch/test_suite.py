"""Every test file is collected, and no test is skipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unavailable import unavailable

TESTS = Path(__file__).parents[1]


def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    """pytest leaves folders with some names out; asked only when the whole suite runs."""
    if not request.config.option.file_or_dir:
        collected = {item.path for item in request.session.items}
        missing = set(TESTS.rglob("test_*.py")) - collected
        assert not [path for path in missing if "pytest.mark.slow" not in path.read_text()]


def test_no_test_is_skipped() -> None:
    words = re.compile(r"pytest\.(mark\.)?(skip|skipif|importorskip|xfail)\b|\bunavailable\(")
    found = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py") if words.search(path.read_text())}
    # Two nodes need network namespaces, jobs the programs of Slurm, pages a browser, which `make` installs.
    allowed = {"arch/test_suite.py", "dist/test_two_nodes.py", "submit/test_slurm.py", "report/test_in_a_browser.py"}
    assert found <= allowed


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_in_ci_a_test_fails_where_it_would_be_skipped(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception), match="No browser: install one") as found:
        unavailable("No browser: install one.")
    assert found.type is outcome
