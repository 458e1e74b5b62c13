"""The parameters that decoding reads, by layer and head, of a whole model or of one pipeline stage.

They come from named tensors: of a model in memory, whose parameters are then read where they are, or of a
checkpoint, whatever layout it was trained in, of which only what the stage needs is read.

Shape suffixes: V vocabulary, H hidden, P positions, X a group's queries, key and value, D head channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from eeplan.errors import CheckpointError, DecodeError
from eeplan.runtime.decode.team import ALONE, Team
from eeplan.runtime.model import EarlyExitGPT, StageSpec
from eeplan.spec import RunSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
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
class HeadWeights:
    """Parameters of an exit's head, the final one included."""

    vocabulary: Tensor
    """[V, H], without padding; of the team's tokens."""
    norm: Tensor | None
    block: LayerWeights | None
    mlp: tuple[Tensor, Tensor, Tensor] | None
    """Norm, first and second matrix."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What one process decodes with."""

    run: RunSpec
    stage: StageSpec
    """Layers and exits held; exits are in order of depth."""
    num_layers: int
    """Of the whole model."""
    vocab_size: int
    """Tokens that may be emitted."""
    embedding: Tensor | None
    """On the first stage."""
    layers: tuple[LayerWeights, ...]
    heads: dict[int, HeadWeights]
    """By depth; the final one, on the last stage, at the depth of all layers."""
    num_slots: int
    """Layers that need a place in the store: those of the stage, then those inside its heads."""
    cos_P1XD: Tensor
    sin_P1XD: Tensor
    """Rotation, see :func:`rotation`."""
    team: Team
    """Processes that hold the other shares of the stage's matrices."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.layers[0].qkv.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.layers[0].qkv.device


def weights_of(
    model: EarlyExitGPT,
    positions: int,
    vocab_size: int | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Weights:
    """Parameters of a model in memory: whole, on this process, without tensor parallelism.

    Args:
        positions: most tokens of a sequence.
        vocab_size: tokens that may be emitted; default, the model's vocabulary without padding.
        dtype: to compute in; default, the model's own, in which parameters are not copied.

    Raises:
        DecodeError: a parameter does not fit into ``dtype``.
    """
    run = model.run
    named = {
        name: _cast(name, parameter.detach(), dtype) for name, parameter in model.named_global_parameters()
    }
    with torch.no_grad():
        angles = model.rotary(positions)
    return weights_from(
        named, run, model.stage_spec, angles, run.model.vocab_size if vocab_size is None else vocab_size
    )


def stored_weights(
    folder: Path,
    run: RunSpec,
    stage: StageSpec,
    vocab_size: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    team: Team = ALONE,
) -> Weights:
    """Parameters of one stage out of a verified checkpoint of any layout.

    Args:
        dtype: to compute in; default, as stored.
        team: processes that share the stage.

    Raises:
        CheckpointError: a tensor is missing or not readable.
        DecodeError: one does not fit into ``dtype``.
    """
    reader = dcp.FileSystemReader(folder)
    try:
        stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        missing = [name for name in _names(run, stage) if name not in stored]
        if missing:
            raise ValueError(f"it has no {missing[0]}")
        state: dict[str, Any] = {
            name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
            for name in _names(run, stage)
        }
        with warnings.catch_warnings():
            # Each process reads for itself; torch need not point it out.
            warnings.filterwarnings("ignore", message=r"torch\.distributed is (disabled|unavailable)")
            dcp.load(state, storage_reader=reader, no_dist=True)
    except (OSError, RuntimeError, ValueError, KeyError, dcp.CheckpointException) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"checkpoint {folder} does not fit its plan: {first_line}") from None
    named = {name: _cast(name, tensor, dtype).to(device) for name, tensor in state.items()}
    angles = rotary_angles(run, run.training.seq_length).to(device)
    return weights_from(named, run, stage, angles, vocab_size, team)


def weights_from(
    named: Mapping[str, Tensor],
    run: RunSpec,
    stage: StageSpec,
    angles_P11D: Tensor,
    vocab_size: int,
    team: Team = ALONE,
) -> Weights:
    """Parameters out of whole tensors by their global names; more than are needed may be there."""
    exits = tuple(sorted(stage.exits, key=lambda exit_: exit_.depth))
    layers = tuple(
        _layer(named, f"decoder.layers.{index}.", slot, team)
        for slot, index in enumerate(range(stage.first_layer - 1, stage.last_layer))
    )
    heads, num_slots = _heads(named, run, stage, vocab_size, team)
    queries = run.model.num_attention_heads // run.model.query_groups
    cos, sin = rotation(angles_P11D, queries, layers[0].qkv.dtype)
    return Weights(
        run=run,
        stage=StageSpec(stage.first_layer, stage.last_layer, exits, stage.is_first, stage.is_last),
        num_layers=run.model.num_layers,
        vocab_size=vocab_size,
        embedding=named["embedding.word_embeddings.weight"] if stage.is_first else None,
        layers=layers,
        heads=heads,
        num_slots=num_slots,
        cos_P1XD=cos,
        sin_P1XD=sin,
        team=team,
    )


def rotary_angles(run: RunSpec, positions: int) -> Tensor:
    """Angles [P, 1, 1, D] of rotary embedding, the same for both halves of the channels (Su et al. 2021)."""
    even = torch.arange(0, run.model.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (run.model.rotary_base ** (even / run.model.head_dim))
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles, angles), dim=-1)[:, None, None]


def rotation(angles_P11D: Tensor, queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine, and sine with the sign that turns a roll by half the channels into a rotation [P, 1, X, D].

    The rotation takes (a, b) to (a cos - b sin, b cos + a sin), with a and b the halves of the channels; a
    roll gives (b, a). X are a group's queries, its key and its value; the value is turned by no angle, so
    that all three take one operation.
    """
    half = angles_P11D.shape[-1] // 2
    cos, sin = angles_P11D.cos(), angles_P11D.sin()
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)

    def with_value(turning_P11D: Tensor, still: float) -> Tensor:
        parts = (turning_P11D.expand(-1, -1, queries + 1, -1), torch.full_like(turning_P11D, still))
        return torch.cat(parts, dim=2).to(dtype)

    return with_value(cos, 1.0), with_value(signed, 0.0)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(tensor.dtype).max and bool((cast.isinf() & tensor.isfinite()).any()):
        raise DecodeError(
            f"{name} has numbers beyond {largest:g}, the largest of {str(dtype).removeprefix('torch.')}; use "
            "another dtype"
        )
    return cast


