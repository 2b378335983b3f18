"""The forecast: what kernels move, what the clock waits for, and that planted changes move it the right way.

They look at programs of a few lines, and at one small layer where the compilers are.
"""

import dataclasses
import json
import re

import pytest

from tests.support.aot import Compiler
from tests.support.forecast_table import REPORT, constants, markdown
from tests.support.quality import RESULTS
from topoep_jax import transport
from topoep_jax.aot import TARGETS, LayerProgram, Program, Report, compile_layer
from topoep_jax.aot.compiler import Memory
from topoep_jax.aot.dump import Thunk
from topoep_jax.aot.forecast import SKEWS, Forecast, planned_work
from topoep_jax.aot.hlo import Array, Module
from topoep_jax.aot.prices import US, Prices
from topoep_jax.aot.schedule import Collective
from topoep_jax.aot.steps import kernels, read_steps
from topoep_jax.config import LayerConfig
from topoep_jax.plan.hardware import Hardware
from topoep_jax.rates import Rates, read
from topoep_jax.simulate import LayerRates, PipelinedLayer
from topoep_jax.simulate import program as simulation
from topoep_jax.topology import Topology

MIB = 2**20
H800 = TARGETS["h800"]
DOCS = RESULTS.parent.parent / "docs"

# The rows of a chunk fill a GPU, so that tiles and rows count, and the compilers take seconds.
CONFIG = LayerConfig(
    1024, 512, 16, 4, Topology.uniform(2, 4), block_rows=128, chunks=2, overflow="flag", hardware=Hardware.h800()
)

# A fill, rows gathered from a table that is smaller than they, a strip taken from and written into a large array, a
# product that XLA tiles, a collective over it, and a loop of three turns with a kernel in each.
KERNELS = """
HloModule jit_step

%filling () -> f32[1024,1024] {
  %zero = f32[] constant(0)
  ROOT %zeros = f32[1024,1024]{1,0} broadcast(%zero), dimensions={}
}

%gathering (table: bf16[1024,1024], at: s32[8192]) -> bf16[8192,1024] {
  %table = bf16[1024,1024]{1,0} parameter(0)
  %at = s32[8192]{0} parameter(1)
  ROOT %rows = bf16[8192,1024]{1,0} gather(%table, %at), offset_dims={1}
}

%taking (all: f32[64,1048576], at.1: s32[]) -> f32[1,1048576] {
  %all = f32[64,1048576]{1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  ROOT %strip = f32[1,1048576]{1,0} dynamic-slice(%all, %at.1, %at.1), dynamic_slice_sizes={1,1048576}
}

%writing (all.1: f32[64,1048576], strip.1: f32[1,1048576], at.2: s32[]) -> f32[64,1048576] {
  %all.1 = f32[64,1048576]{1,0} parameter(0)
  %strip.1 = f32[1,1048576]{1,0} parameter(1)
  %at.2 = s32[] parameter(2)
  ROOT %written = f32[64,1048576]{1,0} dynamic-update-slice(%all.1, %strip.1, %at.2, %at.2)
}

%multiplying (a: bf16[4096,2048], b: bf16[2048,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,2048]{1,0} parameter(0)
  %b = bf16[2048,4096]{1,0} parameter(1)
  ROOT %dot = bf16[4096,4096]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%adding (c: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  ROOT %sum = s32[] add(%c, %c)
}

%turn (d: (s32[])) -> (s32[]) {
  %d = (s32[]) parameter(0)
  %e = s32[] get-tuple-element(%d), index=0
  %more = s32[] fusion(%e), kind=kLoop, calls=%adding
  ROOT %out = (s32[]) tuple(%more)
}

%condition (f: (s32[])) -> pred[] {
  ROOT %again = pred[] constant(true)
}

ENTRY %main (x: bf16[1024,1024], y: s32[8192], z: f32[64,1048576], i: s32[], u: bf16[4096,2048], v: bf16[2048,4096]) -> bf16[4096,4096] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %y = s32[8192]{0} parameter(1)
  %z = f32[64,1048576]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %u = bf16[4096,2048]{1,0} parameter(4)
  %v = bf16[2048,4096]{1,0} parameter(5)
  %fill = f32[1024,1024]{1,0} fusion(), kind=kLoop, calls=%filling
  %rows.1 = bf16[8192,1024]{1,0} fusion(%x, %y), kind=kLoop, calls=%gathering
  %strip.2 = f32[1,1048576]{1,0} fusion(%z, %i), kind=kLoop, calls=%taking
  %written.1 = f32[64,1048576]{1,0} fusion(%z, %strip.2, %i), kind=kLoop, calls=%writing
  %start = (bf16[8192,1024]{1,0}, bf16[65536,1024]{1,0}) all-gather-start(%rows.1), dimensions={0}
  %product = bf16[4096,4096]{1,0} fusion(%u, %v), kind=kCustom, calls=%multiplying
  %done = bf16[65536,1024]{1,0} all-gather-done(%start)
  %state = (s32[]) tuple(%i)
  %loop = (s32[]) while(%state), condition=%condition, body=%turn, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %result = bf16[4096,4096]{1,0} copy(%product), metadata={op_name="jit(step)/transpose(jvp())/copy"}
}
"""  # noqa: E501


