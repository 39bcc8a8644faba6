"""Rectified flow against its formula and diffusers' own scheduler, on a small real DiT in plain torch; and what both
objectives of denoising share: splits, fillers, dropped labels, refusals and the proofs before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.config.part import decode, plain
from fullshard.contracts.objective import Objective
from fullshard.errors import RecipeError, SetupError
from fullshard.families.diffusion.keyed_noise import LABEL_DROP, NOISE, TIME, normal, uniform
from fullshard.families.diffusion.objectives.ddpm import DDPM
from fullshard.families.diffusion.objectives.flow_matching import FlowMatching
from tests.near import assert_near

CLASSES = 10
SHAPE = (2, 8, 8)
BOTH = pytest.mark.parametrize(
    "objective", [FlowMatching(), FlowMatching(integer_time=True), DDPM(), DDPM(prediction="v", min_snr=5.0)]
)


class Dit(nn.Module):
    """A DiT of diffusers as objectives call it; it remembers what it was given."""

    num_classes: int | None = CLASSES
    null_label: int | None = CLASSES

    def __init__(self, *, channels: int = SHAPE[0]) -> None:
        super().__init__()
        from diffusers import DiTTransformer2DModel

        torch.manual_seed(0)
        self.dit = DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=SHAPE[0],
            out_channels=channels,
            num_layers=2,
            sample_size=SHAPE[-1],
            patch_size=2,
            num_embeds_ada_norm=CLASSES,
        )
        self.eval()  # in training its own label drop would draw from torch's generator
        self.given: list[Any] = []

    def denoise(self, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        self.given = [noisy, timesteps, labels]
        found: torch.Tensor = self.dit(noisy, timesteps, class_labels=labels).sample
        return found


class Plain(nn.Module):
    """The least that can denoise; without labels."""

    num_classes: int | None = None
    null_label: int | None = None

    def __init__(self, told: Callable[[torch.Tensor], torch.Tensor] = lambda timesteps: timesteps) -> None:
        super().__init__()
        self.told = told
        self.embed = nn.Linear(1, 1)
        self.given: list[Any] = []

    def denoise(self, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        self.given = [noisy, timesteps, labels]
        return noisy * self.embed(self.told(timesteps).float()[:, None])[:, :, None, None]


def batch(samples: int = 8, *, fillers: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.cat([torch.arange(samples), torch.full((fillers,), -1)])
    return {
        "images": torch.randn(samples + fillers, *SHAPE, generator=generator),
        "label": torch.randint(CLASSES, (samples + fillers,), generator=generator),
        "draws": ids * 104729 + 5,
        "sample_ids": ids,
    }


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def run(objective: Objective, model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> tuple[float, Any]:
    """The mean loss of a step over these micro-batches, and its gradients."""
    total = torch.tensor(float(sum(objective.count(each) for each in batches)))
    terms = objective.backward(model, batches, total, {}, lambda loss: loss)
    return float(sum(each.loss_sum for each in terms) / total), gradients(model)


def assert_same(one: tuple[float, Any], other: tuple[float, Any]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert len(one[1]) == len(other[1]) > 0
    # All at once: some gradients, of key biases, are zero but for rounding.
    assert_near(*(torch.cat([gradient.reshape(-1) for gradient in each[1]]) for each in (one, other)))


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_loss_and_gradients_are_those_of_the_formula(name: str) -> None:
    model, data = Dit(), batch()
    images, times = data["images"], uniform(data["draws"], TIME)
    noise = normal(data["draws"], SHAPE, NOISE)
    t = times[:, None, None, None]
    predicted = model.dit((1 - t) * images + t * noise, times * 1000, class_labels=data["label"]).sample
    loss = getattr(F, name)(predicted, noise - images)  # samples have one size, so the mean of all is that of means
    loss.backward()
    expected = loss.item(), gradients(model)
    assert_same(run(FlowMatching(loss=name, label_drop=0), model, [data]), expected)  # type: ignore[call-arg]


def test_the_path_and_its_times_equal_diffusers() -> None:
    """Its scheduler makes the same noisy images and timesteps, and walks back to the images by the target."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    model, data = Dit(), batch()
    images, noise = data["images"], normal(data["draws"], SHAPE, NOISE)
    FlowMatching().loss(model, data, {})
    times = uniform(data["draws"], TIME)
    order = times.argsort(descending=True)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=times[order].tolist())
    noisy = scheduler.scale_noise(images[order], scheduler.timesteps, noise[order])
    torch.testing.assert_close(model.given[0][order], noisy)
    torch.testing.assert_close(model.given[1][order], scheduler.timesteps)
    assert model.given[1].dtype == torch.float32

    scheduler.set_timesteps(sigmas=[float(times[0])])
    back = scheduler.step(noise[:1] - images[:1], scheduler.timesteps[0], model.given[0][:1]).prev_sample
    assert_near(back, images[:1])


