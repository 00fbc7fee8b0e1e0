"""Schedules of kernels: the text that libtpu writes, and one small kernel compiled by it."""

import importlib.util
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuport.cost import CHIPS, KernelCompileError, KernelSchedule, schedule, schedule_kernels
from tpuport.cost.bundles import ScheduleFormatError, Span, read_bundles
from tpuport.cost.kernels import find_calls
from tpuport.foundation.errors import MissingExtraError, UsageError

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="waits for libtpu (make test installs it)"
)


def bundles_text(lines: list[str]) -> str:
    return "= control target key end\n" + "".join(
        f" {hex(at) if at else '0':>6} {line}\n" for at, line in enumerate(lines)
    )


# A loop over a grid of 4 by 3 from bundle 1 to 21: 4 to 8 run first of a row, 10 to 15 multiply.
LINES = [
    "  :  { %s0 = smov 0 }\niteration_bounds: (4, 3)",
    "LB: > { %p = scmp.ge.s32 %s0, 12 } /* Start region 9 */",
    "   : > { %1 = sbr.rel (%p1) target = $region4 }",
    *["   : > {}"] * 4,
    *["   : > { %v1 = vadd.f32 %v0, %v0 }"] * 2,
    "PF: > { %2 = sbr.rel (%p2) target = $region6 } /* Start/End empty region 4 */",
    *["   : > {}"] * 4,
    *["   : > { %3 = vmatmul.mubr.bf16.gmra.mxu0 %v1 }"] * 5,
    "PF: > { %s1 = sadd.s32 1, %s0 } /* Start/End empty region 6 */",
    "   : > { %4 = sbr.rel (!%p3) target = $region9 }",
    *["   : > {}"] * 4,
    "   :  { %5 = vsyncpa 1 }",
]


def test_loops_and_what_jumps_skip():
    found = read_bundles(bundles_text(LINES))
    assert found.grid == (4, 3)
    (loop,) = found.whole.inner
    assert (loop.is_loop, loop.start, loop.stop, loop.products) == (True, 1, 25, 5)
    assert [(s.start, s.stop, s.products) for s in loop.inner] == [(7, 9, 0), (14, 19, 5)]
    assert loop.own == 24 - 2 - 5
    assert [span.stop - span.start for span in found.whole.walk()] == [26, 24, 2, 5]


def make(lines: list[str], **options) -> KernelSchedule:
    found = read_bundles(bundles_text(lines))
    return KernelSchedule("k", CHIPS["v6e"], found.grid, found, **options)


def test_cycles_of_a_step():
    kernel = make(LINES)
    # Once in a row of three steps: the two bundles without products that can be skipped.
    assert kernel.cycles_a_step() == pytest.approx(17 + 5 + 2 / 3)
    assert kernel.cycles_a_step(row_steps=2) == pytest.approx(17 + 5 + 1)
    assert kernel.cycles_a_step(active=0.5, row_steps=2) == pytest.approx(17 + 2.5 + 1)


def test_seconds_of_a_call():
    clock = CHIPS["v6e"].clock_hz
    assert make(LINES).seconds(row_steps=2) == pytest.approx((2 + 12 * 23) / clock)
    # Data that takes longer to come than to use.
    slow = make(LINES, step_bytes=1e6)
    assert slow.seconds() == pytest.approx(12e6 / CHIPS["v6e"].hbm_bandwidth)
    # A chip of two cores splits a parallel grid.
    on_two = KernelSchedule("k", CHIPS["v5p"], (4, 3), slow.bundles, parallel=True)
    assert on_two.seconds(row_steps=2) == pytest.approx((2 + 6 * 23) / CHIPS["v5p"].clock_hz)


def test_a_loop_within_a_step_needs_its_trips():
    inner = Span(5, 9, 2, True)
    step = Span(1, 21, 2, True, (inner,))
    whole = read_bundles(bundles_text(LINES))
    nested = type(whole)(Span(0, 22, 2, False, (step,)), (4,))
    with pytest.raises(UsageError, match="Kernel k has a loop within a step"):
        KernelSchedule("k", CHIPS["v6e"], (4,), nested).cycles_a_step()
    assert KernelSchedule("k", CHIPS["v6e"], (4,), nested, trips=(10,)).cycles_a_step() == 16 + 40


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nothing here", "no bundle such as"),
        (bundles_text(LINES).replace("0x3 ", "0x4 ", 1), "bundle 3 is called 0x4"),
        (bundles_text(LINES).replace("$region", "%region"), "its jumps do not say where to"),
        # From within what another jump skips to behind it.
        (
            bundles_text(
                [*LINES[:3], "   : > { %7 = sbr.rel (%p7) target = $region6 }", *LINES[4:]]
            ),
            "its jumps cross",
        ),
    ],
)
def test_other_forms_are_refused(text, reason):
    with pytest.raises(ScheduleFormatError, match=reason) as error:
        read_bundles(text)
    assert "use a libtpu from 0.0.42 to 0.0.52" in str(error.value)


