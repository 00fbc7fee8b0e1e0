"""The benchmark of a training step: everyone takes the same step, and the page says what ran."""

from typing import Any

import pytest

from benchmarks import recogdrive_step as benchmark
from benchmarks.contestants import COMPILED, EAGER, OURS, PLAIN
from benchmarks.recogdrive_step import Found, Options, PlannerLoss, check_losses
from benchmarks.recogdrive_step_page import COMPACT, UPSTREAM, page
from benchmarks.timing import Series
from recipes.recogdrive.kinds import OURS as KIND
from recipes.recogdrive.kinds import imitation_loss
from recipes.recogdrive.planner import make_planner
from tests.recipes.recogdrive.small import CONFIG


def test_all_take_the_same_step():
    """Eager twice, once with the noise drawn in upstream's way, and both in jax."""
    batch = benchmark.make_batch(Options(tokens=4), CONFIG.state_width)

    def planner() -> Any:
        return benchmark.fill_zeros(make_planner(CONFIG))

    def drawn(model: Any, batch: Any) -> Any:
        with benchmark._drawn(batch):
            return benchmark.compact_loss(
                model, {n: v for n, v in batch.items() if n not in ("noise", "times")}
            )

    given, alike = (PlannerLoss(planner(), one, batch) for one in (benchmark.compact_loss, drawn))
    found = Found()
    found.add(COMPACT, EAGER, lambda: benchmark.eager_step(given, batch))
    found.add(UPSTREAM, EAGER, lambda: benchmark.eager_step(alike, batch))
    plain = PlannerLoss(planner(), benchmark.compact_loss, batch)
    found.add(COMPACT, PLAIN, lambda: benchmark.plain_step(plain, batch))
    found.add(COMPACT, OURS, lambda: benchmark.ported_step(planner(), KIND, imitation_loss, batch))
    assert not found.errors
    assert len(found.losses) == 4
    check_losses(found)
    first, second, third = found.losses[COMPACT, EAGER]
    assert len({first, second, third}) == 3
    found.losses[COMPACT, OURS] = [first, second, third * 1.001]
    with pytest.raises(RuntimeError, match=r"the losses of \(\"the recipe's\", 'tpuport'\) are"):
        check_losses(found)


def test_what_cannot_run_is_kept_with_its_reason():
    found = Found()
    found.add(UPSTREAM, PLAIN, lambda: [][1])
    assert "IndexError at test_recogdrive_step.py:" in found.errors[UPSTREAM, PLAIN]
    with pytest.raises(IndexError):  # the port has to run
        found.add(UPSTREAM, OURS, lambda: [][1])


def test_the_page_has_the_ratios_and_what_did_not_run(tmp_path):
    ways = [(planner, way) for planner in (UPSTREAM, COMPACT) for way in (EAGER, COMPILED, OURS)]
    seconds = dict.fromkeys(ways, 4.0) | {(UPSTREAM, OURS): 2.0, (COMPACT, OURS): 1.0}
    found = Found(
        losses={way: [0.5, 0.25] for way in ways},
        errors={(UPSTREAM, PLAIN): "SomeError at rope.py:76: no value"},
        notes=["A note."],
        times={way: Series([t] * 3, [t / 2] * 3) for way, t in seconds.items()},
    )
    text = page(Options(upstream=tmp_path, tokens=7), found)
    assert "| upstream's | eager PyTorch | 0.50 | 0.50 to 0.50 | 0.50 | 1.00 |" in text
    assert "| the recipe's | torch.compile | 0.25 | 0.25 to 0.25 | 0.25 | 1.00 |" in text
    assert "| upstream's | tpuport | | | | 0.50 |" in text
    assert "| upstream's | plain torchax | does not run | | | |" in text
    assert "- Plain torchax does not run upstream's planner: `SomeError at rope.py:76:" in text
    assert "7 hidden states" in text
    assert "- A note." in text
    assert str(tmp_path) not in text
