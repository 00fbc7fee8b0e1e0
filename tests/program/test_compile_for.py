"""Compiling for a TPU that is not there: bytes, causes, verdicts, and what stays as it was."""

import dataclasses
import json
import re
from typing import Any

import jax
import pytest
import torch

import tpuport
from tests.program.small import BATCH, WIDTH, Block, Small, batch, needs_libtpu, on_meta, squared
from tpuport.aot.compile_for import products_in_fp32
from tpuport.aot.entry_points import as_call
from tpuport.aot.records import Memory, Product, Work
from tpuport.cost.schedule import KernelSchedule, UnknownTripsError
from tpuport.foundation.errors import UsageError
from tpuport.sharding import make_mesh

pytestmark = needs_libtpu

WEIGHTS = 2 * WIDTH * WIDTH * 4
WHOLE = (2 * WIDTH + 8 * WIDTH + 8) * 4  # biases, and the head, which is small


@pytest.fixture(scope="module")
def forward() -> tpuport.CompileReport:
    return tpuport.compile_for(on_meta(), "v6e-8", inputs=batch())


@pytest.fixture(scope="module")
def training() -> tpuport.CompileReport:
    return tpuport.compile_for(on_meta(), "v5e-4", inputs=batch(), train=squared)


@pytest.fixture(scope="module")
def refused() -> tpuport.CompileReport:
    ported = on_meta()
    return tpuport.compile_for(
        ported, "v5e-4", inputs=batch(1 << 30), train=squared, rules="replicated"
    )


def test_memory_is_what_the_shapes_say(forward: tpuport.CompileReport):
    memory = forward.memory
    assert forward.fits
    assert memory.available == round(31.25 * 2**30)
    assert memory.parameters == WEIGHTS // 8 + WHOLE
    assert memory.buffers == WIDTH * 4
    assert memory.inputs == BATCH // 8 * WIDTH * 4 + 8
    assert memory.optimizer == memory.aliased == 0
    # The output, float32[2, 8] a chip, in tiles of 128 columns and 2 or 8 rows.
    assert memory.outputs in (2 * 128 * 4, 8 * 128 * 4)
    assert memory.padding > 0
    assert memory.peak == sum(memory.parts().values())


def test_collectives_have_their_module_and_their_rule(forward: tpuport.CompileReport):
    assert forward.work is not None
    gathered = {one.module: one for one in forward.work.collectives if one.kind == "all-gather"}
    assert set(gathered) == {"block.up", "block.down"}
    for name, one in gathered.items():
        assert one.rule.startswith(f"{name}.weight: P('fsdp'")
        assert (one.count, one.group_size, one.bytes) == (1, 8, WIDTH * WIDTH * 4)


def test_less_effort_gives_a_program_of_the_same_work(forward: tpuport.CompileReport):
    quick = tpuport.compile_for(on_meta(), "v6e-8", inputs=batch(), quick=True)
    assert (quick.quick, forward.quick) == (True, False)
    assert "compiled quickly, optimised less" in str(quick)
    assert "compiled quickly" not in str(forward)
    assert quick.work is not None
    assert forward.work is not None
    assert quick.work.products == forward.work.products
    assert quick.work.collectives == forward.work.collectives
    assert quick.memory.parts().keys() == forward.memory.parts().keys()
    wins = {"exec_time_optimization_effort": "none"}
    with pytest.raises(TypeError, match="incompatible function arguments"):
        tpuport.compile_for(on_meta(), "v6e-8", inputs=batch(), quick=True, options=wins)


def test_flops_are_counted_by_hand(forward: tpuport.CompileReport):
    assert forward.work is not None
    assert forward.work.model_flops == 2 * BATCH * WIDTH * (2 * WIDTH + 8)
    (product,) = forward.work.products
    assert (product.dtypes, product.count) == ("float32 x float32", 3)


def test_the_time_of_a_step_comes_with_its_assumptions(forward: tpuport.CompileReport):
    assert forward.estimate is not None
    assert 0 < forward.estimate.seconds < 1e-3
    assert any("overlap" in line for line in forward.estimate.assumptions)


def test_a_training_step_holds_the_optimizer_in_place(training: tpuport.CompileReport):
    memory = training.memory
    assert training.what == "training step"
    assert memory.parameters == WEIGHTS // 4 + WHOLE
    # Two moments of adamw, and its count.
    assert memory.optimizer == 2 * memory.parameters + 4
    counters_and_key = 4 + 4 + 8
    held = memory.state + counters_and_key
    assert held <= memory.aliased <= held + memory.padding
    # The loss, the norm of gradients and whether it was skipped are new.
    assert memory.outputs <= 4096


