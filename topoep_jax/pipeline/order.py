"""What a GPU's scheduler is told: which collective runs under which product, one collective at a time.

XLA schedules a program as it likes within its data dependencies. `stage` adds dependencies: whatever is computed from
its results comes after all of its operands. What passes through it is what a collective and the products beside it
read, and by that both follow the collective and the products before: those of one stage are free to overlap, those of
two stages are not. Where the data alone orders two stages there is no call. One collective at a time, because more of
them share the links and gain nothing, and because gradients must not depend on timing.

A barrier leaves no trace in the program, so the resulting order is not promised but tested, on programs for GPUs that
are compiled ahead of time (tests/aot/pipeline_test.py), as is that each stage is needed (tools/order_mutants.py).
"""

import contextlib
from collections.abc import Iterator
from typing import TypeVarTuple

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from topoep_jax import transport

Values = TypeVarTuple("Values")


def stage(name: str, *values: *Values) -> tuple[*Values]:
    """Returns `values` (pytrees) as they were, but none before all.

    Args:
      name: of the collective that the stage holds.
      *values: all that the stage reads.
    """
    del name  # The mutants leave out stages by name.
    return lax.optimization_barrier(values)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Names the collective inside: as a scope, and in a form that lasts where XLA drops scopes (docs/layer.md)."""
    with jax.named_scope(f"topoep_{name}"), set_xla_metadata(topoep_phase=name), transport.named(name):
        yield
