"""What the paper prints (arXiv 2609.35481, on 32 H800 in four nodes), with how sure its reading is.

Marks: C, printed and unambiguous, or forced by a percentage of the text; I, one reading survives arithmetic or layout;
A, the value is printed, whose it is is a guess. Nothing in this file was measured, or computed, by this project.
"""

from typing import NamedTuple

PLANNERS = ("none", "fastermoe", "flexmoe", "eplb_fixed_main", "topoep_paper")
"""This library's names for the columns of `THROUGHPUT`: Megatron-LM, FasterMoE, FlexMoE, DeepSeek-EPLB, TopoEP."""
LAYERS = {"qwen3-30b-a3b": 5, "glm-4.5-air": 5, "deepseek-v2": 4}
"""Of the models that the paper trains, at reduced depth."""


class Value(NamedTuple):
    """A number of the paper and its mark."""

    number: float
    mark: str


THROUGHPUT: dict[str, dict[str, Value]] = {
    "qwen3-30b-a3b": {
        "none": Value(329.7, "C"),
        "fastermoe": Value(335.5, "A"),
        "flexmoe": Value(399.8, "A"),
        "eplb_fixed_main": Value(347.8, "A"),
        "topoep_paper": Value(417.5, "C"),
    },
    "glm-4.5-air": {
        "none": Value(88.3, "C"),
        "fastermoe": Value(88.8, "A"),
        "flexmoe": Value(93.2, "A"),
        "eplb_fixed_main": Value(92.5, "A"),
        "topoep_paper": Value(106.7, "C"),
    },
    "deepseek-v2": {
        "none": Value(94.1, "C"),
        "fastermoe": Value(96.8, "A"),
        "flexmoe": Value(97.3, "A"),
        "eplb_fixed_main": Value(99.3, "A"),
        "topoep_paper": Value(103.5, "C"),
    },
}
"""Figure 13a: thousand tokens per second at skew -4."""

UNIFORM_THROUGHPUT: dict[str, dict[str, Value]] = {
    "qwen3-30b-a3b": {"none": Value(456.6, "C"), "topoep_paper": Value(417.8, "I")},
    "glm-4.5-air": {"none": Value(119.0, "C"), "topoep_paper": Value(106.7, "I")},
    "deepseek-v2": {"none": Value(125.0, "C"), "topoep_paper": Value(104.1, "I")},
}
"""Figure 12 at skew 0, derived from percentages of the text. GLM's TopoEP is assumed to equal that at skew -4."""

IMBALANCE: dict[str, dict[str, Value]] = {
    "qwen3-30b-a3b": {
        "none": Value(4.09, "I"),
        "fastermoe": Value(3.88, "I"),
        "flexmoe": Value(2.16, "A"),
        "eplb_fixed_main": Value(3.07, "A"),
        "topoep_paper": Value(1.41, "C"),
    },
    "glm-4.5-air": {
        "none": Value(3.24, "I"),
        "fastermoe": Value(2.97, "I"),
        "flexmoe": Value(1.98, "A"),
        "eplb_fixed_main": Value(2.48, "A"),
        "topoep_paper": Value(1.05, "C"),
    },
    "deepseek-v2": {
        "none": Value(4.56, "I"),
        "fastermoe": Value(4.30, "I"),
        "flexmoe": Value(2.52, "A"),
        "eplb_fixed_main": Value(2.69, "A"),
        "topoep_paper": Value(1.03, "C"),
    },
}
"""Figure 13b: rows of the busiest rank over the mean, at skew -4."""

INTER_NODE: dict[str, dict[str, Value]] = {
    "qwen3-30b-a3b": {
        "none": Value(0.75, "C"),
        "fastermoe": Value(0.656, "C"),
        "flexmoe": Value(0.549, "A"),
        "eplb_fixed_main": Value(0.399, "A"),
        "topoep_paper": Value(0.0091, "C"),
    },
    "glm-4.5-air": {
        "none": Value(0.5, "C"),
        "fastermoe": Value(0.438, "C"),
        "flexmoe": Value(0.38, "A"),
        "eplb_fixed_main": Value(0.185, "C"),
        "topoep_paper": Value(0.011, "C"),
    },
    "deepseek-v2": {
        "none": Value(0.5, "C"),
        "fastermoe": Value(0.375, "C"),
        "flexmoe": Value(0.395, "A"),
        "eplb_fixed_main": Value(0.068, "A"),
        "topoep_paper": Value(0.0188, "I"),
    },
}
"""Figure 16a: share of the assignments executed on another node than their source's, at skew -4."""


class Breakdown(NamedTuple):
    """Milliseconds per layer on the straggler rank."""

    experts_forward: Value
    experts_backward: Value
    exchange_forward: Value
    """Dispatch and combine."""
    exchange_backward: Value
    replicas_forward: Value | None = None
    """Pull."""
    replicas_backward: Value | None = None
    """Push."""


BREAKDOWN: dict[tuple[str, str], Breakdown] = {
    ("qwen3-30b-a3b", "none"): Breakdown(Value(3.81, "C"), Value(6.91, "C"), Value(10.28, "I"), Value(13.11, "C")),
    ("qwen3-30b-a3b", "topoep_paper"): Breakdown(
        Value(1.37, "C"), Value(3.51, "C"), Value(4.47, "I"), Value(4.55, "C"), Value(1.04, "I"), Value(1.07, "I")
    ),
    ("glm-4.5-air", "none"): Breakdown(Value(8.00, "I"), Value(16.02, "I"), Value(11.67, "C"), Value(15.40, "I")),
    ("glm-4.5-air", "topoep_paper"): Breakdown(
        Value(2.99, "I"), Value(7.42, "I"), Value(7.60, "C"), Value(7.64, "I"), Value(1.32, "A"), Value(1.58, "A")
    ),
}
"""Figure 15, at skew -4."""
