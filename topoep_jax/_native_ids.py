"""Numbers by which the native code knows what Python calls by name; they are here without the extension, too."""

PLANNER_IDS = {"none": 0, "topoep_paper": 1, "topoep": 2}
"""`enum Planner` of xla_ffi/plan/problem.h."""

PULL_IDS = {"direct": 0, "relayed": 1, "striped": 2, "best": 3}
"""`enum Pulls` of xla_ffi/plan/problem.h."""

OBJECTIVE_IDS = {"bottleneck": 0, "eq8": 1}
"""`enum Objective` of xla_ffi/plan/problem.h."""