def test_times_are_drawn_as_the_recipe_says() -> None:
    draws = torch.arange(50_000)
    even = FlowMatching().times(draws)
    assert even.mean() == pytest.approx(0.5, abs=0.01)
    assert even.var() == pytest.approx(1 / 12, abs=0.002)
    middle = FlowMatching(time="logit_normal", logit_mean=-1.0, logit_std=0.5).times(draws)
    assert middle.dtype == torch.float32
    assert middle.logit().mean() == pytest.approx(-1, abs=0.01)
    assert middle.logit().std() == pytest.approx(0.5, abs=0.01)
    for times in (even, middle):  # of a stream of their own: they say nothing about the noise
        pair = torch.stack([times.logit(), normal(draws, (1,), NOISE)[:, 0]])
        assert torch.corrcoef(pair)[0, 1].abs() < 0.02


def test_integer_timesteps_follow_from_the_seed_and_all_occur() -> None:
    objective = FlowMatching(integer_time=True)
    found = objective.timesteps(objective.times(torch.arange(50_000)))
    assert found.dtype == torch.int64
    assert found.unique().tolist() == list(range(1000))
    assert objective.timesteps(torch.tensor([0.0, 0.0015, 0.9999, 1.0])).tolist() == [0, 1, 999, 999]
    model, data = Plain(), batch()
    objective.loss(model, data, {})
    noisy, told, _ = model.given
    exact = objective.times(data["draws"])
    assert told.tolist() == (exact * 1000).int().tolist()
    t, noise = exact[:, None, None, None], normal(data["draws"], SHAPE, NOISE)
    torch.testing.assert_close(noisy, (1 - t) * data["images"] + t * noise)


def test_the_model_gets_times_on_its_own_scale() -> None:
    assert FlowMatching(timestep_scale=1).timesteps(torch.tensor([0.25])).tolist() == [0.25]
    half = FlowMatching().timesteps(torch.tensor([0.5], dtype=torch.bfloat16))
    assert half.dtype == torch.float32


@BOTH
def test_the_sum_over_any_split_is_that_of_the_whole(objective: Objective) -> None:
    model, data = Dit(), batch()
    whole = run(objective, model, [data])
    for sizes in ([4, 4], [1, 7], [3, 3, 2]):
        parts = zip(*(value.split(sizes) for value in data.values()), strict=True)
        assert_same(run(objective, model, [dict(zip(data, part, strict=True)) for part in parts]), whole)


@BOTH
def test_fillers_neither_count_nor_change_anything(objective: Objective) -> None:
    model, data = Dit(), batch(6)
    filled = batch(6, fillers=2)
    for key in data:
        filled[key][:6] = data[key]
    filled["images"][6:] = float("nan")
    filled["label"][6:] = -1
    assert objective.count(filled) == objective.count(data) == 6
    assert_same(run(objective, model, [filled]), run(objective, model, [data]))

    only = batch(0, fillers=3)
    assert objective.count(only) == 0
    terms = objective.loss(model, only, {})
    terms.loss_sum.backward()
    assert terms.loss_sum.item() == 0
    assert not any(gradient.any() for gradient in gradients(model))


