"""Grouped SwiGLU over the instances of one rank, on rows that are sorted and aligned by instance."""

from topoep_jax.experts.activation import swiglu as swiglu
from topoep_jax.experts.api import gmm as gmm
from topoep_jax.experts.api import swiglu_backward as swiglu_backward
from topoep_jax.experts.api import wgrad as wgrad
from topoep_jax.experts.packed import Instances as Instances
from topoep_jax.experts.packed import Matrix as Matrix
from topoep_jax.experts.packed import WeightGrad as WeightGrad
from topoep_jax.experts.packed import pack_experts as pack_experts
from topoep_jax.experts.packed import packed_matrices as packed_matrices
from topoep_jax.experts.packed import unpack_experts as unpack_experts
