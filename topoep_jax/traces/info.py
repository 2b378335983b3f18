"""What a trace knows besides the chosen experts: sizes and names that its readers would otherwise have to be told."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from topoep_jax._integers import is_integer
from topoep_jax.topology import Topology

VERSION = 1
MAX_EXPERTS = 2**16 - 1
"""Most experts of a trace: they and one value for padding are 16-bit numbers."""

_FORMAT = "topoep_jax routing trace"


@dataclasses.dataclass(frozen=True)
class TraceInfo:
    """The head of a trace file.

    Attributes:
      num_experts: E, a multiple of `num_ranks`, at most `MAX_EXPERTS`.
      num_ranks: R, the ranks among which each microbatch is divided.
      layers: number of each recorded layer in its model, ascending; dense layers are counted there and missing here.
      topology: domain of each rank, if known.
      model: name of the model, if known.
      hidden: H, width of a token, if known.
      ffn: I, inner width of an expert, if known.
      num_groups: groups of R ranks whose microbatches are the parts of each step, if known.

    Raises:
      ValueError: a value out of range.
    """

    num_experts: int
    num_ranks: int
    layers: tuple[int, ...]
    topology: Topology | None = None
    model: str | None = None
    hidden: int | None = None
    ffn: int | None = None
    num_groups: int | None = None

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        for name in ("num_experts", "num_ranks", "hidden", "ffn", "num_groups"):
            value = getattr(self, name)
            unknown = value is None and name not in ("num_experts", "num_ranks")
            if not unknown and not is_integer(value, 1):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if self.num_experts > MAX_EXPERTS or self.num_experts % self.num_ranks:
            raise ValueError(
                f"{self.num_experts} experts on {self.num_ranks} ranks: their number must be a multiple of"
                f" {self.num_ranks}, at most {MAX_EXPERTS}"
            )
        numbered = all(is_integer(layer, 0) for layer in layers)
        if not layers or not numbered or sorted(set(layers)) != list(layers):
            raise ValueError(f"layers={layers} must be the ascending numbers of at least one layer, as in (1, 2, 3)")
        if self.topology is not None and self.topology.num_ranks != self.num_ranks:
            raise ValueError(f"the topology has {self.topology.num_ranks} ranks, but the trace {self.num_ranks}")
        if self.model is not None and not isinstance(self.model, str):
            raise ValueError(f"model={self.model!r} must be a name")
        object.__setattr__(self, "layers", tuple(map(int, layers)))

    def to_json(self) -> str:
        """The text that a file keeps."""
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["domain_of_rank"] = None if self.topology is None else self.topology.domain_of_rank
        del fields["topology"]
        return json.dumps({"format": _FORMAT, "version": VERSION, **fields})

    @classmethod
    def from_json(cls, text: str) -> "TraceInfo":
        """What `to_json` wrote; members that it does not know are left alone.

        Raises:
          ValueError: another format, a later version, a member that is missing or out of range.
        """
        try:
            head = json.loads(text)
        except RecursionError:
            raise ValueError("its head nests too deep") from None
        if not isinstance(head, Mapping) or head.get("format") != _FORMAT:
            raise ValueError(f"its head is {text[:60]!r}, not that of a {_FORMAT}")
        version = head.get("version")
        if type(version) is not int or version < 1:
            raise ValueError(f"version={version!r} is none")
        if version > VERSION:
            raise ValueError(
                f"it has version {version} of the format, but this topoep_jax reads up to {VERSION}: take a later one"
            )
        names = ("num_experts", "num_ranks", "layers", "domain_of_rank", "model", "hidden", "ffn")
        missing = [name for name in names if name not in head]
        if missing:
            raise ValueError(f"its head has no {', '.join(missing)}")
        domains = head["domain_of_rank"]
        for name in ("layers", "domain_of_rank"):
            if not isinstance(head[name], list) and (name == "layers" or domains is not None):
                raise ValueError(f"{name}={head[name]!r} must be a list of integers")
        known = {name: head[name] for name in names if name != "domain_of_rank"}
        topology = None if domains is None else Topology(tuple(domains))
        # The first files of version 1 do not have it.
        return cls(**known, topology=topology, num_groups=head.get("num_groups"))
