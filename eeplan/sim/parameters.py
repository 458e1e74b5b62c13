"""Exact parameter counts per pipeline stage, for one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eeplan.spec import HeadKind, RunSpec


@dataclass(frozen=True, slots=True)
class Head:
    """What an exit puts on its stage, whatever layer it reads."""

    kind: HeadKind
    tied: bool
    """Whether it shares the final head's vocabulary matrix (the embedding's, too, in a tied model)."""


def vocabulary_parameters(run: RunSpec) -> int:
    """One rank's share of a vocabulary matrix: h V / t."""
    return run.model.hidden_size * run.padded_vocab_size // run.parallel.tensor_model_parallel_size


def layer_parameters(run: RunSpec) -> int:
    """One transformer layer: q, k, v, projection, SwiGLU MLP (2 h F in, F h out), two RMSNorms of h."""
    model, tp = run.model, run.parallel.tensor_model_parallel_size
    key_value = 2 * model.query_groups * model.head_dim
    attention = model.hidden_size * (2 * model.hidden_size + key_value)
    return (attention + 3 * model.hidden_size * model.ffn_size) // tp + 2 * model.hidden_size


def head_parameters(run: RunSpec, head: Head) -> int:
    """An exit head, without the matrix where that is shared (see ``spec.HeadKind``)."""
    model, tp = run.model, run.parallel.tensor_model_parallel_size
    own_matrix = 0 if head.tied else vocabulary_parameters(run)
    mlp = model.hidden_size + 3 * model.hidden_size * model.ffn_size // tp
    before_matrix = {
        "minimal": 0,
        "norm": model.hidden_size,
        "mlp": mlp + model.hidden_size,
        "block": layer_parameters(run) + model.hidden_size,
    }
    return before_matrix[head.kind] + own_matrix


def holds_shared_matrix(run: RunSpec, num_stages: int, stage: int, heads: Sequence[Head]) -> bool:
    """Whether ``stage`` holds a copy of the matrix that the final head and tied exits share."""
    embedding_is_shared = stage == 0 and not run.model.untie_embeddings_and_output_weights
    is_last = stage == num_stages - 1
    return is_last or embedding_is_shared or any(head.tied for head in heads)


def stage_parameters(
    run: RunSpec, num_stages: int, stage: int, num_layers: int, heads: Sequence[Head]
) -> int:
    """All parameters that one rank of ``stage`` holds, with that many layers and the exits ``heads`` on it.

    Besides layers: the embedding on the first stage, the final norm on the last, and one copy of the shared
    vocabulary matrix where the final head or a tied exit needs it and the embedding is not already that
    (facts: a replica of h V per stage even when tied, except on stage 1).
    """
    total = num_layers * layer_parameters(run)
    total += sum(head_parameters(run, head) for head in heads)
    embedding_is_shared = stage == 0 and not run.model.untie_embeddings_and_output_weights
    if stage == 0:
        total += vocabulary_parameters(run)
    if stage == num_stages - 1:
        total += run.model.hidden_size
    if holds_shared_matrix(run, num_stages, stage, heads) and not embedding_is_shared:
        total += vocabulary_parameters(run)
    return total
