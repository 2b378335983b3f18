"""How good a plan could be: exact optima of small cases by MILP, best quotas for a given placement by LP.

Nothing here plans in training; it tells planners, tests and reports how far they are from the best. The programs follow
the objectives of `plan.cost`, with rows as real numbers: a bound holds for every plan in whole rows, and the plan that
attains it is rounded and scored by `plan.cost` itself. The solver is HiGHS, by SciPy, on one thread.
"""

from typing import Any, TypedDict

import numpy as np

from topoep_jax._needs import to_install
from topoep_jax.plan.cost import predict_ps
from topoep_jax.plan.problem import CostModel, Problem
from topoep_jax.plan.types import Plan, unpriced

_PS_PER_UNIT = 1e6
"""The solver counts microseconds: picoseconds would spread its numbers over ten decades."""


class Bound(TypedDict):
    """What `milp_optimum` and `lp_quota_bound` found.

    Attributes:
      objective_ps: predicted picoseconds of the plan below; None if the solver found none in time.
      bound_ps: picoseconds that no plan of those considered is predicted to beat.
      plan: that plan in NumPy, without time and status; or None.
      status: "optimal" (to the gap asked for) or "time limit".
    """

    objective_ps: int | None
    bound_ps: int
    plan: Plan | None
    status: str


def milp_optimum(
    omega: np.ndarray, problem: Problem, *, time_limit: float | None = None, mip_rel_gap: float = 1e-3
) -> Bound:
    """The best of all plans that keep laws 1-5, for small cases: seconds at R = 6, E = 12, N = 1.

    Args:
      omega: int [R, E], demand.
      problem: the question; `cap_rows` does not constrain the answer.
      time_limit: seconds; None for as long as it takes.
      mip_rel_gap: "optimal" means that plan and bound lie this close together.

    Raises:
      ImportError: SciPy is missing.
      ValueError: the cost has terms that are not linear in rows and replicas.
    """
    omega = np.asarray(omega, np.int64)
    program = _Program(omega, problem, _legal_replicas(omega, problem))
    result = program.solve(placement_is_free=True, time_limit=time_limit, mip_rel_gap=mip_rel_gap)
    # Where no replica is legal nothing is integral, and the solver speaks of no dual bound.
    return program.bound(result, result.mip_dual_bound if program.y.size else result.fun)


def lp_quota_bound(slot_expert: np.ndarray, omega: np.ndarray, problem: Problem) -> Bound:
    """The best quotas for the placement `slot_expert` (int [R, N], -1 = empty), every replica of which is pulled.

    A tenth of a second at R = 32, a few seconds at R = 128. `objective_ps` may lie below `bound_ps` where the best
    quotas leave a replica idle: it is not pulled then. Errors as in `milp_optimum`.
    """
    omega = np.asarray(omega, np.int64)
    program = _Program(omega, problem, _placed_replicas(slot_expert, omega))
    result = program.solve(placement_is_free=False)
    return program.bound(result, result.fun)


def _legal_replicas(omega: np.ndarray, problem: Problem) -> np.ndarray:
    """bool [R, E]: where a replica obeys C4 and is not beside its own main."""
    cost, domain, main = problem.cost, np.array(problem.topology.domain_of_rank), problem.main_rank()
    demand = np.zeros((problem.topology.num_domains, omega.shape[1]), np.int64)
    np.add.at(demand, domain, omega)
    saves = 2 * demand[domain] * cost.token_bytes > cost.expert_bytes
    near = domain[:, None] == domain[main]
    return (saves | near) & (main != np.arange(omega.shape[0])[:, None])


