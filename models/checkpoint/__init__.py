"""Weights in and out: released safetensors folders and checkpoints of the trainer, read and written block by block.

    params = load(folder, config, state_shardings(abstract(config), mesh))
    save(folder, config, params, dtype=jnp.bfloat16)

`python -m models.checkpoint` inspects, verifies and converts folders.
"""

from models.checkpoint.api import load as load
from models.checkpoint.api import read_config as read_config
from models.checkpoint.api import save as save
from models.checkpoint.faults import CheckpointError as CheckpointError
from models.checkpoint.parameters import abstract as abstract
