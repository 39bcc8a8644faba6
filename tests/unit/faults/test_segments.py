"""Segments of GPU memory that grow, unless the user has chosen."""

from __future__ import annotations

import pytest

from fullshard.faults.segments import VARIABLES, grow_segments


def test_segments_grow() -> None:
    environ: dict[str, str] = {}
    grow_segments(environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_stays(name: str) -> None:
    environ = {name: "max_split_size_mb:512"}
    grow_segments(environ)
    assert environ == {name: "max_split_size_mb:512"}
