"""EarlyExitGPT: megatron-core's GPTModel with output heads on intermediate layers.

The class holds the layers and exits of one pipeline stage; with one stage it is the whole model. Parameter
names are those of a stock Megatron GPT, plus ``exits.<depth>.…``. When a layer or a head runs is decided by
the caller (``stage.py`` in training, ``decode/`` in generation), never here.

Shape suffixes: S sequence, B batch, H hidden, V vocabulary (one tensor-parallel share of it).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eeplan.plan import Plan
from eeplan.runtime.backend import Backend, cuda_names_on_cpu
from eeplan.runtime.dropout import DropoutPlace, masks_of
from eeplan.runtime.layers import LayerParts, layer_parts, transformer_config
from eeplan.runtime.sharding import share_of, whole_shape
from eeplan.spec import HeadKind, RunSpec


@dataclass(frozen=True, slots=True)
class ExitSpec:
    """One early exit as the model needs it: where it reads and what its head is."""

    depth: int
    head: HeadKind
    tied: bool


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The part of the model that one pipeline stage holds. Layers are numbered from 1, inclusive."""

    first_layer: int
    last_layer: int
    exits: tuple[ExitSpec, ...]
    is_first: bool
    is_last: bool

    @property
    def num_layers(self) -> int:
        """Transformer layers on this stage."""
        return self.last_layer - self.first_layer + 1

    def holds_tied_matrix(self, run: RunSpec) -> bool:
        """Whether the stage holds a copy of the matrix that the final head and tied exits share."""
        embedding_counts = self.is_first and not run.model.untie_embeddings_and_output_weights
        return self.is_last or embedding_counts or any(exit_.tied for exit_ in self.exits)


def stage_specs(plan: Plan) -> tuple[StageSpec, ...]:
    """The model parts of a plan, one per pipeline stage."""
    last = len(plan.stages) - 1
    return tuple(
        StageSpec(
            first_layer=stage.first_layer,
            last_layer=stage.last_layer,
            exits=tuple(
                ExitSpec(exit_.depth, exit_.head, exit_.tied) for exit_ in plan.exits if exit_.stage == index
            ),
            is_first=index == 0,
            is_last=index == last,
        )
        for index, stage in enumerate(plan.stages)
    )


def whole_model_spec(plan: Plan) -> StageSpec:
    """All stages of a plan as one part, for a single process."""
    parts = stage_specs(plan)
    return StageSpec(
        first_layer=1,
        last_layer=parts[-1].last_layer,
        exits=tuple(exit_ for part in parts for exit_ in part.exits),
        is_first=True,
        is_last=True,
    )


