"""What a chip holds at the peak, against programs written by hand and libtpu's own messages."""

from tpuport.aot.aot import parse_too_large
from tpuport.aot.memory import listed_by_compiler
from tpuport.cost.hlo.liveness import live_at_peak, parameter_bytes
from tpuport.cost.hlo.parser import read_program

MIB = 1 << 20
# Sizes in MiB: a and b are 4 each, their sum 4, the result 4. On-chip memory does not count.
CHAIN = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0:T(8,128)} parameter(0), metadata={op_name="params['w']"}
  %a = f32[1024,1024]{1,0:T(8,128)} negate(%p), metadata={op_name="jit(f)/m/blocks.0/neg"}
  %chip = f32[1024,1024]{1,0:T(8,128)S(1)} negate(%p)
  %b = f32[1024,1024]{1,0:T(8,128)} exponential(%a), metadata={op_name="jit(f)/m/blocks.1/exp"}
  %same = f32[1024,1024]{1,0:T(8,128)} bitcast(%a)
  %c = f32[1024,1024]{1,0:T(8,128)} add(%b, %same), metadata={op_name="jit(f)/m/add"}
  ROOT %d = f32[1024,1024]{1,0:T(8,128)} add(%c, %chip)
}
"""
LOOP = """\
HloModule jit_f, is_scheduled=true

%body (s: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %s = (s32[]{:T(128)}, f32[1024,1024]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %x = f32[1024,1024]{1,0:T(8,128)} get-tuple-element(%s), index=1
  %t = f32[1024,2048]{1,0:T(8,128)} concatenate(%x, %x), dimensions={1}
  %y = f32[1024,1024]{1,0:T(8,128)} slice(%t), slice={[0:1024], [0:1024]}
  ROOT %r = (s32[]{:T(128)}, f32[1024,1024]{1,0:T(8,128)}) tuple(%i, %y)
}

%condition (s: (s32[], f32[1024,1024])) -> pred[] {
  %s = (s32[]{:T(128)}, f32[1024,1024]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %n = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = f32[1024,1024]{1,0:T(8,128)} negate(%p)
  %state = (s32[]{:T(128)}, f32[1024,1024]{1,0:T(8,128)}) tuple(%zero, %start)
  %loop = (s32[]{:T(128)}, f32[1024,1024]{1,0:T(8,128)}) while(%state), body=%body
  %last = f32[1024,1024]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  ROOT %out = f32[1024,1024]{1,0:T(8,128)} negate(%last)
}
"""
STARTED = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (p: bf16[512,512]) -> bf16[1024,512] {
  %p = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[512,512]{1,0:T(8,128)(2,1)} negate(%p)
  %go = (bf16[512,512]{1,0:T(8,128)(2,1)}, bf16[1024,512]{1,0:T(8,128)(2,1)}) all-gather-start(%x)
  %other = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} negate(%p)
  %got = bf16[1024,512]{1,0:T(8,128)(2,1)} all-gather-done(%go)
  ROOT %out = bf16[1024,512]{1,0:T(8,128)(2,1)} negate(%got)
}
"""


def test_most_is_held_where_three_arrays_live():
    live = live_at_peak(read_program(CHAIN))
    assert [(one.name, one.bytes // MIB) for one in live] == [("a", 4), ("b", 4), ("c", 4)]
    assert live[0].op_name == "jit(f)/m/blocks.0/neg"


def test_a_loop_counts_with_the_temporaries_of_its_body():
    live = live_at_peak(read_program(LOOP))
    assert {(one.name, one.bytes // MIB) for one in live} == {("t", 8), ("start", 4)}
    assert {one.name for one in live if one.is_carried} == {"start"}


def test_an_operand_stays_until_an_asynchronous_operation_is_done():
    live = live_at_peak(read_program(STARTED))
    assert {(one.name, one.bytes) for one in live} == {("x", 512 * 1024), ("go", 1024 * 1024)}


def test_arguments_are_padded_to_tiles():
    text = CHAIN.replace(
        "f32[1024,1024]{1,0:T(8,128)} parameter", "f32[3,100]{1,0:T(8,128)} parameter"
    )
    assert parameter_bytes(read_program(text)) == {"params['w']": (1200, 4096)}


def test_a_refusal_with_a_list_of_buffers():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
        " hbm. Used 63.80G of 30.75G hbm. Exceeded hbm capacity by 33.05G.\n\nTotal hbm usage"
        " >= 65.05G:\n    reserved          1.25G\n    program          63.80G\n\n  Largest"
        ' program allocations in hbm:\n\n  1. Size: 2.00G\n     Operator: op_name="jit(step)/'
        'transpose(jvp(blocks.3))/blocks.3.attn/dot_general" source_file="/a.py" source_line=9\n'
        "     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}\n     Unpadded size: 2.00G\n"
        "     Allocation type: HLO temp\n     ==========================\n"
    )
    found = parse_too_large(message)
    assert found is not None
    assert (found.wanted, found.available) == (round(63.8 * 2**30), round(30.75 * 2**30))
    (held,) = listed_by_compiler(found.largest, {"blocks.3", "blocks.3.attn"})
    assert (held.module, held.operation) == ("blocks.*.attn", "dot_general backward")
    assert (held.shape, held.bytes) == ("f32[32,4096,4096]", 2 << 30)


def test_another_failure_is_no_refusal():
    assert parse_too_large("INTERNAL: Mosaic failed to compile TPU kernel") is None
    vmem = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 256.00M of 128.00M vmem"
    )
    assert parse_too_large(vmem) is None
