"""Images from the current model: a grid with a row for each class or text, always from the same noise.

The ranks share the images out and run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from fullshard.contracts.evaluation import EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError
from fullshard.families.diffusion.denoiser.batch_inputs import Text, texts_of
from fullshard.families.diffusion.evaluations.base import MakesImages
from fullshard.families.diffusion.evaluations.image_callbacks import require_denoiser
from fullshard.families.diffusion.image_samples import ImageCollator
from fullshard.families.diffusion.sampling.conditioning import shape_of, takes_texts
from fullshard.families.diffusion.sampling.image_batches import collected, make_images
from fullshard.families.diffusion.vae.latents import as_strips

if TYPE_CHECKING:
    import torch
    from torch import nn

_AT_ONCE = 64
"""Images that each rank makes at once."""


class Pictures(MakesImages):
    """Makes images and writes them to `pictures/samples-STEP.png` in the run folder. Latents without a VAE to decode
    them are drawn as grey channels side by side, and also written to `pictures/samples-STEP.npy`."""

    numbers: ClassVar[Numbers | None] = {}

    classes: list[int] | None = None
    """A row for each of these labels; null: every class, or one row if the model has none."""
    texts: int = Field(8, ge=1)
    """Rows if the model takes texts: this many of the first texts of the validation data."""
    per_class: int = Field(8, ge=1)
    """Images per row."""

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        denoiser: Any = model
        require_denoiser("pictures", objective, model)
        if takes_texts(model) and held_out is None:
            raise RecipeError(
                f"evaluate.parts: kind pictures makes images for the first {self.texts} texts of the validation data, "
                "but there is no validation data. Set data.validation or data.holdout."
            )
        self.sampler(objective, model)
        wrong = [label for label in self.classes or () if not 0 <= label < (denoiser.num_classes or 0)]
        if wrong:
            raise RecipeError(
                f"evaluate.parts: kind pictures asks for the class {wrong[0]}, but the model has "
                f"{denoiser.num_classes or 'no'} classes. Allowed: 0 to one less than there are."
            )

    def run(self, inputs: EvaluationInputs) -> Findings:
        import torch

        from fullshard.dist import reduce
        from fullshard.dist.gather import gather_rows

        model: Any = inputs.model
        text, empty, shape = self._texts(inputs) if takes_texts(model) else (None, None, None)
        rows = list(self.classes if self.classes is not None else range(model.num_classes or 1))
        if text is not None:
            rows = list(range(len(text["mask"])))
        ranks, rank = reduce.place()
        made = make_images(
            inputs.objective,
            model,
            torch.tensor(rows).repeat_interleave(self.per_class),
            self.sampler(inputs.objective, model),
            batch=_AT_ONCE,
            place=(ranks, rank),
            device=inputs.device,
            text=text,
            empty=empty,
            shape=shape,
            vae=inputs.aux.get("vae"),
        )
        images = collected(made, gather=gather_rows, keep=rank == 0)
        if images is None:
            return Findings()
        images = inputs.collator.decode(images)
        collator = inputs.collator
        is_latent = isinstance(collator, ImageCollator) and collator.gives_latents or images.shape[1] not in (1, 3)
        shown = as_strips(images) if is_latent else images
        path = inputs.show("samples", shown, columns=self.per_class, array=images if is_latent else None)
        return Findings(texts=[f"Pictures: {path}"])

    def _texts(self, inputs: EvaluationInputs) -> tuple[Text, Text, tuple[int, ...]]:
        """The first texts of the validation data, on every rank; the empty text; the shape of the model's output."""
        import torch

        from fullshard.dist import reduce

        found: dict[int, dict[str, torch.Tensor]] = {}
        shape: tuple[int, ...] = ()
        empty: dict[str, torch.Tensor] = {}
        seen = 0
        for batch in inputs.batches():
            shape = shape_of(batch["images"], inputs.objective)
            empty = {name: part.to(inputs.device) for name, part in batch.items() if name.startswith("empty_")}
            for row, number in enumerate(batch["sample_ids"].tolist()):
                if 0 <= number < self.texts:
                    found[number] = {name: part[row] for name, part in batch.items() if name.startswith("text_")}
            seen += len(batch["sample_ids"]) * reduce.place()[0]
            if seen >= self.texts:  # batches have the same size on every rank
                break
        for share in reduce.gather_objects(found):
            found |= share
        rows = [found[number] for number in sorted(found)]
        together = {name: torch.stack([row[name] for row in rows]).to(inputs.device) for name in rows[0]}
        return *texts_of(inputs.model, {**together, **empty}, inputs.aux), shape


__all__ = ["Pictures"]