class ExitHead(torch.nn.Module):
    """Hidden states to logits, by head kind (see ``spec.HeadKind``)."""

    def __init__(self, config: TransformerConfig, spec: ExitSpec, parts: LayerParts, vocab_size: int) -> None:
        super().__init__()
        if spec.head == "block":
            self.block = TransformerLayer(config, parts.layer.submodules, layer_number=spec.depth)
        if spec.head == "mlp":
            self.mlp_norm = torch.nn.Identity() if parts.norm_is_in_linear else _norm(config, parts)
            self.mlp = MLP(
                config, parts.layer.submodules.mlp.submodules, ffn_hidden_size=config.ffn_hidden_size
            )
        if spec.head != "minimal":
            self.norm = _norm(config, parts)
        self.kind = spec.head
        self.output_layer = _output_layer(config, vocab_size, allocate=not spec.tied)

    def forward(self, hidden_SBH: Tensor, rotary: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Logits [S, B, V] of this exit.

        Args:
            rotary: rotary angles of the S positions, for block heads.
            tied_weight: the shared vocabulary matrix, or None when the exit has its own.
        """
        hidden = hidden_SBH
        if self.kind == "block":
            hidden, _ = self.block(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
        if self.kind == "mlp":
            update, _ = self.mlp(self.mlp_norm(hidden))
            hidden = hidden + update
        if self.kind != "minimal":
            hidden = self.norm(hidden)
        logits_SBV, _ = self.output_layer(hidden, weight=tied_weight)
        return logits_SBV


class EarlyExitGPT(GPTModel):
    """One stage of a GPT with early exits. Pieces are exposed; nothing runs by itself."""

    def __init__(self, run: RunSpec, stage: StageSpec, config: TransformerConfig, parts: LayerParts) -> None:
        block = TransformerBlockSubmodules(
            layer_specs=[parts.layer] * stage.num_layers, layer_norm=parts.norm
        )
        super().__init__(
            config=config,
            transformer_layer_spec=block,
            vocab_size=run.padded_vocab_size,
            max_sequence_length=run.training.seq_length,
            pre_process=stage.is_first,
            post_process=stage.is_last,
            share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=run.model.rotary_base,
        )
        self.stage_spec = stage
        self.run = run
        self.exits = torch.nn.ModuleDict(
            {str(spec.depth): ExitHead(config, spec, parts, run.padded_vocab_size) for spec in stage.exits}
        )
        self.exit_is_tied = {spec.depth: spec.tied for spec in stage.exits}
        self.tied_replica: ColumnParallelLinear | None = None
        """This stage's copy of the shared matrix, where neither embedding nor final head holds one."""
        if stage.holds_tied_matrix(run) and not stage.is_last and not self._embedding_is_tied:
            self.tied_replica = _output_layer(config, run.padded_vocab_size, allocate=True)
        self._mark_shared_copies()

    @property
    def _embedding_is_tied(self) -> bool:
        return bool(self.pre_process and self.share_embeddings_and_output_weights)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """This stage's copy of the matrix shared by final head and tied exits; None if it has none."""
        if self._embedding_is_tied:
            return self.embedding.word_embeddings.weight
        if self.post_process:
            return self.output_layer.weight
        replica = getattr(self, "tied_replica", None)
        return None if replica is None else replica.weight

    def embed(
        self, tokens_BS: Tensor, position_ids_BS: Tensor, dropout: DropoutPlace | None = None
    ) -> Tensor:
        """Token embeddings [S, B, H]; first stage only."""
        with masks_of(dropout, "embedding", sequence_parallel=self.config.sequence_parallel):
            return self.embedding(input_ids=tokens_BS, position_ids=position_ids_BS)

    def rotary(self, length: int, offset: int = 0) -> Tensor:
        """Rotary angles [length, 1, 1, D] of positions ``offset`` onwards."""
        return self.rotary_pos_emb(length, offset=offset)

    def run_layers(
        self,
        hidden_SBH: Tensor,
        rotary: Tensor,
        start: int,
        stop: int,
        dropout: DropoutPlace | None = None,
    ) -> Tensor:
        """Run layers after depth ``start`` up to depth ``stop`` (layers ``start + 1`` to ``stop``).

        With full recompute only each layer's input is kept for the backward.
        """
        recompute = self.run.training.recompute_granularity == "full" and self.training
        for layer in range(start + 1, stop + 1):
            if recompute and torch.is_grad_enabled():
                # Dropout seeds itself, so random states need not be kept and set again.
                hidden_SBH = checkpoint(
                    self._run_layer, hidden_SBH, rotary, layer, dropout,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                hidden_SBH = self._run_layer(hidden_SBH, rotary, layer, dropout)
        return hidden_SBH

    def _run_layer(
        self, hidden_SBH: Tensor, rotary: Tensor, layer: int, dropout: DropoutPlace | None
    ) -> Tensor:
        module = self.decoder.layers[layer - self.stage_spec.first_layer]
        with masks_of(dropout, f"layer {layer}", sequence_parallel=self.config.sequence_parallel):
            hidden_SBH, _ = module(hidden_states=hidden_SBH, attention_mask=None, rotary_pos_emb=rotary)
        return hidden_SBH

    def exit_logits(
        self, depth: int, hidden_SBH: Tensor, rotary: Tensor, dropout: DropoutPlace | None = None
    ) -> Tensor:
        """Logits [S, B, V] of the early exit at ``depth``; of heads, only a block has dropout."""
        tied = self.shared_embedding_or_output_weight() if self.exit_is_tied[depth] else None
        with masks_of(dropout, f"exit {depth}", sequence_parallel=self.config.sequence_parallel):
            return self.exits[str(depth)](hidden_SBH, rotary, tied)

    def final_logits(self, hidden_SBH: Tensor) -> Tensor:
        """Logits [S, B, V] of the final head; last stage only."""
        weight = self.shared_embedding_or_output_weight() if self._embedding_is_tied else None
        logits_SBV, _ = self.output_layer(self.decoder.final_layernorm(hidden_SBH), weight=weight)
        return logits_SBV

    def named_global_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters under names that do not depend on the split; the tied matrix has one name everywhere."""
        shared = self.shared_embedding_or_output_weight()
        for name, parameter in self.named_parameters():
            is_shared = parameter is shared
            first = self.stage_spec.first_layer
            yield tied_matrix_name(self.run) if is_shared else global_name(name, first), parameter

    def _mark_shared_copies(self) -> None:
        """Tell megatron-core which copies to leave out of the gradient norm, so that each matrix counts once,

        and to give each copy a bucket of its own, so that the distributed optimizer cuts all copies alike.
        """
        shared = self.shared_embedding_or_output_weight()
        if shared is None:
            return
        untied = self.run.model.untie_embeddings_and_output_weights
        is_original = self.post_process if untied else self.pre_process
        marked: Any = shared
        marked.shared = not is_original
        marked.shared_embedding = True
        marked.is_embedding_or_output_parameter = True


def build_model(run: RunSpec, stage: StageSpec, backend: Backend) -> EarlyExitGPT:
    """Model part on the backend's device, initialised from ``run.training.seed``.

    megatron-core's own initialisation, which also marks tensor-parallel shares, is overwritten.
    """
    config = transformer_config(run, backend.pipeline_size)
    with cuda_names_on_cpu(backend.device):
        model = EarlyExitGPT(run, stage, config, layer_parts(backend.device))
    model.to(device=backend.device, dtype=config.params_dtype)
    initialize(model, run)
    return model


def initialize(model: EarlyExitGPT, run: RunSpec) -> None:
    """Fill every parameter from a generator seeded by its name, so that no split changes the model.

    Matrices are normal with ``init_method_std``; those that write into the residual stream are scaled down by
    sqrt(2 num_layers); norms are one.
    """
    std = run.model.init_method_std
    residual_std = std / math.sqrt(2.0 * run.model.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_global_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            writes_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            scale = residual_std if writes_residual else std
            _fill_normal(parameter, scale, name, run.training.seed)


def global_name(local_name: str, first_layer: int) -> str:
    """Name with the layer's index in the whole model (from 0) instead of in the stage.

    Norms that Transformer Engine keeps in the matrix after them get the names that they have without it.
    """
    name = re.sub(
        r"^decoder\.layers\.(\d+)\.",
        lambda match: f"decoder.layers.{int(match.group(1)) + first_layer - 1}.",
        local_name,
    )
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    name = re.sub(r"^(exits\.\d+)\.mlp\.linear_fc1\.layer_norm_weight$", r"\1.mlp_norm.weight", name)
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def tied_matrix_name(run: RunSpec) -> str:
    """Global name of the matrix that the final head and tied exits share."""
    if run.model.untie_embeddings_and_output_weights:
        return "output_layer.weight"
    return "embedding.word_embeddings.weight"


def _norm(config: TransformerConfig, parts: LayerParts) -> torch.nn.Module:
    norm: torch.nn.Module = parts.norm(
        config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
    )
    return norm


def _output_layer(config: TransformerConfig, vocab_size: int, *, allocate: bool) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        config.hidden_size,
        vocab_size,
        config=config,
        init_method=config.init_method,
        bias=False,
        skip_bias_add=False,
        gather_output=False,
        skip_weight_param_allocation=not allocate,
    )


def _fill_normal(parameter: torch.nn.Parameter, std: float, name: str, seed: int) -> None:
    """Draw the whole matrix on the CPU, keep this rank's tensor-parallel share."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    whole = torch.randn(whole_shape(parameter), generator=generator) * std
    parameter.copy_(share_of(whole, name, parameter))
