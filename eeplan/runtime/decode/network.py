"""The model as decoding runs it: the same parameters, a few rows of some sequences, no framework around them.

Training goes through megatron-core's modules. For a single row their bookkeeping (process groups, contexts,
autograd wrappers, bias and dropout plumbing) takes several times as long as a small layer's arithmetic, so
generation calls the same arithmetic on the same tensors directly. Tests hold every op against the modules'
own results. Covers what ``layers.transformer_config`` builds: RMSNorm, rotary positions, grouped key/value
heads, gated SiLU, no biases.

Rows of several sequences share the products with a layer's matrices; each attends to its own sequence.

Shape suffixes: R rows, H hidden, V vocabulary, G key/value heads, N query heads per key/value head, X a
group's queries, key and value, D head channels, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from eeplan.runtime.decode.kv import KeyValueStore
from eeplan.runtime.decode.products import SHORT, Product, short_product
from eeplan.runtime.decode.weights import LayerWeights, Weights, weights_of
from eeplan.runtime.model import EarlyExitGPT, ExitSpec


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive positions of one sequence, as rows of a forward."""

    store: KeyValueStore
    position: int
    """Of the first row."""
    rows: int


@dataclass(frozen=True, slots=True)
class _Place:
    """What attention needs to know about the rows of a forward, the same on every layer."""

    parts: Sequence[Part]
    cos_R1XD: Tensor
    sin_R1XD: Tensor
    masks: list[Tensor | None]
    """By part, over the queries of a group and the keys; None where a single row sees all."""
    multiply: Product


