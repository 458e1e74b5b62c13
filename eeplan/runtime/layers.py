"""What a model part is built of: megatron-core's configuration of a run, and its layer modules.

On a GPU with Transformer Engine installed its fused modules are used, else megatron-core's own with the
attention and the norm of this package.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from eeplan.runtime.attention import SdpaCoreAttention
from eeplan.runtime.precision import dtype_of
from eeplan.spec import RunSpec


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Modules that layers and heads are built of."""

    layer: ModuleSpec
    """A transformer layer."""
    norm: Any
    """A norm's class, called with config, hidden_size and eps."""
    norm_is_in_linear: bool
    """Whether the norm before a matrix is part of the matrix's module (Transformer Engine)."""


class RmsNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that megatron-core may run on shares of the sequence.

    Each tensor-parallel rank then sees a share of the positions, so the weight's gradient is a sum over
    ranks: the mark on the weight makes ``finalize_model_grads`` add it up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


def has_transformer_engine(device: torch.device) -> bool:
    """Whether Transformer Engine can be used: it is installed, and ``device`` is a GPU."""
    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def layer_parts(device: torch.device) -> LayerParts:
    """The modules to build with on ``device``."""
    if has_transformer_engine(device):
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        return LayerParts(spec, gpt_layer_specs.TENorm, norm_is_in_linear=True)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = RmsNorm
    spec.submodules.pre_mlp_layernorm = RmsNorm
    spec.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    return LayerParts(spec, RmsNorm, norm_is_in_linear=False)


def transformer_config(run: RunSpec, pipeline_model_parallel_size: int) -> TransformerConfig:
    """megatron-core's configuration of ``run``, without fused kernels that need a GPU.

    Full recompute is not in it: the model does it (``EarlyExitGPT.run_layers``).
    """
    training, parallel = run.training, run.parallel
    dtype = dtype_of(training.precision)
    return TransformerConfig(
        num_layers=run.model.num_layers,
        hidden_size=run.model.hidden_size,
        num_attention_heads=run.model.num_attention_heads,
        num_query_groups=run.model.query_groups,
        ffn_hidden_size=run.model.ffn_size,
        kv_channels=run.model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=run.model.layernorm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=training.hidden_dropout,
        attention_dropout=training.attention_dropout,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        recompute_granularity="selective" if training.recompute_granularity == "selective" else None,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
    )
