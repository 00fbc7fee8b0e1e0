"""What is read from compiled text, against programs whose communication and FLOPs are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.cost import CompiledCost, read_compiled
from tpuport.cost.compiled_cost import group_size
from tpuport.cost.hlo.parser import arrays, read_program
from tpuport.sharding import count_collectives


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def compiled(function, mesh: Mesh, *args) -> str:
    """The text for (shape, spec) pairs of fp32."""
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in args
    ]
    return jax.jit(function).lower(*shapes).compile().as_text()


def shard(function, mesh: Mesh, in_specs, out_specs):
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def test_an_all_reduce_in_a_scan_counts_as_often_as_it_runs(mesh):
    def run(x):
        def body(h, _):
            with jax.named_scope("blocks.0"):
                return jax.lax.psum(jnp.sin(h), "a"), None

        return jax.lax.scan(body, x, None, length=13)[0]

    text = compiled(shard(run, mesh, P("a"), P("a")), mesh, ((64, 32), P("a")))
    (found,) = read_compiled(text).collectives
    assert (found.kind, found.times, found.group_size) == ("all-reduce", 13, 4)
    assert found.bytes == 16 * 32 * 4
    assert found.module == "blocks.0"
    assert read_compiled(text).bytes_by_kind() == {"all-reduce": 13 * 16 * 32 * 4}
    # The text has it once.
    assert count_collectives(text) == {"all-reduce": 1}


def test_loops_in_loops_multiply(mesh):
    def run(x):
        def inner(h, _):
            return jax.lax.psum(jnp.sin(h), "b"), None

        def outer(h, _):
            return jax.lax.scan(inner, h, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    text = compiled(shard(run, mesh, P("a"), P("a")), mesh, ((64, 32), P("a")))
    assert [(one.times, one.group_size) for one in read_compiled(text).collectives] == [(15, 2)]


@pytest.mark.parametrize(
    ("kind", "function", "out_specs", "num_bytes"),
    [
        ("all-gather", lambda x: jax.lax.all_gather(x, "a", tiled=True), P(), 64 * 32 * 4),
        ("reduce-scatter", lambda x: jax.lax.psum_scatter(x, "a", tiled=True), P("a"), 16 * 32 * 4),
        (
            "all-to-all",
            lambda x: jax.lax.all_to_all(x, "a", 1, 0, tiled=True),
            P(None, "a"),
            16 * 32 * 4,
        ),
        (
            "collective-permute",
            lambda x: jax.lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)]),
            P("a"),
            16 * 32 * 4,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bytes_of_each_kind(mesh, kind, function, out_specs, num_bytes):
    text = compiled(shard(function, mesh, P("a"), out_specs), mesh, ((64, 32), P("a")))
    found = read_compiled(text)
    assert found.bytes_by_kind() == {kind: num_bytes}
    assert count_collectives(text) == {kind: 1}


def test_flops_of_what_a_chip_computes(mesh):
    """Spread over `a` and repeated over `b`: half of what chips compute is the same."""
    text = compiled(jnp.matmul, mesh, ((64, 32), P("a", None)), ((32, 48), P()))
    assert read_compiled(text).dot_flops == 2 * 16 * 32 * 48


def test_flops_of_products_in_a_scan_by_module(mesh):
    def run(x, ws):
        def body(h, w):
            with jax.named_scope("layers.*"):
                return jnp.sin(h @ w), None

        with jax.named_scope("head"):
            return jax.lax.scan(body, x, ws)[0].T @ x

    text = compiled(run, mesh, ((64, 32), P()), ((7, 32, 32), P()))
    found = read_compiled(text, modules={"layers.*", "head"})
    assert found.dot_flops_by_module == {"layers.*": 7 * 2 * 64 * 32 * 32, "head": 2 * 64 * 32 * 32}
    assert not found.unknown


def test_flops_of_a_convolution(mesh):
    def run(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")

    found = read_compiled(compiled(run, mesh, ((2, 6, 8, 8), P()), ((16, 6, 3, 3), P())))
    # Of 8 positions and 3 of a kernel, 22 pairs read no padding.
    assert found.dot_flops == 2 * 2 * 16 * 6 * 22 * 22


def test_batch_dims_that_became_positions_of_a_convolution():
    """Each of 16 heads meets only itself: 16 positions, dilated so that no other one is read."""
    text = (
        "ENTRY %main (q: f32[16,64,32], k: f32[16,48,32]) -> f32[16,64,48] {\n"
        "  %q = f32[16,64,32] parameter(0)\n"
        "  %k = f32[16,48,32] parameter(1)\n"
        "  ROOT %s = f32[16,64,48] convolution(%q, %k), window={size=16 stride=15 lhs_dilate=16},"
        " dim_labels=0bf_0oi->0bf\n"
        "}\n"
    )
    assert read_compiled(text).dot_flops == 2 * 16 * 64 * 48 * 32


TPU_TEXT = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%fused (p0: bf16[300,1200], p1: bf16[1200,1200]) -> bf16[1200,300] {
  %p0 = bf16[300,1200]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[1200,1200]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.9 = bf16[1200,300]{0,1:T(8,128)(2,1)} convolution(%p1, %p0), dim_labels=fb_oi->bf, metadata={op_name="jit(f)/while/body/closed_call/blocks.0/dot_general" stack_frame_id=8}
}

%gather (q: bf16[300,1200]) -> bf16[2400,1200] {
  %q = bf16[300,1200]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[2400,1200]{1,0:T(8,128)(2,1)} all-gather(%q), channel_id=3, replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}
}

%body (s: (s32[], bf16[300,1200])) -> (s32[], bf16[300,1200]) {
  %s = (s32[]{:T(128)}, bf16[300,1200]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %h = bf16[300,1200]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %w = bf16[1200,1200]{1,0:T(8,128)(2,1)} broadcast(%i), dimensions={}
  %fusion.1 = bf16[1200,300]{0,1:T(8,128)(2,1)} fusion(%h, %w), kind=kOutput, calls=%fused, backend_config={"window_config":{"estimated_cycles":"2924"}}
  %copy.4 = bf16[300,1200]{0,1:T(8,128)(2,1)} copy(%h)
  %copy.5 = bf16[300,1200]{1,0:T(8,128)(2,1)S(1)} copy(%h)
  %ag-start = (bf16[300,1200]{1,0}, bf16[2400,1200]{1,0:T(8,128)(2,1)}) async-start(%h), calls=%gather
  %ag-done = bf16[2400,1200]{1,0:T(8,128)(2,1)} async-done(%ag-start), calls=%gather
  %ar-start = bf16[300,1200]{1,0:T(8,128)(2,1)} all-reduce-start(%h), channel_id=5, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %ar-done = bf16[300,1200]{1,0:T(8,128)(2,1)} all-reduce-done(%ar-start)
  %p-start = (bf16[300,1200]{1,0}, bf16[300,1200]{1,0}, u32[], u32[]) collective-permute-start(%h), channel_id=7, source_target_pairs={{0,1},{1,0}}
  %p-done = bf16[300,1200]{1,0} collective-permute-done(%p-start)
  %attend.3 = bf16[300,1200]{1,0:T(8,128)(2,1)} custom-call(%h), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/while/body/closed_call/blocks.0/attend/pallas_call"}
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%one, %i)
  ROOT %t = (s32[]{:T(128)}, bf16[300,1200]{1,0:T(8,128)(2,1)}) tuple(%next, %attend.3)
}

%condition (s: (s32[], bf16[300,1200])) -> pred[] {
  %s.1 = (s32[]{:T(128)}, bf16[300,1200]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %limit = s32[]{:T(128)} constant(14)
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: bf16[300,1200]) -> bf16[300,1200] {
  %two = s32[]{:T(128)} constant(2)
  %copy.1 = s32[]{:T(128)} copy(%two)
  %x = bf16[300,1200]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="x"}
  %init = (s32[]{:T(128)}, bf16[300,1200]{1,0:T(8,128)(2,1)}) tuple(%copy.1, %x)
  %while = (s32[]{:T(128)}, bf16[300,1200]{1,0:T(8,128)(2,1)}) while(%init), condition=%condition, body=%body
  ROOT %out = bf16[300,1200]{1,0:T(8,128)(2,1)} get-tuple-element(%while), index=1
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def on_tpu() -> CompiledCost:
    return read_compiled(TPU_TEXT)


def test_trips_of_a_loop_that_counts_from_two_to_fourteen(on_tpu):
    assert {one.times for one in on_tpu.collectives} == {12}
    assert not on_tpu.unknown


@pytest.mark.parametrize(("step", "trips"), [(2, 6), (5, 3), (24, 1)])
def test_trips_of_a_loop_that_counts_in_larger_steps(step, trips):
    """As libtpu's do that overlap a product with the gathering of its operand."""
    found = read_compiled(TPU_TEXT.replace("constant(1)", f"constant({step})"))
    assert {one.times for one in found.collectives} == {trips}
    assert found.dot_flops == trips * 2 * 300 * 1200 * 1200
    assert not found.unknown


