"""What the engine proves before step 1 about every objective that reads tokens, also a user's own.

Each label counts at its own position; no position with a loss sees a later token; documents in a packed row do not see
each other; padding changes nothing. The proofs change single tokens of short rows, cut from a real sample, and look
where the predictions, or the objective's loss, change. Every rank runs the same forward passes on the same rows, and
all get the same verdict. Must not know model classes, recipes or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fullshard.contracts.data import IGNORE, Features
from fullshard.contracts.objective import Batch, Objective
from fullshard.data.pack import row_of
from fullshard.dist import reduce
from fullshard.dist.shard import reshard
from fullshard.dist.upload import to_device
from fullshard.errors import NumericalError, SetupError
from fullshard.proofs.nonzero_weights import nonzero_weights

WIDTH = 32
"""Tokens of a row, if data.sequence_length allows."""
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""How far rounding alone may move a prediction, relative to its norm: in a mixture of experts, a changed token changes
which tokens are computed together."""
SHARE = 0.2
"""If all tokens together move a prediction only a little, as with fresh weights, rounding may be this share of that
movement. In a model that looks ahead, later tokens move a prediction about as much as earlier ones."""
LABELS = 4
"""Labels that count in a row: a sum of few terms shows a small change of one."""


@dataclass(frozen=True)
class Probe:
    """What the proofs run: a model with its objective, and the collator."""

    objective: Objective
    model: nn.Module
    aux: dict[str, nn.Module]
    compute: torch.dtype
    device: torch.device
    collate: Callable[..., Batch]
    """Takes the features of some rows, and a length to pad them to or None."""

    def batch(self, *rows: Features, length: int | None = None) -> Batch:
        return to_device(self.collate(rows, length=length), self.device)

    def loss(self, row: Features, *, length: int | None = None) -> torch.Tensor:
        """The objective's own sum over one row; its random draws are the same every time."""
        torch.manual_seed(0)
        total = self.objective.loss(self.model, self.batch(row, length=length), self.aux).loss_sum
        return total.detach().double().reshape(1, 1)

    def predictions(self, *rows: Features, length: int | None = None) -> torch.Tensor:
        """(rows, positions, vocabulary)."""
        torch.manual_seed(0)
        found = self.objective.predictions(self.model, self.batch(*rows, length=length))
        assert found is not None
        if not all(reduce.gather_objects(bool(found.isfinite().all()))):
            raise _not_finite(self.compute)
        return found.detach().float()


def _not_finite(compute: torch.dtype) -> NumericalError:
    """The error for logits that are NaN or Inf, with what the dtype has to do with it."""
    dtype = str(compute).removeprefix("torch.")
    low = f"Values beyond {torch.finfo(compute).max:.3g} do not fit into it. " if compute.itemsize < 4 else ""
    other = "fp32" if compute == torch.bfloat16 else "bf16 or fp32"
    advice = f"Use precision: {other}; if that gives the same, the weights are broken" if low else "Use other weights"
    return NumericalError(
        f"Before the first step the logits of the model are not finite (computed in {dtype}). {low}{advice}."
    )


def prove(probe: Probe, find: Callable[[], Features], *, packed: bool, longest: int) -> list[str]:
    """Raises SetupError on every rank if something does not hold; returns a line for each thing proven.

    `find` returns one training sample, the same on every rank; rows of at most `longest` tokens are cut from it."""
    objective = probe.objective
    if not reads(objective, "input_ids") or "input_ids" not in (sample := find()):
        return []
    rows = Rows(sample, width=max(4, min(WIDTH, longest)))
    labelled = rows.labelled and reads(objective, "labels")
    lines: list[str] = []
    with _without_training(probe):
        if not _has_predictions(objective):
            if (why := _unprovable(probe, rows)) is not None:
                return _unproven(objective, why, packed=packed)
            lines += [_labels_in_place(probe, rows)] if labelled else []
        causal, scale = _causality(probe, rows) if labelled else ([], math.inf)
        lines += causal
        if packed:
            lines.append(_isolation(probe, rows, labelled=labelled, scale=scale))
        # Without labels only the objective knows which positions have a loss.
        lines += [_padding(probe, rows, scale=scale)] if labelled else []
    return lines


