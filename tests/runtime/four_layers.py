"""The model of four layers that tests of gradients and layouts train, and the exits they choose from."""

from __future__ import annotations

from typing import Any

EXITS: list[dict[str, Any]] = [
    {"layer": 1, "boundary": "after", "head": "minimal"},
    {"layer": 3, "boundary": "before", "head": "norm", "tied": False},
    {"layer": 3, "boundary": "after", "head": "mlp"},
    {"layer": 4, "boundary": "before", "head": "block"},
]
"""Depths 1, 2, 3 and 3 cannot all be used at once; cases pick from them."""


def four_layers(*, untied: bool) -> dict[str, Any]:
    """The model section of a run file."""
    return {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 120,
        "make_vocab_size_divisible_by": 64,
        "untie_embeddings_and_output_weights": untied,
    }
