from collections.abc import Sequence

def registrations() -> dict[str, object]: ...
def group_sizes(
    domain_of_rank: list[int],
    mains_per_rank: int,
    num_slots: int,
    expert_bytes: int,
    pulls: int,
    staging_bytes: int,
    bounce_bytes: int,
) -> list[int]: ...
def plan_workspace(
    domain_of_rank: Sequence[int],
    num_experts: int,
    num_slots: int,
    planner: int,
    num_candidates: int,
    num_thrifty: int,
    num_eager: int,
    paper: bool,
    has_speeds: bool,
) -> int: ...
