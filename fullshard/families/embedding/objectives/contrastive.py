"""Contrastive training: queries, positives and negatives of a whole step, over all ranks.

Negatives are shared by all samples of a step, so the loss couples micro-batches. With several chunks the model runs
twice, as in GradCache: first without gradients for all embeddings, then chunk by chunk with the gradient of the loss
with respect to each embedding. Must not know data sources, optimizers or how a loss compares embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from fullshard.config.part import Section, decode
from fullshard.contracts.model import Family
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Batch, Numbers, Objective, Terms
from fullshard.errors import DataError, RecipeError
from fullshard.families.embedding.objectives.matryoshka import Matryoshka
from fullshard.similarity.base import Embedded, SimilarityLoss

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fullshard.families.embedding.batching.chunks import Chunk, Images, Texts
    from fullshard.families.embedding.batching.rng_state import RngState
    from fullshard.families.embedding.batching.step_plan import StepPlan

FEW = 64
"""Texts that are tried before step 1."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""How far a unit vector may move when its text shares a row with others."""
KEPT = 8
"""With at most this many chunks, the last chunk's activations are kept during the loss, which saves one forward pass.
With more chunks the gain is small, and the memory of the loss, which grows with the batch, would come on top."""


class Cache(Section):
    """How a step is cut into chunks."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("chunk", "tokens"),)

    chunk: int | None = Field(None, ge=1)
    """Texts that go through the model together; their activations decide the memory."""
    tokens: int | None = Field(None, ge=1)
    """The same as a number of tokens, for texts of any length."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        return {"chunk": value} if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_of(self) -> Cache:
        if (self.chunk is None) == (self.tokens is None):
            raise ValueError("give exactly one of cache.chunk (texts) and cache.tokens")
        return self


