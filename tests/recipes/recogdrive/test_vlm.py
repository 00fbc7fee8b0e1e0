"""The loss and hidden states of static batches are those of samples by themselves."""

import copy
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from recipes.recogdrive.finetune import (
    FinetuneOptions,
    chat_loss,
    make_optimizer,
    make_schedule,
    make_step,
)
from recipes.recogdrive.vlm import make_config, tokens_per_tile
from tests.recipes.recogdrive.chat_data import LENGTH, Small, loss_by_transformers
from tpuport.foundation.errors import UsageError

# Pictures of several shapes, two in one sample, and none.
PICKED = (0, 1, 2, 3, 4)


def test_packed_rows_have_the_loss_of_their_samples(small: Small):
    samples = small.samples(*PICKED)
    losses = [loss_by_transformers(small.model, sample) for sample in samples]
    total, count = sum(loss for loss, _ in losses), sum(count for _, count in losses)
    rows = [[samples[0], samples[4], samples[3]], [samples[2], samples[1]], []]
    packed, metrics = small.model(**small.batch(rows, 3 * LENGTH))
    torch.testing.assert_close(packed, total / count, rtol=1e-5, atol=0)
    assert metrics["num_labels"] == metrics["weight"] == count
    assert metrics["ignored_rows"] == 0
    alone, _ = small.model(**small.batch([[sample] for sample in samples]))
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)


def test_packed_gradients_are_those_of_samples(small: Small):
    samples = small.samples(*PICKED)
    ours, theirs = copy.deepcopy(small.model), copy.deepcopy(small.model)
    losses = [loss_by_transformers(theirs, sample) for sample in samples]
    torch.stack([loss / len(samples) / count for loss, count in losses]).sum().backward()
    batch = small.batch([samples[:2], samples[2:4], samples[4:]], 3 * LENGTH, reduction="sample")
    ours(**batch)[0].backward()
    largest = max(p.grad.abs().max() for p in theirs.parameters() if p.grad is not None)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is None:  # the mask token, which nobody uses
            assert one.grad is None or not one.grad.any(), name
        else:
            torch.testing.assert_close(
                one.grad, other.grad, rtol=0, atol=1e-5 * float(largest), msg=name
            )


def test_tiles_whose_flag_is_0_do_not_count(small: Small):
    batch = small.batch([small.samples(1), small.samples(0)])
    loss, _ = small.model(**batch)
    moved = {name: value.clone() for name, value in batch.items()}
    # One that does not count before those that do.
    moved["pixel_values"] = torch.roll(moved["pixel_values"], 1, dims=1)
    moved["image_flags"] = torch.roll(moved["image_flags"], 1, dims=1)
    assert not moved["image_flags"][:, 0].any()
    moved["pixel_values"][:, 0] = 1e3
    torch.testing.assert_close(small.model(**moved)[0], loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_row_with_other_numbers_of_tokens_and_features_is_ignored(small: Small, change: int):
    sample = small.samples(1)[0]
    tiles = sample["pixel_values"]
    wrong = {**sample, "pixel_values": tiles[:-1] if change < 0 else tiles[[0, *range(len(tiles))]]}
    model = copy.deepcopy(small.model)
    loss, metrics = model(**small.batch([[wrong]]))
    loss.backward()
    assert loss.item() == 0.0
    assert metrics["ignored_rows"] == 1
    assert metrics["num_labels"] == 0
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    # Other rows are as they were.
    both, _ = small.model(**small.batch([[wrong], small.samples(0)]))
    alone, _ = small.model(**small.batch([small.samples(0)]))
    torch.testing.assert_close(both, alone, rtol=1e-5, atol=0)


def test_logits_by_parts_are_the_same(small: Small):
    batch = small.batch([small.samples(0, 1)])
    whole, _ = small.model(**batch)
    model = copy.deepcopy(small.model)
    model.loss_chunk = 100
    torch.testing.assert_close(model(**batch)[0], whole, rtol=1e-6, atol=0)


# -- as a program ----------------------------------------------------------------------------------


def options(**more: Any) -> FinetuneOptions:
    given = {"learning_rate": 1e-3, "bf16": False, "fsdp_devices": 1, "max_grad_norm": 0.5}
    return FinetuneOptions("", "", "", **{**given, **more})


def batches(small: Small, count: int = 5) -> list[dict[str, torch.Tensor]]:
    """Rows with one, two or three samples."""
    random = np.random.default_rng(3)
    made = []
    for _ in range(count):
        a, b, c, d = (small.samples(int(i))[0] for i in random.integers(0, 10, 4))
        made.append(small.batch([[a, b], [c], [d], []]))
    return made


def make_small_step(small: Small, **more: Any) -> Any:
    return make_step(copy.deepcopy(small.model), options(**more), steps=5)


def trained(step: Any, given: list[dict[str, torch.Tensor]]) -> tuple[list[float], Any]:
    """The losses of some steps, and the weights after them."""
    state, losses = step.init(), []
    for batch in given:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert step.retraces == 0
    return losses, step.load_state(state).to_torch().state_dict()


@pytest.mark.parametrize("frozen", [(), ("freeze_llm", "freeze_backbone")])
def test_five_steps_are_those_of_torch(thin: Small, frozen: tuple[str, ...]):
    chosen = options(**dict.fromkeys(frozen, True))
    eager = copy.deepcopy(thin.model)
    step = make_step(copy.deepcopy(thin.model), chosen, steps=5)
    if frozen:
        for name in ("llm", "backbone"):
            eager.parts()[name].requires_grad_(False)
    theirs = make_optimizer(eager, chosen)
    schedule = make_schedule(theirs, chosen, 5)
    state = step.init()
    for batch in batches(thin):
        state, metrics = step(state, batch)
        theirs.zero_grad()
        loss, _ = chat_loss(eager.train(), batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        theirs.step()
        schedule.step()
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-4)
        np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=1e-4)
    assert step.retraces == 0
    after = step.load_state(state).to_torch().state_dict()
    before = thin.model.state_dict()
    for name, expected in eager.state_dict().items():
        moved = (expected - before[name]).abs().max()
        scale = max(float(expected.abs().max()), 1e-3)
        assert (after[name] - expected).abs().max() <= 1e-4 * scale, name
        if frozen and "projector" not in name:
            assert moved == 0, name


