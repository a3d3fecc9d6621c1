"""Reading a scheduled program: on small programs in the words of the compilers, with every figure known by hand."""

import pytest

from parallel import hlo
from parallel.report import read_report
from parallel.timeline import Task, length, play, waited
from parallel.traffic import moved_bytes

# A loop body as JAX 0.10.2 prints it for eight H200s: two sums of which one overlaps a product, then a gather.
ASYNCHRONOUS = """HloModule jit_resume, is_scheduled=true

%fused_product (param_0: bf16[1000,100], param_1: bf16[100]) -> bf16[1000] {
  %param_0 = bf16[1000,100]{1,0} parameter(0)
  %param_1 = bf16[100]{0} parameter(1)
  ROOT %dot.1 = bf16[1000]{0} dot(%param_0, %param_1), lhs_contracting_dims={1}
}

%fused_write (param_0.1: bf16[2,4096], param_1.1: bf16[2,1], param_2.1: s32[]) -> bf16[2,4096] {
  %param_0.1 = bf16[2,4096]{1,0} parameter(0)
  %param_1.1 = bf16[2,1]{1,0} parameter(1)
  %param_2.1 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = bf16[2,4096]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2.1, %param_2.1)
}

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%x, %y)
}

%body (state: (bf16[1000,100], bf16[100], bf16[2,4096], bf16[2,1], s32[])) -> (bf16[1000,100], bf16[100]) {
  %state = (bf16[1000,100]{1,0}, bf16[100]{0}, bf16[2,4096]{1,0}, bf16[2,1]{1,0}, /*index=4*/s32[]) parameter(0)
  %w = bf16[1000,100]{1,0} get-tuple-element(%state), index=0
  %v = bf16[100]{0} get-tuple-element(%state), index=1
  %cache = bf16[2,4096]{1,0} get-tuple-element(%state), index=2
  %new = bf16[2,1]{1,0} get-tuple-element(%state), index=3
  %at = s32[] get-tuple-element(%state), index=4
  %all-reduce-start = bf16[100]{0} all-reduce-start(%v), to_apply=%add, metadata={op_name="jit(f)/layer0.mlp/psum"}
  %product = bf16[1000]{0} fusion(%w, %v), kind=kInput, calls=%fused_product, metadata={op_name="jit(f)/layer1.mlp/dot"}
  %all-reduce-start.1 = bf16[100]{0} all-reduce-start(%v), to_apply=%add, metadata={op_name="jit(f)/layer1.mlp/psum"}
  %write = bf16[2,4096]{1,0} fusion(%cache, %new, %at), kind=kLoop, calls=%fused_write
  %all-reduce-done = bf16[100]{0} all-reduce-done(%all-reduce-start), metadata={op_name="jit(f)/layer0.mlp/psum"}
  %all-reduce-done.1 = bf16[100]{0} all-reduce-done(%all-reduce-start.1), metadata={op_name="jit(f)/layer1.mlp/psum"}
  %all-gather-start = ((bf16[100]{0}), (bf16[800]{0})) all-gather-start(%all-reduce-done), dimensions={0}
  %all-gather-done = (bf16[800]{0}) all-gather-done(%all-gather-start)
  ROOT %tuple = (bf16[1000,100]{1,0}, bf16[100]{0}) tuple(%w, %all-reduce-done.1)
}

%condition (state.1: (bf16[1000,100], bf16[100])) -> pred[] {
  %state.1 = (bf16[1000,100]{1,0}, bf16[100]{0}) parameter(0)
  ROOT %constant = pred[] constant(true)
}

ENTRY %main (p: bf16[1000,100]) -> bf16[100] {
  %p = bf16[1000,100]{1,0} parameter(0)
  %while = (bf16[1000,100]{1,0}, bf16[100]{0}) while(%p), condition=%condition, body=%body
  ROOT %result = bf16[100]{0} get-tuple-element(%while), index=1
}
"""
# JAX 0.12 prints a sum that nothing overlaps as one operation; other kinds come in a wrapper.
SYNCHRONOUS = """HloModule jit_resume, is_scheduled=true

%wrapped (x: bf16[800]) -> bf16[100] {
  %x = bf16[800]{0} parameter(0)
  ROOT %reduce-scatter = bf16[100]{0} reduce-scatter(%x), dimensions={0}, to_apply=%add
}

ENTRY %main (v: bf16[800]) -> bf16[100] {
  %v = bf16[800]{0} parameter(0)
  %sum = bf16[800]{0} all-reduce(%v), to_apply=%add, metadata={op_name="jit(f)/while/body/head/psum"}
  %start = ((bf16[800]{0}), bf16[100]{0}) async-start(%sum), calls=%wrapped
  %copy = bf16[800]{0} copy(%sum)
  ROOT %done = bf16[100]{0} async-done(%start)
}
"""
# A TPU's compiler fetches weights into on-chip memory ahead of time.
ON_CHIP = """HloModule jit_resume, is_scheduled=true

ENTRY %main (w: bf16[1000]) -> bf16[1000] {
  %w = bf16[1000]{0:T(256)} parameter(0)
  %copy-start = (bf16[1000]{0:T(256)S(1)}, bf16[1000]{0:T(256)}, u32[]{:S(2)}) copy-start(%w)
  %copy-done = bf16[1000]{0:T(256)S(1)} copy-done(%copy-start)
  ROOT %negate = bf16[1000]{0:T(256)} negate(%copy-done)
}
"""
PRODUCT = 2 * (1000 * 100 + 100 + 1000)
BYTES_PER_SECOND = 1e9  # so that a thousand bytes take a microsecond


