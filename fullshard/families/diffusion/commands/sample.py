"""`fullshard sample`: images from a trained diffusion model, as one grid and as files. Starts its own ranks, or joins.

Must not import torch before it is called, nor know how a model is loaded or images are made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.commands.options import WhichWeights, as_words, check_weights, one_of
from fullshard.errors import SetupError

if TYPE_CHECKING:
    import torch

    from fullshard.commands.chosen_run import Chosen
    from fullshard.contracts.world import World
    from fullshard.families.diffusion.sampling.from_run import Loaded, SampleOptions
    from fullshard.log.console import Console

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")]
Classes = Annotated[
    str | None, typer.Option(metavar="0,1,2", help="Classes, one row each. Default: the first ten classes.")
]
Texts = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT|FILE.txt", help="A text, or a file with one text per line; one row each. Repeatable."),
]
PerClass = Annotated[int, typer.Option(min=1, metavar="N", help="Images per row.")]
Guidance = Annotated[
    float | None,
    typer.Option(min=0, metavar="X", help="Weight of the class or text; 1 is what the model learned. Default: 2."),
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Sampling steps from noise to image.")]
SamplingMethod = Annotated[
    str, typer.Option(metavar="heun|euler", help="heun runs the model twice per step, and needs fewer steps.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the noise.")]
Grid = Annotated[
    str | None,
    typer.Option(metavar="FILE.png", help="Where to write the grid. Default: RUN/pictures/sample-STEP.png."),
]
Images = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Also write each image to its own file, one folder per row.")
]
Checkpoint = Annotated[
    str | None,
    typer.Option(metavar="STEP|best|latest", help="Which checkpoint. Default: the latest, or RUN/model without one."),
]
Devices = Annotated[str, typer.Option(metavar="N|0,1|auto", help="Ranks: a number, GPU ids, or auto for every GPU.")]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Images that each rank makes at once.")]


def sample(
    run: Run,
    classes: Classes = None,
    texts: Texts = None,
    per_class: PerClass = 8,
    guidance: Guidance = None,
    steps: Steps = 32,
    method: SamplingMethod = "heun",
    seed: Seed = 0,
    grid: Grid = None,
    images: Images = None,
    checkpoint: Checkpoint = None,
    weights: WhichWeights = None,
    devices: Devices = "auto",
    batch_size: BatchSize = 64,
) -> None:
    """Make images with the model of RUN.

    The run's recipe says how images are sampled and how its data was scaled. The same seed gives the same images, on
    any number of ranks. An existing grid is replaced.

    Exit codes: 0 done; 2 a mistake in the options or the run; 3 the images hold NaN or Inf.
    """
    from fullshard.commands.chosen_run import choose, on_this_machine
    from fullshard.commands.own_ranks import start_own
    from fullshard.dist import env

    # First, before anything is loaded: mistakes in the options alone.
    wanted, written = _classes(classes), _texts(texts)
    one_of("--method", method, ("heun", "euler"))
    check_weights(weights)
    launch = env.detect(os.environ)
    chosen = choose(run, checkpoint, here=on_this_machine(devices=devices, nodes=launch.num_nodes))
    picture = Path(grid).expanduser() if grid else chosen.run / "pictures" / f"sample-{chosen.name}.png"
    target = _Target(_grid(picture), _folder(images))
    if launch.rank == 0:
        target.probe()
    options: dict[str, Any] = {"--classes": classes, "--method": method, "--weights": weights, "--guidance": guidance}
    options |= {"--per-class": per_class, "--steps": steps, "--seed": seed, "--batch-size": batch_size}
    options |= {"--grid": target.grid, "--images": target.folder}
    words = ["sample", str(chosen.checkpoint or chosen.run), *as_words(options | {"--texts": list(written)})]
    if (code := start_own(words, chosen.reading.recipe.topology)) is not None:
        raise typer.Exit(code)
    from fullshard.families.diffusion.sampling.from_run import SampleOptions
    from fullshard.families.diffusion.sampling.image_batches import SamplerSettings

    sampler = SamplerSettings(steps, "heun" if method == "heun" else "euler", guidance, seed)
    _on_rank(chosen, SampleOptions(wanted, per_class, sampler, batch_size, weights, written), target)


class _Target:
    """Where images go."""

    def __init__(self, grid: Path, folder: Path | None) -> None:
        self.grid, self.folder = grid, folder

    def probe(self) -> None:
        """Checks that both can be written, before any work is done."""
        with _writing("--grid", self.grid):
            self.grid.parent.mkdir(parents=True, exist_ok=True)
            hidden = self._hidden()
            hidden.touch()
            hidden.unlink()
        if self.folder is not None:
            with _writing("--images", self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / ".fullshard").touch()
                (self.folder / ".fullshard").unlink()

    def write(self, images: torch.Tensor, rows: Sequence[int] | None, *, per_class: int, latents: bool = False) -> None:
        """`latents`: also written as .npy, beside the grid and in place of each image file."""
        from fullshard.families.diffusion.vae.latents import as_strips
        from fullshard.images.grids import save_array, save_grid

        hidden = self._hidden()
        with _writing("--grid", self.grid):
            try:
                save_grid(as_strips(images) if latents else images, hidden, columns=per_class)
                hidden.replace(self.grid)
                if latents:
                    save_array(images, self.latents)
            finally:
                hidden.unlink(missing_ok=True)
        if self.folder is not None:
            with _writing("--images", self.folder):
                for number, image in enumerate(images):
                    row, column = divmod(number, per_class)
                    place = self.folder / str(rows[row]) if rows is not None else self.folder
                    place.mkdir(exist_ok=True)
                    name = f"{column:0{len(str(per_class - 1))}d}"
                    save_array(image, place / f"{name}.npy") if latents else _save(image, place / f"{name}.png")

    @property
    def latents(self) -> Path:
        """The .npy file with all latents."""
        return self.grid.with_suffix(".npy")

    def _hidden(self) -> Path:
        return self.grid.with_name(f".sample-{os.getpid()}-{self.grid.name}")


def _save(image: torch.Tensor, path: Path) -> None:
    """One image at its own size; a grid enlarges small ones."""
    from PIL import Image

    from fullshard.families.diffusion.evaluations.image_callbacks import as_pixels

    values = as_pixels(image[None], as_bytes=True)[0].numpy()
    Image.fromarray(values[0] if len(values) == 1 else values.transpose(1, 2, 0)).save(path)


def _classes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SetupError(f"--classes {text} is not a list of classes. Write their numbers, separated by commas: 0,1,2.")
    return tuple(int(part) for part in parts)


def _texts(given: list[str] | None) -> tuple[str, ...]:
    found: list[str] = []
    for text in given or ():
        if not text.lower().endswith(".txt"):
            found.append(text)
            continue
        try:
            lines = Path(text).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"--texts {text} cannot be read ({error}). Check its name.") from error
        found += [line for line in lines if line.strip()]
    if given is not None and not all(text.strip() for text in found or [""]):
        raise SetupError(f"--texts {' '.join(given)}: a text is missing or blank. Give at least one.")
    return tuple(found)


def _grid(path: Path) -> Path:
    if "://" in str(path) or path.suffix.lower() != ".png" or path.is_dir():
        raise SetupError(f"--grid {path}: the grid must be a local file whose name ends in .png. Give another name.")
    return path


def _folder(text: str | None) -> Path | None:
    if text is None:
        return None
    folder = Path(text).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(f"--images {text} exists and is not an empty folder. Choose another name, or empty it first.")
    return folder


@contextlib.contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"{option} {path} cannot be written ({error.strerror or error}). Check disk space and permissions, or "
            "choose another path."
        ) from error


def _on_rank(chosen: Chosen, options: SampleOptions, target: _Target) -> None:
    """Everything that happens on a rank, from loading to the last line."""
    from fullshard.families.diffusion.sampling import from_run
    from fullshard.log.bar import Pace
    from fullshard.log.console import Bar
    from fullshard.setup.on_ranks import as_rank

    with as_rank(chosen.reading.recipe.topology) as (console, meet):

        def watch(steps: int) -> Bar:
            return Bar(console, "Sampling", "", Pace(steps, clock=console.clock))

        loaded = from_run.load(chosen, options, console)
        world = meet()
        _announce(console, chosen, options, loaded, world, target)
        found = from_run.make(loaded, chosen, options, world, watch)
        if found is not None:
            rows = range(len(options.texts)) if options.texts else from_run.classes_of(loaded.module, options)
            target.write(found, rows, per_class=options.per_class, latents=loaded.is_latent)
            _say_done(console, target, len(found), latents=loaded.is_latent)


def _announce(
    console: Console, chosen: Chosen, options: SampleOptions, loaded: Loaded, world: World, target: _Target
) -> None:
    from fullshard.families.diffusion.sampling.conditioning import is_conditioned
    from fullshard.families.diffusion.sampling.from_run import classes_of
    from fullshard.formatting.plural import counted

    rows, sampler = classes_of(loaded.module, options), loaded.sampler
    each = counted(options.per_class, "image")
    what = f"{each} of each class: {', '.join(map(str, rows))}" if rows else each
    if options.texts:
        what = f"{each} of each text: {'; '.join(options.texts[:3])}{'; ...' if len(options.texts) > 3 else ''}"
    guided = f", guidance {sampler.guidance:g}" if is_conditioned(loaded.module) else ", without labels or texts"
    lines = [
        ("weights", f"{chosen.weights}{f', --weights {options.weights}' if options.weights else ''}"),
        ("images", what),
        ("sampler", f"{counted(sampler.steps, 'step')} of {sampler.method}{guided}, seed {sampler.seed}"),
        ("world", world.describe()),
        ("grid", str(target.grid)),
    ]
    if target.folder is not None:
        lines.append(("files", str(target.folder)))
    console.header(f"fullshard sample: {chosen.reading.recipe.name}", lines)


def _say_done(console: Console, target: _Target, count: int, *, latents: bool) -> None:
    from fullshard.formatting.plural import counted

    if latents:
        console.say(f"Wrote {target.grid} ({counted(count, 'latent')}: each a row of grey channels)")
        console.say(f"Wrote {target.latents} (the latents; the recipe has no VAE to decode them)")
    else:
        console.say(f"Wrote {target.grid} ({counted(count, 'image')})")
    if target.folder is not None:
        console.say(f"Wrote {counted(count, 'file')} to {target.folder}")


__all__ = ["sample"]