def _names(run: RunSpec, stage: StageSpec) -> list[str]:
    """Global names of the tensors that a stage decodes with."""
    names = [
        f"decoder.layers.{index}.{part}"
        for index in range(stage.first_layer - 1, stage.last_layer)
        for part in _LAYER_PARTS
    ]
    for exit_ in stage.exits:
        prefix = f"exits.{exit_.depth}."
        if exit_.head == "block":
            names += [f"{prefix}block.{part}" for part in _LAYER_PARTS]
        if exit_.head == "mlp":
            names += [f"{prefix}{part}" for part in _MLP_PARTS]
        if exit_.head != "minimal":
            names.append(f"{prefix}norm.weight")
        names.append(_matrix_name(run) if exit_.tied else f"{prefix}output_layer.weight")
    if stage.is_last:
        names += [_FINAL_NORM, _matrix_name(run)]
    if stage.is_first:
        names.append("embedding.word_embeddings.weight")
    return list(dict.fromkeys(names))


_LAYER_PARTS = (
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
"""In the order of :class:`LayerWeights`."""
_MLP_PARTS = ("mlp_norm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
_FINAL_NORM = "decoder.final_layernorm.weight"


def _matrix_name(run: RunSpec) -> str:
    """Of the matrix that the final head and tied exits share."""
    if run.model.untie_embeddings_and_output_weights:
        return "output_layer.weight"
    return "embedding.word_embeddings.weight"


def _layer(named: Mapping[str, Tensor], prefix: str, slot: int, team: Team) -> LayerWeights:
    known = {f"{prefix}{part}" for part in _LAYER_PARTS}
    left_out = [name for name in named if name.startswith(prefix) and name not in known]
    assert not left_out, f"parameters that decoding would leave out: {left_out}"
    tensors = [named[f"{prefix}{part}"] for part in _LAYER_PARTS]
    attention_norm, qkv, proj, mlp_norm, fc1, fc2 = tensors
    return LayerWeights(
        attention_norm=attention_norm,
        # Laid out by group, so an even cut is one by group.
        qkv=team.share(qkv),
        proj=team.share(proj, dim=1),
        mlp_norm=mlp_norm,
        fc1=team.gated_share(fc1),
        fc2=team.share(fc2, dim=1),
        slot=slot,
    )


def _heads(
    named: Mapping[str, Tensor], run: RunSpec, stage: StageSpec, vocab_size: int, team: Team
) -> tuple[dict[int, HeadWeights], int]:
    """Heads by depth, and how many layers need a place in the store."""
    heads, slots = {}, stage.num_layers
    tokens = team.tokens(vocab_size)
    held = slice(tokens.start, tokens.stop)
    for exit_ in sorted(stage.exits, key=lambda one: one.depth):
        prefix = f"exits.{exit_.depth}."
        block = _layer(named, f"{prefix}block.", slots, team) if exit_.head == "block" else None
        slots += block is not None
        mlp = None
        if exit_.head == "mlp":
            norm, fc1, fc2 = (named[f"{prefix}{part}"] for part in _MLP_PARTS)
            mlp = (norm, team.gated_share(fc1), team.share(fc2, dim=1))
        matrix = named[_matrix_name(run) if exit_.tied else f"{prefix}output_layer.weight"]
        heads[exit_.depth] = HeadWeights(matrix[held], named.get(f"{prefix}norm.weight"), block, mlp)
    if stage.is_last:
        matrix = named[_matrix_name(run)][held]
        heads[run.model.num_layers] = HeadWeights(matrix, named[_FINAL_NORM], None, None)
    return heads, slots