def test_gradients_are_those_of_torch(thin: Small):
    """Those of each parameter, where the steps show what AdamW makes of them."""
    (batch,) = batches(thin, 1)
    eager = copy.deepcopy(thin.model)
    eager(**batch)[0].backward()
    ported = tpuport.convert(copy.deepcopy(thin.model), verify=False)

    def loss(params: Any) -> Any:
        (value, _), _ = ported.apply(params, ported.buffers, None, **batch)
        return value

    grads = jax.jit(jax.grad(loss))(ported.params)
    largest = max(float(p.grad.abs().max()) for p in eager.parameters() if p.grad is not None)
    for name, parameter in eager.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference = np.abs(np.asarray(grads[name]) - expected.numpy()).max()
        assert difference <= 1e-4 * largest, name


@pytest.fixture(scope="module")
def thin(small: Small) -> Small:
    return small.thin()


@pytest.fixture(scope="module")
def one_device(thin: Small) -> tuple[list[float], Any]:
    """Losses and weights of two steps in float32 on one device, to compare others with."""
    return trained(make_small_step(thin), eight_rows(thin))


def eight_rows(small: Small) -> list[dict[str, torch.Tensor]]:
    return [{n: torch.cat([v, v]) for n, v in b.items()} for b in batches(small, 2)]


def check_same(found: Any, expected: Any) -> None:
    """Losses and weights."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, value in expected[1].items():
        scale = max(float(value.abs().max()), 1e-3)
        assert (found[1][name] - value).abs().max() <= 1e-4 * scale, name


def test_fsdp_on_eight_devices_is_one_device(thin: Small, one_device: Any):
    spread = make_small_step(thin, fsdp_devices=8)
    check_same(trained(spread, eight_rows(thin)), one_device)
    places = [
        {str(shard.index) for shard in value.addressable_shards}
        for value in spread.ported.params.values()
    ]
    assert max(map(len, places)) == 8


def test_parts_of_a_batch_count_by_their_labels(thin: Small, one_device: Any):
    step = make_small_step(thin, gradient_accumulation_steps=2)
    check_same(trained(step, eight_rows(thin)), one_device)


def test_bfloat16_trains_float32_weights(thin: Small, one_device: Any):
    losses, after = trained(make_small_step(thin, bf16=True), eight_rows(thin))
    np.testing.assert_allclose(losses, one_device[0], rtol=2e-2)
    assert losses != one_device[0]
    assert {value.dtype for value in after.values()} == {torch.float32}


# -- its size --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "billions", "width"), [("internvl3-2b", 2.09, 1536), ("internvl3-8b", 7.94, 3584)]
)
def test_full_sizes_are_internvls(size: str, billions: float, width: int):
    """Parameters as the weights on the Hub count them, and the planner's input width."""
    from transformers import InternVLForConditionalGeneration

    with torch.device("meta"):
        vlm = InternVLForConditionalGeneration(make_config(size))
    assert vlm.num_parameters() / 1e9 == pytest.approx(billions, rel=5e-3)
    assert vlm.config.text_config.hidden_size == width
    assert vlm.config.image_seq_length == tokens_per_tile(448, 14, 0.5) == 256


def test_an_unknown_size_is_refused():
    with pytest.raises(UsageError, match="size 'huge': expected one of tiny, internvl3-2b"):
        make_config("huge")
