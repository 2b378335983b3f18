"""What the configs of all models share, and how a Hugging Face config is read: every fault in one error."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from models.rotary import Yarn
from topoep_jax._integers import is_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shapes that every model has.

    Attributes:
      vocab: tokens of the vocabulary.
      hidden: width of a token.
      num_layers: dense layers and MoE layers.
      num_heads: heads of queries.
      ffn: inner width of one expert.
      num_experts: routed experts of a layer.
      top_k: experts of a token.
      shared_ffn: inner width of all shared experts together; 0 for none.
      dense_layers: how many layers, the first ones, have a dense block instead of experts.
      dense_ffn: inner width of that block; 0 where there is none, whatever was given.
      rope_theta: base of the wavelengths of rotary positions.
      norm_eps: added to the mean square in norms.
      tied_embeddings: the output layer is the embedding table.
      max_positions: length of the longest sequence it is meant for; only exported configs say it.

    Raises:
      ValueError: shapes that do not fit together; it lists all of them.
    """

    vocab: int
    hidden: int
    num_layers: int
    num_heads: int
    ffn: int
    num_experts: int
    top_k: int
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    max_positions: int = 4096

    def __post_init__(self) -> None:
        if not self.dense_layers:
            object.__setattr__(self, "dense_ffn", 0)
        report(f"{type(self).__name__} does not fit together", self.faults())

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts: all after the dense ones."""
        return self.num_layers - self.dense_layers

    def faults(self) -> list[str]:
        """What is wrong with the values; a model adds its own."""
        sizes = ["vocab", "hidden", "num_layers", "num_heads", "ffn", "num_experts", "top_k", "max_positions"]
        sizes += ["dense_ffn"] if self.dense_layers else []
        faults = [f"{name}={getattr(self, name)} must be at least 1" for name in sizes if getattr(self, name) < 1]
        faults += [
            f"{name}={getattr(self, name)} must be positive"
            for name in ("rope_theta", "norm_eps")
            if not getattr(self, name) > 0
        ]
        faults += [
            f"{field.name}={getattr(self, field.name)} must be finite"
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), float) and not math.isfinite(getattr(self, field.name))
        ]
        if self.top_k > self.num_experts:
            faults.append(f"top_k={self.top_k} exceeds num_experts={self.num_experts}")
        if self.shared_ffn < 0:
            faults.append(f"shared_ffn={self.shared_ffn} must not be negative")
        if not 0 <= self.dense_layers < max(self.num_layers, 1):
            faults.append(
                f"dense_layers={self.dense_layers} must leave one of num_layers={self.num_layers} its experts"
            )
        return faults

    def shared_expert_faults(self) -> list[str]:
        """What is wrong with shared experts where checkpoints count them: each is as wide as a routed one."""
        if self.ffn < 1 or self.shared_ffn % self.ffn == 0:
            return []
        return [f"shared_ffn={self.shared_ffn} is not a multiple of ffn={self.ffn}"]


def grouped_query_faults(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> list[str]:
    """What is wrong with the shapes of a `models.attention.GroupedQueryAttention`."""
    faults = []
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        faults.append(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}: query heads share key heads in"
            " equal groups"
        )
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        faults.append(
            f"the rotated part of a head, {rotary_dim} of head_dim={head_dim}, must be even and within the head:"
            " rotary positions turn pairs"
        )
    return faults


def report(what: str, faults: list[str]) -> None:
    """Raises ValueError with all faults, if there are any."""
    if faults:
        raise ValueError(f"{what}: {'; '.join(faults)}")


class HFConfig:
    """Reads a Hugging Face `config.json`; what is missing or not supported is collected, and `done` raises it.

    Both spellings of rotary settings are understood: `rope_theta` and `rope_scaling` beside the others, or in
    `rope_parameters`, as transformers 5 writes them. Versions differ in which of them counts, so what is said twice has
    to be said alike.
    """

    def __init__(self, values: Mapping[str, Any], model_type: str) -> None:
        self._type = model_type
        self._faults: list[str] = []
        self._rope = self._rotary(values)
        self._values = {**self._rope, **{name: value for name, value in values.items() if value is not None}}
        self._nulls = {name for name, value in values.items() if value is None}
        self.only("model_type", model_type)
        self.only("hidden_act", "silu")
        self.only("attention_dropout", 0)
        self.only("mlp_bias", False)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that the config has; 1 for a fault, which `done` will raise."""
        value = self._first(names, default)
        if not is_integer(value):
            value = self._fault(f"{names[0]}={value!r} must be an integer", 1)
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """The value as a float."""
        # Programs differ in what they make of a null.
        value = None if name in self._nulls else self._first((name,), default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            value = self._fault(f"{name}={value!r} must be a number", 1.0)
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """The value as a bool."""
        value = self._first((name,), default)
        return value if isinstance(value, bool) else bool(self._fault(f"{name}={value!r} must be true or false", False))

    def only(self, name: str, *supported: Any) -> None:
        """Faults a value that is present, not null and not in `supported`."""
        value = self._values.get(name)
        if value is not None and value not in supported:
            self._fault(f"{name}={value!r} is not supported, only {' or '.join(map(repr, supported))}", None)

    def no_scaling(self) -> None:
        """Faults stretched rotary positions."""
        if self._rope_type() != "default":
            self._fault(f"rotary positions of type {self._rope_type()!r} are not supported here", None)

    def yarn(self) -> Yarn | None:
        """The stretch of rotary positions, None where there is none."""
        if self._rope_type() == "default":
            return None
        if self._rope_type() != "yarn":
            return self._fault(f"rotary positions of type {self._rope_type()!r} are not supported, only 'yarn'", None)
        known = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
        for name in sorted(set(self._rope) - known - {"rope_type", "rope_theta"}):
            self._fault(f"{name}={self._rope[name]!r} of YaRN is not supported", None)
        given = {name: self._rope[name] for name in known if self._rope.get(name) is not None}
        try:
            length = int(given.pop("original_max_position_embeddings"))
            yarn = Yarn(original_length=length, **{name: float(value) for name, value in given.items()})
        except (KeyError, TypeError, ValueError) as error:
            needed = "factor and original_max_position_embeddings"
            return self._fault(f"YaRN needs {needed}, all its values being positive numbers: {error}", None)
        if given.get("mscale_all_dim") and "mscale" not in given:
            self._fault(f"mscale_all_dim={given['mscale_all_dim']} of YaRN without mscale is not supported", None)
        return yarn

    def done(self) -> None:
        """Raises ValueError with everything that was found."""
        report(f"this config cannot be loaded as {self._type!r}", self._faults)

    def _rope_type(self) -> str:
        return str(self._rope.get("rope_type", "default"))

    def _rotary(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All rotary settings, wherever they stand; faults what is said twice, and not alike."""
        blocks: list[dict[str, Any]] = [{name: values.get(name) for name in ("rope_theta", "partial_rotary_factor")}]
        for name in ("rope_scaling", "rope_parameters"):
            block = values.get(name) or {}
            if not isinstance(block, Mapping):
                self._fault(f"{name}={block!r} must be an object", None)
            elif block:
                kinds = [block[key] for key in ("rope_type", "type") if block.get(key) is not None]
                blocks += [{**block, "type": None, "rope_type": kind} for kind in kinds or ["default"]]
        rope: dict[str, Any] = {}
        for name, value in (item for block in blocks for item in block.items()):
            if value is not None and rope.setdefault(name, value) != value:
                self._fault(f"rotary setting {name} is said to be {rope[name]!r} and {value!r}", None)
        return rope

    def _first(self, names: tuple[str, ...], default: Any) -> Any:
        present = [self._values[name] for name in names if self._values.get(name) is not None]
        if not present and default is None:
            return self._fault(f"{' or '.join(names)} is missing", 1)
        return present[0] if present else default

    def _fault(self, fault: str, instead: Any) -> Any:
        self._faults.append(fault)
        return instead
