import numpy as np

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
def plan_workspace(attributes: dict[str, np.ndarray]) -> int: ...
