"""Predicted actions are compared event by event; movement of a pointer counts from its last position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fullshard.contracts.data import IGNORE
from fullshard.families.vision.desktop.actions import Meaning
from fullshard.families.vision.desktop.events import Action, Key, Mouse, RawMouse
from fullshard.families.vision.desktop.formats import FORMATS
from fullshard.families.vision.evaluations.actions import _compared
from tests.families.vision.desktop.samples import Pieces, pieces

FORM = FORMATS["factorized"]


def compared(documents: list[list[Action]], said: dict[int, Action]) -> list[tuple[Meaning | None, Meaning | None]]:
    """A packed row of documents; `said` replaces actions, by their number, in what the model predicts."""
    tokenizer = Pieces()
    labels, places, predicted = list[int](), list[int](), list[int]()
    number = 0
    for document in documents:
        start = len(labels)
        for action in document:
            texts = FORM.encode(action), FORM.encode(said.get(number, action))
            true, other = ([tokenizer.convert_tokens_to_ids(one) for one in pieces(text)] for text in texts)
            labels += [IGNORE, *true]
            predicted += [0, *other]
            number += 1
        places += range(len(labels) - start)
    batch: dict[str, Any] = {"labels": torch.tensor([labels]), "position_ids": torch.tensor([places])}
    encoder = SimpleNamespace(settings=SimpleNamespace(format="factorized"))
    inputs: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=tokenizer), encoder=encoder)
    return list(_compared(batch, torch.tensor([predicted]), inputs))


def test_each_action_is_compared_with_what_was_predicted() -> None:
    actions: list[Action] = [Key(0, 65, True), RawMouse(0, 5, 0), RawMouse(0, 0, 0, 1)]
    found = compared([actions], {1: RawMouse(0, 0, -5)})
    assert found == [
        (Meaning("key", "A down"), Meaning("key", "A down")),
        (Meaning("movement", "right"), Meaning("movement", "up")),
        (Meaning("button", "left down"), Meaning("button", "left down")),
    ]


def test_a_pointer_moves_from_where_it_was_in_its_own_document() -> None:
    first: list[Action] = [Mouse(0, "move", 10, 10), Mouse(0, "move", 20, 10)]
    found = compared([first, first[1:]], {1: Mouse(0, "move", 10, 0)})
    # Without a last position there is no direction: such actions are not counted.
    assert found == [(None, None), (Meaning("movement", "right"), Meaning("movement", "up")), (None, None)]
