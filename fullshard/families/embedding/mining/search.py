"""Loads an embedding model, embeds texts with it, and searches a corpus for the hits of every query.

sentence-transformers does the work. Must not know records, options or which hits are wanted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.checkpoint.folder import MANIFEST
from fullshard.errors import SetupError, first_line, missing_package
from fullshard.families.embedding.mining.negatives import Hit

if TYPE_CHECKING:
    import torch

    from fullshard.log.console import Bar

BATCHES = 16
"""Batches per update of the progress bar."""
QUERIES = 100
"""Queries per search."""
PAIRS = 2**14
"""Pairs scored at once."""
_MODEL = ("modules.json", "config.json", "adapter_config.json")


def locate(name: str) -> str:
    """The folder of MODEL, or its hub name; weights are not fetched yet."""
    from fullshard.hf.hub import fetch

    folder = fetch(name, revision=None, code=False, weights=False, where="MODEL")
    for place in (folder, folder / "model"):
        _refuse_language_model(name, place)
    if not Path(name).expanduser().is_dir() and not name.startswith("package:"):
        return name
    if any((folder / file).is_file() for file in _MODEL):
        return str(folder)
    if (folder / MANIFEST).is_file():
        raise SetupError(
            f"MODEL = {name} is a checkpoint. Write it as a model first (fullshard export {shlex.quote(name)} OUT), "
            "and give OUT."
        )
    if any((folder / "model" / file).is_file() for file in _MODEL):
        return str(folder / "model")
    raise SetupError(
        f"MODEL = {name} holds no model: neither it nor {folder / 'model'} has any of {', '.join(_MODEL)}. Give "
        "the folder of a model; fullshard export makes one from a checkpoint."
    )


def _refuse_language_model(name: str, folder: Path) -> None:
    """sentence-transformers would silently average a language model's hidden states and call that embeddings."""
    if (folder / "modules.json").is_file():
        return
    for file, says in _LANGUAGE_MODEL.items():
        try:
            found = says(json.loads((folder / file).read_text(encoding="utf-8")))
        except (OSError, ValueError, AttributeError):  # missing or broken: loading it raises a better error
            continue
        if found:
            raise SetupError(
                f"MODEL = {name} is a language model ({found} in {folder / file}): it predicts tokens and has no "
                "embeddings. fullshard mine takes an embedding model: a run with objective.kind: contrastive, a folder "
                "or hub name of sentence-transformers, or an encoder such as BERT."
            )


def _causal(config: dict[str, Any]) -> str | None:
    return next((name for name in config.get("architectures") or () if name.endswith("ForCausalLM")), None)


def _causal_adapter(config: dict[str, Any]) -> str | None:
    return "CAUSAL_LM" if config.get("task_type") == "CAUSAL_LM" else None


_LANGUAGE_MODEL = {"config.json": _causal, "adapter_config.json": _causal_adapter}
"""How configs of Transformers and PEFT show a language model; with modules.json either is an embedding model."""


def get_ready(device: str | None) -> None:
    """Raises if the package or the device is missing, before anything is read."""
    try:
        import sentence_transformers  # noqa: F401
    except ImportError as error:
        raise missing_package("sentence-transformers", extra="embedding", needed_by="fullshard mine") from error
    import torch

    from fullshard.kernels.amx import avoid_broken_amx

    avoid_broken_amx()
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SetupError(
            f"--device {device} cannot be used here ({first_line(error)}). Leave it out, or use cpu."
        ) from error


def load(name: str, *, device: str | None) -> Any:
    """The model as sentence-transformers loads it, from its own folder, one of Transformers, or one of adapters."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    moving = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return SentenceTransformer(name, device=device)
    except Exception as error:  # the libraries raise many types
        raise SetupError(
            f"MODEL = {name} cannot be loaded by sentence-transformers ({first_line(error)}). Give a model with its "
            "tokenizer, as a run leaves it in its folder model/."
        ) from error
    finally:
        if moving:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class Embedder:
    """A model, with the prompt of each side."""

    model: Any
    query_prompt: str
    document_prompt: str
    batch_size: int

    @property
    def _cosine(self) -> bool:
        return bool(self.model.similarity_fn_name == "cosine")

    def num_pieces(self, texts: Sequence[str]) -> int:
        return -(-len(texts) // (self.batch_size * BATCHES))

    def queries(self, texts: Sequence[str], bar: Bar) -> torch.Tensor:
        return self._embed(self.model.encode_query, self.query_prompt, texts, bar)

    def documents(self, texts: Sequence[str], bar: Bar) -> torch.Tensor:
        return self._embed(self.model.encode_document, self.document_prompt, texts, bar)

    def _embed(self, encode: Any, prompt: str, texts: Sequence[str], bar: Bar) -> torch.Tensor:
        import torch

        step, found = self.batch_size * BATCHES, []
        for start in range(0, len(texts), step):
            try:
                vectors = encode(
                    list(texts[start : start + step]),
                    prompt=prompt,
                    batch_size=self.batch_size,
                    show_progress_bar=False,
                    convert_to_tensor=True,
                    normalize_embeddings=self._cosine,
                )
            except torch.OutOfMemoryError as error:
                raise SetupError(
                    f"--batch-size {self.batch_size} does not fit into the memory of {self.model.device}. Set a "
                    "smaller one."
                ) from error
            # In bf16 many scores would tie.
            found.append(vectors.float())
            bar.advance()
        vectors = torch.cat(found)
        if not bool(torch.isfinite(vectors).all()):
            raise SetupError("MODEL gives embeddings with NaN or Inf. Check its weights.")
        return vectors

    def pair_scores(
        self, queries: torch.Tensor, documents: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> list[float]:
        """The score of each pair of a query and a document."""
        from sentence_transformers.util import pairwise_dot_score

        score = pairwise_dot_score if self._cosine else self.model.similarity_pairwise
        scores: list[float] = []
        for start in range(0, len(pairs), PAIRS):
            left, right = map(list, zip(*pairs[start : start + PAIRS], strict=True))
            scores += score(queries[left], documents[right]).tolist()
        return scores

    def search(
        self, queries: torch.Tensor, documents: torch.Tensor, depths: Sequence[int], bar: Bar
    ) -> Iterator[list[Hit]]:
        """The best hits of each query, at least as many as its depth if the corpus has them."""
        from sentence_transformers.util import dot_score, semantic_search

        # For cosine, embeddings are normalised; other models use their own similarity.
        score = dot_score if self._cosine else self.model.similarity
        for start in range(0, len(queries), QUERIES):
            some = slice(start, start + QUERIES)
            found = semantic_search(queries[some], documents, top_k=max(depths[some]), score_function=score)
            for hits in found:
                yield [(int(hit["corpus_id"]), float(hit["score"])) for hit in hits]
            bar.advance()
