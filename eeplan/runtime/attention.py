"""Core attention on ``torch.nn.functional.scaled_dot_product_attention``.

Goes into megatron-core's SelfAttention through the layer spec. It keeps no [s, s] matrix, on CPU or GPU.
Decoding has its own (``decode.network``).

Shape suffixes: S positions, B batch, N query heads, G key/value heads, D channels.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class SdpaCoreAttention(torch.nn.Module):
    """Causal attention with grouped key/value heads, in the signature megatron-core expects."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [S, B, N, D]; key, value: [S, B, G, D]. Rotary embedding is already applied.
            attention_mask: ignored; the mask is causal.

        Returns:
            [S, B, N * D].
        """
        query_BNSD, key_BGSD, value_BGSD = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout_p = self.dropout_p if self.training else 0.0
        # Tensor-parallel ranks hold different heads, and so different masks.
        own_masks = get_cuda_rng_tracker().fork() if dropout_p else contextlib.nullcontext()
        with own_masks:
            context_BNSD = scaled_dot_product_attention(
                query_BNSD,
                key_BGSD,
                value_BGSD,
                dropout_p=dropout_p,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        seq, batch = query.shape[:2]
        return context_BNSD.permute(2, 0, 1, 3).reshape(seq, batch, -1)