def test_a_step_that_is_not_known_is_said():
    found = read_compiled(TPU_TEXT.replace("add(%one, %i)", "multiply(%one, %i)"))
    assert {one.times for one in found.collectives} == {12}
    assert found.unknown == ("by how much the loop while counts up; one is taken",)


def test_asynchronous_collectives_count_once(on_tpu):
    found = {one.kind: (one.bytes, one.group_size) for one in on_tpu.collectives}
    assert found == {
        "all-gather": (2400 * 1200 * 2, 8),
        "all-reduce": (300 * 1200 * 2, 4),
        "collective-permute": (300 * 1200 * 2, 2),
    }
    assert len(on_tpu.collectives) == 3
    assert sum(count_collectives(TPU_TEXT).values()) == 3


def test_one_spread_over_several_fusions_counts_once():
    one = (
        "  %all-gather.{0} = f32[256,1024] all-gather(%x), channel_id=14, "
        'replica_groups=[2,4]<=[8], frontend_attributes={{chain_id="3"}}\n'
    )
    head = "ENTRY %main (x: f32[64,1024]) -> f32[64,1024] {\n  %x = f32[64,1024] parameter(0)\n"
    text = head + "".join(one.format(step) for step in range(5)) + "}\n"
    (found,) = read_compiled(text).collectives
    assert (found.bytes, found.times) == (256 * 1024 * 4, 1)
    assert count_collectives(text) == {"all-gather": 1}