def read_program(text: str, graphs: tuple[str, ...] = ()) -> Program:
    thunks = [Thunk("kKernel", name, True) for name in graphs]
    return Program(Module(text), Memory(0, 0, 0, 0), thunks, [], {}, 8)


def forecast(program: Program, rates: Rates | None = None) -> Forecast:
    prices = Prices(rates or Rates(), Hardware.h800(), H800.memory_bandwidth, 8, 2, None)
    return Forecast(read_steps(program), prices)


def test_kernels_are_counted_with_what_they_move() -> None:
    found = {step.name: (step.kernel, times) for step, times in kernels(read_steps(read_program(KERNELS)))}
    assert {name: (kernel.category, kernel.num_bytes, times) for name, (kernel, times) in found.items()} == {
        "fill": ("fills", 4 * MIB, 1),
        "rows.1": ("gathers and sums", 2 * MIB + 4 * 8192 + 16 * MIB, 1),
        "strip.2": ("gathers and sums", 8 * MIB + 4, 1),
        "written.1": ("gathers and sums", 8 * MIB + 4, 1),
        "product": ("other products", (16 + 16 + 32) * MIB, 1),
        "more": ("layout and plan", 8, 3),
        "result": ("other kernels", 64 * MIB, 1),
    }
    assert found["product"][0].terms == 2048


def test_the_clock_waits_for_what_nothing_hides() -> None:
    found = forecast(read_program(KERNELS))
    (wait,) = (span for span in found.walk.spans if span.what == "wait")
    (exchange,) = (span for span in found.walk.spans if span.what == "exchange")
    product = next(span for span in found.walk.spans if span.label == "product")
    assert exchange.begin == product.begin < product.end == wait.begin < wait.end == exchange.end
    assert sum(found.categories.values()) == found.total_ps
    assert found.categories["waits for exchanges"] == sum(found.waits.values()) == wait.end - wait.begin
    assert found.forward_ps == found.total_ps - found.categories["other kernels"]
    # 128 MiB over a NIC at 50 GB/s, less an eighth that stays; and a product of 69 GFLOP.
    assert exchange.end - exchange.begin == pytest.approx((20 + 7 * 16 * MIB / 50e3) * US, rel=1e-6)
    assert found.prices.balanced(next(s.kernel for s in found.steps if s.name == "product")) == round(2**36 / 600)
    assert found.bound_ps == exchange.end - exchange.begin - 20 * US
    assert found.range_ps[0] < found.total_ps < found.range_ps[1]


