"""`topoep measure`: writes the rates of this machine, or of all processes of a job, for `topoep plan --hardware`."""

from collections.abc import Iterator
from typing import Any

import jax

from topoep_jax import launch
from topoep_jax.cli.flags import Flags
from topoep_jax.cli.output import check_writable, plural, table
from topoep_jax.measure import measure
from topoep_jax.plan.hardware import rate_flags, unmeasured_links
from topoep_jax.topology import Topology

_BYTES = 1_000_000  # Femtoseconds per byte times GB/s.


def define() -> Flags:
    """Flags of the command."""
    values = Flags()
    values.add("out", str, "file to write", "hardware.json")
    domains = "equal domains of neighbouring devices (default: what the devices report)"
    values.add("domains", int, domains, least=1)
    values.add("repeats", int, "timed runs of each measurement, of which the median counts", 5, least=1)
    coordinator = "host:port of process 0, in a job of several; Slurm, Open MPI and Kubernetes say it by themselves"
    values.add("coordinator", str, coordinator)
    values.add("num_processes", int, "processes of the job; 1 measures alone whatever started it", least=1)
    values.add("process_id", int, "which of them this is", least=0)
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints."""
    check_writable("out", values.out, ".json")
    job = launch.find(values.coordinator, values.num_processes, values.process_id)
    launch.connect(job)
    launch.check_devices(job)
    found = measure(values.out, topology=_topology(values.domains), repeats=values.repeats)
    yield _report(found)
    links = unmeasured_links(found)
    if links:
        yield f"\nwritten to {values.out}: give what it lacks, in Gb/s per direction and device, when using it with\n"
    else:
        yield f"\nwritten to {values.out}: use it with\n"
    yield f"  topoep plan --model=.. --hardware={values.out} {rate_flags(links)}".rstrip() + "\n"


def _topology(domains: int | None) -> Topology | None:
    devices = len(jax.devices())
    if domains is None:
        return None
    if devices % domains:
        raise ValueError(f"--domains={domains} does not divide the {devices} devices")
    return Topology.uniform(domains, devices // domains)


def _report(found: dict[str, Any]) -> str:
    def bandwidth(fs_per_byte: int | None) -> str:
        return "not measured" if fs_per_byte is None else f"{_BYTES / fs_per_byte:.1f} GB/s"

    rows = [
        ["between domains, per device and direction", bandwidth(found["inter_fs_per_byte"])],
        ["inside a domain, per device and direction", bandwidth(found["intra_fs_per_byte"])],
        ["grouped GEMM in bf16, median device", _flops(found["gflops"])],
    ]
    if found["rank_speed"] is not None:
        rows.append(["slowest device", f"{min(found['rank_speed']) / 10:.0f} % of it"])
    title = f"{found['num_devices']} x {found['device_kind']}, {plural(found['num_domains'], 'domain')}"
    return f"{table([title, 'measured'], rows)}\n" + found["note"].replace("; ", "\n") + "\n"


def _flops(gflops: int) -> str:
    return f"{gflops / 1e3:.1f} TFLOP/s" if gflops >= 1000 else f"{gflops} GFLOP/s"