def test_one_that_goes_on_during_a_loop_counts_once():
    step = (
        "  %{0} = bf16[2400,1200] all-gather(%{1}), channel_id=9, replica_groups=[1,8]<=[8],"
        ' frontend_attributes={{chain_id="8"}}\n'
    )
    text = TPU_TEXT.replace("  %copy.4 =", step.format("further", "h") + "  %copy.4 =")
    text = text.replace("  %init =", step.format("start", "x") + "  %init =")
    found = [one for one in read_compiled(text).collectives if one.bytes == 2400 * 1200 * 2]
    assert sorted(one.times for one in found) == [1, 12]


def test_a_product_that_became_a_convolution(on_tpu):
    assert on_tpu.dot_flops_by_module == {"blocks.0": 12 * 2 * 300 * 1200 * 1200}


def test_kernels_and_cycles(on_tpu):
    (kernel,) = on_tpu.kernels
    assert (kernel.name, kernel.module, kernel.times) == ("attend", "attend", 12)
    assert read_compiled(TPU_TEXT, modules={"blocks.0"}).kernels[0].module == "blocks.0"
    assert on_tpu.estimated_cycles == 12 * 2924


def test_only_copies_that_change_a_layout_or_nothing_count(on_tpu):
    # `copy.5` brings an array to the chip, which costs no layout change.
    assert {one.name for one in on_tpu.copies} == {"copy.4"}
    assert on_tpu.copied_bytes == 12 * 2 * 1200 * 384


def test_traffic_of_memory_counts_runs(on_tpu):
    h, w = 300 * 1200 * 2, 1200 * 1200 * 2
    each = [
        w + 4,  # the broadcast of a number
        h + w + h,  # the fusion
        2 * h,  # a copy, and one to the chip
        h,
        h + 8 * h,  # collectives: all-gather, all-reduce, permute
        2 * h,
        2 * h,
    ]
    # With each run of the body the counter is increased and compared; a copy of a number before.
    assert on_tpu.hbm_bytes == 12 * sum(each) + 12 * (12 + 9) + 8


SLICED = """\
%read (p0: f32[9,8,128], p1: s32[], p2: f32[9,8,128]) -> f32[9,8,128] {
  %p0 = f32[9,8,128] parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[9,8,128] parameter(2)
  %slice = f32[1,8,128] dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,8,128}
  ROOT %update = f32[9,8,128] dynamic-update-slice(%p2, %slice, %p1)
}

ENTRY %main (a: f32[9,8,128], i: s32[], b: f32[9,8,128]) -> f32[9,8,128] {
  %a = f32[9,8,128] parameter(0)
  %i = s32[] parameter(1)
  %b = f32[9,8,128] parameter(2)
  ROOT %f = f32[9,8,128] fusion(%a, %i, %b), kind=kLoop, calls=%read
}
"""


def test_of_a_stack_one_slice_is_read_and_one_is_written():
    assert read_compiled(SLICED).hbm_bytes == 2 * 8 * 128 * 4 + 4


FETCHED = """\
ENTRY %main (a: f32[64,128]) -> f32[8,128] {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  %start = ((f32[64,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:8], [0:128]}
  ROOT %done = f32[8,128]{1,0:T(8,128)S(1)} slice-done(%start)
}
"""  # noqa: E501


def test_of_an_array_that_is_fetched_in_parts_the_part_is_read():
    assert read_compiled(FETCHED).hbm_bytes == 8 * 128 * 4