def test_what_is_in_a_graph_has_a_launch_of_its_own_price() -> None:
    rates = Rates(kernel_us=1000.0, graph_kernel_us=1.0)
    alone, together = (forecast(read_program(KERNELS, graphs), rates).total_ps for graphs in ((), ("more",)))
    assert alone - together == 3 * 999 * US


def test_constants_are_replaced_by_what_was_measured(tmp_path) -> None:
    file = tmp_path / "rates.json"
    file.write_text('{"memory_share": 0.42, "plan_us": 100}')
    rates = Rates().measured(read(file))
    assert (rates.memory_share, rates.plan_us, rates.kernel_us) == (0.42, 100, Rates().kernel_us)
    assert (rates.end(quick=True).plan_us, rates.end(quick=False).kernel_us) == (100, 5)
    for text, reason in (
        ('{"plan": 1}', r"\['plan'\] are no constants"),
        ('{"plan_us": "x"}', "plan_us='x' must be a positive number"),
        ('{"plan_us": 0}', "plan_us=0 must be a positive number"),
        ("[]", "must be a JSON object"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=reason):
            read(file)


def test_the_simulator_has_the_same_constants() -> None:
    layer = LayerRates(Hardware.h800())
    assert (layer.launch_us, layer.plan_us) == (Rates().collective_us, Rates().plan_us)
    for field in dataclasses.fields(Rates):
        about = field.metadata
        assert min(about["quickest"], about["slowest"]) <= field.default <= max(about["quickest"], about["slowest"])
        assert about["source"]
        assert about["meaning"]


@pytest.mark.parametrize("phase", ["dispatch_1", "combine_2", "pull"])
def test_the_simulator_says_the_same_of_an_exchange(phase: str) -> None:
    work = planned_work(CONFIG, 4096, -2.0)
    moved, width = {
        "dispatch_1": (work.rows[0] * CONFIG.hidden * 2, CONFIG.hidden),
        "combine_2": (work.rows[1].T * CONFIG.hidden * 2, CONFIG.hidden),
        "pull": (work.pulled, CONFIG.expert_size),
    }[phase]
    sent = Array("bf16", (CONFIG.num_mains, width), 0)
    exchange = Collective("c", "ragged-all-to-all", phase, "main", 0, (sent,), (), True, (), 1, 1)
    step = simulation.Program(CONFIG.num_ranks)
    rates = LayerRates(CONFIG.hardware)
    step.exchange(phase, phase, moved, rates.launch_us * US)
    _, end = simulation.run(step, PipelinedLayer(rates).links(work))
    prices = Prices(Rates(), CONFIG.hardware, H800.memory_bandwidth, CONFIG.num_ranks, 2, work)
    assert moved.any()
    if phase == "pull":  # few ranks wait for each other there, and only in the simulator
        assert rates.launch_us * US < end.max() <= prices.collective(exchange)
    else:
        assert end.max() == prices.collective(exchange)


def test_the_docs_have_the_tables_of_the_code_and_of_the_last_report() -> None:
    assert f"<!-- constants -->\n{constants()}<!-- /constants -->" in (DOCS / "forecast.md").read_text()
    table = markdown(json.loads((RESULTS / REPORT).read_text()))
    assert f"<!-- forecast -->\n{table}<!-- /forecast -->" in (DOCS / "layer.md").read_text()


@pytest.fixture(scope="module")
def layer(aot: Compiler) -> LayerProgram:
    return compile_layer(CONFIG, aot.mesh(2, 4), 4096)


def report(layer: LayerProgram, text: str = "", rates: Rates | None = None) -> Report:
    """Of the layer, or of another text of its program."""
    program = dataclasses.replace(layer.program, module=Module(text)) if text else layer.program
    return Report.of(program, H800, 2, layer, rates=rates)


def change(layer: LayerProgram, names: list[str], pattern: str, into: str) -> str:
    """The program's text with a pattern replaced in the lines of these instructions."""
    text = layer.program.module.text
    for name in names:
        text, count = re.subn(rf"^(\s+(?:ROOT )?%{re.escape(name)} = .*?){pattern}", rf"\1{into}", text, flags=re.M)
        assert count == 1, (name, count)
    return text


def total(found: Report, skew: float = -4.0) -> int:
    return found.forecasts[skew].total_ps


def of_category(layer: LayerProgram, category: str) -> list[str]:
    steps = kernels(read_steps(layer.program))
    return list(dict.fromkeys(s.name for s, _ in steps if s.kernel and s.kernel.category == category))


def test_planted_changes_move_the_forecast(layer: LayerProgram) -> None:
    now = report(layer)
    fills = of_category(layer, "fills")
    without_fills = report(layer, change(layer, fills, r" fusion\(", " bitcast("))
    assert "fills" not in without_fills.forecast.categories
    assert total(without_fills) < total(now)

    products = of_category(layer, "products of rows")
    grids = change(layer, products, r"grid_x = (\d+)", r"grid_x = \g<2>0")
    smaller_tiles = report(layer, grids)
    assert smaller_tiles.forecast.categories["products of rows"] > now.forecast.categories["products of rows"]
    assert total(smaller_tiles) > total(now)

    launched = change(layer, fills[:1], r"$", "\n  %one_more = s32[] fusion(), kind=kLoop, calls=%none")
    one_more = report(layer, launched + "\n%none () -> s32[] {\n  ROOT %one = s32[] constant(1)\n}\n")
    assert one_more.num_kernels == now.num_kernels + 1
    assert 0 < total(one_more) - total(now) <= Rates().kernel_us * US

    (home,) = (c for c in now.collectives if c.phase == "home_2")
    bare = report(layer, ended_at_once(layer.program.module.text, home.name))
    assert bare.forecast.waits["home_2"] > now.forecast.waits.get("home_2", 0)
    assert total(bare) > total(now)

    slow = report(layer, rates=Rates(plan_us=2 * Rates().plan_us))
    assert slow.forecast.waits["plan"] - now.forecast.waits["plan"] == Rates().plan_us * US
    assert total(slow) - total(now) == Rates().plan_us * US


def ended_at_once(text: str, start: str) -> str:
    """The program's text with a collective waited for right where it starts."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(f"%{start} = "))
    end = next(i for i, line in enumerate(lines) if f"-done(%{start})" in line)
    lines.insert(begin + 1, lines.pop(end))
    return "\n".join(lines)


def test_a_forecast_adds_up_and_repeats(layer: LayerProgram) -> None:
    assert layer.program.layers == ((CONFIG, 4096),)
    found = report(layer)
    assert json.dumps(found.json()) == json.dumps(report(layer).json())
    for skew in SKEWS:
        here = found.forecasts[skew]
        assert sum(here.categories.values()) == here.total_ps
        assert here.bound_ps < here.total_ps
        assert here.range_ps[0] < here.total_ps < here.range_ps[1]
        assert here.losses == sorted(here.losses, key=lambda loss: -loss.us)
    told = found.json()
    assert told["forecast_ms"].keys() == told["bound_ms"].keys() == {"0", "-1", "-2", "-4"}
    assert isinstance(told["kernels"], int)
    assert told["kernels"] == sum(times for _, times in kernels(found.forecast.steps))


def test_calls_on_the_stream_of_the_products_are_priced(aot: Compiler) -> None:
    config = dataclasses.replace(CONFIG, transport="device")
    mesh = aot.mesh(2, 4)
    transport.init(mesh, "ep", configs=config, compile_only=True)
    try:
        found = Report.of(compile_layer(config, mesh, 1024).program, H800, 2)
    finally:
        transport.shutdown("ep")
    waits = found.forecast.waits
    assert {"pull", "repull", "push", "plan"} <= waits.keys()
    assert min(waits["pull"], waits["push"]) > Rates().call_us * US