def test_every_gradient_is_a_product(training: tpuport.CompileReport):
    assert training.work is not None
    # Forward, the gradients of weights, and of all inputs but the first.
    layers = 2 * WIDTH + 8
    assert training.work.model_flops == 2 * BATCH * WIDTH * (3 * layers - WIDTH)


def test_a_report_survives_json(forward: tpuport.CompileReport, training: tpuport.CompileReport):
    for report in (forward, training):
        assert tpuport.CompileReport.from_json(report.to_json()) == report
    data = json.loads(forward.to_json())
    assert data["fits"] is True
    assert data["peak"] == forward.memory.peak
    with pytest.raises(UsageError, match="this is no compile report as JSON"):
        tpuport.CompileReport.from_json('{"model": "x"}')


def test_text_and_page_give_the_verdict(
    forward: tpuport.CompileReport, refused: tpuport.CompileReport, tmp_path
):
    assert str(forward).startswith("✔ Small, forward: fits v6e-8")
    assert "block.up.weight: P('fsdp')" in str(forward)
    assert "on all chips, 1.00 times the model's" in str(forward)
    assert str(refused).startswith("✘ Small, training step: does not fit v5e-4")
    refused.save(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "does not fit v5e-4" in page
    assert "Content-Security-Policy" in page
    assert "spread parameters and the optimizer" in page


def test_what_does_not_fit_says_by_how_much_and_what_to_try(refused: tpuport.CompileReport):
    memory = refused.memory
    assert not refused.fits
    assert memory.refused > memory.available == round(15.75 * 2**30)
    assert memory.refused == memory.peak
    assert refused.refused.startswith("RESOURCE_EXHAUSTED")
    assert refused.estimate is None
    assert refused.work is not None
    assert refused.work.model_flops > 0
    first, *rest = refused.advice
    assert first.startswith("spread parameters and the optimizer's state over all 4 chips")
    assert any("a smaller batch" in line for line in rest)
    assert any("policy=lambda ported: tpuport.cast(ported, 'bf16'):" in line for line in rest)
    assert any("tpuport.remat(ported, 'full')" in line for line in rest)
    assert refused.held_is_whole
    assert f"float32[{1 << 30}, {WIDTH}]" in [one.shape for one in refused.held]


def test_float32_products_are_said_where_they_are_a_part_of_the_work():
    wide, narrow = "float32 x float32", "bfloat16 x bfloat16"

    def said(flops: int) -> list[str]:
        products = (Product(narrow, "", 8, 10**6), Product(wide, "", 1, flops))
        return products_in_fp32(Work(0, products=products, fp32_products=(products[1],)))

    assert said(999) == []
    (line,) = said(10**6)
    assert line.startswith("50.0% of the FLOPs of products have float32 operands")


def test_too_large_without_a_refusal_does_not_fit_either():
    memory = Memory(available=100, parameters=60, optimizer=0, buffers=0, inputs=0, temporaries=41)
    assert not memory.fits
    assert dataclasses.replace(memory, temporaries=40).fits


def test_a_model_with_weights_is_taken_by_its_shapes_and_left_as_it_is(
    training: tpuport.CompileReport,
):
    ported = tpuport.convert(Small())
    weight = ported.params["head.weight"]
    # A refused program: nothing has to be compiled to see what was traced.
    report = tpuport.compile_for(ported, "v5e-4", inputs=batch(1 << 30), train=squared)
    assert report.memory.parameters == training.memory.parameters
    assert ported.params["head.weight"] is weight
    assert ported.sharding is None
    assert ported(torch.ones(2, WIDTH)).shape == (2, 8)


def test_a_policy_changes_the_copy_that_is_compiled():
    ported = on_meta()

    def narrow(copy: tpuport.PortedModel) -> None:
        tpuport.cast(copy, "bf16")
        tpuport.remat(copy, {"block": "full"})

    report = tpuport.compile_for(
        ported, "v5e-4", inputs=batch(1 << 30), train=squared, policy=narrow
    )
    assert report.memory.parameters == (WEIGHTS // 4 + WHOLE) // 2
    assert {str(leaf.dtype) for leaf in ported.params.values()} == {"float32"}
    # What was done is not advised.
    assert not [line for line in report.advice if "tpuport.cast" in line or "tpuport.remat" in line]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": None}, r"needs topology='v6e-8' \(any slice\), or a mesh"),
        ({"topology": "v6e-7"}, "There is no TPU topology 'v6e-7'"),
        ({"mesh": {"fsdp": 3}}, "multiply to 3, and there are 4 devices"),
        ({"inputs": [1]}, "a tuple of positional arguments, a dict .* got a list"),
        ({"train": True, "method": "forward"}, "has shape .*: expected one floating number"),
        ({"train": lambda out: None}, "a NoneType has no loss: expected a scalar"),
        ({"train": squared, "optimizer": "adamx"}, "optax.GradientTransformation.*got 'adamx'"),
    ],
)
def test_wrong_calls_are_said(options: dict, message: str):
    given = {"topology": "v5e-4", "inputs": batch(), **options}
    with pytest.raises(UsageError, match=message):
        tpuport.compile_for(on_meta(), given.pop("topology"), **given)


