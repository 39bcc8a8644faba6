"""Images that the model makes as it is now: a grid with a row for each class or text, always from the same noise.

The ranks share the images out and run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers, Objective
from fullshard.dist import reduce
from fullshard.errors import RecipeError
from fullshard.families.diffusion.denoiser.batch_inputs import Text, texts_of
from fullshard.families.diffusion.sampling.image_batches import Way, collected, make_images
from fullshard.families.diffusion.sampling.image_callbacks import guidance_of, require_denoiser, shape_of, takes_texts
from fullshard.families.diffusion.sampling.sampler import Method

_AT_ONCE = 64
"""So many images each rank makes together."""


class Pictures(Evaluation):
    """Makes images and keeps them as `pictures/samples-STEP.png` in the run folder; latents that no VAE decodes also as
    `pictures/samples-STEP.npy`, and in the picture as grey channels side by side."""

    numbers: ClassVar[Numbers | None] = {}

    classes: list[int] | None = None
    """A row for each of these labels; null: every class, or one row where the model has none."""
    texts: int = Field(8, ge=1)
    """Rows where the model takes texts: the first so many of the validation data."""
    per_class: int = Field(8, ge=1)
    """Images in a row."""
    steps: int = Field(32, ge=1)
    """From noise to an image."""
    method: Method = "heun"
    """euler asks the model once a step, heun twice, and needs fewer steps for the same."""
    guidance: float | None = Field(None, ge=0)
    """How much a label or a text counts: 1 is what the model learned, more is clearer and less varied; null: 2, and 1
    for a model without labels and texts, one that takes its guidance as an input (Flux with guidance_embeds), and one
    from scratch that never saw them dropped (objective.label_drop = 0)."""
    seed: int = 0
    """Decides the noise."""

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        denoiser: Any = model
        require_denoiser("pictures", objective, model)
        if takes_texts(model) and held_out is None:
            raise RecipeError(
                f"evaluate.parts: kind pictures makes images of the first {self.texts} texts of the validation data, "
                "and there is none. Give data.validation or data.holdout."
            )
        self._guidance(objective, model)
        wrong = [label for label in self.classes or () if not 0 <= label < (denoiser.num_classes or 0)]
        if wrong:
            raise RecipeError(
                f"evaluate.parts: kind pictures asks for the class {wrong[0]}, and the model has "
                f"{denoiser.num_classes or 'no'} classes. Allowed: 0 to one less than there are."
            )

    def _guidance(self, objective: Objective, model: Any) -> float:
        where = "evaluate.parts: pictures.guidance"
        return guidance_of(model, objective, self.guidance, usual=2.0, where=where)

    def run(self, inputs: EvaluationInputs) -> Findings:
        model: Any = inputs.model
        text, none, shape = self._texts(inputs) if takes_texts(model) else (None, None, None)
        rows = list(self.classes if self.classes is not None else range(model.num_classes or 1))
        if text is not None:
            rows = list(range(len(text["mask"])))
        ranks, rank = reduce.place()
        made = make_images(
            inputs.objective,
            model,
            torch.tensor(rows).repeat_interleave(self.per_class),
            Way(self.steps, self.method, self._guidance(inputs.objective, model), self.seed),
            batch=_AT_ONCE,
            place=(ranks, rank),
            device=inputs.device,
            text=text,
            none=none,
            shape=shape,
            vae=inputs.aux.get("vae"),
        )
        images = collected(made, gather=reduce.gather_rows, keep=rank == 0)
        if images is None:
            return Findings()
        # Told on rank 0, which is where texts are printed.
        return Findings(texts=[f"Pictures: {inputs.show('samples', images, columns=self.per_class)}"])

    def _texts(self, inputs: EvaluationInputs) -> tuple[Text, Text, tuple[int, ...]]:
        """The first texts of the validation data, on every rank, the one that means none, and the shape of what the
        model makes there."""
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
            if seen >= self.texts:  # a batch holds as many on every rank
                break
        for share in reduce.gather_objects(found):
            found |= share
        rows = [found[number] for number in sorted(found)]
        together = {name: torch.stack([row[name] for row in rows]).to(inputs.device) for name in rows[0]}
        return *texts_of(inputs.model, {**together, **empty}, inputs.aux), shape


__all__ = ["Pictures"]
