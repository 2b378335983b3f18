"""What the paper prints beside what `topoep_jax.simulate.published` holds, with the same marks.

Marks: C, printed and unambiguous, or forced by a percentage of the text; I, one reading survives arithmetic or layout;
A, the value is printed, whose it is is a guess. Nothing in this file was measured, or computed, by this project.
"""

from topoep_jax.simulate.published import Value

PLACEMENT_MIB = {"replica on node 1": Value(64, "C"), "replica on node 0": Value(27, "C")}
"""Figure 3: bytes between nodes, forward and backward."""

SLOTS_IMBALANCE: dict[int, dict[str, Value]] = {
    0: {"none": Value(8.39, "C")},
    1: {"topoep_paper": Value(3.79, "C"), "flexmoe": Value(1.45, "C")},
    2: {
        "topoep_paper": Value(1.30, "C"),
        "flexmoe": Value(1.395, "C"),
        "fastermoe": Value(2.51, "C"),
        "eplb_fixed_main": Value(2.94, "C"),
    },
    3: {"topoep_paper": Value(1.30, "C")},
    4: {"topoep_paper": Value(1.30, "C"), "fastermoe": Value(1.82, "C"), "eplb_fixed_main": Value(2.88, "C")},
}
"""Figure 10, by slots of a rank; three of those at two slots follow from 6.8, 48.2 and 55.8 %."""

SOLVER_US = {8: Value(131, "C"), 128: Value(510, "C")}
"""Figure 11a, by ranks, at 640 experts. Eleven more labels are printed, whose bars are not known."""
SOLVER_US_OF_32_RANKS = (Value(337, "C"), Value(455, "C"))
"""Figure 11b: least and most from 64 to 1024 experts."""

NATURAL_GAIN = {
    "qwen3-30b-a3b": Value(9.5, "C"),
    "glm-4.5-air": Value(11.4, "C"),
    "deepseek-v2": Value(6.2, "C"),
}
"""Figure 12: percent of throughput under natural routing; no load ratio is printed of it."""

REPLICA_SERVED: dict[str, dict[str, Value]] = {
    "qwen3-30b-a3b": {
        "none": Value(0.0, "C"),
        "fastermoe": Value(0.121, "C"),
        "flexmoe": Value(0.522, "A"),
        "eplb_fixed_main": Value(0.694, "A"),
        "topoep_paper": Value(0.798, "C"),
    },
    "glm-4.5-air": {
        "none": Value(0.0, "C"),
        "fastermoe": Value(0.117, "C"),
        "flexmoe": Value(0.175, "A"),
        "eplb_fixed_main": Value(0.586, "C"),
        "topoep_paper": Value(0.638, "C"),
    },
    "deepseek-v2": {
        "none": Value(0.0, "C"),
        "fastermoe": Value(0.234, "C"),
        "flexmoe": Value(0.348, "A"),
        "eplb_fixed_main": Value(0.547, "A"),
        "topoep_paper": Value(0.683, "I"),
    },
}
"""Figure 16b: share of the assignments that replicas execute, at skew -4."""

EXPERT_SKEW = {
    "DAPO-Math": (Value(7.34, "C"), Value(12.93, "C")),
    "StarCoderData": (Value(7.08, "C"), Value(8.85, "C")),
}
"""Figure 2c: load of the busiest expert over the mean, mean and peak over the layers."""
TURNOVER_PERCENT = (Value(15.9, "A"), Value(20.0, "A"))
"""Figure 2d, means; which data set has which is a guess."""
LOSS_DIFFERENCE_PERCENT = {"mean": Value(0.088, "C"), "max": Value(0.407, "C")}
"""Figure 14: relative, TopoEP against Megatron-LM over 10,000 steps."""