def test_a_function_around_a_model_is_compiled():
    def thrice(ported: Any, params: Any, buffers: Any, key: Any, x: Any, times: int) -> Any:
        assert ported.mesh.size == 4
        step = lambda x, _: (x + ported.apply(params, buffers, key, x)[0].sum(-1)[:, None], None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=times)[0]

    ported = on_meta()
    once = tpuport.compile_for(ported, "v5e-4", inputs=batch(), rules="ddp")
    report = tpuport.compile_for(
        ported, "v5e-4", inputs=(batch(), {"times": 3}), rules="ddp", method=thrice
    )
    assert (report.what, report.topology, report.mesh["fsdp"]) == ("thrice", "v5e-4", 4)
    assert report.memory.parameters == once.memory.parameters
    assert report.memory.inputs == once.memory.inputs
    assert report.work is not None
    assert once.work is not None
    assert report.work.chip_flops == 3 * once.work.chip_flops
    assert ported.mesh is None
    with pytest.raises(UsageError, match="method=thrice is a function around the model"):
        tpuport.compile_for(ported, "v5e-4", inputs=batch(), method=thrice, train=squared)


def test_only_ported_models_are_compiled():
    with pytest.raises(UsageError, match=r"what tpuport.convert.* gives, got a Small"):
        tpuport.compile_for(Small(), "v5e-4", inputs=batch())  # type: ignore[arg-type]


def test_a_mesh_has_its_devices():
    mesh = make_mesh({"fsdp": 4}, "v5e-4")
    with pytest.raises(UsageError, match="a mesh has devices already"):
        tpuport.compile_for(on_meta(), "v5e-4", mesh=mesh, inputs=batch())


def test_several_slices_are_named_and_what_passes_between_them_is_not_counted():
    report = tpuport.compile_for(
        on_meta(), "v5e-4", mesh={"fsdp": 4}, dcn={"data": 2}, inputs=batch()
    )
    assert (report.topology, report.num_chips) == ("2 x v5e-4", 8)
    assert report.work is not None
    assert any("between slices" in line for line in report.work.unknown)


def test_an_unknown_argument_is_said():
    with pytest.raises(UsageError, match="compile_for has no argument 'mehs'; it has input_specs"):
        tpuport.compile_for(on_meta(), "v5e-4", inputs=batch(), mehs={})


def test_repeated_blocks_compile_as_one_loop_and_so_does_their_state():
    with torch.device("meta"):
        model = torch.nn.Sequential(*[Block() for _ in range(3)])
    ported = tpuport.convert(model)
    given = {"inputs": batch(), "train": squared}
    stacked = tpuport.compile_for(ported, "v5e-4", **given)
    each = tpuport.compile_for(ported, "v5e-4", **given, stack=False)
    assert stacked.memory.parameters == each.memory.parameters
    assert stacked.memory.optimizer == each.memory.optimizer == 2 * each.memory.parameters + 4
    assert stacked.work is not None
    assert each.work is not None
    assert stacked.work.model_flops == each.work.model_flops
    assert sorted(ported.params) == sorted(dict(model.named_parameters()))


def test_arguments_are_positional_named_or_both():
    assert as_call((1, 2)) == ((1, 2), {})
    assert as_call({"a": 1}) == ((), {"a": 1})
    assert as_call(((1,), {"a": 2})) == ((1,), {"a": 2})


class Attends(torch.nn.Module):
    """Attention of a kernel's size."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x * self.scale, x, x)


@needs_libtpu
def test_a_kernel_whose_time_is_not_known_leaves_the_estimate_open(monkeypatch):
    def seconds(self: KernelSchedule) -> float:
        raise UnknownTripsError(f"Kernel {self.name} has a loop. What to do: nothing")

    monkeypatch.setattr(KernelSchedule, "seconds", seconds)
    with torch.device("meta"):
        ported = tpuport.convert(Attends())
    shape = jax.ShapeDtypeStruct((4, 2, 256, 64), "float32")
    report = tpuport.compile_for(ported, "v6e-4", inputs=(shape,), rules="ddp", quick=True)
    assert (report.fits, report.estimate) == (True, None)
    assert report.work is not None
    (said,) = report.work.unknown
    assert re.fullmatch(
        r"the time of kernels, and so of a step: Kernel splash_\w+ has a loop\.", said
    )