def test_copies_of_xla_are_no_kernels():
    """They are longer than a small kernel, and have a grid where the kernel's is not named."""
    copy = read_bundles(bundles_text([*LINES, "   :  {} /* exit bundle: %copy.5 = copy(%x) */"]))
    lines = [LINES[0].partition("\n")[0], *LINES[1:20], *LINES[21:]]
    last = "   :  {} /* exit bundle: %_lambda_.1 = custom-call(%copy.5) */"
    kernel = read_bundles(bundles_text([*lines, last]))
    assert (copy.operation, copy.grid) == ("copy", (4, 3))
    assert (kernel.operation, kernel.grid) == ("custom-call", ())
    assert schedule._kernels({"copy": copy, "k": kernel}) == {"k": kernel}
    # Without the names of operations it is the grid that tells.
    unnamed = replace(copy, operation="")
    assert schedule._kernels({"k": unnamed, "start": replace(unnamed, grid=())}) == {"k": unnamed}
    assert schedule._kernel_name("179-copy-66-final_bundles.txt") == "copy"
    assert schedule._kernel_name("179-splash_dq.1-72-final_bundles.txt") == "splash_dq"


def scaled(x_ref, y_ref):
    y_ref[...] = x_ref[...] * 2.0


@needs_libtpu
def test_a_kernel_whose_operands_are_in_vmem_has_its_own_schedule():
    """XLA copies narrow rows into another layout and into VMEM, in a loop."""
    shape = (16, 16, 256, 72)
    block = pl.BlockSpec((1, 1, 256, 72), lambda i, j: (i, j, 0, 0))

    def run(x):
        call = pl.pallas_call(
            scaled,
            out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
            grid=shape[:2],
            in_specs=[block],
            out_specs=block,
        )
        return call(x)

    jaxpr = jax.make_jaxpr(run)(jax.ShapeDtypeStruct(shape, "bfloat16"))
    (kernel,) = schedule_kernels(jaxpr, "v6e").values()
    assert kernel.bundles.operation == "custom-call"
    assert 0 < kernel.seconds() < 1e-3


def product(size: int, block: int, **options):
    """A product of two square matrices in blocks, summed along the innermost dim of its grid."""

    def body(a, b, o, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o[...] = total[...].astype(o.dtype)

    def run(a, b):
        return pl.pallas_call(
            body,
            grid=(size // block,) * 3,
            in_specs=[
                pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
                pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
            out_shape=jax.ShapeDtypeStruct((size, size), jnp.bfloat16),
            scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
            name="blocked_product",
            **options,
        )(a, b)

    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    return jax.make_jaxpr(run)(x, x)


def test_what_a_call_says_about_itself():
    (call,) = find_calls(product(1024, 256))
    assert (call.name, call.grid, call.parallel) == ("blocked_product", (4, 4, 4), False)
    assert call.flops == 2 * 1024**3
    assert call.bytes == 3 * 1024 * 1024 * 2
    # Both operands come anew at each step, the result goes once in four.
    assert call.step_bytes == 256 * 256 * 2 * (2 + 1 / 4)
    semantics = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"))
    assert find_calls(product(1024, 256, compiler_params=semantics))[0].parallel


def test_without_libtpu_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'needs libtpu.*pip install "tpuport\[tpu\]"'):
        schedule_kernels(product(1024, 256), "v6e")


@needs_libtpu
def test_a_deep_product_comes_near_the_peak():
    """The calibration of bundles and clock: libtpu 0.0.42 schedules 0.82 of the peak."""

    def body(a, b, o):
        o[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def run(a, b):
        return pl.pallas_call(
            body,
            grid=(2, 2),
            in_specs=[
                pl.BlockSpec((512, 1024), lambda i, j: (i, 0)),
                pl.BlockSpec((1024, 512), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((512, 512), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
            name="deep_product",
        )(a, b)

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    (kernel,) = schedule_kernels(jax.make_jaxpr(run)(x, x), "v6e-8").values()
    assert kernel.grid == (2, 2)
    body_cycles = max(span.own for span in kernel.step.walk() if not span.is_loop)
    share = 2 * 512 * 1024 * 512 / body_cycles / CHIPS["v6e"].flops_per_cycle
    assert 0.75 < share <= 1
    assert kernel.seconds() > 2 * 1024**3 / CHIPS["v6e"].bf16_flops


@needs_libtpu
def test_what_does_not_fit_is_refused_with_libtpus_reason():
    def run(x):
        return pl.pallas_call(
            lambda a, o, large: None,
            grid=(2,),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            scratch_shapes=[pltpu.VMEM((1 << 20, 128), jnp.float32)],
            name="too_large",
        )(x)

    jaxpr = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((8, 128), jnp.float32))
    with pytest.raises(KernelCompileError, match=r"cannot compile the kernel for v5e:2x2: .*vmem"):
        schedule_kernels(jaxpr, "v5e")
