"""What every plan must obey, one function per law; each returns None or raises a `LawError` that names what is wrong.

The laws read a plan and the demand it answers, never the planner: they judge native code, baselines and replayed plans
alike. `EXEMPT` is the one table of planners that are allowed to break a law, with the reason.
"""

from collections.abc import Callable

import numpy as np

from topoep_jax.plan import reference
from topoep_jax.plan.cost import picoseconds, predict_ps
from topoep_jax.plan.finish import aligned_rows, is_bad, meets_cap, refuse
from topoep_jax.plan.problem import Problem
from topoep_jax.plan.types import Plan, Status

EXEMPT: dict[str, dict[str, str]] = {
    "none": {},
    "topoep_paper": {"never_worse": "the paper fills slots to save traffic without looking at load, and may lose"},
    "topoep": {},
    "eplb": {
        "slots": "experts move: a rank holds any E/R + N of them, and mains may be missing; evaluation only",
        "benefit": "copies are placed by load; domains are unknown to it",
        "never_worse": "balances load and ignores traffic and pulls",
    },
    "eplb_fixed_main": {"never_worse": "fills every slot by load, whatever the pulls cost"},
    "fastermoe": {
        "benefit": "a shadow goes to every rank that has rows for it, regardless of its domain's demand",
        "never_worse": "prices one expert at a time on one link, not the busiest rank",
    },
    "flexmoe": {
        "benefit": "weighs pulls only in the time of the slowest rank",
        "never_worse": "lowers the largest sum over one rank, not the sum of the largest terms",
    },
    "ultraep": {"never_worse": "balances load and ignores pulls"},
    "moonep": {
        "slots": "exact balance needs up to E/R slots per rank, whatever N is; its draft is scored, not finished",
        "benefit": "balances load without looking at traffic",
        "never_worse": "pays any number of pulls for exact balance",
    },
    "llep": {
        "benefit": "spills to the least loaded rank, in any domain",
        "never_worse": "balances load and ignores traffic and pulls",
    },
    "lplb": {
        "benefit": "its mirrors are a fixed graph across domains",
        "never_worse": "minimises the largest row count only",
    },
    "echo": {"benefit": "fills cold ranks wherever they are", "never_worse": "balances row counts only"},
    "taot": {"benefit": "topology is a preference, not a condition", "never_worse": "balances row counts first"},
    "placemoe": {
        "benefit": "fills all slots; does not price pulls",
        "never_worse": "does not price pulls, which it expects to keep for many steps",
    },
    "metro": {"never_worse": "balances activated experts, not rows"},
}
"""Law -> reason, for each planner. `lplb` and `taot` calculate in floats: determinism binds them per machine."""


class LawError(ValueError):
    """A plan breaks a law; the message names the rank, the expert and the values."""


def check_plan(
    plan: Plan,
    omega: np.ndarray,
    problem: Problem,
    planner: str,
    *,
    again: Plan | None = None,
) -> None:
    """Checks every law that binds `planner`; determinism too if `again` is another answer to the same question.

    Raises:
      LawError: the first law that is broken.
    """
    plan = Plan(*(np.asarray(field) for field in plan))
    well_formed(plan, omega, problem)
    if again is not None:
        determinism(plan, again)
    if bad_input(plan, omega, problem):
        return
    checks: dict[str, Callable[[Plan, np.ndarray, Problem], None]] = {
        "slots": slots,
        "reachability": reachability,
        "conservation": conservation,
        "benefit": benefit,
        "no_idle_replica": no_idle_replica,
        "never_worse": never_worse,
        "capacity": capacity,
        "bookkeeping": bookkeeping,
    }
    for name, check in checks.items():
        if name not in EXEMPT[planner]:
            check(plan, omega, problem)


