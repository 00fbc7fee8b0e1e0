"""Lightning's modules and Hugging Face's arguments train as their own loops do."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification
from transformers.optimization import get_scheduler

import tpuport
from tests.training.small import Small, batches
from tests.training.test_step import same
from tpuport.foundation.errors import UsageError
from tpuport.training import from_lightning, from_training_arguments
from tpuport.training.adapters.transformers import model_loss


class Lit(Small):
    """A module as Lightning has them, and what its Trainer would do with it."""

    form = "epoch"

    def __init__(self) -> None:
        super().__init__(0.0)
        # Batch norm would see other batches in the parts of an accumulated one.
        self.norm = torch.nn.LayerNorm(16)  # type: ignore[assignment]

    def log(self, name: str, value: Any, prog_bar: bool = False) -> None:
        raise RuntimeError("this module has no trainer")

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, Any]:
        out = self(batch["x"])
        self.log("accuracy", (out.argmax(-1) == batch["y"]).float().mean(), prog_bar=True)
        return {"loss": F.cross_entropy(out, batch["y"]), "logits": out}

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {
            "epoch": {"optimizer": optimizer, "lr_scheduler": scheduler},
            "step": {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2},
            },
            "lists": ([optimizer], [{"scheduler": scheduler, "interval": "step"}]),
            "one": optimizer,
            "list": [optimizer],
            "two": [optimizer, optimizer],
        }[self.form]


def eager(model: Any, every: int | None, accumulate: int, clip: float) -> Any:
    """Six updates by hand."""
    model = copy.deepcopy(model)
    found = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1
    )
    for number, batch in enumerate(batches(6), 1):
        for x, y in zip(batch["x"].chunk(accumulate), batch["y"].chunk(accumulate), strict=True):
            (F.cross_entropy(model(x), y) / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        found.step()
        found.zero_grad()
        if every is not None and number % every == 0:
            found.param_groups[0]["lr"] *= 0.5
    return model


@pytest.mark.parametrize(
    ("form", "every", "accumulate"),
    [("epoch", 3, 2), ("step", 2, 1), ("lists", 1, 4)],
)
def test_a_lightning_module_trains_as_its_trainer_would(form: str, every: int, accumulate: int):
    model = Lit()
    model.form = form
    expected = eager(model, every, accumulate, 0.5)
    trainer = {
        "max_epochs": 2,
        "gradient_clip_val": 0.5,
        "accumulate_grad_batches": accumulate,
    }
    made = from_lightning(tpuport.convert(model), trainer, steps_per_epoch=3)
    assert made.steps == 6
    state = made.step.init()
    for batch in batches(6):
        state, metrics = made.step(state, batch)
    assert {"loss", "accuracy"} <= metrics.keys()
    same(made.step.load_state(state).to_torch(), expected)


@pytest.mark.parametrize("form", ["one", "list"])
def test_a_lone_optimizer_in_either_form(form: str):
    model = Lit()
    model.form = form
    made = from_lightning(tpuport.convert(model), SimpleNamespace(max_steps=5))
    assert made.steps == 5
    made.step(made.step.init(), batches(1)[0])


@pytest.mark.parametrize(
    ("form", "trainer", "message"),
    [
        ("two", {"max_steps": 1}, "2 optimizers and 0 schedules.*trainable="),
        ("epoch", {"max_steps": 1}, "interval='epoch' .* steps_per_epoch="),
        ("one", {}, "how many updates the run has is not known"),
        ("step", {"max_steps": 1, "accumulate_grad_batches": 2}, "frequency=2 counts the loader"),
        (
            "one",
            {"max_steps": 1, "gradient_clip_val": 1, "gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm='value': expected 'norm'",
        ),
    ],
)
def test_what_a_trainer_cannot_say_is_asked_for(form: str, trainer: Any, message: str):
    model = Lit()
    model.form = form
    with pytest.raises(UsageError, match=message):
        from_lightning(tpuport.convert(model, verify=False), trainer)


def test_a_module_that_is_not_lightnings_is_refused():
    with pytest.raises(UsageError, match="a Linear has no training_step"):
        from_lightning(tpuport.convert(torch.nn.Linear(2, 2)), steps=1)
    model = Lit()
    model.automatic_optimization = False
    with pytest.raises(UsageError, match=r"optimises by hand.*alternating"):
        from_lightning(tpuport.convert(model), steps=1)


@pytest.mark.parametrize("name", ["global_step", "current_epoch"])
def test_what_changes_with_the_step_is_not_frozen_into_it(name: str):
    class Warming(Lit):
        form = "one"
        _trainer: Any = None

        @property
        def global_step(self) -> int:
            """As Lightning has it."""
            return self._trainer.global_step if self._trainer else 0

        @property
        def current_epoch(self) -> int:
            return self._trainer.current_epoch if self._trainer else 0

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] * (1 + getattr(self, name))

    made = from_lightning(tpuport.convert(Warming(), verify=False), steps=4)
    with pytest.raises(UsageError, match=rf"asks the trainer for {name} .*pass it in the batch"):
        made.step(made.step.init(), batches(1)[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("optim_args", "alpha=1"),
    ],
)
def test_an_argument_without_a_form_is_refused(name: str, value: Any):
    with pytest.raises(UsageError, match=rf"{name}={value!r} has no form here"):
        from_training_arguments(
            {name: value, "max_steps": 1}, tpuport.convert(bert(), verify=False)
        )


@pytest.mark.parametrize(("two_parts", "counted"), [(True, 6), (False, 4)])
def test_the_labels_of_two_part_models_are_not_shifted(two_parts: bool, counted: int):
    class ForConditionalGeneration:
        config = SimpleNamespace(is_encoder_decoder=two_parts)

        def __call__(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": labels.sum()}

    _, metrics = model_loss(ForConditionalGeneration(), {"labels": torch.ones(2, 3).long()})
    assert metrics["weight"] == counted


def bert() -> Any:
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",  # else the first call writes it down
    )
    return BertForSequenceClassification(config)


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(0, 50, (8, 6), generator=generator),
            "attention_mask": torch.ones(8, 6, dtype=torch.long),
            "labels": torch.randint(0, 2, (8,), generator=generator),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant_with_warmup"])
def test_training_arguments_train_as_the_trainer_does(schedule: str):
    args = SimpleNamespace(
        learning_rate=1e-3,
        weight_decay=0.1,
        warmup_ratio=0.3,
        lr_scheduler_type=schedule,
        max_grad_norm=0.5,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        adam_beta2=0.95,
    )
    model = bert()
    expected = copy.deepcopy(model)
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in expected.named_parameters():
        groups["bias" not in name and "LayerNorm" not in name].append(parameter)
    theirs = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": 0.1},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    scheduler = get_scheduler(schedule, theirs, num_warmup_steps=2, num_training_steps=5)
    made = from_training_arguments(args, tpuport.convert(model), steps=5)
    assert (made.batch_size, made.seed) == (8, 42)
    state = made.step.init()
    for batch in texts(5):
        state, metrics = made.step(state, batch)
        losses = []
        for part in range(2):
            given = {name: value[part * 4 : part * 4 + 4] for name, value in batch.items()}
            losses.append(expected(**given).loss / 2)
            losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        theirs.step()
        scheduler.step()
        theirs.zero_grad()
        np.testing.assert_allclose(
            metrics["loss"], sum(float(one.detach()) for one in losses), rtol=1e-4
        )
    found = made.step.load_state(state).to_torch()
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        if "key.bias" in name:
            continue  # its gradient is rounding alone, which Adam makes large
        scale = max(float(other.detach().abs().max()), 1e-3)
        assert (one - other).abs().max() <= 1e-4 * scale, name


def test_what_the_arguments_do_not_say_is_asked_for():
    ported = tpuport.convert(bert())
    with pytest.raises(UsageError, match="steps=-1: how many updates"):
        from_training_arguments({}, ported)
    with pytest.raises(UsageError, match=r"optim='lomo' has no form here; there are adamw_hf"):
        from_training_arguments({"optim": "lomo"}, ported, steps=1)
