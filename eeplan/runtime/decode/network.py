"""The model as decoding runs it: the same parameters, a few rows of one sequence, no framework around them.

Training goes through megatron-core's modules. For a single row their bookkeeping (process groups, contexts,
autograd wrappers, bias and dropout plumbing) takes several times as long as a small layer's arithmetic, so
generation calls the same arithmetic on the same tensors directly. Tests hold every op against the modules'
own results. Covers what ``model.transformer_config`` builds: RMSNorm, rotary positions, grouped key/value
heads, gated SiLU, no biases; one process without tensor parallelism.

Shape suffixes: R rows (consecutive positions), H hidden, V vocabulary, G key/value heads, N query heads per
key/value head, D head channels, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from eeplan.runtime.decode.kv import KeyValueStore
from eeplan.runtime.model import EarlyExitGPT, ExitSpec


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parameters of one transformer layer."""

    attention_norm: Tensor
    qkv: Tensor
    proj: Tensor
    mlp_norm: Tensor
    fc1: Tensor
    fc2: Tensor
    slot: int
    """Its place in the store."""


@dataclass(frozen=True, slots=True)
class _Head:
    """Parameters of an exit's head, the final one included."""

    vocabulary: Tensor
    """[V, H], without padding."""
    norm: Tensor | None
    block: _Layer | None
    mlp: tuple[Tensor, Tensor, Tensor] | None
    """Norm, first and second matrix."""


class DecodeNetwork:
    """A whole model's parameters, and the keys and values of one sequence of at most ``capacity`` tokens.

    Args:
        model: the whole model, without tensor parallelism. Its parameters are read where they are.
        vocab_size: tokens that may be emitted; logits of the vocabulary's padding are not computed.
    """

    def __init__(self, model: EarlyExitGPT, capacity: int, vocab_size: int) -> None:
        shape = model.run.model
        self.exits: tuple[ExitSpec, ...] = tuple(sorted(model.stage_spec.exits, key=lambda e: e.depth))
        self.num_layers = model.stage_spec.last_layer
        self.vocab_size = vocab_size
        self._eps = shape.layernorm_epsilon
        self._groups, self._head_dim = shape.query_groups, shape.head_dim
        self._layers = [_layer_of(layer, slot) for slot, layer in enumerate(model.decoder.layers)]
        self._embedding: Tensor = model.embedding.word_embeddings.weight.detach()
        self._heads, num_slots = _heads_of(model, self.exits, vocab_size)
        self.store = KeyValueStore(
            num_layers=num_slots,
            capacity=capacity,
            num_query_groups=self._groups,
            head_dim=self._head_dim,
            dtype=self._embedding.dtype,
            device=self._embedding.device,
        )
        queries = shape.num_attention_heads // shape.query_groups
        self._cos_P1XD, self._sin_P1XD = _rotation(model, capacity, queries, self._embedding.dtype)
        self._multiply = linear if self.device.type == "cuda" else _multiply_on_cpu

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._embedding.device

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [R, H] of tokens."""
        return embedding(torch.tensor(tokens, device=self.device), self._embedding)

    def run_layers(self, hidden_RH: Tensor, position: int, start: int, stop: int) -> Tensor:
        """Run layers after depth ``start`` up to depth ``stop`` on the rows from ``position`` on."""
        mask = self._mask(len(hidden_RH), position)
        for layer in self._layers[start:stop]:
            hidden_RH = self._run_layer(layer, hidden_RH, position, mask)
        return hidden_RH

    def run_block(self, depth: int, hidden_RH: Tensor, position: int) -> Tensor:
        """The transformer layer inside a ``block`` head, which attends and so wants every row."""
        block = self._heads[depth].block
        assert block is not None, f"the exit at depth {depth} has no block"
        return self._run_layer(block, hidden_RH, position, self._mask(len(hidden_RH), position))

    def exit_logits(self, depth: int, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V] of the exit at ``depth``, or of the final one at the depth of all layers.

        Args:
            hidden_RH: hidden states there; of a ``block`` head, what :meth:`run_block` made of them.
        """
        head = self._heads[depth]
        if head.mlp is not None:
            norm, fc1, fc2 = head.mlp
            hidden_RH = self._mlp(hidden_RH, norm, fc1, fc2)
        if head.norm is not None:
            hidden_RH = self._norm(hidden_RH, head.norm)
        return self._multiply(hidden_RH, head.vocabulary)

    def final_logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V] of the final exit."""
        return self.exit_logits(self.num_layers, hidden_RH)

    def _norm(self, hidden_RH: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden_RH, weight.shape, weight, self._eps)

    def _mlp(self, hidden_RH: Tensor, norm: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        gate, up = self._multiply(self._norm(hidden_RH, norm), fc1).chunk(2, dim=-1)
        return hidden_RH + self._multiply(silu(gate) * up, fc2)

    def _run_layer(self, layer: _Layer, hidden_RH: Tensor, position: int, mask: Tensor | None) -> Tensor:
        rows, groups, width = len(hidden_RH), self._groups, self._head_dim
        # Each group holds its N queries, then its key, then its value (megatron-core's layout).
        qkv_RX = self._multiply(self._norm(hidden_RH, layer.attention_norm), layer.qkv)
        qkv_RGXD = qkv_RX.view(rows, groups, -1, width)
        here = slice(position, position + rows)
        turned_RGXD = torch.addcmul(
            qkv_RGXD * self._cos_P1XD[here], qkv_RGXD.roll(width // 2, dims=-1), self._sin_P1XD[here]
        )
        keys_GKD, values_GKD = self.store.extend(layer.slot, position, turned_RGXD[:, :, -2:])
        # The queries of one group look at the same keys, so they are rows of one product.
        query_GND = turned_RGXD[:, :, :-2].permute(1, 2, 0, 3).reshape(groups, -1, width)
        if mask is not None:
            mask = mask.repeat(query_GND.shape[1] // rows, 1)
        context_GND = scaled_dot_product_attention(
            query_GND[None], keys_GKD[None], values_GKD[None], attn_mask=mask
        )
        context_RH = context_GND.view(groups, -1, rows, width).permute(2, 0, 1, 3).reshape(rows, -1)
        hidden_RH = hidden_RH + self._multiply(context_RH, layer.proj)
        return self._mlp(hidden_RH, layer.mlp_norm, layer.fc1, layer.fc2)

    def _mask(self, rows: int, position: int) -> Tensor | None:
        """[R, K], True where row r may look at key k: k <= position + r. A single row sees all."""
        if rows == 1:
            return None
        queries_R = torch.arange(position, position + rows, device=self.device)
        return torch.arange(position + rows, device=self.device)[None] <= queries_R[:, None]


def _multiply_on_cpu(rows_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """``linear`` for few rows: [R, O].

    A CPU is held up by reading the weights, and its matrix library reads them at half the speed when they are
    the right-hand factor of a product with two to eight rows (measured with MKL; one row, or many, are fine).
    """
    if not 2 <= len(rows_RI) <= 8:
        return linear(rows_RI, weight_OI)
    return torch.mm(weight_OI, rows_RI.t()).t().contiguous()


def _rotation(model: EarlyExitGPT, capacity: int, queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine, and sine with the sign that turns a roll by half the channels into a rotation [P, 1, X, D].

    The rotation takes (a, b) to (a cos - b sin, b cos + a sin), with a and b the halves of the channels; a
    roll gives (b, a). X are a group's queries, its key and its value; the value is turned by no angle, so
    that all three take one operation.
    """
    with torch.no_grad():
        angles = model.rotary(capacity)
    half = angles.shape[-1] // 2
    cos, sin = angles.cos(), angles.sin()
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)

    def with_value(turning_P11D: Tensor, still: float) -> Tensor:
        parts = (turning_P11D.expand(-1, -1, queries + 1, -1), torch.full_like(turning_P11D, still))
        return torch.cat(parts, dim=2).to(dtype)

    return with_value(cos, 1.0), with_value(signed, 0.0)


