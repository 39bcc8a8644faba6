"""`fullshard export`: a checkpoint as files that other libraries load. One process, CPU only, tensor by tensor.

Must not import torch before it is called, nor know how anything is read or written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.commands.options import Base, TrustRemoteCode, WhichWeights, check_weights, one_of
from fullshard.errors import CheckpointError, SetupError
from fullshard.formatting.plural import counted

if TYPE_CHECKING:
    from fullshard.contracts.model import Family
    from fullshard.log.console import Bar, Console

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint folder, a run folder (its last one), RUN/best or a URL."
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A folder that does not exist yet; a file for --as state.")],
    form: Annotated[
        str | None,
        typer.Option("--as", metavar="hf|adapter|merged|state", help="What to write; adapter for a LoRA run, else hf."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16|fp16|original", help="original: as the model was stored before training.")
    ] = "original",
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="The largest size of one file: 5GB, 500MB.")] = "5GB",
    weights: WhichWeights = None,
    base: Base = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the model of CHECKPOINT for other libraries.

    hf is a folder for Transformers, adapter one for PEFT; merged is a whole model with the adapters added to its
    weights; state is one file (.safetensors, .pt) with every tensor under the name that it has in training. Needs no
    GPU, and no more memory than the largest file. An interrupted export leaves nothing behind.
    """
    from fullshard.checkpoint.folder import named
    from fullshard.export import write as writing
    from fullshard.log import libraries
    from fullshard.log.console import Console

    size = parse_size(shard_size)
    one_of("--as", form, (None, *writing.FORMS))
    check_weights(weights)
    one_of("--dtype", dtype, tuple(writing.DTYPES))
    found = named(checkpoint)
    target = writing.free(out, found)
    console = Console()
    _check(found, console)
    with libraries.route(console):
        from fullshard.export.source import open_trained

        trained = open_trained(found, base=base, trust_remote_code=trust_remote_code, weights=weights)
        options = writing.ExportOptions(
            writing.choose_form(trained, form, target), dtype, size if shard_size != "5GB" else None
        )
        names = list(writing.names_for(trained, options.form))
        writing.write(trained, target, options, _watched(trained.tensors(names), len(names), console))
    _say_done(console, target, options.form, trained.family)


def parse_size(text: str) -> int:
    """`5GB`, `500 MB`, `2GiB` or a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise SetupError(f"--shard-size {text!r} is not a size. Write a number and a unit: 5GB, 500MB, 2GiB.")
    return int(float(found[1]) * unit)


def _check(checkpoint: Path, console: Console) -> None:
    """Raises for a damaged checkpoint. A remote one is read only once, so only its file sizes are checked."""
    from fullshard.checkpoint import folder, integrity

    described = folder.read_manifest(checkpoint).get("files", {})
    console.say(f"Checking {checkpoint}")
    with _bar(console, "Checking", len(described)) as bar:
        local = not folder.is_remote(checkpoint)
        found = integrity.file_problems(checkpoint, described, checksums=local, done=lambda size: bar.advance())
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(found[:3])}{more}. Export another one.")


def _bar(console: Console, label: str, total: int) -> Bar:
    from fullshard.log.bar import Pace
    from fullshard.log.console import Bar

    return Bar(console, label, "", Pace(total, clock=console.clock))


def _watched(tensors: Iterator[tuple[str, Any]], total: int, console: Console) -> Iterator[tuple[str, Any]]:
    """The tensors, with a bar that counts them."""
    with _bar(console, "Writing", total) as bar:
        for pair in tensors:
            yield pair
            bar.advance()


def _say_done(console: Console, out: Path, form: str, family: Family) -> None:
    from fullshard.card.load_code import importing
    from fullshard.formatting import readable

    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    number = counted(len(files), "file")
    place = str(out.resolve())
    pickled = f"torch.load({place!r}, weights_only=True)"
    load = {
        "hf": family.load_with(place, adapter=False),
        "merged": family.load_with(place, adapter=False),
        "adapter": family.load_with(place, adapter=True),
        "state": f"safetensors.torch.load_file({place!r})" if out.suffix == ".safetensors" else pickled,
    }
    console.say(f"Wrote {out} ({form}, {readable.size(size)}, {number}).")
    if line := load[form]:
        console.whole(f"Load it with: {importing(line)}")
    elif form == "adapter":
        console.say("Other libraries cannot read its base model: export with --as merged for a whole model.")
