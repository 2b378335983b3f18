"""What the reader of compiled programs makes of HLO: lines as two compilers write them, cut down to what matters."""

import re

from topoep_jax.aot.compiler import Memory, Program
from topoep_jax.aot.dump import Thunk
from topoep_jax.aot.hlo import Array, Module
from topoep_jax.aot.host import host_reads, num_host_reads
from topoep_jax.aot.schedule import collectives

DEVICE_KERNEL = {
    "xla_gpu_experimental_ragged_all_to_all_use_device_kernel": "true",
    "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel": "false",
}

# jax 0.12: rows in symmetric memory, S(7). A GEMM runs between start and done, in the second exchange none; the third
# is synchronous, and so is the fourth, whose start and done stand for themselves.
ROWS = """
HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[2,64])) -> (s32[], f32[2,64]) {
  %p = (s32[], f32[2,64]{1,0:S(7)}) parameter(0)
  %turn = s32[] get-tuple-element(%p), index=0
  %grads = f32[2,64]{1,0:S(7)} get-tuple-element(%p), index=1
  %into = f32[32,64]{1,0:S(7)} fusion(), kind=kLoop, calls=%fill
  %n = s64[32]{0:S(7)} fusion(%turn), kind=kLoop, calls=%fill
  %push = ((f32[2,64]{1,0:S(7)}, f32[32,64]{1,0:S(7)}, s64[32]{0:S(7)}, s64[32]{0:S(7)}, s64[32]{0:S(7)}, /*index=5*/s64[32]{0:S(7)}), f32[32,64]{1,0:S(7)}) ragged-all-to-all-start(%grads, %into, %n, %n, %n, /*index=5*/%n), channel_id=1, frontend_attributes={topoep_phase="push"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %weights = f32[4,64]{1,0} custom-call(%grads, %into), custom_call_target="__gpu$xla.gpu.triton", api_version=API_VERSION_TYPED_FFI, backend_config={grid_x = 2 : i32, ir = "name = \\22x\\22", name = "topoep_wgrad", num_stages = 3 : i32, num_warps = 8 : i32}
  %home = f32[32,64]{1,0:S(7)} ragged-all-to-all-done(%push), frontend_attributes={topoep_phase="push"}
  ROOT %out = (s32[], f32[2,64]{1,0:S(7)}) tuple(%turn, %grads)
}

%condition (p.1: (s32[], f32[2,64])) -> pred[] {
  ROOT %more = pred[] constant(true)
}

%fill (p.2: s32[]) -> s64[32] {
  ROOT %filled = s64[32]{0} constant({...})
}

ENTRY %main (x: bf16[1024,128], grads.1: f32[2,64]) -> bf16[256,128] {
  %x = bf16[1024,128]{1,0:S(7)} parameter(0), sharding={devices=[16,1]<=[16]}
  %grads.1 = f32[2,64]{1,0:S(7)} parameter(1)
  %eid = s32[8]{0} constant({...})
  %none = bf16[256,128]{1,0:S(7)} constant({...})
  %m = s64[32]{0:S(7)} constant({...})
  %start = ((bf16[1024,128]{1,0:S(7)}, bf16[256,128]{1,0:S(7)}, s64[32]{0:S(7)}, s64[32]{0:S(7)}, s64[32]{0:S(7)}, /*index=5*/s64[32]{0:S(7)}), bf16[256,128]{1,0:S(7)}) ragged-all-to-all-start(%x, %none, %m, %m, %m, /*index=5*/%m), channel_id=1, frontend_attributes={topoep_phase="dispatch_2"}, metadata={scheduling_name="start"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %gate_up = bf16[256,256]{1,0} custom-call(%none, %eid, %x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/shard_map/topoep_gmm/pallas_call"}, backend_config={name = "other", num_stages = 3 : i32}
  %done = bf16[256,128]{1,0:S(7)} ragged-all-to-all-done(%start), frontend_attributes={topoep_phase="dispatch_2"}
  %start.1 = ((bf16[1024,128]{1,0:S(7)}, bf16[256,128]{1,0:S(7)}, s64[32]{0:S(7)}, s64[32]{0:S(7)}, s64[32]{0:S(7)}, /*index=5*/s64[32]{0:S(7)}), bf16[256,128]{1,0:S(7)}) ragged-all-to-all-start(%x, %none, %m, %m, %m, /*index=5*/%m), backend_config={"collective_backend_config":{"is_sync":false}}
  %plain = bf16[256,256]{1,0} custom-call(%none, %eid, %x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/attention/pallas_call"}, backend_config={name = "other", num_stages = 3 : i32}
  %done.1 = bf16[256,128]{1,0:S(7)} ragged-all-to-all-done(%start.1), metadata={op_name="jit(step)/optimization_barrier"}
  %sync = bf16[256,128]{1,0:S(7)} ragged-all-to-all(%x, %none, %m, %m, %m, /*index=5*/%m), frontend_attributes={topoep_phase="grad_1"}, backend_config={"collective_backend_config":{"is_sync":true}}
  %gather = (s32[1,32]{1,0}, s32[16,32]{1,0}) all-gather-start(%eid), dimensions={0}, metadata={op_name="jit(step)/all_gather"}, backend_config={"collective_backend_config":{"is_sync":true}}
  %gathered = s32[16,32]{1,0} all-gather-done(%gather), metadata={op_name="jit(step)/all_gather"}
  %state = (s32[], f32[2,64]{1,0:S(7)}) tuple(%eid, %grads.1)
  %loop = (s32[], f32[2,64]{1,0:S(7)}) while(%state), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"18"}}
  ROOT %result = bf16[256,128]{1,0} copy(%done)
}
"""  # noqa: E501

