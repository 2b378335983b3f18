"""The decoder that all models are: embedding, dense layers, MoE layers, norm, head; a model says what its blocks are.

Layers of a kind are alike, so their parameters are stacked on a leading axis and one scanned body is compiled for any
depth.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from models.attention import Core, Implementation
from models.config import DecoderConfig
from models.layers import Embedding, Projection, RMSNorm, SwiGLU
from models.rotary import Rotation
from topoep_jax import MoE, MoEMetrics, Routed

Remat = Literal["none", "full", "dots"]
Config = TypeVar("Config", bound=DecoderConfig)


class Output(NamedTuple):
    """What a model returns. B sequences of S tokens, Lm MoE layers of E experts, K experts a token."""

    logits: jax.Array
    """f32 [B, S, vocab]; of a stage that is not the last, its hidden states [B, S, hidden] in the compute dtype."""
    metrics: MoEMetrics
    """What the planner did, each field [Lm, ...]."""
    routing: Routed | None
    """What each layer's router chose if asked for: expert_idx int32 [Lm, B, S, K], logits f32 [Lm, B, S, E]."""


class AttentionBlock(Protocol):
    """What mixes tokens."""

    def __call__(self, x: jax.Array, by: Rotation, segments: jax.Array | None = None) -> jax.Array: ...


class Surroundings(NamedTuple):
    """What all layers get besides x."""

    by: Rotation
    segments: jax.Array | None
    step: jax.Array


class DenseLayer(nnx.Module):
    """Attention and a dense block, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: DecoderConfig, attention: AttentionBlock, dtypes: Mapping[str, Any], rngs: nnx.Rngs
    ) -> None:
        self.attention_norm = _norm(config, dtypes)
        self.attention = attention
        self.ffn_norm = _norm(config, dtypes)
        self.ffn = SwiGLU(config.hidden, config.dense_ffn, **dtypes, rngs=rngs)

    def __call__(self, x: jax.Array, around: Surroundings) -> jax.Array:
        """Maps x [B, S, hidden] to the same shape."""
        x = x + self.attention(self.attention_norm(x), around.by, around.segments)
        return x + self.ffn(self.ffn_norm(x))


class MoELayer(nnx.Module):
    """Attention and the experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, attention: AttentionBlock, moe: MoE, dtypes: Mapping[str, Any]) -> None:
        self.attention_norm = _norm(config, dtypes)
        self.attention = attention
        self.moe_norm = _norm(config, dtypes)
        self.moe = moe

    def __call__(
        self, x: jax.Array, around: Surroundings, replay: jax.Array | None, layer: jax.Array
    ) -> tuple[jax.Array, MoEMetrics, Routed]:
        """Maps x [B, S, hidden] to the same shape; also what the planner did and what the router chose."""
        x = x + self.attention(self.attention_norm(x), around.by, around.segments)
        mask = None if around.segments is None else around.segments != 0
        y, metrics, routed = self.moe(
            self.moe_norm(x), mask, replay, layer=layer, step=around.step, return_routing=True
        )
        return x + y, metrics, routed