def conservation(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """Law 1: for every source and expert, the quotas over all instances sum to the demand."""
    experts = instance_experts(plan, problem)
    exists = (experts >= 0) & (experts < problem.num_experts)
    served = np.zeros((problem.num_experts, omega.shape[0]), np.int64)
    np.add.at(served, experts[exists], plan.quota[:, exists].T)
    wrong = np.argwhere(omega != served.T)
    if wrong.size:
        rank, expert = wrong[0]
        raise LawError(
            f"conservation: source rank {rank} demands {omega[rank, expert]} rows of expert {expert}, but the quotas of"
            f" its instances sum to {served[expert, rank]}"
        )


def reachability(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """Law 2: rows go only to an instance that exists, and no quota is negative."""
    wrong = np.argwhere((plan.quota < 0) | ((plan.quota != 0) & (instance_experts(plan, problem) < 0)))
    if wrong.size:
        source, rank, instance = wrong[0]
        raise LawError(
            f"reachability: quota[{source}, {rank}, {instance}]={plan.quota[source, rank, instance]}, but"
            f" instance {instance} of rank {rank} is"
            f" {'an empty slot' if instance_experts(plan, problem)[rank, instance] < 0 else 'given a negative quota'}"
        )


def slots(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """Law 3: slots hold other ranks' experts, each once per rank, ascending, empty slots last."""
    for rank, experts in enumerate(plan.slot_expert.tolist()):
        filled = [e for e in experts if e != -1]
        if any(not 0 <= e < problem.num_experts for e in filled):
            raise LawError(f"slots: rank {rank} holds {experts}, but experts are 0..{problem.num_experts - 1}")
        own = [e for e in filled if e // problem.mains_per_rank == rank]
        if own:
            raise LawError(f"slots: rank {rank} holds a replica of expert {own[0]}, whose main instance it owns")
        if len(set(filled)) != len(filled):
            raise LawError(f"slots: rank {rank} holds an expert twice: {experts}")
        if experts != sorted(filled) + [-1] * (len(experts) - len(filled)):
            raise LawError(f"slots: rank {rank} holds {experts}: must be ascending, with empty slots (-1) last")


def benefit(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """Law 4: a replica outside its main's domain costs less to pull than the token traffic of its domain."""
    domain_of_rank = np.array(problem.topology.domain_of_rank)
    for rank, slot in np.argwhere(plan.slot_expert >= 0):
        expert, domain = plan.slot_expert[rank, slot], domain_of_rank[rank]
        if domain_of_rank[problem.main_rank()[expert]] == domain:
            continue
        demand = int(omega[domain_of_rank == domain, expert].sum(dtype=np.int64))
        saved = 2 * demand * problem.cost.token_bytes
        if problem.cost.expert_bytes >= saved:
            raise LawError(
                f"benefit: rank {rank} holds expert {expert} from another domain for {problem.cost.expert_bytes} bytes,"
                f" but the {demand} rows of domain {domain} save only {saved} bytes"
            )


def no_idle_replica(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """Law 5: a filled slot serves rows; else it would be pulled for nothing."""
    rows = plan.quota.sum(axis=0, dtype=np.int64)[:, problem.mains_per_rank :]
    wrong = np.argwhere((plan.slot_expert >= 0) & (rows == 0))
    if wrong.size:
        rank, slot = wrong[0]
        raise LawError(
            f"no idle replica: slot {slot} of rank {rank} holds expert {plan.slot_expert[rank, slot]} but has no quota"
        )


def determinism(plan: Plan, again: Plan) -> None:
    """Law 6: equal inputs, equal bits, whoever plans."""
    for name, first, second in zip(Plan._fields, plan, again, strict=True):
        first, second = np.asarray(first), np.asarray(second)
        if first.shape != second.shape or first.dtype != second.dtype:
            raise LawError(
                f"determinism: {name} is {first.dtype}{list(first.shape)}, and {second.dtype}{list(second.shape)} in"
                " another answer to the same question"
            )
        differs = first != second
        if differs.any():
            at = tuple(np.argwhere(differs)[0].tolist())
            raise LawError(
                f"determinism: {name}{list(at)} is {first[at]}, and {second[at]} in another answer to the same question"
            )


def never_worse(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """Law 7: the plan is predicted to take no longer than the empty plan, unless only the plan can meet the cap."""
    empty = _empty_plan(omega, problem)
    ours, theirs = picoseconds(plan.predicted_ps), picoseconds(empty.predicted_ps)
    if ours > theirs and meets_cap(empty, problem):
        raise LawError(
            f"never worse: the plan is predicted to take {ours} ps, the empty plan {theirs} ps (the busiest rank has"
            f" {plan.rank_load.max()} and {empty.rank_load.max()} rows)"
        )


def capacity(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """Law 8: CAP_MET is set exactly when no rank exceeds `cap_rows` aligned rows."""
    claimed = bool(int(plan.status) & Status.CAP_MET)
    if claimed != meets_cap(plan, problem):
        aligned = aligned_rows(plan, problem)
        raise LawError(
            f"capacity: CAP_MET is {claimed}, but rank {aligned.argmax()} has {aligned.max()} aligned rows and cap_rows"
            f" is {problem.cap_rows}"
        )


def bookkeeping(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """What the plan says of itself is true: rank_load, predicted_ps, EMPTY and OVER_EMPTY_COST."""
    load = plan.quota.sum(axis=(0, 2), dtype=np.int64)
    wrong = np.flatnonzero(plan.rank_load != load)
    if wrong.size:
        rank = wrong[0]
        raise LawError(f"bookkeeping: rank_load[{rank}]={plan.rank_load[rank]}, but its quotas sum to {load[rank]}")
    counted = predict_ps(plan, problem)
    if picoseconds(plan.predicted_ps) != counted:
        raise LawError(f"bookkeeping: predicted_ps={picoseconds(plan.predicted_ps)}, but a recount gives {counted}")
    empty = _empty_plan(omega, problem)
    status = Status(int(plan.status)) & ~Status.CAP_MET
    expected = Status(0)
    if (plan.slot_expert < 0).all():
        expected |= Status.EMPTY
    if meets_cap(empty, problem) and counted > picoseconds(empty.predicted_ps):
        expected |= Status.OVER_EMPTY_COST
    if status != expected:
        raise LawError(f"bookkeeping: status is {status!r} besides CAP_MET, expected {expected!r}")


def bad_input(plan: Plan, omega: np.ndarray, problem: Problem) -> bool:
    """Whether the demand is bad; then the plan must refuse it, and no other law applies.

    Raises:
      LawError: good demand was refused, or bad demand was not.
    """
    bad = is_bad(omega)
    if bool(int(plan.status) & Status.BAD_INPUT) != bad:
        raise LawError(
            f"bad input: status is {Status(int(plan.status))!r}, but the demand has minimum {omega.min()} and total"
            f" {omega.sum(dtype=np.int64)}"
        )
    if bad:
        determinism(plan, refuse(problem))
    return bad


def well_formed(plan: Plan, omega: np.ndarray, problem: Problem) -> None:
    """Shapes are those of the problem and everything is int32."""
    for name, field, expected in zip(Plan._fields, plan, refuse(problem), strict=True):
        if field.shape != expected.shape or field.dtype != np.int32:
            raise LawError(
                f"well formed: {name} is {field.dtype}{list(field.shape)}, expected int32{list(expected.shape)}"
            )


def instance_experts(plan: Plan, problem: Problem) -> np.ndarray:
    """The expert of every instance, int [R, J]; -1 for an empty slot."""
    mains = np.arange(problem.num_experts).reshape(problem.topology.num_ranks, -1)
    return np.concatenate([mains, plan.slot_expert], axis=1)


def _empty_plan(omega: np.ndarray, problem: Problem) -> Plan:
    return reference.solve(omega, problem, "none")
