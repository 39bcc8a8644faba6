"""`fullshard mine`: hard negatives for pairs, from a model's nearest neighbours in a corpus. One process.

Must not import torch before it is called, nor know how texts are embedded, searched or chosen.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.errors import DataError, SetupError

if TYPE_CHECKING:
    from fullshard.families.embedding.encoders.pairs import Pair, Pairs
    from fullshard.families.embedding.mining.corpus import Task
    from fullshard.families.embedding.mining.negatives import Rules, Tally
    from fullshard.families.embedding.mining.search import Embedder
    from fullshard.log.console import Bar, Console

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A run folder, a model folder, a hub name, or package:NAME/FOLDER."),
]
Data = Annotated[
    str, typer.Argument(metavar="DATA", help="Pairs, as in data.train: a file, a folder, docstrings, {kind: ...}.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The .jsonl file to write, ready for data.train.")]
Negatives = Annotated[int, typer.Option(min=1, metavar="N", help="Negatives to mine for each pair.")]
HitRanks = Annotated[
    str, typer.Option(metavar="A:B", help="Choose among hits A to B of a query, both included; 1 is the best hit.")
]
Margin = Annotated[
    float | None, typer.Option(metavar="X", help="Keep negatives that score at least this far below the positive.")
]
MaxScore = Annotated[float | None, typer.Option(metavar="X", help="Maximum score of a negative.")]
MinScore = Annotated[float | None, typer.Option(metavar="X", help="Minimum score of a negative.")]
Corpus = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="More documents to search: records with a text, a document or a positive."),
]
Column = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OURS=THEIRS", help="Column of the query, positive, negatives or label; document for --corpus."
    ),
]
Prompt = Annotated[
    list[str] | None,
    typer.Option(metavar="SIDE=TEXT", help="Prefix of every query or document, instead of the model's own prompt."),
]
Replace = Annotated[bool, typer.Option("--replace", help="Drop the negatives that DATA has.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Texts to embed at once.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1. Default: a GPU if there is one.")]


def mine(
    model: Model,
    data: Data,
    out: Out,
    negatives: Negatives = 5,
    ranks: HitRanks = "10:100",
    margin: Margin = None,
    max_score: MaxScore = None,
    min_score: MinScore = None,
    corpus: Corpus = None,
    column: Column = None,
    prompt: Prompt = None,
    replace: Replace = False,
    overwrite: Overwrite = False,
    batch_size: BatchSize = 32,
    device: Device = None,
) -> None:
    """Mine hard negatives for the pairs of DATA with MODEL.

    Writes the pairs with their negatives to OUT. Every query searches the corpus: all positives of DATA, and the
    documents of --corpus. Its hits are ranked without its own positives, those of equal queries, and a document equal
    to the query; these are never negatives. The hardest hits between the two ranks that satisfy --margin and the scores
    are added to the negatives of the pair. The first hits are often unmarked correct answers; the default skips nine of
    them.

    OUT has the columns query, positive, negatives and label; others are not kept. It appears only when complete.
    """
    from fullshard.families.embedding.mining import search
    from fullshard.families.embedding.mining.negatives import Rules
    from fullshard.log import libraries
    from fullshard.log.console import Console

    rules = _checked(Rules(negatives, *_window(ranks), margin, max_score, min_score))
    encoders = _encoders(column or [], prompt or [], replace=replace)
    console = Console()
    with libraries.route(console), _beside(out, overwrite=overwrite) as file:
        console.say("Loading sentence-transformers")
        search.get_ready(device)
        place = search.locate(model)
        task = _read(data, corpus, encoders, console)
        _check_reach(rules, task)
        console.say(f"Loading {place}")
        loaded = search.load(place, device=device)
        console.note("; ".join(encoders[0].prompt_notes(loaded)))
        embedder = search.Embedder(loaded, *encoders[0].prompts_for(loaded), batch_size)
        mined, tally = _mine(embedder, task, rules, console)
        _write(file, task, mined)
    _summarise(console, out, rules, tally, kept=sum(len(pair.texts) - 2 for pair in task.pairs))


def _window(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise SetupError(
            f"--ranks {text} is not a range of hits. Write FIRST:LAST, both included; 1 is the best hit: 10:100."
        )
    return int(found[1]), int(found[2])


def _checked(rules: Rules) -> Rules:
    """The rules, checked to leave something to choose from."""
    room = rules.last - rules.first + 1
    if rules.number > room:
        raise SetupError(
            f"--ranks {rules.first}:{rules.last} holds {room} hits, and --negatives {rules.number} asks for more. "
            "Widen --ranks, or ask for fewer."
        )
    for option, value in (
        ("--margin", rules.margin),
        ("--max-score", rules.max_score),
        ("--min-score", rules.min_score),
    ):
        if value is not None and not math.isfinite(value):
            raise SetupError(f"{option} {value} is not a finite number. Give a finite one, or leave it out.")
    if rules.max_score is not None and rules.min_score is not None and rules.min_score > rules.max_score:
        raise SetupError(
            f"--min-score {rules.min_score:g} is above --max-score {rules.max_score:g}, so no score is allowed. "
            "Swap them."
        )
    return rules


def _encoders(column: Sequence[str], prompt: Sequence[str], *, replace: bool) -> tuple[Pairs, Pairs]:
    """The encoders of DATA and of --corpus, where a document is in the place of a positive."""
    from fullshard.families.embedding.encoders.pairs import ALIASES, Pairs, Prompts

    mapping = _assignments("--column", column, (*ALIASES, "document"))
    document = mapping.pop("document", None)
    prompts = Prompts(**_assignments("--prompt", prompt, ("query", "document")))
    own = Pairs(column_mapping=mapping, prompts=prompts, negatives=0 if replace else None)
    return own, Pairs(column_mapping={"positive": document} if document else {})


def _assignments(option: str, words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    from fullshard.config.part import did_you_mean

    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            hint = did_you_mean(name, list(known))
            raise SetupError(f"{option} {word}: write NAME=..., where NAME is one of {', '.join(known)}{hint}.")
        if found.setdefault(name, value) != value:
            raise SetupError(f"{option} {name} is given twice: {found[name]!r} and {value!r}. Give one of them.")
    return found


def _read(data: str, corpus: str | None, encoders: tuple[Pairs, Pairs], console: Console) -> Task:
    """The pairs and the corpus; prints which columns were read, and what was left out."""
    from fullshard.families.embedding.mining.corpus import lay_out, open_source, read_documents, read_pairs

    console.say(f"Reading {data}{f' and {corpus}' if corpus else ''}")
    records = open_source(data, where="DATA")
    pairs = read_pairs(records, encoders[0], console)
    for note in [*getattr(records, "notes", []), *encoders[0].columns_read(records[0])]:
        console.note(note)
    if corpus is None:
        return lay_out(pairs, [])
    more = open_source(corpus, where="--corpus")
    for note in getattr(more, "notes", []):
        console.note(note)
    return lay_out(pairs, read_documents(more, encoders[1], console))


def _check_reach(rules: Rules, task: Task) -> None:
    """Raises DataError if no query has as many hits as --ranks starts at, before anything is embedded."""
    reach = len(task.documents.texts) - min(len(own) for own in task.own)
    if rules.first > reach:
        fix = f"Set --ranks 1:{reach}, or give" if reach else "Give"
        raise DataError(
            f"--ranks {rules.first}:{rules.last} is beyond the corpus: it has {len(task.documents.texts):,} "
            f"different documents, of which at most {reach:,} are hits of a query. {fix} more documents with "
            "--corpus."
        )


def _mine(embedder: Embedder, task: Task, rules: Rules, console: Console) -> tuple[list[list[int]], Tally]:
    """The document numbers of each pair's negatives."""
    from fullshard.families.embedding.mining import negatives
    from fullshard.families.embedding.mining.search import QUERIES

    queries, documents = task.queries.texts, task.documents.texts
    with _bar(console, f"Embedding {len(documents):,} documents", embedder.num_pieces(documents)) as bar:
        document_vectors = embedder.documents(documents, bar)
    with _bar(console, f"Embedding {len(queries):,} queries", embedder.num_pieces(queries)) as bar:
        query_vectors = embedder.queries(queries, bar)
    positives = embedder.pair_scores(
        query_vectors, document_vectors, list(zip(task.query_of, task.positive_of, strict=True))
    )
    pairs_of: list[list[int]] = [[] for _ in queries]
    for pair, query in enumerate(task.query_of):
        pairs_of[query].append(pair)
    depths = [min(rules.last + len(own), len(documents)) for own in task.own]
    tally = negatives.Tally()
    mined: list[list[int]] = [[] for _ in task.pairs]
    with _bar(console, "Searching", -(-len(queries) // QUERIES)) as bar:
        for query, hits in enumerate(embedder.search(query_vectors, document_vectors, depths, bar)):
            found = negatives.window(hits, task.own[query], rules)
            for pair in pairs_of[query]:
                mined[pair] = negatives.choose(found, task.kept(pair), positives[pair], rules, tally)
    if not tally.num_negatives:
        raise DataError(f"No negative was found for any pair: {tally.why()}. Relax these, or give a --corpus.")
    return mined, tally


def _bar(console: Console, label: str, total: int) -> Bar:
    from fullshard.log.bar import Pace
    from fullshard.log.console import Bar

    return Bar(console, label, "", Pace(total, clock=console.clock))


def _record(pair: Pair, mined: list[str]) -> dict[str, Any]:
    query, positive, *kept = pair.texts
    record: dict[str, Any] = {"query": query, "positive": positive, "negatives": kept + mined}
    if not math.isnan(pair.label):
        record["label"] = int(pair.label) if pair.label.is_integer() else pair.label
    return record


@contextlib.contextmanager
def _beside(text: str, *, overwrite: bool) -> Iterator[Path]:
    """A file beside OUT, created before any work is done, and renamed to OUT at the end."""
    out = Path(text).expanduser()
    if "://" in text or out.suffix != ".jsonl":
        raise SetupError(f"OUT = {text} must be a local file whose name ends in .jsonl. Change the name.")
    if out.is_dir() or (out.exists() and not overwrite):
        raise SetupError(f"OUT = {out} exists. Choose another name, or use --overwrite to write over a file.")
    # Two commands that write the same OUT must not write the same hidden file.
    hidden = out.with_name(f".mine-{os.getpid()}-{out.name}")
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        hidden.touch()
    try:
        yield hidden
        with _writing(out):
            hidden.replace(out)
    finally:
        hidden.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"OUT = {out} cannot be written ({error.strerror or error}). Check disk space and permissions; nothing was "
            "written."
        ) from error


def _write(file: Path, task: Task, mined: list[list[int]]) -> None:
    with _writing(file), file.open("w", encoding="utf-8") as lines:
        for pair, numbers in zip(task.pairs, mined, strict=True):
            found = [task.documents.texts[number] for number in numbers]
            lines.write(json.dumps(_record(pair, found), ensure_ascii=False) + "\n")


def _summarise(console: Console, out: str, rules: Rules, tally: Tally, *, kept: int) -> None:
    from fullshard.formatting.plural import counted

    def share(number: int) -> str:
        return f"{number} for {counted(tally.mined[number], 'pair')}"

    negatives = tally.negative_sum / tally.num_negatives
    rows = [
        ("mined", f"{counted(tally.num_negatives, 'negative')}: {', '.join(map(share, sorted(tally.mined)[::-1]))}"),
        ("mean score", f"positives {tally.positive_sum / tally.num_pairs:.4f}, mined negatives {negatives:.4f}"),
    ]
    if kept:
        rows.insert(1, ("kept", f"{counted(kept, 'negative')} of DATA, in front"))
    if short := tally.num_pairs - tally.mined[rules.number]:
        rows.append(("too few", f"{counted(short, 'pair')} got fewer than {rules.number}: {tally.why()}"))
    console.header(f"Wrote {out}, {counted(tally.num_pairs, 'pair')}", rows)


__all__ = ["mine"]