class Decoder(nnx.Module, Generic[Config]):
    """A decoder whose expert blocks plan, replicate and reroute every microbatch.

    Args:
      config: the shapes.
      mesh: device mesh with the expert-parallel axis.
      axis: name of that axis; batches are sharded over it.
      data_axes: mesh axes over which batches are sharded as well, before `axis`.
      moe_options: passed on to every `topoep_jax.MoE` (planner, num_slots, topology, ...).
      remat: what the backward pass finds of each layer: "none": everything; "dots": the products of tokens with
        parameters; "full": the layer's input. The rest is made again.
      attention: "auto", "xla" or "cudnn", see `models.attention.Core`.
      stage: (first, last): only the layers first <= l < last of all `config.num_layers`, to be one stage of a pipeline.
        The first stage has the embedding, the last one the norm and the head.
      dtype: of activations and matrix products.
      param_dtype: of the parameters, but for routers, which are f32.
      rngs: stream `params`. A stage draws what the whole model does for its layers.

    Raises:
      ValueError: an unknown option, a stage without MoE layers or with tied embeddings, shapes that do not fit.
    """

    def __init__(
        self,
        config: Config,
        *,
        mesh: Mesh,
        axis: str = "ep",
        data_axes: tuple[str, ...] = (),
        moe_options: Mapping[str, Any] | None = None,
        remat: Remat = "none",
        attention: Implementation = "auto",
        stage: tuple[int, int] | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if remat not in get_args(Remat):
            raise ValueError(f"remat={remat!r} is unknown: take one of {get_args(Remat)}")
        first, last = stage or (0, config.num_layers)
        _check_stage(config, first, last)
        self.config, self.mesh, self.batch_axes, self.remat = config, mesh, (*data_axes, axis), remat
        self.moe_layers = range(max(first, config.dense_layers), last)
        self.starts, self.ends = first == 0, last == config.num_layers
        core = Core(mesh, self.batch_axes, attention)
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        sizes = {name: getattr(config, name) for name in ("hidden", "ffn", "num_experts", "top_k", "shared_ffn")}
        experts = {"mesh": mesh, "axis": axis, "data_axes": data_axes, **sizes, **dtypes, **(moe_options or {})}

        def dense_layer(rngs: nnx.Rngs) -> DenseLayer:
            return DenseLayer(config, self.attention(config, core=core, **dtypes, rngs=rngs), dtypes, rngs)

        def moe_layer(rngs: nnx.Rngs) -> MoELayer:
            attention = self.attention(config, core=core, **dtypes, rngs=rngs)
            return MoELayer(config, attention, MoE(**experts, **self.router(config), rngs=rngs), dtypes)

        keys = {name: rngs.params() for name in ("embedding", "layers", "head")}
        if self.starts:
            self.embedding = Embedding(config.vocab, config.hidden, **dtypes, rngs=nnx.Rngs(keys["embedding"]))
        if first < config.dense_layers:
            self.dense_layers = _stack(dense_layer, keys["layers"], range(first, config.dense_layers))
        self.layers = _stack(moe_layer, keys["layers"], self.moe_layers)
        if self.ends:
            self.norm = _norm(config, dtypes)
        if self.ends and not config.tied_embeddings:
            self.head = Projection(config.hidden, config.vocab, **dtypes, rngs=nnx.Rngs(keys["head"]))

    def attention(self, config: Config, **common: Any) -> AttentionBlock:
        """The model's attention; `common` are core, dtypes and rngs."""
        raise NotImplementedError

    def router(self, config: Config) -> dict[str, Any]:
        """The model's `router` and `router_options` for `topoep_jax.MoE`."""
        raise NotImplementedError

    def rotation(self, config: Config, positions: jax.Array) -> Rotation:
        """The model's rotation at positions, int32 [B or 1, S]."""
        raise NotImplementedError

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        replay: jax.Array | None = None,
        step: jax.Array | int = 0,
        return_routing: bool = False,
    ) -> Output:
        """Next-token logits.

        Args:
          tokens: int32 [B, S], B a multiple of the devices that batches are sharded over. A stage that is not the first
            takes the hidden states [B, S, hidden] of the one before.
          positions: int32 [B, S]; None: counted from 0 in every segment.
          segments: int32 [B, S], numbers of packed sequences, neighbours of equal number being one: tokens attend to
            earlier ones of their sequence, and 0 is padding, which goes to no expert and may be any token. None: each
            row is one sequence.
          replay: int32 [Lm, B, S, K], recorded experts instead of the routers' choice.
          step: training step, seen by forced routing alone.
          return_routing: also return what the routers chose.

        Raises:
          ValueError: shapes; outside of jit also a token that the vocabulary does not have. Under jit such a one yields
            NaN, and so BAD_INPUT in `metrics.status`.
        """
        self._check_shapes(tokens, positions, segments, replay)
        if segments is not None:
            valid = (segments != 0).reshape(*segments.shape, *(1 for _ in tokens.shape[2:]))
            tokens = jnp.where(valid, tokens, jnp.zeros((), tokens.dtype))
            segments = _runs(segments)
        if self.starts:
            self._check_vocabulary(tokens)
        if positions is None:
            positions = _positions(segments, tokens.shape[1])
        around = Surroundings(self.rotation(self.config, positions), segments, jnp.asarray(step, jnp.int32))
        x = self._shard(self.embedding(tokens) if self.starts else tokens)
        if hasattr(self, "dense_layers"):
            x, _ = self._scan(self.dense_layers, x, None, lambda layer, x, _: (layer(x, around), None))

        def moe_layer(layer: MoELayer, x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
            x, metrics, routed = layer(x, around, *inputs)
            return x, (metrics, routed if return_routing else None)

        numbers = jnp.asarray(self.moe_layers, jnp.int32)
        x, (metrics, routed) = self._scan(self.layers, x, (replay, numbers), moe_layer)
        if not self.ends:
            return Output(x, metrics, routed)
        x = self.norm(x)
        logits = self.embedding.scores(x) if self.config.tied_embeddings else self.head(x)
        return Output(logits.astype(jnp.float32), metrics, routed)

    @classmethod
    def num_parameters(cls, config: Config) -> tuple[int, int]:
        """Parameters of the model and those that one token meets, by shape evaluation alone.

        All but the routed experts are met by every token, the embedding table included; of those, top_k of num_experts.
        """
        mesh = Mesh(np.asarray(jax.devices()[:1]), ("ep",))
        model = nnx.eval_shape(lambda: cls(config, mesh=mesh, moe_options={"num_slots": 0}, rngs=nnx.Rngs(0)))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        total = sum(leaf.size for leaf in jax.tree.leaves(params))
        routed = params["layers"]["moe"]["w"].size
        return total, total - routed + routed * config.top_k // config.num_experts

    def _scan(self, stack: Any, x: jax.Array, inputs: Any, call: Callable[..., Any]) -> tuple[jax.Array, Any]:
        """Runs the layers of a stack one after the other; `inputs` and what `call` returns besides x are stacked."""
        graph, states = nnx.split(stack)

        def body(x: jax.Array, of_layer: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            state, inputs = of_layer
            x, outputs = call(nnx.merge(graph, state), x, inputs)
            return self._shard(x), outputs

        if self.remat == "full":
            body = jax.checkpoint(body)
        elif self.remat == "dots":
            body = jax.checkpoint(body, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        return lax.scan(body, x, (states, inputs))

    def _shard(self, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(self.batch_axes)))

    def _check_vocabulary(self, tokens: jax.Array) -> None:
        if isinstance(tokens, jax.core.Tracer) or not getattr(tokens, "is_fully_addressable", True):
            return
        least, most, vocab = int(tokens.min()), int(tokens.max()), self.config.vocab
        if least < 0 or most >= vocab:
            raise ValueError(
                f"tokens lie in {least}..{most}, but the vocabulary is 0..{vocab - 1}: mark padding by segments"
            )

    def _check_shapes(self, x: jax.Array, *arrays: jax.Array | None) -> None:
        ways = int(np.prod([self.mesh.shape[name] for name in self.batch_axes]))
        wanted = "[batch, length]" if self.starts else f"[batch, length, {self.config.hidden}]"
        if x.ndim != (2 if self.starts else 3) or (not self.starts and x.shape[2] != self.config.hidden):
            raise ValueError(f"the model takes {wanted}, not an array of shape {x.shape}")
        if x.shape[0] % ways or not x.size:
            raise ValueError(
                f"the batch of {x.shape[0]} does not divide among the {ways} devices of mesh axes {self.batch_axes}:"
                " add sequences, of segment 0 if need be"
            )
        *per_token, replay = arrays
        for name, array in zip(("positions", "segments"), per_token, strict=True):
            if array is not None and array.shape != x.shape[:2]:
                raise ValueError(f"{name} has shape {array.shape}, but {x.shape[:2]} is needed, as that of the tokens")
        needed = (len(self.moe_layers), *x.shape[:2], self.config.top_k)
        if replay is not None and replay.shape != needed:
            raise ValueError(f"replay has shape {replay.shape}, but {needed} is needed: MoE layers, tokens, top_k")


def _norm(config: DecoderConfig, dtypes: Mapping[str, Any]) -> RMSNorm:
    return RMSNorm(config.hidden, eps=config.norm_eps, param_dtype=dtypes["param_dtype"])


def _stack(make: Callable[[nnx.Rngs], Any], key: jax.Array, layers: range) -> Any:
    """The layers as one module whose parameters have a leading axis; each draws by its own number."""
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.asarray(layers, jnp.uint32))
    stacked = nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    return stacked(lambda key: make(nnx.Rngs(key)))(keys)


def _runs(segments: jax.Array) -> jax.Array:
    """int32 [B, S]: the sequences of each row numbered from 1 on, so that no two have one number; padding stays 0."""
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(segments == 0, 0, jnp.cumsum(begins, axis=1, dtype=jnp.int32))


def _positions(segments: jax.Array | None, length: int) -> jax.Array:
    """int32 [B or 1, S]: the place of every token in its own sequence."""
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    if segments is None:
        return index
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return index - lax.cummax(jnp.where(begins, index, 0), axis=1)


def _check_stage(config: DecoderConfig, first: int, last: int) -> None:
    if not 0 <= first < last <= config.num_layers:
        raise ValueError(f"stage=({first}, {last}) must be layers within 0..{config.num_layers}, first before last")
    if last <= config.dense_layers:
        raise ValueError(
            f"stage=({first}, {last}) has no MoE layer: the first {config.dense_layers} layers are dense, end it later"
        )
    if config.tied_embeddings and (first, last) != (0, config.num_layers):
        raise ValueError(
            f"stage=({first}, {last}) of a model with tied embeddings: the first and the last stage would need the same"
            " table, so keep the model whole"
        )