def report(text, collective_us=8.0):
    return read_report(hlo.parse(text), (PRODUCT, PRODUCT), BYTES_PER_SECOND, collective_us)


def test_work_between_start_and_done():
    first, second, gather = report(ASYNCHRONOUS).collectives
    write = 2 * 2 * 2 + 4
    assert (first.kind, first.source, first.bytes) == ("all-reduce", "layer0.mlp", 200)
    assert (first.kernels, first.work_bytes) == (2, PRODUCT + write)
    assert first.work_us == pytest.approx((PRODUCT + write) / 1000)
    assert (second.kernels, second.work_bytes) == (1, write)
    assert (gather.kind, gather.kernels, gather.exposed) == ("all-gather", 0, True)


def test_an_exchange_is_exposed_when_it_takes_longer_than_the_work():
    assert [c.exposed for c in report(ASYNCHRONOUS).collectives] == [False, True, True]
    assert [c.exposed for c in report(ASYNCHRONOUS, collective_us=300).collectives] == [True, True, True]


def test_totals_of_a_token():
    found = report(ASYNCHRONOUS)
    assert found.most_in_flight == 2
    assert found.kernels == 5
    # An update in place touches what it writes, not the whole buffer.
    assert found.moved_bytes == PRODUCT + 2 * 2 * 2 + 4
    assert [c.source for c in found.layer_sums] == ["layer0.mlp", "layer1.mlp"]


def test_synchronous_and_wrapped_exchanges():
    found = report(SYNCHRONOUS)
    assert [(c.kind, c.source, c.kernels) for c in found.collectives] == [
        ("all-reduce", "head", 0),
        ("reduce-scatter", "", 1),
    ]
    assert found.most_in_flight == 1


def test_copies_into_on_chip_memory_count_once():
    program = hlo.parse(ON_CHIP)
    body = program.loop_body()
    local = {op.name: op for op in body}
    assert {op.name: moved_bytes(program, op, local) for op in body} == {
        "w": 0, "copy-start": 0, "copy-done": 2000, "negate": 2000,
    }  # fmt: skip


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule nothing")


STREAM = [
    Task("work", "a", 4), Task("start", "s1", 8), Task("work", "b", 3), Task("start", "s2", 8), Task("work", "c", 4),
    Task("wait", "s1"), Task("wait", "s2"),
]  # fmt: skip


def test_sums_on_streams_of_their_own_run_side_by_side():
    spans = play(STREAM, streams=2)
    assert [(s.name, s.begin, s.end) for s in spans if s.kind == "sum"] == [("s1", 4, 12), ("s2", 7, 15)]
    assert (length(spans), waited(spans)) == (15, 4)


def test_sums_on_one_stream_wait_for_each_other():
    spans = play(STREAM, streams=1)
    assert [(s.name, s.begin, s.end) for s in spans if s.kind == "sum"] == [("s1", 4, 12), ("s2", 12, 20)]
    assert (length(spans), waited(spans)) == (20, 9)


def test_json_and_table_name_every_exchange():
    found = report(ASYNCHRONOUS)
    assert len(found.to_dict()["collectives"]) == 3
    table = found.format().splitlines()
    assert "hidden" in table[1] and "layer0.mlp" in table[1]
    assert table[4].startswith("3 exchanges, 2 exposed if one takes 8 us")