def _layer_of(layer: Any, slot: int) -> _Layer:
    named = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    parameters = _Layer(
        attention_norm=named.pop("input_layernorm.weight"),
        qkv=named.pop("self_attention.linear_qkv.weight"),
        proj=named.pop("self_attention.linear_proj.weight"),
        mlp_norm=named.pop("pre_mlp_layernorm.weight"),
        fc1=named.pop("mlp.linear_fc1.weight"),
        fc2=named.pop("mlp.linear_fc2.weight"),
        slot=slot,
    )
    assert not named, f"parameters that decoding would leave out: {sorted(named)}"
    return parameters


def _heads_of(
    model: EarlyExitGPT, exits: Sequence[ExitSpec], vocab_size: int
) -> tuple[dict[int, _Head], int]:
    """Heads by depth, and how many layers need a place in the store."""
    shared = model.shared_embedding_or_output_weight()
    assert shared is not None, "the whole model holds the matrix of its final head"
    heads, slots = {}, model.stage_spec.last_layer
    for exit_ in exits:
        head = model.exits[str(exit_.depth)]
        named = {name: parameter.detach() for name, parameter in head.named_parameters()}
        block = _layer_of(head.block, slots) if exit_.head == "block" else None
        slots += block is not None
        mlp = None
        if exit_.head == "mlp":
            mlp = (named["mlp_norm.weight"], named["mlp.linear_fc1.weight"], named["mlp.linear_fc2.weight"])
        matrix = shared.detach() if exit_.tied else named["output_layer.weight"]
        heads[exit_.depth] = _Head(matrix[:vocab_size], named.get("norm.weight"), block, mlp)
    final_norm = model.decoder.final_layernorm.weight.detach()
    heads[model.stage_spec.last_layer] = _Head(shared.detach()[:vocab_size], final_norm, None, None)
    return heads, slots
