"""Shape of the model."""

from __future__ import annotations

from typing import Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from eeplan.schema import Model
from eeplan.spec.fields import require_divides


class ModelSpec(Model):
    """Shape of a Llama-like GPT (RMSNorm, RoPE, SwiGLU, no biases), in Megatron's argument names."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt | None = None
    """Key/value heads (grouped-query attention); None means as many as attention heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the SwiGLU MLP; None means 8/3 of hidden_size rounded up to a multiple of 64."""
    vocab_size: PositiveInt
    make_vocab_size_divisible_by: PositiveInt = 128
    untie_embeddings_and_output_weights: bool = False
    rotary_base: PositiveInt = 10000
    layernorm_epsilon: PositiveFloat = 1e-5
    init_method_std: PositiveFloat = 0.02

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP, with the default filled in."""
        return self.ffn_hidden_size or -(-8 * self.hidden_size // (3 * 64)) * 64

    @property
    def query_groups(self) -> int:
        """Number of key/value heads, with the default filled in."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels per attention head."""
        return self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _shapes_divide(self) -> Self:
        require_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.head_dim % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads is {self.head_dim}; rotary embedding needs an even number"
            )
        require_divides(
            "num_attention_heads", self.num_attention_heads, "num_query_groups", self.query_groups
        )
        return self