PASSED_ON = """\
%seen (b: f32[64,128]) -> f32[64,128] {
  %b = f32[64,128] parameter(0)
  ROOT %same = f32[64,128] bitcast(%b)
}

%product (w: f32[64,128], x: f32[8,128]) -> f32[8,64] {
  %w = f32[64,128] parameter(0)
  %x = f32[8,128] parameter(1)
  %inner = f32[64,128] fusion(%w), kind=kLoop, calls=%seen
  ROOT %y = f32[8,64] convolution(%x, %inner), dim_labels=bf_oi->bf
}

%part (w: f32[64,128]) -> f32[8,128] {
  %w = f32[64,128] parameter(0)
  %inner = f32[64,128] fusion(%w), kind=kLoop, calls=%seen
  ROOT %y = f32[8,128] slice(%inner), slice={[0:8], [0:128]}
}

ENTRY %main (a: f32[64,128], b: f32[8,128]) -> f32[8,64] {
  %a = f32[64,128] parameter(0)
  %f = f32[8,128] fusion(%a), kind=kLoop, calls=%part
  ROOT %g = f32[8,64] fusion(%a, %f), kind=kOutput, calls=%product
}
"""


def test_what_a_fusion_inside_of_another_passes_on_is_read_there():
    product = 64 * 128 + 8 * 128 + 8 * 64
    part = 2 * 8 * 128
    assert read_compiled(PASSED_ON).hbm_bytes == 4 * (product + part)


ON_ITS_WAY = """\
%async_collective_fusion.1 (p0: f32[8,128], p1: f32[64,128], p2: f32[16,128]) -> (f32[16,128], f32[8,128], f32[64,128]) {
  %p0 = f32[8,128] parameter(0)
  %p1 = f32[64,128] parameter(1)
  %p2 = f32[16,128] parameter(2)
  %work = f32[16,128] negate(%p2)
  %step = f32[64,128] all-gather(%p0), channel_id=1, replica_groups=[1,8]<=[8], frontend_attributes={chain_id="1"}
  ROOT %t = (f32[16,128], f32[8,128], f32[64,128]) tuple(%work, %p0, %step)
}

ENTRY %main (a: f32[8,128], b: f32[64,128], c: f32[16,128]) -> (f32[16,128], f32[8,128], f32[64,128]) {
  %a = f32[8,128] parameter(0)
  %b = f32[64,128] parameter(1)
  %c = f32[16,128] parameter(2)
  ROOT %f = (f32[16,128], f32[8,128], f32[64,128]) fusion(%a, %b, %c), kind=kOutput, calls=%async_collective_fusion.1
}
"""  # noqa: E501


def test_a_collective_that_work_moves_on_by_a_step_moves_nothing_more():
    assert read_compiled(ON_ITS_WAY).hbm_bytes == 2 * 16 * 128 * 4


def test_buffers_have_their_padding(on_tpu):
    gathered = next(one for one in on_tpu.buffers if one.name == "w")
    assert (gathered.bytes, gathered.padded_bytes) == (1200 * 1200 * 2, 1200 * 1280 * 2)
    assert on_tpu.padding_bytes > 0
    # What a fusion computes inside is no buffer.
    assert not {one.name for one in on_tpu.buffers} & {"convolution.9", "p0"}


def test_an_unknown_number_of_trips_is_said():
    text = TPU_TEXT.replace("constant(14)", "parameter(1)")
    found = read_compiled(text)
    assert found.unknown == ("how often the loop while runs; it is counted once",)
    assert {one.times for one in found.collectives} == {1}


@pytest.mark.parametrize(
    ("shape", "num_bytes", "padded"),
    [
        ("bf16[300,1201]{1,0:T(8,128)(2,1)}", 300 * 1201 * 2, 304 * 1280 * 2),
        ("bf16[300,1201]{0,1:T(8,128)(2,1)}", 300 * 1201 * 2, 384 * 1208 * 2),
        ("f32[5]{0:T(1024)}", 20, 4096),
        ("f32[3,5]{1,0}", 60, 60),
        ("s4[7,128]{1,0:T(8,128)}", 448, 512),
        ("pred[]{:T(512)}", 1, 512),
    ],
)
def test_padding_of_tiles(shape, num_bytes, padded):
    (array,) = arrays(shape)
    assert (array.bytes, array.padded_bytes) == (num_bytes, padded)


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,4},{1,5}}, x", 2),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", 8),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", 4),
        ("channel_id=1", None),
    ],
)
def test_group_sizes(attributes, size):
    assert group_size(attributes) == size


def test_text_without_a_program_is_empty():
    assert read_program("").entry.instructions == {}
    assert read_compiled("") == CompiledCost(dot_flops=0)