@BOTH
def test_noise_follows_from_the_draw_alone(objective: Objective) -> None:
    """Validation has fixed draws, so its loss is comparable between epochs; in training each epoch draws anew."""
    model, data = Dit(), batch()
    first = objective.loss(model, data, {}).loss_sum.item()
    torch.manual_seed(5)
    assert objective.loss(model, data, {}).loss_sum.item() == first
    assert objective.loss(model, {**data, "draws": data["draws"] + 1}, {}).loss_sum.item() != first
    assert objective.loss(model, {**data, "sample_ids": data["sample_ids"] + 9}, {}).loss_sum.item() == first


@BOTH
@pytest.mark.parametrize(("asked", "share"), [(None, 0.1), (0.3, 0.3), (0.0, 0.0), (0.9, 0.9)])
def test_labels_are_dropped_at_the_rate_asked_for(objective: Any, asked: float | None, share: float) -> None:
    model = Plain()
    model.num_classes = model.null_label = CLASSES
    data = batch(20_000)
    objective.model_copy(update={"label_drop": asked}).loss(model, data, {})
    labels = model.given[2]
    dropped = labels == CLASSES
    assert labels.dtype == torch.int64
    assert float(dropped.float().mean()) == pytest.approx(share, abs=0.01)
    assert torch.equal(dropped, uniform(data["draws"], LABEL_DROP) < share)
    assert torch.equal(labels[~dropped], data["label"][~dropped])


@BOTH
def test_models_get_the_labels_they_know(objective: Objective) -> None:
    data = batch()
    unconditional = Plain()
    objective.loss(unconditional, data, {})
    assert unconditional.given[2] is None
    without_null = Plain()
    without_null.num_classes = CLASSES
    objective.loss(without_null, data, {})
    assert torch.equal(without_null.given[2], data["label"])


@BOTH
def test_images_and_times_stay_fp32(objective: Objective) -> None:
    model, data = Plain(), batch()
    data["images"] = data["images"].to(torch.bfloat16)
    terms = objective.loss(model, data, {})
    assert model.given[0].dtype == torch.float32
    assert model.given[1].dtype in (torch.float32, torch.int64)
    assert terms.loss_sum.dtype == torch.float32
    assert terms.metrics == {}


