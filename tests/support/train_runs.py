"""What the tests of the trainer share: tiny models of each kind, short runs, and what a run left."""

import json
import pathlib

import numpy as np

from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.state import TrainState
from train.step import build

_SHAPE = "hidden=16,num_heads=2,ffn=8,top_k=2"
_GROUPED_QUERY = f"{_SHAPE},num_kv_heads=1,head_dim=8"
_FIRST_DENSE = "num_layers=3,num_experts=8,dense_ffn=16,shared_ffn=8"
SHAPES = {
    "qwen3-tiny": f"{_GROUPED_QUERY},num_layers=2,num_experts=16",
    "glm4-tiny": f"{_GROUPED_QUERY},{_FIRST_DENSE},rotary_dim=4",
    "deepseek-v2-tiny": f"{_SHAPE},{_FIRST_DENSE},q_lora=8,kv_lora=8,nope_dim=8,rope_dim=4,v_dim=8",
}
TINY = {"dtype": "float32", "steps": 4, "save_every": 2, "warmup": 1, "seq_len": 16, "block_rows": 8, "domains": 2}


def settings(run_dir: pathlib.Path, model: str = "qwen3-tiny", **changes) -> TrainConfig:
    """Settings of a short run of `model` on text that lies beside `run_dir`."""
    data = (str(text_of(run_dir.parent)),)
    return TrainConfig(
        **{**TINY, "model": model, "shape": SHAPES[model], "run_dir": str(run_dir), "data": data, **changes}
    )


def text_of(folder: pathlib.Path) -> pathlib.Path:
    """Makes the text, once: processes of one run share a folder, and none may write what another reads."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(f"{number} squared is {number * number}. " for number in range(2000)))
    return path


def metrics_of(run_dir: pathlib.Path) -> list[dict]:
    """The lines of a run without what a clock measured."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


def loads_of(run_dir: pathlib.Path) -> list:
    """The loads of a run: what every expert of every layer was assigned, step by step."""
    return np.load(run_dir / "expert_load.npy").tolist()


def restored(config: TrainConfig) -> TrainState:
    with Checkpoints(pathlib.Path(config.run_dir) / "checkpoints") as checkpoints:
        return checkpoints.restore(build(config))
