"""The losses once more, with one loop for everything, as their papers write them; in fp64, a sample at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fullshard.similarity.base import Embedded

Pair = tuple[int, int | None]
"""A document: its sample, and which of its hard negatives it is; None: the positive."""


def cosine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.dot(left, right) / (left.square().sum().sqrt() * right.square().sum().sqrt())


def number(value: torch.Tensor) -> float:
    return float(value.detach())


def document(embedded: Embedded, pair: Pair) -> torch.Tensor:
    sample, negative = pair
    return embedded.positives[sample] if negative is None else embedded.negatives[sample, negative]


def others(embedded: Embedded, query: int, *, scope: str, labels: bool = True, equal: bool = True) -> list[Pair]:
    """What a query is told from."""
    found: list[Pair] = []
    own = embedded.positive_keys[query] if equal else -1
    for sample in (sample for sample in range(len(embedded.real)) if embedded.real[sample]):
        same = labels and bool(embedded.labels[sample] == embedded.labels[query])
        if sample != query and scope != "own" and not same and embedded.positive_keys[sample] != own:
            found.append((sample, None))
        if sample == query or scope == "shared":
            negatives = range(int(embedded.has_negative[sample].sum()))
            found += [(sample, n) for n in negatives if embedded.negative_keys[sample, n] != own]
    return found


def over_samples(embedded: Embedded, term: Callable[[int], torch.Tensor]) -> torch.Tensor:
    return torch.stack([term(query) for query in range(len(embedded.real)) if embedded.real[query]]).sum()


def softmax_loss(right: torch.Tensor, wrong: list[torch.Tensor]) -> torch.Tensor:
    return -torch.log(torch.exp(right) / (torch.exp(right) + sum(torch.exp(score) for score in wrong)))


def infonce(embedded: Embedded, *, scope: str = "shared", bidirectional: bool = False, **masks: bool) -> torch.Tensor:
    scale = embedded.scalars["log_scale"].exp() if "log_scale" in embedded.scalars else torch.tensor(20.0)

    def term(query: int) -> torch.Tensor:
        pairs = others(embedded, query, scope=scope, **masks)
        vector = embedded.queries[query]
        right = scale * cosine(vector, embedded.positives[query])
        found = softmax_loss(right, [scale * cosine(vector, document(embedded, pair)) for pair in pairs])
        if not bidirectional:
            return found
        queries = [sample for sample, negative in pairs if negative is None]
        back = [scale * cosine(embedded.queries[sample], embedded.positives[query]) for sample in queries]
        return (found + softmax_loss(right, back)) / 2

    return over_samples(embedded, term)


def in_batch_hard(embedded: Embedded, *, top_k: int) -> torch.Tensor:
    def term(query: int) -> torch.Tensor:
        vector = embedded.queries[query]
        pairs = others(embedded, query, scope="shared")
        scores = sorted((20 * cosine(vector, document(embedded, pair)) for pair in pairs), key=number, reverse=True)
        return softmax_loss(20 * cosine(vector, embedded.positives[query]), scores[:top_k])

    return over_samples(embedded, term)


def sigmoid(embedded: Embedded) -> torch.Tensor:
    scale, bias = embedded.scalars["log_scale"].exp(), embedded.scalars["bias"]

    def term(query: int) -> torch.Tensor:
        vector = embedded.queries[query]
        total = torch.log(1 + torch.exp(-(scale * cosine(vector, embedded.positives[query]) + bias)))
        for pair in others(embedded, query, scope="in_batch"):
            total = total + torch.log(1 + torch.exp(scale * cosine(vector, document(embedded, pair)) + bias))
        return total

    return over_samples(embedded, term)


def triplet(embedded: Embedded, *, margin: float = 0.2) -> torch.Tensor:
    def term(query: int) -> torch.Tensor:
        vector = embedded.queries[query]
        near, own = cosine(vector, embedded.positives[query]), range(int(embedded.has_negative[query].sum()))
        missed = [(margin - near + cosine(vector, embedded.negatives[query, n])).clamp(min=0) for n in own]
        return torch.stack(missed).mean()

    return over_samples(embedded, term)


def cosent(embedded: Embedded) -> torch.Tensor:
    real = [sample for sample in range(len(embedded.real)) if embedded.real[sample]]
    cosines = {sample: cosine(embedded.queries[sample], embedded.positives[sample]) for sample in real}
    wrong = torch.ones((), dtype=torch.float64)
    for low in real:
        for high in real:
            if embedded.labels[low] < embedded.labels[high]:
                wrong = wrong + torch.exp(20 * (cosines[low] - cosines[high]))
    return torch.log(wrong) * len(real)


def max_sim(embedded: Embedded, query: int, pair: Pair) -> torch.Tensor:
    """ColBERT's score, divided by the number of the query's tokens."""
    sample, negative = pair
    assert embedded.query_tokens is not None
    assert embedded.positive_tokens is not None
    assert embedded.negative_tokens is not None
    real = embedded.positive_tokens[sample] if negative is None else embedded.negative_tokens[sample, negative]
    tokens = [token for token, there in zip(document(embedded, pair), real, strict=True) if there]
    best = [
        max((cosine(word, token) for token in tokens), key=number)
        for word, there in zip(embedded.queries[query], embedded.query_tokens[query], strict=True)
        if there
    ]
    return torch.stack(best).mean()


def late_interaction(embedded: Embedded) -> torch.Tensor:
    def term(query: int) -> torch.Tensor:
        wrong = [20 * max_sim(embedded, query, pair) for pair in others(embedded, query, scope="shared")]
        return softmax_loss(20 * max_sim(embedded, query, (query, None)), wrong)

    return over_samples(embedded, term)


def distillation(embedded: Embedded, *, divergence: str = "kl", alpha: float = 0.5) -> torch.Tensor:
    queries, positives, negatives = embedded.teacher_queries, embedded.teacher_positives, embedded.teacher_negatives
    assert queries is not None
    assert positives is not None
    assert negatives is not None

    def term(query: int) -> torch.Tensor:
        pairs = [(query, None), *others(embedded, query, scope="shared", labels=False, equal=False)]
        ours = torch.stack([cosine(embedded.queries[query], document(embedded, pair)) for pair in pairs])
        texts = [positives[s] if n is None else negatives[s, n] for s, n in pairs]
        theirs = torch.stack([cosine(queries[query].double(), text.double()) for text in texts])
        if divergence == "mse":
            return torch.stack([(a - b) ** 2 for a, b in zip(ours, theirs, strict=True)]).sum() / len(pairs)
        p, q = ((20 * each).exp() / (20 * each).exp().sum() for each in (theirs, ours))
        return (p * (p / q).log()).sum()

    return alpha * over_samples(embedded, term) + (1 - alpha) * infonce(embedded)