@BOTH
def test_a_model_that_cannot_denoise_is_refused(objective: Any) -> None:
    with pytest.raises(RecipeError, match="Linear has no method denoise. Use model.kind: diffusers"):
        objective.extend(nn.Linear(1, 1))
    objective.extend(Plain())
    objective.extend(Dit())
    with pytest.raises(RecipeError, match='label_drop = 0.2, but Plain has no label for "no class": only 0'):
        objective.model_copy(update={"label_drop": 0.2}).extend(Plain())
    objective.model_copy(update={"label_drop": 0.0}).extend(Plain())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "cross_entropy"}, "objective.loss = 'cross_entropy': it must be one of mse_loss, l1_loss, smooth_l1"),
        ({"loss": "l2_loss"}, "did you mean 'l1_loss'"),
        ({"time": "normal"}, "objective.time = 'normal': it must be one of uniform, logit_normal"),
        ({"logit_mean": 1.0}, "Set time: logit_normal"),
        ({"label_drop": 1.5}, "objective.label_drop = 1.5 is not a share. Give at least 0 and less than 1"),
        ({"label_drop": -0.1}, "objective.label_drop = -0.1 is not a share"),
        ({"label_drop": 1.0}, "objective.label_drop = 1 would drop every label and text"),
        ({"integer_time": True, "timestep_scale": 1}, "whole number of at least 2"),
        ({"integer_time": True, "timestep_scale": 99.5}, "whole number of at least 2"),
        ({"timesteps": 5}, "objective.timesteps is not a known key"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        decode(Objective, {"kind": "flow_matching", **settings}, where="objective")
    assert message in str(caught.value)


def test_settings_come_back_from_a_resolved_recipe() -> None:
    given = {"kind": "flow_matching", "time": "logit_normal", "logit_mean": 0.5, "loss": "l1_loss"}
    objective = decode(Objective, given, where="objective")
    assert plain(objective).items() >= given.items()
    assert decode(Objective, plain(objective), where="objective") == objective
    assert decode(Objective, plain(FlowMatching()), where="objective") == FlowMatching()


@BOTH
def test_a_model_that_tells_all_timesteps_apart_passes(objective: Objective) -> None:
    for model in (Dit(), Plain()):
        lines = objective.check(model, batch(2), packed=False, compute=torch.float32)
        assert lines == ["the model can tell neighbouring timesteps apart (float32)"]
        assert not any(part._forward_hooks for part in model.modules())


@BOTH
def test_times_in_half_precision_are_found_before_the_first_step(objective: Objective) -> None:
    """At the model's door, or, as FSDP casts a block's inputs, at a block's alone."""
    with pytest.raises(
        SetupError, match="Computing in bfloat16, embed gets the same value for some of the timesteps 99"
    ):
        objective.check(Plain(lambda t: t.to(torch.bfloat16)), batch(2), packed=False, compute=torch.bfloat16)

    model = Dit()

    def cast(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "timestep": kwargs["timestep"].to(torch.bfloat16)}

    model.dit.transformer_blocks[1].register_forward_pre_hook(cast, with_kwargs=True)
    with pytest.raises(SetupError, match=r"dit\.transformer_blocks\.1\S* gets the same value"):
        objective.check(model, batch(2), packed=False, compute=torch.bfloat16)


@BOTH
def test_an_embedding_that_casts_its_times_itself_is_named(objective: Objective) -> None:
    class Cast(nn.Module):
        def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
            return timesteps.to(torch.bfloat16)

    with pytest.raises(SetupError, match="told gets the same value"):
        objective.check(Plain(Cast()), batch(2), packed=False, compute=torch.bfloat16)


@BOTH
@pytest.mark.parametrize("exact_first", [False, True])
def test_a_part_that_gets_exact_times_once_and_cast_ones_once_is_found(objective: Objective, exact_first: bool) -> None:
    """As a DiT's first embedding is called in its block and by the model."""

    class Twice(Plain):
        def denoise(self, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
            calls = [timesteps.float()[:, None], timesteps.to(torch.bfloat16).float()[:, None]]
            for value in calls if exact_first else calls[::-1]:
                noisy = noisy * self.embed(value)[:, :, None, None]
            return noisy

    with pytest.raises(SetupError, match="embed gets the same value"):
        objective.check(Twice(), batch(2), packed=False, compute=torch.bfloat16)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@BOTH
def test_a_half_precision_model_keeps_its_times_apart(objective: Objective, compute: torch.dtype) -> None:
    """Sinusoids of exact times, cast after."""

    class Half(Dit):
        def denoise(self, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
            return super().denoise(noisy.to(compute), timesteps, labels).float()

    assert len(objective.check(Half().to(compute), batch(2), packed=False, compute=compute)) == 1


def test_times_too_close_for_the_embedding_are_found() -> None:
    """From 0 to 1, whoever casts them: bf16 cannot hold their sinusoids apart."""

    class Half(Dit):
        def denoise(self, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
            return super().denoise(noisy.bfloat16(), timesteps, labels).float()

    objective = FlowMatching(timestep_scale=1)
    with pytest.raises(SetupError, match="raise objective.timestep_scale"):
        objective.check(Half().bfloat16(), batch(2), packed=False, compute=torch.bfloat16)


@BOTH
def test_what_cannot_be_proven_is_not_claimed(objective: Objective) -> None:
    model = Plain(torch.zeros_like)
    assert objective.check(model, batch(2), packed=False, compute=torch.float32) == []


@BOTH
def test_a_prediction_of_another_shape_is_refused(objective: Objective) -> None:
    with pytest.raises(SetupError, match="of the images. Use a model whose output has as many channels"):
        objective.check(Dit(channels=4), batch(2), packed=False, compute=torch.float32)
