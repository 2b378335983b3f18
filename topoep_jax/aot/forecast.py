"""What a GPU's clock would say of a compiled program, from the plan of synthetic routing and the constants of rates.py.

Nothing here is measured, and docs/forecast.md says what is left out.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

from topoep_jax.aot.prices import US, Prices
from topoep_jax.aot.schedule import Collective
from topoep_jax.aot.steps import Step
from topoep_jax.aot.walk import Walk
from topoep_jax.config import LayerConfig
from topoep_jax.moe import solve_layer_plan
from topoep_jax.shapes import Shape
from topoep_jax.simulate.work import Work, work_of_planner
from topoep_jax.synthetic import biased_demand

SKEWS = (0.0, -1.0, -2.0, -4.0)
"""Of the demand that is planned for: from uniform routing to the worst that is studied."""
PRODUCTS = ("products of rows", "weight gradients of mains", "weight gradients of slots")
PLAN = "plan"
MS = 1_000_000_000
"""Picoseconds."""


def planned_work(config: LayerConfig, tokens: int, skew: float, seed: int = 0) -> Work:
    """Plans one microbatch of synthetic demand; rows beyond the first pass are left out."""
    workload = Shape(config.hidden, config.ffn, config.num_experts, config.top_k, config.topology, tokens=tokens)
    omega = biased_demand(workload, [skew], seed)[skew].astype(np.int32)
    assignments = tokens * config.top_k
    plan = solve_layer_plan(config, omega, assignments)
    return work_of_planner(config, config.planner, plan, assignments)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What one thing costs.

    Attributes:
      what: the thing.
      best: the best that it could be: "at once", "none", "hidden", "even and sustained" (of products).
      us: microseconds that the whole would then be shorter.
      percent: of the whole.
    """

    what: str
    best: str
    us: float
    percent: float


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One run of a program, on a clock.

    Attributes:
      steps: of the program.
      prices: of its steps.
    """

    steps: tuple[Step, ...]
    prices: Prices

    @functools.cached_property
    def walk(self) -> Walk:
        """When what happens."""
        return Walk.of(self.steps, self.prices)

    @property
    def total_ps(self) -> int:
        """Of the program."""
        return self.walk.now

    @property
    def forward_ps(self) -> int:
        """Until the backward pass begins; all of it where there is none."""
        return self.total_ps if self.walk.forward_ps is None else self.walk.forward_ps

    @functools.cached_property
    def categories(self) -> dict[str, int]:
        """Picoseconds of kernels by category, and those in which the clock waits; they add up to the total."""
        found: collections.Counter[str] = collections.Counter()
        for span in self.walk.spans:
            if span.what == "kernel":
                found[span.category] += span.total_ps
            elif span.what == "wait":
                found["waits for the planner" if span.category == PLAN else "waits for exchanges"] += span.total_ps
        return dict(found.most_common())

    @functools.cached_property
    def waits(self) -> dict[str, int]:
        """Picoseconds in which the clock waits, by phase."""
        found: collections.Counter[str] = collections.Counter()
        for span in self.walk.spans:
            if span.what == "wait":
                found[span.category] += span.total_ps
        return dict(found.most_common())

    @functools.cached_property
    def bound_ps(self) -> int:
        """What no order of the same work beats.

        In each pass, the products on evenly spread rows at the sustained rate, and the exchanges' bytes on the links of
        the busiest rank as far as they take longer: all else could run beside them.
        """
        products, wires = [0, 0], [0, 0]
        for step, times in _leaves(self.steps):
            if step.kernel is not None and step.kernel.category in (*PRODUCTS, "other products"):
                products[step.backward] += times * self.prices.balanced(step.kernel)
            elif step.collective is not None:
                wires[step.backward] += times * self.prices.wire(step.collective)
            elif step.what == "call":
                wires[step.backward] += times * self.prices.call_wire(step)
        return sum(max(product, wire) for product, wire in zip(products, wires, strict=True))

    @functools.cached_property
    def losses(self) -> list[Loss]:
        """What costs most, the most first: how much shorter the program would be if one thing were as good as can be.

        They do not add up: what one of them hides another shows.
        """
        losses = []
        for what, best, free in _FREE:
            ps = self.total_ps - Walk.of(self.steps, _Without(self.prices, free)).now
            losses.append(Loss(what, best, ps / US, 100 * ps / max(self.total_ps, 1)))
        return sorted((loss for loss in losses if loss.us > 0), key=lambda loss: -loss.us)

    @functools.cached_property
    def range_ps(self) -> tuple[int, int]:
        """The total with every constant at the end of its range: the quick one, and the slow one."""
        ends = (dataclasses.replace(self.prices, rates=self.prices.rates.end(quick)) for quick in (True, False))
        quick, slow = (Walk.of(self.steps, prices).now for prices in ends)
        return quick, slow


Free = Callable[[Prices, Step | Collective], int | None]
"""What something would take that is as good as can be; None for what stays as it is."""


@dataclasses.dataclass(frozen=True)
class _Without:
    prices: Prices
    free: Free

    def step(self, step: Step) -> int:
        """As `Prices.step`."""
        took = self.free(self.prices, step)
        return self.prices.step(step) if took is None else took

    def collective(self, collective: Collective) -> int:
        """As `Prices.collective`."""
        took = self.free(self.prices, collective)
        return self.prices.collective(collective) if took is None else took


def _kernels(*categories: str) -> Free:
    def free(_: Prices, what: Step | Collective) -> int | None:
        return 0 if isinstance(what, Step) and what.kernel and what.kernel.category in categories else None

    return free


def _best(*categories: str) -> Free:
    def free(prices: Prices, what: Step | Collective) -> int | None:
        if isinstance(what, Step) and what.kernel and what.kernel.category in categories:
            return min(prices.balanced(what.kernel), prices.step(what))
        return None

    return free


def _phases(*phases: str) -> Free:
    def free(_: Prices, what: Step | Collective) -> int | None:
        known = isinstance(what, Collective) or what.what == "call"
        return 0 if known and what.phase.startswith(phases) else None

    return free


def _others(_: Prices, what: Step | Collective) -> int | None:
    return 0 if isinstance(what, Collective) and not what.phase.startswith(_PHASES) else None


def _fixed(prices: Prices, what: Step | Collective) -> int | None:
    return prices.wire(what) if isinstance(what, Collective) else None


_PHASES = ("dispatch", "again", "grad", "combine", "home", "pull", "repull", "push")
_EVEN = "even and sustained"
_FREE: tuple[tuple[str, str, Free], ...] = (
    ("rows to experts", "at once", _phases("dispatch", "again", "grad")),
    ("rows home", "at once", _phases("combine", "home")),
    ("pulls", "at once", _phases("pull", "repull")),
    ("pushes", "at once", _phases("push")),
    ("other exchanges", "at once", _others),
    ("fixed time of collectives", "none", _fixed),
    ("planner", "hidden", _phases(PLAN)),
    ("products of rows", _EVEN, _best("products of rows")),
    ("weight gradients", _EVEN, _best(*PRODUCTS[1:])),
    ("other products", _EVEN, _best("other products")),
    *(
        (category, "none", _kernels(category))
        for category in (
            "fills",
            "gathers and sums",
            "activations",
            "pack, accumulate, store",
            "counting in loops",
            "layout and plan",
            "router and sorts",
            "other kernels",
        )
    ),
)


def _leaves(steps: tuple[Step, ...], times: int = 1) -> Iterator[tuple[Step, int]]:
    for step in steps:
        if step.inner:
            for inner in step.inner:
                yield from _leaves(inner, times * step.turns)
        else:
            yield step, times