class Transformer:
    """Layers and heads of a whole model or of one pipeline stage, over any number of sequences.

    A part with more than ``products.SHORT`` rows must be alone in its forward.
    """

    def __init__(self, weights: Weights) -> None:
        shape = weights.run.model
        self.weights = weights
        self.first_depth = weights.stage.first_layer - 1
        """Layers before the first one here."""
        self.last_depth = weights.stage.last_layer
        self._eps = shape.layernorm_epsilon
        self._team = weights.team
        self._groups, self._head_dim = shape.query_groups // weights.team.size, shape.head_dim
        self._queries = shape.num_attention_heads // shape.query_groups
        self._short = short_product(weights.device, weights.dtype)

    def new_store(self, capacity: int) -> KeyValueStore:
        """Room for one sequence."""
        return KeyValueStore(
            num_layers=self.weights.num_slots,
            capacity=capacity,
            num_query_groups=self._groups,
            head_dim=self._head_dim,
            dtype=self.weights.dtype,
            device=self.weights.device,
        )

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [R, H] of tokens; first stage only."""
        assert self.weights.embedding is not None, "only the first stage embeds"
        return embedding(torch.tensor(tokens, device=self.weights.device), self.weights.embedding)

    def run_layers(self, hidden_RH: Tensor, parts: Sequence[Part], start: int, stop: int) -> Tensor:
        """Run layers after depth ``start`` up to depth ``stop`` on the rows of all parts, in their order."""
        place, first = self._place(parts), self.first_depth
        for layer in self.weights.layers[start - first : stop - first]:
            hidden_RH = self._run_layer(layer, hidden_RH, place)
        return hidden_RH

    def run_block(self, depth: int, hidden_RH: Tensor, parts: Sequence[Part]) -> Tensor:
        """The transformer layer inside a ``block`` head, which attends and so wants every row."""
        block = self.weights.heads[depth].block
        assert block is not None, f"the exit at depth {depth} has no block"
        return self._run_layer(block, hidden_RH, self._place(parts))

    def logits(
        self,
        depth: int,
        hidden_RH: Tensor,
        candidates_C: Tensor | None = None,
        *,
        is_one_sequence: bool = False,
    ) -> Tensor:
        """Logits [R, V] of the exit at ``depth``, or of the final one at the depth of all layers.

        Args:
            hidden_RH: hidden states there; of a ``block`` head, what :meth:`run_block` made of them.
            candidates_C: tokens whose logits are wanted [R, C]; default, of all.
            is_one_sequence: that all rows are of one sequence; many of them need no tiles then.
        """
        head = self.weights.heads[depth]
        multiply = linear if is_one_sequence and len(hidden_RH) > SHORT else self._short
        if head.mlp is not None:
            norm, fc1, fc2 = head.mlp
            hidden_RH = self._mlp(hidden_RH, norm, fc1, fc2, multiply)
        if head.norm is not None:
            hidden_RH = self._norm(hidden_RH, head.norm)
        return self._of_all_tokens(multiply, hidden_RH, head.vocabulary, candidates_C)

    def _of_all_tokens(
        self, multiply: Product, hidden_RH: Tensor, held_VH: Tensor, candidates_C: Tensor | None
    ) -> Tensor:
        """Logits of all tokens or of the candidates, those that other processes of the team hold included."""
        if self._team.size == 1:
            return multiply(hidden_RH, held_VH if candidates_C is None else held_VH[candidates_C])
        vocab_size = self.weights.vocab_size
        held, rows = self._team.tokens(vocab_size), len(hidden_RH)
        if candidates_C is None:
            logits_RV = hidden_RH.new_zeros(rows, vocab_size)
            logits_RV[:, held.start : held.stop] = multiply(hidden_RH, held_VH)
            return self._team.total(logits_RV)
        mine_C = (candidates_C >= held.start) & (candidates_C < held.stop)
        logits_RC = hidden_RH.new_zeros(rows, len(candidates_C))
        logits_RC[:, mine_C] = multiply(hidden_RH, held_VH[candidates_C[mine_C] - held.start])
        return self._team.total(logits_RC)

    def _norm(self, hidden_RH: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden_RH, weight.shape, weight, self._eps)

    def _mlp(self, hidden_RH: Tensor, norm: Tensor, fc1: Tensor, fc2: Tensor, multiply: Product) -> Tensor:
        gate, up = multiply(self._norm(hidden_RH, norm), fc1).chunk(2, dim=-1)
        return hidden_RH + self._team.total(multiply(silu(gate) * up, fc2))

    def _run_layer(self, layer: LayerWeights, hidden_RH: Tensor, place: _Place) -> Tensor:
        rows, groups, width = len(hidden_RH), self._groups, self._head_dim
        # Each group holds its N queries, then its key, then its value (megatron-core's layout).
        qkv_RX = place.multiply(self._norm(hidden_RH, layer.attention_norm), layer.qkv)
        qkv_RGXD = qkv_RX.view(rows, groups, -1, width)
        turned_RGXD = torch.addcmul(
            qkv_RGXD * place.cos_R1XD, qkv_RGXD.roll(width // 2, dims=-1), place.sin_R1XD
        )
        if len(place.parts) == 1:
            context_RH = self._attend(layer.slot, place.parts[0], place.masks[0], turned_RGXD)
        else:
            sizes = [part.rows for part in place.parts]
            each = zip(place.parts, place.masks, turned_RGXD.split(sizes), strict=True)
            context_RH = torch.cat([self._attend(layer.slot, *one) for one in each])
        hidden_RH = hidden_RH + self._team.total(place.multiply(context_RH, layer.proj))
        return self._mlp(hidden_RH, layer.mlp_norm, layer.fc1, layer.fc2, place.multiply)

    def _attend(self, slot: int, part: Part, mask: Tensor | None, turned_RGXD: Tensor) -> Tensor:
        rows, groups, width = part.rows, self._groups, self._head_dim
        keys_GKD, values_GKD = part.store.extend(slot, part.position, turned_RGXD[:, :, -2:])
        # The queries of one group look at the same keys, so they are rows of one product.
        query_GND = turned_RGXD[:, :, :-2].permute(1, 2, 0, 3).reshape(groups, -1, width)
        context_GND = scaled_dot_product_attention(
            query_GND[None], keys_GKD[None], values_GKD[None], attn_mask=mask
        )
        return context_GND.view(groups, -1, rows, width).permute(2, 0, 1, 3).reshape(rows, -1)

    def _place(self, parts: Sequence[Part]) -> _Place:
        is_long = any(part.rows > SHORT for part in parts)
        assert not is_long or len(parts) == 1, "a long part shares no product"
        cos, sin = self.weights.cos_P1XD, self.weights.sin_P1XD
        spans = [slice(part.position, part.position + part.rows) for part in parts]
        if len(spans) == 1:
            cos_R1XD, sin_R1XD = cos[spans[0]], sin[spans[0]]
        else:
            cos_R1XD, sin_R1XD = (torch.cat([table[span] for span in spans]) for table in (cos, sin))
        masks = [self._mask(part.rows, part.position) for part in parts]
        return _Place(parts, cos_R1XD, sin_R1XD, masks, linear if is_long else self._short)

    def _mask(self, rows: int, position: int) -> Tensor | None:
        """[N R, K], True where row r may look at key k: k <= position + r. A single row sees all."""
        if rows == 1:
            return None
        device = self.weights.device
        queries_R = torch.arange(position, position + rows, device=device)
        mask_RK = torch.arange(position + rows, device=device)[None] <= queries_R[:, None]
        return mask_RK.repeat(self._queries, 1)


class DecodeNetwork:
    """A whole model, and the keys and values of one sequence of at most ``capacity`` tokens.

    Args:
        model: the whole model, without tensor parallelism. Its parameters are read where they are.
        vocab_size: tokens that may be emitted; logits of the vocabulary's padding are not computed.
    """

    def __init__(self, model: EarlyExitGPT, capacity: int, vocab_size: int) -> None:
        self._serve(Transformer(weights_of(model, capacity, vocab_size)), capacity)

    @classmethod
    def of(cls, transformer: Transformer, capacity: int) -> DecodeNetwork:
        """One more sequence for parameters that are there already."""
        network = cls.__new__(cls)
        network._serve(transformer, capacity)
        return network

    def _serve(self, transformer: Transformer, capacity: int) -> None:
        self.transformer = transformer
        self.store = transformer.new_store(capacity)

    @property
    def exits(self) -> tuple[ExitSpec, ...]:
        """The early exits, by depth."""
        return self.transformer.weights.stage.exits

    @property
    def num_layers(self) -> int:
        """Transformer layers of the model."""
        return self.transformer.weights.num_layers

    @property
    def vocab_size(self) -> int:
        """Tokens that may be emitted."""
        return self.transformer.weights.vocab_size

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.transformer.weights.device

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [R, H] of tokens."""
        return self.transformer.embed(tokens)

    def part(self, hidden_RH: Tensor, position: int) -> Part:
        """Rows of this sequence."""
        return Part(self.store, position, len(hidden_RH))

    def run_layers(self, hidden_RH: Tensor, position: int, start: int, stop: int) -> Tensor:
        """Run layers after depth ``start`` up to depth ``stop`` on the rows from ``position`` on."""
        return self.transformer.run_layers(hidden_RH, (self.part(hidden_RH, position),), start, stop)

    def run_block(self, depth: int, hidden_RH: Tensor, position: int) -> Tensor:
        """The transformer layer inside a ``block`` head, which attends and so wants every row."""
        return self.transformer.run_block(depth, hidden_RH, (self.part(hidden_RH, position),))

    def exit_logits(self, depth: int, hidden_RH: Tensor, candidates_C: Tensor | None = None) -> Tensor:
        """Logits [R, V] of the exit at ``depth``; see :meth:`Transformer.logits`."""
        return self.transformer.logits(depth, hidden_RH, candidates_C, is_one_sequence=True)

    def final_logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V] of the final exit."""
        return self.exit_logits(self.num_layers, hidden_RH)