def _placed_replicas(slot_expert: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """bool [R, E]."""
    placed = np.zeros(np.shape(omega), bool)
    rank, slot = np.nonzero(np.asarray(slot_expert) >= 0)
    placed[rank, np.asarray(slot_expert)[rank, slot]] = True
    return placed


class _Rows:
    """The constraints of a linear program, row by row."""

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns
        self.matrices: list[Any] = []
        self.lows: list[np.ndarray] = []
        self.highs: list[np.ndarray] = []

    def require(self, low: np.ndarray, high: np.ndarray, *entries: tuple[Any, np.ndarray, np.ndarray]) -> None:
        """low <= A x <= high, where A is the sum of entries (coefficient, row, column)."""
        _, sparse = _scipy()
        value = np.concatenate([np.broadcast_to(np.asarray(v, float), row.shape) for v, row, _ in entries])
        row = np.concatenate([row for _, row, _ in entries])
        column = np.concatenate([column for _, _, column in entries])
        self.matrices.append(sparse.csr_array((value, (row, column)), shape=(low.size, self.num_columns)))
        self.lows.append(low)
        self.highs.append(high)

    def require_at_most(self, high: np.ndarray, *entries: tuple[Any, np.ndarray, np.ndarray]) -> None:
        """A x <= high."""
        self.require(np.full(high.size, -np.inf), high, *entries)

    def minimize(
        self, cost: np.ndarray, lower: np.ndarray, upper: np.ndarray, integrality: np.ndarray, options: dict[str, Any]
    ) -> Any:
        """SciPy's result for the cheapest lower <= x <= upper."""
        optimize, sparse = _scipy()
        low, high = np.concatenate(self.lows), np.concatenate(self.highs)
        return optimize.milp(
            cost,
            integrality=integrality,
            bounds=optimize.Bounds(lower, upper),
            constraints=optimize.LinearConstraint(sparse.vstack(self.matrices), low, high),
            options=options,
        )


class _Program:
    """Columns: rows of each (source, instance) that may have any, each replica (0 or 1), then maxima over ranks."""

    MAXIMA = ("load", "inter_rows", "intra_rows", "inter_pulls", "intra_pulls")

    def __init__(self, omega: np.ndarray, problem: Problem, replicas: np.ndarray) -> None:
        _check_is_linear(problem.cost)
        problem.cost.check_ranks(problem.topology.num_ranks)
        self.omega, self.problem = omega, problem
        self.replica_rank, self.replica_expert = np.nonzero(replicas)
        instance_rank = np.concatenate([problem.main_rank(), self.replica_rank])
        instance_expert = np.concatenate([np.arange(omega.shape[1]), self.replica_expert])
        self.source, self.instance = np.nonzero(omega[:, instance_expert])
        self.rank, self.expert = instance_rank[self.instance], instance_expert[self.instance]
        self.most = omega[self.source, self.expert]
        self.x = np.arange(self.source.size)
        self.y = self.x.size + np.arange(self.replica_rank.size)
        self.num_columns = self.x.size + self.y.size + len(self.MAXIMA)

    def solve(self, *, placement_is_free: bool, time_limit: float | None = None, mip_rel_gap: float = 0.0) -> Any:
        """SciPy's result; with a free placement the replicas are chosen too, else all exist."""
        rows, (num_ranks, num_experts) = _Rows(self.num_columns), self.omega.shape
        demand = self.omega.ravel().astype(float)
        rows.require(demand, demand, (1, self.source * num_experts + self.expert, self.x))
        if placement_is_free:
            away = np.flatnonzero(self.instance >= num_experts)
            at = np.arange(away.size)
            exists = self.y[self.instance[away] - num_experts]
            rows.require_at_most(np.zeros(away.size), (1, at, away), (-self.most[away], at, exists))
            slots = np.full(num_ranks, float(self.problem.num_slots))
            rows.require_at_most(slots, (1, self.replica_rank, self.y))
        cost = self._objective(rows)
        lower, upper = np.zeros(self.num_columns), np.full(self.num_columns, np.inf)
        upper[self.x], upper[self.y] = self.most, 1
        integrality = np.zeros(self.num_columns)
        if placement_is_free:
            integrality[self.y] = 1
        else:
            lower[self.y] = 1
        options = {"mip_rel_gap": mip_rel_gap} | ({} if time_limit is None else {"time_limit": time_limit})
        return rows.minimize(cost / _PS_PER_UNIT, lower, upper, integrality, options)

    def _objective(self, rows: _Rows) -> np.ndarray:
        """Picoseconds of each column; adds to `rows` what makes the maxima maxima."""
        num_ranks = self.omega.shape[0]
        ps = np.zeros(self.num_columns)

        def busiest(name: str, columns: np.ndarray, rank: np.ndarray, coefficient: Any = 1.0) -> int:
            top = self.num_columns - len(self.MAXIMA) + self.MAXIMA.index(name)
            everywhere = np.arange(num_ranks)
            limit = (-1, everywhere, np.full(num_ranks, top))
            rows.require_at_most(np.zeros(num_ranks), (coefficient, rank, columns), limit)
            return top

        cost, crosses = self.problem.cost, self.problem.topology.crosses_domains()
        slowness = 1000 / np.array(cost.rank_speed or (1000,) * num_ranks)
        ps[busiest("load", self.x, self.rank, slowness[self.rank])] = cost.row_ps
        inter, intra = cost.inter_fs_per_byte / 1000, cost.intra_fs_per_byte / 1000
        owner = self.problem.main_rank()[self.replica_expert]
        far_x, far_y = crosses[self.source, self.rank], crosses[owner, self.replica_rank]
        near_x = ~far_x & (self.source != self.rank)
        row, pull = 2 * cost.token_bytes, cost.expert_bytes
        for name, price, columns, start, end in (
            ("inter_rows", row * inter, self.x[far_x], self.source[far_x], self.rank[far_x]),
            ("intra_rows", row * intra, self.x[near_x], self.source[near_x], self.rank[near_x]),
            ("inter_pulls", pull * inter, self.y[far_y], owner[far_y], self.replica_rank[far_y]),
            ("intra_pulls", pull * intra, self.y[~far_y], owner[~far_y], self.replica_rank[~far_y]),
        ):
            if self.problem.objective == "bottleneck":
                ps[busiest(name, columns, start)] = price
                busiest(name, columns, end)
            else:
                ps[columns] += price
        return ps

    def bound(self, result: Any, proven: float | None) -> Bound:
        """What a result says: its plan in whole rows, and what it proves."""
        bound_ps = 0 if proven is None else max(int(proven * _PS_PER_UNIT), 0)
        status = "optimal" if result.status == 0 else "time limit"
        if result.x is None:
            return Bound(objective_ps=None, bound_ps=bound_ps, plan=None, status=status)
        plan = self._rounded(result.x)
        return Bound(objective_ps=predict_ps(plan, self.problem), bound_ps=bound_ps, plan=plan, status=status)

    def _rounded(self, solution: np.ndarray) -> Plan:
        """The plan of a solution: rows are cut where their running sum over the instances of an expert passes a half.

        Crumbs on replicas that do not exist, within the solver's tolerance, go to the other instances.
        """
        num_ranks, num_experts = self.omega.shape
        exists = np.concatenate([np.ones(num_experts, bool), solution[self.y] > 0.5])
        rows = np.zeros((num_ranks, num_experts, num_ranks))
        rows[self.source, self.expert, self.rank] = solution[self.x] * exists[self.instance]
        passed = rows.cumsum(axis=2)
        share = passed / np.maximum(passed[:, :, -1:], 1e-9)
        cuts = np.rint(share * self.omega[:, :, None]).astype(np.int64)
        whole = np.diff(cuts, axis=2, prepend=0)
        mains, slots = self.problem.mains_per_rank, self.problem.num_slots
        slot_expert = np.full((num_ranks, slots), -1, np.int64)
        quota = np.zeros((num_ranks, num_ranks, mains + slots), np.int64)
        for rank in range(num_ranks):
            own = np.arange(rank * mains, (rank + 1) * mains)
            away = np.flatnonzero(whole[:, :, rank].sum(axis=0))
            away = away[away // mains != rank]
            slot_expert[rank, : away.size] = away
            quota[:, rank, : mains + away.size] = whole[:, np.concatenate([own, away]), rank]
        return unpriced(slot_expert, quota)


def _check_is_linear(cost: CostModel) -> None:
    plain = {"instance_ps": 0, "tile_rows": 0, "pulls": "direct"}
    for name, value in plain.items():
        if getattr(cost, name) != value:
            raise ValueError(
                f"{name}={getattr(cost, name)!r}: bounds are known for {name}={value!r} only, as a linear program has"
                " no such term"
            )


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise ImportError(f"bounds need SciPy's linear programs: {to_install('scipy')}") from error
    return optimize, sparse
