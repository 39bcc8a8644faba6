"""Writes the tables of docs/coming-from.md from the dialects: `python -m tests.docs.coming_from`."""

from __future__ import annotations

import re

from fullshard.dialects.report import markdown
from fullshard.dialects.tables import dialects
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "coming-from.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A page with the tables as they are now."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", text)


def table(name: str) -> str:
    """What is said about one trainer, and its keys; those that the HF Trainer's table has are not repeated."""
    dialect = dialects()[name]
    without = () if name == "hf_trainer" else dialects()["hf_trainer"].rows
    return f"\n{dialect.intro}\n\n{markdown(dialect, without=without)}\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
