"""`python -m recipes.mae_dit compile`: each step at full size, for chips that are not there."""

from typing import Any

import jax
import pytest

import tpuport
from recipes.mae_dit import compile as programs
from tests.program.small import needs_libtpu
from tpuport.foundation.errors import UsageError
from tpuport.training import TrainStep

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "intermediate_size": 32}
SMALL |= {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_VIT_B", {**programs._VIT_B, **SMALL})
    for name, given in programs._DITS.items():
        smaller = {**given, "hidden_size": 16, "depth": 1, "num_heads": 2, "input_size": 4}
        monkeypatch.setitem(programs._DITS, name, smaller)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_each_program_asks_for_its_step(name: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(
        tpuport, "compile_for", lambda *given, **named: asked.append((given, named))
    )
    programs.compile_program(name, programs.How("v5p-128", batch=64, accumulate=4, quick=False))
    (((step, topology), named),) = asked
    assert isinstance(step, TrainStep)
    assert (topology, named["mesh"], named["quick"]) == ("v5p-128", {"fsdp": -1}, False)
    shapes = jax.tree.leaves(named["inputs"])
    assert {shape.shape[0] for shape in shapes} == {64}
    assert len(shapes) == (1 if name in ("stage1", "discriminator") else 2)
    part = "discriminator." if name == "discriminator" else "model."
    assert all(trained.startswith(part) for trained in step.trained)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["discriminator", "dit-xl"])
def test_a_step_is_compiled_from_shapes(name: str):
    report = programs.compile_program(name, programs.How("v6e-4", batch=8, kernel_times=False))
    assert (report.fits, report.num_chips, report.quick) == (True, 4, True)
    assert report.memory.optimizer > 0


def test_what_does_not_fit_is_named():
    with pytest.raises(UsageError, match="program='dit': expected one of stage1, discriminator"):
        programs.compile_program("dit", programs.How())
    with pytest.raises(UsageError, match="batch=10 does not divide into accumulate=4 parts"):
        programs.compile_program("dit-xl", programs.How(batch=10, accumulate=4))