def _unprovable(probe: Probe, rows: Rows) -> str | None:
    """Why changes of this loss would prove nothing; None if they do."""
    one, other = probe.loss(rows.plain), probe.loss(rows.plain)
    if not all(reduce.gather_objects(bool(one.isfinite().all()))):
        return "its loss is not finite"
    moved = _moved(one, other)
    return f"its loss differs by {moved:.1e} from call to call" if moved > ROUNDING[probe.compute] else None


def _unproven(objective: Objective, why: str, *, packed: bool) -> list[str]:
    if packed and "finite" not in why:  # a loss that is not finite stops the run at its first step anyway
        raise SetupError(
            f"data.pack: nothing shows that objective.kind = {objective.kind()} keeps the documents of a packed row "
            f"apart, because {why} on the same row. Let it draw all random numbers from torch's default generator, or "
            "set data.pack: false."
        )
    return [f"nothing about objective.kind = {objective.kind()}: {why}"]


def reads(objective: Objective, key: str) -> bool:
    """Whether the objective reads this key of a batch; without `needs` it may read all."""
    return not objective.needs or key in objective.needs


class Rows:
    """Short rows cut from a sample: every feature with an entry for each token is cut at the same places."""

    def __init__(self, sample: Features, *, width: int) -> None:
        ids, labels = sample["input_ids"], sample.get("labels", np.empty(0))
        # A shorter sample is repeated, so that its beginning follows its end: only if it has fewer than 8 tokens.
        self.width = min(width, max(len(ids), 8))
        self._sample, self._size, self._latest = sample, len(ids), max(len(ids) - self.width, 0)
        self.labelled = len(labels) == len(ids)
        learned = np.flatnonzero(labels != IGNORE) if self.labelled else np.arange(len(ids))
        self.first = int(learned[0]) if len(learned) else 0
        # Starts some tokens before the first label: a prefix model may look both ways there.
        self.plain = self._cut(min(max(self.first - self.width // 4, 0), self._latest), self.width)
        carry = self.carrying(self.plain)
        self.cut = int(carry[len(carry) // 2])

    def _cut(self, start: int, width: int) -> Features:
        """`width` tokens from `start` on, as one document."""
        places = (start + np.arange(width)) % self._size
        row = {name: array[places] if len(array) == self._size else array for name, array in self._sample.items()}
        row["position_ids"] = np.arange(width, dtype=np.int32)
        if self.labelled:
            following = np.append(row["input_ids"][1:], IGNORE)
            row["labels"] = np.where(row["labels"] != IGNORE, following, IGNORE).astype(np.int32)
        return row

    def carrying(self, row: Features) -> np.ndarray:
        """Positions with a loss and a token after them."""
        found = np.flatnonzero(row["labels"][:-1] != IGNORE) if self.labelled else np.arange(self.width - 1)
        return found if len(found) else np.arange(len(row["input_ids"]) - 1)

    def changed(self, row: Features, places: slice) -> Features:
        """The row with other tokens in some places and the same labels."""
        ids = row["input_ids"].copy()
        ids[places] = self.other(ids[places])
        return {**row, "input_ids": ids}

    def other(self, ids: np.ndarray) -> np.ndarray:
        """For each token a different one from the sample."""
        known = np.unique(self._sample["input_ids"])
        if len(known) == 1:
            return np.where(ids == 0, 1, 0).astype(ids.dtype)
        return known[(np.searchsorted(known, ids) + 1) % len(known)].astype(ids.dtype)

    def counting(self, row: Features, places: np.ndarray) -> Features:
        """The row with labels in these places only."""
        labels = np.full_like(row["labels"], IGNORE)
        # Where the sample has no label, any token will do.
        labels[places] = np.where(row["labels"][places] == IGNORE, row["input_ids"][places], row["labels"][places])
        return {**row, "labels": labels}

    def at_first_label(self) -> Features:
        """A row in which only the label of its first position counts."""
        return self.counting(self._cut(self.first, max(2, min(self.width, self._size - self.first))), np.array([0]))

    def short(self) -> Features:
        """Half a row."""
        return self._cut(min(self.first, self._latest), self.width // 2)

    def documents(self) -> tuple[Features, Features]:
        """Two halves of a row, each a document."""
        start, half = min(self.first, self._latest), self.width // 2
        return self._cut(start, half), self._cut(start + half, half)


def _causality(probe: Probe, rows: Rows) -> tuple[list[str], float]:
    """No position with a loss sees a later token. Also returns how far earlier tokens move a prediction."""
    later, earlier = _influence(probe, rows)
    if earlier == 0.0:
        # Weights that start at zero may hide that tokens will see each other.
        with nonzero_weights(probe.model):
            later, earlier = _influence(probe, rows)
    if probe.objective.bidirectional:
        return [], earlier
    if later > (allowed := _allowed(probe, earlier)):
        own = "" if _has_predictions(probe.objective) else _IF_MASKED
        raise SetupError(
            f"model: a position that carries a loss sees later tokens. Other tokens after it move its prediction by "
            f"{later:.1e} (allowed: {allowed:.0e}; earlier tokens move it by {earlier:.1e}), so it would learn to copy "
            "the next token, not to predict it. Use a causal language model; where the model's config has a switch "
            f"for it (is_decoder, causal), set it in model.overrides.{own}"
        )
    if earlier == 0.0:
        return ["no token affects the prediction at another: the model sees each token alone"], earlier
    return [f"positions do not see later tokens ({later:.1e}; earlier ones move them by {earlier:.1e})"], earlier


_IF_MASKED = (
    " If the labels of your objective are not the next tokens, as with masked ones, write `bidirectional: "
    "ClassVar[bool] = True` in its class."
)


def _influence(probe: Probe, rows: Rows) -> tuple[float, float]:
    """How far changed tokens after the cut move predictions up to it, and those before it the one at the cut."""
    row, cut = rows.plain, rows.cut
    carry = rows.carrying(row)
    seen = carry[carry <= cut]
    after, before = rows.changed(row, slice(cut + 1, None)), rows.changed(row, slice(0, cut))
    if _has_predictions(probe.objective):
        plain, ahead, behind = probe.predictions(row, after, before)
        places = torch.from_numpy(seen).to(plain.device)
        return _moved(plain[places], ahead[places]), _moved(plain[cut], behind[cut])
    few, last = seen[-LABELS:], seen[-1:]
    ahead = _moved(probe.loss(rows.counting(row, few)), probe.loss(rows.counting(after, few)))
    return ahead, _moved(probe.loss(rows.counting(row, last)), probe.loss(rows.counting(before, last)))


def _isolation(probe: Probe, rows: Rows, *, labelled: bool, scale: float) -> str:
    """In a packed row no document sees another."""
    first, second = rows.documents()
    other = rows.changed(first, slice(None))
    half = rows.width // 2
    if _has_predictions(probe.objective):
        plain, changed = probe.predictions(row_of([first, second]), row_of([other, second]))
        moved = _moved(plain[half:], changed[half:])
    elif labelled:
        counted = rows.counting(second, rows.carrying(second)[:LABELS])
        # The first document has no labels: its own loss must not count here.
        silent, quiet = (rows.counting(each, np.empty(0, dtype=int)) for each in (first, other))
        moved = _moved(probe.loss(row_of([silent, counted])), probe.loss(row_of([quiet, counted])))
    else:
        moved = _entangled(probe, first, second, rows)
    if moved > (allowed := _allowed(probe, scale)):
        calls = (
            ""
            if _has_predictions(probe.objective)
            else (
                " Your objective may call the model without position_ids, which separate the documents: pass "
                "`position_ids=batch['position_ids']`, or call `model.hidden_states_and_head` as "
                "fullshard/families/language/objectives/causal_lm.py does."
            )
        )
        raise SetupError(
            f"data.pack: a document in a packed row changes the next one by {moved:.1e} (allowed: {allowed:.0e}): the "
            f"model's attention does not keep documents apart.{calls} Set data.pack: false."
        )
    return f"documents in a packed row do not see each other ({moved:.1e})"


def _entangled(probe: Probe, first: Features, second: Features, rows: Rows) -> float:
    """How far the loss is from a sum over documents, for which f(a, b) - f(A, b) - f(a, B) + f(A, B) is zero."""
    others = [rows.changed(document, slice(None)) for document in (first, second)]
    both, one = probe.loss(row_of([first, second])), probe.loss(row_of([others[0], second]))
    two, none = probe.loss(row_of([first, others[1]])), probe.loss(row_of(others))
    return _moved(both + none, one + two)


def _padding(probe: Probe, rows: Rows, *, scale: float) -> str:
    """A row has the same loss with and without padding after it."""
    row, half = rows.short(), rows.width // 2
    if _has_predictions(probe.objective):
        moved = _moved(probe.predictions(row)[0], probe.predictions(row, length=rows.width)[0, :half])
    else:
        row = rows.counting(row, rows.carrying(row)[-LABELS:])
        moved = _moved(probe.loss(row), probe.loss(row, length=rows.width))
    rounding = ROUNDING[probe.compute]
    # A row of another length may use other kernels, which round in another order.
    if moved > (allowed := min(10 * rounding, max(rounding, SHARE * scale))):
        whose = (
            "the model depends on the length of the row. Use another model."
            if _has_predictions(probe.objective)
            else "your objective counts it, or the model depends on the length of the row. Leave positions without a "
            "label (-100) out of the sum."
        )
        raise SetupError(f"Padding after a row moves its loss by {moved:.1e} (allowed: {allowed:.0e}): {whose}")
    return f"padding changes nothing ({moved:.1e})"


def _labels_in_place(probe: Probe, rows: Rows) -> str:
    """A row without labels has no loss, and the label of its first position counts there: an objective that shifts the
    labels again leaves that one out."""
    row = rows.at_first_label()
    labels = row["labels"].copy()
    labels[0] = rows.other(labels[:1])[0]
    without = rows.counting(row, np.empty(0, dtype=int))
    none, one, other = (float(probe.loss(each)) for each in (without, row, {**row, "labels": labels}))
    kind = probe.objective.kind()
    if not all(reduce.gather_objects(abs(none) <= 1e-6 * max(1.0, abs(one)))):
        raise SetupError(
            f"objective.kind = {kind}: the loss of a row without any label (all are -100) is {none:g}, and must be 0. "
            "Rows without labels fill up a step, and padding has no labels: leave labels of -100 out of the sum."
        )
    if not all(reduce.gather_objects(math.isfinite(one) and math.isfinite(other) and one != other)):
        raise SetupError(
            f"objective.kind = {kind} does not use the label of a row's first position: with that label alone its loss "
            f"is {one:g}, and {other:g} with another one. Labels are shifted already: labels[:, i] is the target of "
            "position i. Compare logits[:, i] with labels[:, i], and do not shift again."
        )
    return "each label counts at its own position, and nothing else does"


def _allowed(probe: Probe, scale: float) -> float:
    return min(ROUNDING[probe.compute], SHARE * scale) if scale else ROUNDING[probe.compute]


def _moved(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest distance between two predictions, relative to their norm, over all positions and ranks."""
    size = one.norm(dim=-1).clamp(min=1e-30)
    moved = float(((one - other).norm(dim=-1) / size).max())
    return float(max(reduce.gather_objects(math.inf if math.isnan(moved) else moved)))


def _has_predictions(objective: Objective) -> bool:
    """Whether the loss is computed from its predictions: a class may override the loss alone."""
    loss, predictions = (_owner(type(objective), name) for name in ("loss", "predictions"))
    return predictions is not Objective and issubclass(predictions, loss)


def _owner(kind: type, name: str) -> type:
    return next(parent for parent in kind.__mro__ if name in vars(parent))


@contextmanager
def _without_training(probe: Probe) -> Iterator[None]:
    """Without gradients, dropout, or compiling for shapes that occur only here."""
    probe.model.eval()
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices=[probe.device] if probe.device.type == "cuda" else []),
    ):
        yield
    reshard(probe.model)
