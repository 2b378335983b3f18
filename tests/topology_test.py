"""Topology: numbering, uneven and interleaved domains, reading domains from a mesh, and its errors."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from topoep_jax.topology import Topology


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "cpu"


def mesh_of(process, slices=None, axes=("ep",)):
    process = np.asarray(process)
    slices = np.full(process.shape, None) if slices is None else np.asarray(slices)
    devices = np.empty(process.shape, object)
    for number, where in enumerate(np.ndindex(process.shape)):
        devices[where] = FakeDevice(number, int(process[where]), slices[where])
    return Mesh(devices, axes)


@pytest.mark.parametrize(
    ("domains", "num_domains", "members"),
    [
        ((0,), 1, [(0,)]),
        ((0, 0, 0, 1), 2, [(0, 1, 2), (3,)]),
        ((0, 1, 0, 1), 2, [(0, 2), (1, 3)]),
        ((2, 0, 1, 0), 3, [(1, 3), (2,), (0,)]),
    ],
)
def test_domains_by_hand(domains, num_domains, members):
    topology = Topology(domains)
    assert (topology.num_ranks, topology.num_domains) == (len(domains), num_domains)
    assert [topology.ranks_of_domain(d) for d in range(num_domains)] == members
    crosses = topology.crosses_domains()
    assert crosses.dtype == bool
    for s, source in enumerate(domains):
        assert crosses[s].tolist() == [source != domain for domain in domains]


def test_it_is_a_value():
    assert Topology(np.array([0, 0, 1])) == Topology((0, 0, 1))
    assert hash(Topology([0, 0, 1])) == hash(Topology((0, 0, 1)))
    assert {Topology((0, 1)): 1}[Topology.uniform(2, 1)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology((0,)).domain_of_rank = (1,)


def test_uniform_domains():
    assert Topology.uniform(2, 3).domain_of_rank == (0, 0, 0, 1, 1, 1)
    assert Topology.uniform(1, np.int64(1)) == Topology((0,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(()), "empty"),
        (lambda: Topology((0, 2)), r"\(0, 2\).*gaps"),
        (lambda: Topology((1, 1)), r"\(1, 1\).*gaps"),
        (lambda: Topology((-1, 0)), r"\(-1, 0\).*gaps"),
        (lambda: Topology.uniform(0, 8), "num_domains=0"),
        (lambda: Topology.uniform(2, -1), "ranks_per_domain=-1"),
        (lambda: Topology.uniform(True, True), "num_domains=True"),
        (lambda: Topology((True, False)), r"\(True, False\) must hold one integer per rank"),
    ],
)
def test_bad_domains_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_from_emulated_devices_of_one_process():
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "ep"))
    assert Topology.from_mesh(mesh) == Topology.uniform(1, 4)
    assert Topology.from_mesh(mesh, "data") == Topology.uniform(1, 2)


def test_processes_are_domains_numbered_as_they_appear():
    assert Topology.from_mesh(mesh_of([7, 7, 3, 3, 3, 9])).domain_of_rank == (0, 0, 1, 1, 1, 2)
    assert Topology.from_mesh(mesh_of([4, 2, 4, 2])).domain_of_rank == (0, 1, 0, 1)


def test_slices_count_where_they_tell_devices_apart():
    # One process per GPU, two islands of three.
    by_slice = mesh_of([0, 1, 2, 3, 4, 5], slices=[1, 1, 1, 0, 0, 0])
    assert Topology.from_mesh(by_slice).domain_of_rank == (0, 0, 0, 1, 1, 1)
    assert Topology.from_mesh(by_slice, group_by="process").num_domains == 6
    all_in_one = mesh_of([0, 0, 1, 1], slices=[0, 0, 0, 0])
    assert Topology.from_mesh(all_in_one).domain_of_rank == (0, 0, 1, 1)
    assert Topology.from_mesh(all_in_one, group_by="slice").num_domains == 1
    gpus = np.vectorize(lambda device: dataclasses.replace(device, platform="gpu"), otypes=[object])(all_in_one.devices)
    assert Topology.from_mesh(Mesh(gpus, ("ep",))).num_domains == 1  # two processes share a node
    half_known = mesh_of([0, 0, 1, 1], slices=[0, 1, None, None])
    assert Topology.from_mesh(half_known).domain_of_rank == (0, 0, 1, 1)


@pytest.mark.parametrize("axes", [("data", "ep"), ("ep", "data")])
def test_other_axes_may_use_other_nodes_of_the_same_shape(axes):
    process = np.array([[0, 0, 1, 1], [2, 2, 3, 3]])
    mesh = mesh_of(process if axes[0] == "data" else process.T, axes=axes)
    assert Topology.from_mesh(mesh).domain_of_rank == (0, 0, 1, 1)


def test_bad_meshes_are_named():
    with pytest.raises(ValueError, match=r"\('ep',\) but no axis 'experts'"):
        Topology.from_mesh(mesh_of([0, 1]), "experts")
    with pytest.raises(ValueError, match=r"different domains.*by hand"):
        Topology.from_mesh(mesh_of([[0, 0, 1, 1], [2, 3, 2, 3]], axes=("data", "ep")))
    with pytest.raises(ValueError, match="group_by='node'"):
        Topology.from_mesh(mesh_of([0, 1]), group_by="node")
    with pytest.raises(ValueError, match=r"no slice index.*group_by='process'"):
        Topology.from_mesh(mesh_of([0, 1]), group_by="slice")


@pytest.mark.parametrize("domains", [(0, 10**11), (0.5, 0), "01", (True, False)])
def test_ids_that_are_no_small_integers_are_refused_at_once(domains):
    with pytest.raises(ValueError, match="domain_of_rank"):
        Topology(domains)
