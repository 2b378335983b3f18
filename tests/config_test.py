"""A layer's configuration: everything that cannot work is refused when it is made, with what to do."""

import dataclasses
import pickle
import re
import subprocess
import sys

import pytest

from topoep_jax import LayerConfig, Topology

SIZES = {"hidden": 16, "ffn": 8, "num_experts": 16, "top_k": 3}
NODES = Topology.uniform(2, 4)
BAD_CONFIGS = [
    ({"num_experts": 12}, "num_experts=12 is not divisible by the 8 ranks"),
    ({"top_k": 17}, "top_k=17 exceeds num_experts=16"),
    ({"top_k": 0}, "top_k=0 must be an integer of at least 1"),
    ({"num_slots": -1}, "num_slots=-1 must be an integer of at least 0"),
    ({"num_slots": 15}, "num_slots=15 must be within 0..14"),
    ({"cap_factor": 0.0}, "cap_factor=0.0 must be a finite positive number"),
    ({"cap_factor": float("nan")}, "cap_factor=nan must be a finite positive number"),
    ({"cap_factor": float("inf")}, "cap_factor=inf must be a finite positive number"),
    ({"router": "gpt"}, "router='gpt' must be 'qwen3', 'glm4' or 'deepseek_v2'"),
    ({"planner": "magic"}, "planner='magic' is unknown"),
    ({"effort": "heroic"}, "effort='heroic' must be 'fast', 'default' or 'full'"),
    ({"planner_implementation": "fpga"}, "planner_implementation='fpga' must be 'cpu', 'cuda' or 'reference', or None"),
    ({"planner_implementation": ["cpu"]}, "planner_implementation=['cpu'] must be 'cpu'"),
    ({"effort": ["fast"]}, "effort=['fast'] must be"),
    ({"router": ["glm4"]}, "router=['glm4'] must be"),
    ({"overflow": "ignore"}, "overflow='ignore' must be"),
    ({"transport": "pigeon"}, "transport='pigeon' must be 'xla' or 'device'"),
    ({"transport": "device", "pulls": "swum"}, "pulls='swum' must be 'direct', 'relayed', 'striped' or 'best'"),
    ({"pulls": "striped"}, "pulls='striped' needs transport='device'"),
    ({"chunks": 3}, "chunks=3 must be 1 or 2"),
    ({"block_rows": 0}, "block_rows=0 must be an integer of at least 1"),
    ({"shared_ffn": -1}, "shared_ffn=-1 must be an integer of at least 0"),
    ({"hidden": 2.0}, "hidden=2.0 must be an integer"),
    ({"num_slots": True}, "num_slots=True must be an integer"),
    ({"ffn": None}, "ffn=None must be an integer"),
    ({"cap_factor": "1"}, "cap_factor='1' must be a finite positive number"),
    ({"topology": (0, 0)}, "topology=(0, 0) must be a Topology"),
    ({"forced": -2.0}, "forced=-2.0 must be None or Forced(skew)"),
    ({"router_options": {"scale": 2.0}}, "router_options has 'scale', but router 'qwen3' takes ['renormalize']"),
    ({"router": "glm4", "router_options": {"scale": float("nan")}}, "scale=nan must be a finite number"),
    ({"router": "deepseek_v2"}, "router 'deepseek_v2' needs ['num_groups', 'topk_group'] in router_options"),
    ({"router_options": {"renormalize": 0.5}}, "renormalize=0.5 must be True or False"),
    ({"router_options": None}, "router_options=None must be a dict"),
    *(
        ({"router": "deepseek_v2", "router_options": {"num_groups": groups, "topk_group": kept}}, message)
        for groups, kept, message in (
            (2.0, 1, "num_groups=2.0 must be an integer"),
            (2, True, "topk_group=True must be an integer"),
            (3, 1, "num_groups=3 does not divide"),
            (2, 3, "topk_group=3"),
        )
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS, ids=lambda v: str(v)[:40])
def test_a_bad_option_is_named_with_its_reason(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LayerConfig(**(SIZES | {"topology": NODES} | change))


def test_a_layer_stays_as_it_was_made():
    config = LayerConfig(**SIZES, topology=NODES)
    with pytest.raises(dataclasses.FrozenInstanceError, match="num_slots cannot be set"):
        config.num_slots = 1
    assert dataclasses.replace(config, num_slots=1).num_slots == 1
    assert pickle.loads(pickle.dumps(config)) == config


def test_equal_options_make_equal_layers():
    options = {"num_groups": 4, "topk_group": 2, "scale": 16}
    config = LayerConfig(**SIZES, topology=NODES, router="deepseek_v2", router_options=options)
    again = LayerConfig(**SIZES, topology=NODES, router="deepseek_v2", router_options=tuple(options.items()))
    assert config == again and hash(config) == hash(again)
    assert config.router_options == (("num_groups", 4), ("scale", 16.0), ("topk_group", 2))


def test_a_layer_starts_no_devices():
    """`jax.distributed.initialize` must be able to come after it."""
    text = f"""
from jax._src import xla_bridge
from topoep_jax import LayerConfig, Topology
for router, options in (("deepseek_v2", {{"num_groups": 4, "topk_group": 2}}), ("glm4", {{"scale": 2.5}})):
    LayerConfig(**{SIZES}, topology=Topology.uniform(2, 4), router=router, router_options=options)
assert not xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", text], check=True)