class Contrastive(Objective):
    """Pulls a query's embedding to its positive's and away from all others."""

    encoder: ClassVar[str | None] = "pairs"
    needs: ClassVar[tuple[str, ...]] = ("tokens", "lengths", "texts", "label", "keys")

    similarity: SimilarityLoss = Field(
        default_factory=lambda: decode(SimilarityLoss, {}, where="objective.loss"), alias="loss"
    )
    """How embeddings are compared."""
    matryoshka: Matryoshka | None = None
    """Train prefixes of each embedding as embeddings too: true, a list of dimensions, or settings."""
    cache: Cache | None = None
    """Two passes in chunks, so that memory does not grow with the batch: texts, {chunk: 64}, {tokens: N}."""
    teacher: Family | None = None
    """The frozen model that objective.loss: distillation learns from; it must have the same tokenizer."""
    across_ranks: bool = True
    """Samples of other ranks are negatives too; without it the loss depends on the number of ranks."""

    @model_validator(mode="after")
    def _teacher(self) -> Contrastive:
        if self.similarity.needs_teacher != (self.teacher is not None):
            raise ValueError("objective.teacher and objective.loss: distillation need each other")
        return self

    def gives(self) -> Numbers:
        return {"loss": "min"} if self.similarity.tokens else {"loss": "min", "accuracy": "max"}

    def frozen(self) -> dict[str, Any]:
        return {"teacher": self.teacher} if self.teacher is not None else {}

    def extend(self, module: nn.Module) -> None:
        from fullshard.hf.scalars import NAME as SCALARS
        from fullshard.hf.scalars import Scalars

        model: Any = module
        if not hasattr(model, "embed"):
            raise RecipeError(
                f"objective.kind = contrastive needs an embedding model, but {type(module).__name__} is not one. "
                "Use model.kind: sentence_transformer."
            )
        width = model.embedding_width
        for dim, _ in self.matryoshka.of(width) if self.matryoshka else ():
            if dim > width:
                raise RecipeError(
                    f"objective.matryoshka.dims has {dim}, but the model's embeddings have {width} dimensions. Each "
                    f"must be at most {width}."
                )
        if learned := self.similarity.learned():
            setattr(model, SCALARS, Scalars(learned))

    def count(self, batch: Batch) -> int:
        return int((batch["sample_ids"] >= 0).sum())

    def check_data(self, stored: Any, *, module: nn.Module, samples_per_step: int) -> None:
        """Every record has what the loss compares, and a step has enough samples."""
        texts = stored.store.sizes("lengths")[stored.chosen]
        if self.similarity.requires_negatives() and (without := stored.chosen[texts < 3]).size:
            raise DataError(
                f"{_place(stored, without)}: objective.loss = {self.similarity.kind()} needs a negative in every "
                f"record, but {without.size:,} of {len(texts):,} have no negative. Add negatives (fullshard mine "
                "finds some), or use objective.loss: infonce."
            )
        labels = stored.store.flat("label")[stored.chosen]
        if getattr(self.similarity, "mask_labels", False) and len(labels) > 1 and (labels == labels[0]).all():
            raise DataError(
                f"data: every record has the label {labels[0]:g}, so no sample is a negative and nothing is learned. "
                "Map another column (data.encode.column_mapping), or set objective.loss.mask_labels: false."
            )
        missing = stored.chosen[np.isnan(labels)]
        if self.similarity.needs_labels and missing.size:
            raise DataError(
                f"{_place(stored, missing)}: objective.loss = {self.similarity.kind()} needs a label in every record, "
                f"but {missing.size:,} of {len(texts):,} have no label. Name its column in data.encode.column_mapping."
            )
        if samples_per_step < 2 and self.similarity.in_batch and int(texts.max()) < 3:
            raise RecipeError(
                "batch: a step has one sample, and records have no negatives, so there is nothing to compare its "
                "positive with. Raise batch.per_device or batch.global to at least 2."
            )

    def check(self, model: nn.Module, batch: Batch, *, packed: bool, compute: torch.dtype) -> list[str]:
        """Texts that share a row keep their embeddings; if they do not, texts are padded instead."""
        import torch

        from fullshard.dist import reduce
        from fullshard.families.embedding.batching.chunks import Chunk, Texts, crowded

        bound: Any = model
        bound.packs = False
        if not packed:
            return []
        texts = crowded(Texts.of([batch]), most=FEW, images=_images(model))
        few = Chunk(np.arange(len(texts.lengths)))
        model.eval()
        apart, why = float("inf"), ""
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            alone, _ = self._embed(model, texts, few, packed=False)
            try:
                shared, _ = self._embed(model, texts, few, packed=True)
                apart = float((alone - shared).norm(dim=-1).max() / alone.norm(dim=-1).max().clamp(min=1e-6))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a model that takes no 4-d attention mask
                why = f", {type(error).__name__}"
        # A collective: every rank gets here, whatever happened above.
        if reduce.any_rank(not apart <= TOLERANCE[str(compute).removeprefix("torch.")], texts.device):
            return [f"texts are padded: in this model they cannot share a row ({apart:.1e} apart{why})"]
        bound.packs = True
        return [f"texts that share a row do not change each other ({apart:.1e})"]

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        plan = self._plan([batch])
        first = self._first_pass(model, plan)
        embedded = self._embedded(first.vectors, first.scalars, plan, self._taught(plan, aux))
        return Terms(self._reduced(embedded), {} if self.similarity.tokens else {"accuracy": _accuracy(embedded)})

    def backward(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        total: torch.Tensor,
        aux: dict[str, nn.Module],
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[Terms]:
        plan = self._plan(list(batches))
        taught = self._taught(plan, aux)
        if len(plan.chunks) == 1:
            vectors, scalars = self._embed(model, plan.texts, plan.chunks[0], longest=plan.longest)
            vectors = vectors[plan.inverse()]
            loss = self._reduced(self._embedded(vectors, scalars, plan, taught))
            scale(loss / total).backward()
        else:
            first = self._first_pass(model, plan, keep=len(plan.chunks) <= KEPT)
            leaves = [leaf.detach().requires_grad_() for leaf in (first.vectors, first.scalars) if leaf is not None]
            loss = self._reduced(self._embedded(leaves[0], leaves[1] if len(leaves) > 1 else None, plan, taught))
            scale(loss / total).backward()
            self._second_pass(model, plan, first, *(leaf.grad for leaf in leaves))
        return [Terms(loss.detach(), {"padding": plan.padding(packed=_packs(model))})]

    def embeddings(self, model: nn.Module, batch: Batch) -> tuple[Texts, torch.Tensor]:
        """The texts of a batch and an embedding of each, without gradients; every rank must call this in step."""
        plan = self._plan([batch])
        return plan.texts, self._first_pass(model, plan).vectors

    def _plan(self, batches: Sequence[Batch]) -> StepPlan:
        from fullshard.families.embedding.batching.step_plan import StepPlan

        cache = self.cache
        return StepPlan.of(batches, size=cache.chunk if cache else None, tokens=cache.tokens if cache else None)

    def _embed(
        self, model: Any, texts: Texts, chunk: Chunk, *, longest: int = 0, packed: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from fullshard.families.embedding.batching.chunks import by_text, inputs

        tokens = self.similarity.tokens
        packed = _packs(model) if packed is None else packed
        given = inputs(texts, chunk, packed=packed, pad=_pad(model), images=_images(model))
        vectors, scalars = model.embed(**given, tokens=tokens)
        vectors = by_text(vectors, given["lengths"], longest) if tokens and longest else vectors
        # After the texts comes a blank image, which keeps this rank in step with ranks that have one.
        return vectors if tokens and not longest else vectors[: len(chunk.texts)], scalars

    @no_grad
    def _first_pass(self, model: nn.Module, plan: StepPlan, *, keep: bool = False) -> _First:
        """All embeddings. `keep`: the activations of the last chunk are kept, so that it need not run again."""
        import torch

        from fullshard.families.embedding.batching.rng_state import RngState

        states: list[RngState] = []
        found: list[torch.Tensor] = []
        scalars = None
        for number, chunk in enumerate(plan.chunks, start=1):
            states.append(RngState.now(plan.texts.device))
            with torch.set_grad_enabled(keep and number == len(plan.chunks)):
                vectors, scalars = self._embed(model, plan.texts, chunk, longest=plan.longest)
            found.append(vectors)
        kept = (found[-1], scalars) if keep else None
        joined = torch.cat([vectors for vectors, chunk in zip(found, plan.chunks, strict=True) if not chunk.filler])
        return _First(joined[plan.inverse()], scalars, states, kept)

    def _second_pass(
        self,
        model: nn.Module,
        plan: StepPlan,
        first: _First,
        gradient: torch.Tensor | None,
        of_scalars: torch.Tensor | None = None,
    ) -> None:
        """The same forward passes again, from last to first, each followed by its backward pass."""
        import torch

        from fullshard.dist.gradients import one_by_one
        from fullshard.families.embedding.batching.chunks import on_device

        assert gradient is not None
        device = plan.texts.device
        kept, first.kept = first.kept, None
        turns = list(zip(plan.chunks, first.states, strict=True))[::-1]
        for chunk, state in one_by_one(model, turns, reduce_once=True):
            if kept is not None:
                (vectors, scalars), kept = kept, None
            else:
                state.restore(device)
                vectors, scalars = self._embed(model, plan.texts, chunk, longest=plan.longest)
            share = gradient[on_device(chunk.texts, device)]
            surrogate = (vectors * (torch.zeros_like(share) if chunk.filler else share)).sum()
            if scalars is not None and of_scalars is not None:
                surrogate = surrogate + (scalars * (of_scalars if chunk is plan.chunks[0] else 0.0)).sum()
            surrogate.backward()
            del vectors, surrogate  # frees the activations before the next chunk makes its own

    def _taught(self, plan: StepPlan, aux: dict[str, nn.Module]) -> torch.Tensor | None:
        """The teacher's embeddings of the same texts."""
        import torch

        from fullshard.families.embedding.batching.rng_state import RngState

        if self.teacher is None:
            return None
        with torch.no_grad():
            before = RngState.now(plan.texts.device)
            vectors = self._first_pass(aux["teacher"], plan).vectors
            before.restore(plan.texts.device)
        return vectors

    def _embedded(
        self, vectors: torch.Tensor, scalars: torch.Tensor | None, plan: StepPlan, taught: torch.Tensor | None
    ) -> Embedded:
        """Queries, positives and negatives of all ranks."""
        import torch

        from fullshard.dist import reduce
        from fullshard.families.embedding.batching.chunks import on_device

        texts, device = plan.texts, plan.texts.device
        firsts, number = texts.firsts[:, None], np.arange(2, 2 + plan.negatives)[None]
        has = on_device(number < texts.per_sample[:, None], device)
        negative = on_device(np.where(number < texts.per_sample[:, None], firsts + number, 0), device)
        query, positive = on_device(texts.firsts, device), on_device(texts.firsts + 1, device)
        lengths = on_device(texts.lengths, device)
        within = torch.arange(plan.longest, device=device)

        def real(index: torch.Tensor) -> torch.Tensor | None:
            return self._all(within < lengths[index][..., None]) if self.similarity.tokens else None

        ranks, rank = reduce.place() if self.across_ranks else (1, 0)
        size = len(texts.per_sample)
        names = self.similarity.learned()
        return Embedded(
            queries=self._all(vectors[query]),
            positives=self._all(vectors[positive]),
            negatives=self._all(vectors[negative]),
            has_negative=self._all(has),
            real=self._all(texts.real),
            own=slice(rank * size, (rank + 1) * size),
            labels=self._all(texts.labels),
            query_keys=self._all(texts.keys[query]),
            positive_keys=self._all(texts.keys[positive]),
            negative_keys=self._all(texts.keys[negative]),
            scalars=dict(zip(names, scalars, strict=True)) if scalars is not None else {},
            query_tokens=real(query),
            positive_tokens=real(positive),
            negative_tokens=real(negative),
            teacher_queries=None if taught is None else self._all(taught[query]),
            teacher_positives=None if taught is None else self._all(taught[positive]),
            teacher_negatives=None if taught is None else self._all(taught[negative]),
        )

    def _all(self, mine: torch.Tensor) -> torch.Tensor:
        import torch

        from fullshard.dist.gather import gather_rows

        if not self.across_ranks:
            return mine
        if mine.dtype == torch.bool:
            return gather_rows(mine.to(torch.uint8)).bool()
        return gather_rows(mine)

    def _reduced(self, embedded: Embedded) -> torch.Tensor:
        """The loss, at every Matryoshka dimension."""
        import torch

        if self.matryoshka is None:
            return self.similarity.loss(embedded)
        dims = self.matryoshka.of(embedded.queries.shape[-1])
        return torch.stack([weight * self.similarity.loss(embedded.narrowed(dim)) for dim, weight in dims]).sum()


@dataclass
class _First:
    """The result of the first of two passes."""

    vectors: torch.Tensor
    """In the order of the texts."""
    scalars: torch.Tensor | None
    states: list[RngState]
    """The RNG state of each chunk."""
    kept: tuple[torch.Tensor, torch.Tensor | None] | None
    """The last chunk's embeddings and scalars, with their graph."""


def _packs(model: Any) -> bool:
    return bool(getattr(model, "packs", False))


def _images(model: Any) -> Images | None:
    rule = getattr(model, "embed_rule", None)
    return rule.images if rule is not None else None


def _pad(model: Any) -> int:
    """A token for padding; no text sees it, so any token will do."""
    return int(getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) or 0)


def _accuracy(embedded: Embedded) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of this rank's queries are closest to their own positive, and how many queries there are."""
    import torch.nn.functional as F

    queries, positives = (F.normalize(each, dim=-1) for each in (embedded.queries, embedded.positives))
    scores = queries[embedded.own] @ positives.T
    keys = embedded.positive_keys
    scores = scores.masked_fill(~embedded.real, -2.0)
    right = (keys[scores.argmax(-1)] == keys[embedded.own]) & embedded.real[embedded.own]
    return right.sum(), embedded.real[embedded.own].sum()


def _place(stored: Any, samples: np.ndarray) -> str:
    return str(stored.records.where(int(stored.store.records[samples[0]])))


__all__ = ["Contrastive"]
