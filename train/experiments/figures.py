"""All figures in the order of the report, and what of the paper is not here, with the reason."""

from train.experiments import (
    fig02_skew,
    fig03_placement,
    fig04_host_trip,
    fig10_slots,
    fig11_latency,
    fig12_skew,
    fig13a_throughput,
    fig13b_imbalance,
    fig14_loss,
    fig15_breakdown,
    fig16_locality,
    fig_a_skews,
    fig_b_ranks,
    fig_c_uneven,
    fig_d_memory,
)
from train.experiments.figure import Figure

FIGURES: dict[str, Figure] = {
    figure.number: figure
    for figure in (
        fig02_skew.FIGURE,
        fig03_placement.FIGURE,
        fig04_host_trip.FIGURE,
        fig10_slots.FIGURE,
        fig11_latency.FIGURE,
        fig12_skew.FIGURE,
        fig13a_throughput.FIGURE,
        fig13b_imbalance.FIGURE,
        fig14_loss.FIGURE,
        fig15_breakdown.FIGURE,
        fig16_locality.FIGURE,
        fig_a_skews.FIGURE,
        fig_b_ranks.FIGURE,
        fig_c_uneven.FIGURE,
        fig_d_memory.FIGURE,
    )
}

DRAWINGS = {
    "1": "drawing of an expert-parallel layer",
    "5": "drawing of the system; ours is docs/layer.md",
    "6": "drawing of replica transfers; ours is docs/device.md",
    "7": "schedule of the forward pass, redrawn beside ours in docs/layer.md",
    "8": "schedule of the backward pass, redrawn beside ours in docs/layer.md",
    "9": "example of the two stages; `topoep explain` draws any plan",
    "Table 1": "sizes of the models: docs/models.md",
}
"""What has no numbers to reproduce, and where ours is."""

CANNOT = (
    "Throughput of Figures 12 and 13a, and times of Figure 15, on 32 H800: there is no such cluster here. They are"
    " modelled, and the constants of the model were fitted to these very figures.",
    "Natural routing of Figure 12 (+9.5, +11.4, +6.2 %): the paper prints neither its routing nor its load ratios.",
    "Kernel latencies of Figure 11 on a GPU: shown only where a results file of a GPU run is there.",
    "Figure 2's model: Qwen3-30B-A3B with its released weights on DAPO-Math and StarCoderData.",
    "Figure 14's run: Qwen3-30B-A3B for 10,000 steps on the paper's corpus.",
)
