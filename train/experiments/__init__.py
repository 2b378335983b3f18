"""The paper's experiments, side by side: `python -m train.experiments` (docs/experiments.md).

Each figure is a module with what it needs, `run(settings) -> records` and `draw(records) -> figure`. Records go to one
JSON, pictures and tables to a static report, and the paper's values stand beside ours.
"""