# A scan over blocks whose branches hold the products, a library call, and an exchange in a wrapped computation.
FORMS = """
HloModule jit_step

%branch (a: bf16[128,64], b: bf16[64,32]) -> bf16[128,32] {
  %a = bf16[128,64]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  ROOT %dot = bf16[128,32]{1,0} dot(%a, %b), metadata={op_name="jit(step)/topoep_gmm/while/body/dot_general"}
}

%idle (c: bf16[128,64], d: bf16[64,32]) -> bf16[128,32] {
  ROOT %zeros = bf16[128,32]{1,0} constant({...})
}

%block (e: (s32[], bf16[128,64], bf16[64,32])) -> (s32[], bf16[128,64], bf16[64,32]) {
  %e = (s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0}) parameter(0)
  ROOT %chosen = bf16[128,32]{1,0} conditional(%e, %e, %e), branch_computations={%idle, %branch}
}

%condition (f: s32[]) -> pred[] {
  ROOT %more = pred[] constant(true)
}

%wrapped (g: f32[512]) -> f32[4096] {
  %g = f32[512]{0} parameter(0)
  ROOT %all = f32[4096]{0} all-to-all(%g)
}

ENTRY %main (x: f32[512]) -> f32[4096] {
  %x = f32[512]{0} parameter(0)
  %start = ((f32[512]{0}), f32[4096]{0}) async-start(%x), calls=%wrapped, metadata={op_name="jit(step)/all_to_all"}
  %update = ((f32[512]{0}), f32[4096]{0}) async-update(%start)
  %state = (s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0}) tuple(%x)
  %loop = (s32[], bf16[128,64]{1,0}, bf16[64,32]{1,0}) while(%state), condition=%condition, body=%block
  %library = bf16[128,64]{1,0} custom-call(%x), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/topoep_wgrad/dot_general"}
  %call = f32[4]{0} custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"
  ROOT %done = f32[4096]{0} async-done(%update)
}
"""  # noqa: E501


def program(text: str, options: dict[str, str], thunks: list[Thunk] | None = None) -> Program:
    return Program(Module(text), Memory(0, 0, 0, 0), thunks or [], [], options, 16)


def test_collectives_are_found_with_what_runs_under_them() -> None:
    found = collectives(program(ROWS, DEVICE_KERNEL))
    assert [(c.phase, c.kind, c.asynchronous, [g.name for g in c.gemms], c.overlapped) for c in found] == [
        ("dispatch_2", "ragged-all-to-all", True, ["gate_up"], True),
        ("bf16[1024,128] to bf16[256,128]", "ragged-all-to-all", True, [], False),
        ("grad_1", "ragged-all-to-all", False, [], False),
        ("all_gather", "all-gather", False, [], False),
        ("push", "ragged-all-to-all", True, ["weights"], True),
    ]
    dispatch, *_, gather, push = found
    assert (dispatch.num_bytes, dispatch.times) == (256 * 128 * 2, 1)
    assert gather.num_bytes == 16 * 32 * 4
    assert (push.num_bytes, push.times, push.computation) == (2 * 64 * 4, 18, "body")
    assert dispatch.gemms[0].operands[0] == Array("bf16", (256, 128), 7)


def test_an_older_compiler_names_no_memory_space_and_every_exchange_reads_on_the_host() -> None:
    plain = re.sub(r":S\(7\)", "", ROWS)
    found = collectives(program(plain, {}))
    assert [c.overlapped for c in found] == [True, False, False, False, True]
    for text, options in ((plain, {}), (plain, DEVICE_KERNEL), (ROWS, {})):
        reads = host_reads(program(text, options))
        assert num_host_reads(reads) == 3 + 18
        assert all("without the device's kernel" in read.reason for read in reads)


def test_nothing_is_read_where_the_device_runs_the_exchange() -> None:
    assert host_reads(program(ROWS, DEVICE_KERNEL)) == []


def test_gemms_count_in_any_form_and_at_any_depth() -> None:
    (collective,) = collectives(program(FORMS, {}))
    assert (collective.kind, collective.phase, collective.overlapped) == ("all-to-all", "all_to_all", True)
    assert [(gemm.kind, gemm.name) for gemm in collective.gemms] == [("gmm", "dot"), ("wgrad", "library")]


def test_the_host_steers_loops_branches_and_callbacks_outside_of_graphs() -> None:
    reads = {read.what: read.reason for read in host_reads(program(FORMS, {}))}
    assert reads.keys() == {"loop", "chosen", "call"}
    assert "number of turns" in reads["loop"]
    graph = [Thunk("kWhile", "loop", True), Thunk("kConditional", "chosen", True)]
    assert {read.what for read in host_reads(program(FORMS, {}, graph))} == {"call"}


def test_what_runs_on_another_stream_is_looked_into() -> None:
    beside = FORMS.replace("async-start(%x), calls=%wrapped", "call-start(%x), to_apply=%aside").replace(
        "%wrapped (g",
        "%aside (g: f32[512]) -> f32[512] {\n  %turning = f32[512]{0} while(%g), body=%wrapped\n}\n\n%wrapped (g",
    )
    assert "turning" in {read.what for read in host_reads(program(beside, {}))}


def test_an_unknown_step_of_the_executable_is_reported() -> None:
    (read,) = host_reads(program(ROWS, DEVICE_KERNEL, [Thunk("kHostSend", "", False)]))
    assert (read.what, read.reason) == ("HostSend", "not known to stay on the device")
