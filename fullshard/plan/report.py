"""The plan as text for people and as data for machines.

Must not predict anything.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from fullshard.formatting.plural import counted
from fullshard.formatting.readable import columns, duration, short, size
from fullshard.plan.measured import Measured, Part, Pass
from fullshard.plan.moments import Memory
from fullshard.plan.picture import in_characters
from fullshard.plan.predict import Prediction
from fullshard.plan.remedies import Remedy
from fullshard.plan.scaling import Row
from fullshard.plan.speed import StepTime

WORDS = {"optimizer": "optimizer state", "ema": "average (EMA)", "gathered": "gathered units", "reduced": "reductions"}
PAGE, CELL = 80, 24


def text(found: Prediction, time: StepTime | None, *, steps: int | None, price: float | None) -> Iterator[str]:
    """The report, line by line."""
    yield from _wrapped(f"Plan of {found.recipe.name}: {_where(found)}")
    yield ""
    highest = found.peak
    rows = [(WORDS.get(kind, kind), size(amount)) for kind, amount in _kinds(highest.memory)]
    yield from _wrapped(f"Memory of a rank at its peak, {highest.name}: {needs(found, highest.memory.total)}")
    yield from _lines([*rows, *((name, size(amount)) for name, amount in found.outside.items() if amount)])
    yield ""
    yield from _lines(
        [
            ("held between steps", size(found.held.between_steps)),
            ("activations", _by_block(found)),
            ("host memory of a node", ", ".join(f"{name} {size(amount)}" for name, amount in found.host.items())),
            ("checkpoint", size(found.checkpoint) + (f", written in about {time.save:.0f} s" if time else "")),
        ]
    )
    yield ""
    yield from in_characters(found.moments, found.place.gpu.memory if found.place.gpu else None)
    yield ""
    yield verdict(found)
    if time is not None:
        yield ""
        yield from _lines(_time(found, time, steps=steps, price=price))
    if found.measured is not None:
        yield ""
        yield from _measured(found, found.measured)
    for note in found.notes:
        yield from _wrapped(f"Note: {note}.")


def needs(found: Prediction, amount: float) -> str:
    """A size; without the activations it is a bound."""
    return size(amount) if found.activations.known else f"at least {size(amount)} (activations are not predicted)"


def verdict(found: Prediction) -> str:
    """Whether it fits, and with how much room."""
    gpu, room = found.place.gpu, found.room
    if gpu is None or room is None:
        return "CPU ranks: give --gpu to see whether it fits on one."
    known = found.activations.known
    asked = f"{'' if known else 'at least '}{size(found.needed)} of {size(gpu.memory)} on {gpu.name}"
    if room < 0:
        return f"It does not fit: {asked}, {size(-room)} too much."
    left = f"{asked}, {size(room)} left ({room / gpu.memory:.0%})"
    return f"It fits: {left}." if known else f"It may fit: {left} for activations, which are not predicted."


def advice(tried: Sequence[Remedy], chosen: Remedy | None) -> Iterator[str]:
    """What helps, the cheapest first."""
    yield "What helps, the cheapest first:"
    for remedy in tried:
        known = remedy.found.activations.known
        fits = f"{'fits' if known else 'may fit'}, {size(remedy.found.room or 0)} left"
        speed = f", {short(remedy.time.rate)} {remedy.found.work.noun}s/s" if remedy.time else ""
        other = "" if remedy.change.same else "; changes what is computed"
        yield f"  {remedy.change}"
        fits = fits if remedy.fits else "does not fit alone"
        yield f"      {'' if known else 'at least '}{size(remedy.found.needed)}{speed}; {fits}{other}"
    if chosen is None:
        yield "No combination of these fits. Use more or larger GPUs, or a smaller model."
    else:
        speed = f" and {short(chosen.time.rate)} {chosen.found.work.noun}s/s" if chosen.time else ""
        yield "Cheapest that fits:"
        yield f"  {chosen.change}"
        yield f"      {size(chosen.found.needed)}{speed}"


def scaling_table(rows: Sequence[Row]) -> Iterator[str]:
    """Speed of one rank, and the memory it needs, by strategy and number of ranks."""
    yield "Speed of a rank (memory it needs): 8 ranks to a node, the same micro-batch"
    worlds = sorted({world for row in rows for world in row.cells})
    yield f"{'ranks':>6}" + "".join(f"{row.strategy:>{CELL}}" for row in rows)
    for world in worlds:
        yield f"{world:>6,}" + "".join(f"{_cell(row, world):>{CELL}}" for row in rows)
    for row in rows:
        yield from _wrapped(f"  {row.strategy}: {row.ends()}")


def _cell(row: Row, world: int) -> str:
    cell = row.cells[world]
    needed = size(cell.found.needed)
    return f"{short(cell.each)}/s ({needed})" if cell.fits else f"too large ({needed})"


def data(
    found: Prediction,
    time: StepTime | None,
    tried: Sequence[Remedy],
    chosen: Remedy | None,
    rows: Sequence[Row],
) -> dict[str, Any]:
    """The same for machines, in bytes and seconds."""
    gpu = found.place.gpu
    return {
        "ranks": {"per_node": found.place.per_node, "nodes": found.place.nodes, "gpu": gpu.name if gpu else None},
        "layout": asdict(found.plan.layout),
        "peak": {"moment": found.peak.name, "allocated": found.peak.memory.total, **asdict(found.peak.memory)},
        "outside": dict(found.outside),
        "needed": found.needed,
        "available": int(gpu.memory) if gpu else None,
        "fits": None if found.room is None else found.room >= 0,
        "held": {key: value for key, value in asdict(found.held).items() if key != "notes"},
        "activations": {"kept": found.activations.kept, "blocks": [block.kept for block in found.activations.blocks]},
        "host": dict(found.host),
        "checkpoint": found.checkpoint,
        "moments": [{"name": moment.name, **asdict(moment.memory)} for moment in found.moments],
        "time": _time_data(time),
        "measured": _measured_data(found.measured) if found.measured else None,
        "remedies": [_remedy_data(remedy) for remedy in tried],
        "fit": _remedy_data(chosen) if chosen else None,
        "scaling": {row.strategy: _row_data(row) for row in rows},
        "notes": list(found.notes),
    }


def _measured_data(known: Measured) -> dict[str, Any]:
    """Bytes are left out where nothing counts them."""

    def data(found: Pass) -> dict[str, float]:
        times = {"tokens": found.tokens, "forward": found.forward, "backward": found.backward}
        return asdict(found) if known.counts_bytes else times

    def guessed(found: Pass) -> dict[str, float]:
        return {
            key: value for key, value in asdict(found).items() if key in ("kept", "forward_needs", "backward_needs")
        }

    parts = []
    for part, guess in zip((*known.kinds, known.outside), known.was_modelled(), strict=True):
        both = {"name": part.name, "calls": part.calls, "whole": data(part.whole), "other": data(part.other)}
        parts.append({**both, "modelled": guessed(guess)})
    return {
        "device": known.device,
        "counts_bytes": known.counts_bytes,
        "parts": parts,
        "seconds": known.seconds(known.work),
        "modelled_seconds": known.modelled,
    }


def _row_data(row: Row) -> dict[str, Any]:
    cells = {
        world: {"tokens_per_second": cell.time.rate, "needed": cell.found.needed, "fits": cell.fits}
        for world, cell in row.cells.items()
    }
    return {"ends": row.ends(), "ranks": cells}


def _remedy_data(remedy: Remedy) -> dict[str, Any]:
    return {
        "settings": dict(remedy.change.settings),
        "same": remedy.change.same,
        "needed": remedy.found.needed,
        "fits": remedy.fits,
        "time": _time_data(remedy.time),
    }


def _time_data(time: StepTime | None) -> dict[str, Any] | None:
    return None if time is None else {**asdict(time), "total": time.total, "rate": time.rate}


def _where(found: Prediction) -> str:
    place, gpu = found.place, found.place.gpu
    nodes = f" on {counted(place.nodes, 'node')}" if place.nodes > 1 else ""
    kind = gpu.name if gpu else "CPU"
    return f"{counted(place.world, 'rank')}{nodes}, {kind}; {found.plan.layout.describe()}"


def _kinds(memory: Memory) -> list[tuple[str, int]]:
    return [(field.name, amount) for field in fields(memory) if (amount := getattr(memory, field.name))]


def _by_block(found: Prediction) -> str:
    """Equal blocks together."""
    seen, mode = found.activations, found.plan.activation_checkpointing
    if not seen.blocks:
        return "not predicted"
    sizes = Counter((block.kept, block.cost.compiled) for block in seen.blocks)
    kinds = ", ".join(f"{counted(count, 'block')} of {size(kept)}" for (kept, _), count in sizes.most_common(4))
    compiled = "compiled" if all(block.cost.compiled for block in seen.blocks) else "not compiled"
    redone = "" if mode == "none" else f", recomputed {mode}"
    return f"{size(seen.kept)}: {kinds} ({compiled}{redone}); outside the blocks {size(seen.outside)}"


def _time(found: Prediction, time: StepTime, *, steps: int | None, price: float | None) -> list[tuple[str, str]]:
    world, noun = found.place.world, found.work.noun
    parts = f"compute {_s(time.compute)}, update {_s(time.update)}, communication {_s(time.exposed)} not hidden"
    parts += f" of {_s(time.sent)}" + (f", offload {_s(time.offload)}" if time.offload else "")
    rows = [
        ("time of a step", f"{_s(time.total)}: {parts}"),
        ("speed", f"{short(time.rate)} {noun}s/s, {short(time.rate / world)} per rank, MFU {time.mfu:.0%}"),
    ]
    unit, amount = (f"1B {noun}s", 1e9) if noun != "image" else ("1M images", 1e6)
    spans = [(unit, amount / time.rate)] + ([(f"the run of {steps:,} steps", steps * time.total)] if steps else [])
    for label, seconds in spans:
        hours = world * seconds / 3600
        cost = f", {price * hours:,.2f} at {price:g} per GPU hour" if price is not None else ""
        rows.append((label, f"{duration(seconds)}, {hours:,.1f} GPU hours{cost}"))
    return rows


def _measured(found: Prediction, known: Measured) -> Iterator[str]:
    """What was measured beside what was modelled."""
    work, parts = known.work, (*known.kinds, known.outside)
    rows = f"{work.rows:,} x {work.length:,} {work.noun}s" if work.length > 1 else counted(work.rows, work.noun)
    yield from _wrapped(f"Measured on {known.device} with {rows}" + (", and used above:" if found.place.gpu else ":"))
    names = [part.name if part.calls == 1 else f"{part.calls} x {part.name}" for part in parts]
    bytes_of = [_bytes(*pair) if known.counts_bytes else "" for pair in zip(parts, known.was_modelled(), strict=True)]
    each = [_seconds(part, work.noun) + more for part, more in zip(parts, bytes_of, strict=True)]
    seconds = known.seconds(work)
    beside = f", modelled {_near(known.modelled, seconds, _ms)}" if known.modelled else ""
    rate = f"{short(work.learned / seconds)} {work.noun}s/s of a rank, without update and communication"
    all_of_it = ("a micro-batch", f"computed in {_ms(seconds)}{beside}: {rate}")
    yield from _lines([*zip(names, each, strict=True), all_of_it])
    if not known.counts_bytes:
        yield from _wrapped("Only times are measured: nothing counts the memory of a CPU, so bytes stay modelled.")


def _seconds(part: Part, noun: str) -> str:
    real, other = part.whole, part.other
    less = f"{_ms(other.forward)} and {_ms(other.backward)} with {counted(other.tokens, noun)}"
    return f"forward {_ms(real.forward)}, backward {_ms(real.backward)} ({less})"


def _bytes(part: Part, guess: Pass) -> str:
    """Measured and modelled; and whether twice the tokens keep twice as much."""
    real, other = part.whole, part.other
    names = {"keeps": "kept", "needs forward": "forward_needs", "needs backward": "backward_needs"}
    both = [(word, getattr(real, name), getattr(guess, name)) for word, name in names.items()]
    found = "".join(f"; {word} {size(seen)}, modelled {_near(said, seen, size)}" for word, seen, said in both)
    straight = other.kept * real.tokens / other.tokens
    if abs(straight - real.kept) > 0.05 * real.kept:
        found += f"; not in proportion to the tokens: {size(other.kept)} with {other.tokens:,}"
    return found


def _near(guess: float, real: float, said: Callable[[float], str]) -> str:
    """A modelled number, and how far it is from the measured one."""
    return f"{said(guess)} ({guess / real - 1:+.1%})" if real else said(guess)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, PAGE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _lines(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    for left, right in columns([row for row in rows if row[1]], width=PAGE):
        yield f"{left}{right}".rstrip()
