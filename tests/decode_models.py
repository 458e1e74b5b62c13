"""A small model with early exits in float64, equal to the reference's, for the tests of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from builders import make_run
from hypothesis import strategies as st
from oracles import naive_decode
from oracles import reference_gpt as gpt

from eeplan.runtime import backend
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.kv import KeyValueStore
from eeplan.runtime.decode.network import DecodeNetwork
from eeplan.runtime.model import EarlyExitGPT, ExitSpec, StageSpec, build_model
from eeplan.spec import HEAD_KINDS, RunSpec

SEQ_LENGTH = 24
ALL_HEADS = [
    {"layer": 1, "head": "minimal"},
    {"layer": 2, "head": "block", "tied": False},
    {"layer": 4, "boundary": "before", "head": "mlp"},
    {"layer": 4, "head": "norm"},
]
PROMPT = [3, 1, 4, 1, 5]
THRESHOLD = 0.5
"""With these heads and seed, tokens leave at every exit."""
NEW = SEQ_LENGTH - len(PROMPT) + 1


def small_run(exits: list[dict[str, Any]], untied: bool = False, vocab_size: int = 13) -> RunSpec:
    """Five layers of 16 channels, grouped keys, a padded vocabulary."""
    return make_run(
        model={
            "num_layers": 5,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 24,
            "vocab_size": vocab_size,
            "make_vocab_size_divisible_by": 16,
            "untie_embeddings_and_output_weights": untied,
        },
        parallel={"pipeline_model_parallel_size": 1},
        training__seq_length=SEQ_LENGTH,
        exits={"layers": exits},
    )


def build(
    here: backend.Backend, run: RunSpec, dtype: torch.dtype = torch.float64, seed: int = 6
) -> tuple[EarlyExitGPT, gpt.Parameters]:
    """The runtime's model and the reference's parameters, equal."""
    exits = gpt.requested_exits(run)
    params = gpt.init_parameters(run, seed, dtype, std=0.3)
    stage = StageSpec(
        first_layer=1,
        last_layer=run.model.num_layers,
        exits=tuple(ExitSpec(e.depth, e.head, e.tied) for e in exits),
        is_first=True,
        is_last=True,
    )
    model = build_model(run, stage, here).to(dtype).eval()
    named = dict(model.named_global_parameters())
    assert named.keys() == params.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(params[name])
    return model, params


def differences(found: Sequence[Emission], expected: Sequence[naive_decode.NaiveToken]) -> list[str]:
    """What differs, one line a token; empty when equal."""
    lines = [f"{len(found)} tokens instead of {len(expected)}"] if len(found) != len(expected) else []
    for index, (a, b) in enumerate(zip(found, expected, strict=False)):
        numbers = torch.tensor([a.confidence - b.confidence, a.logprob - b.logprob]).abs()
        if (a.token, a.exit) != (b.token, b.exit) or not bool((numbers < 1e-9).all()):
            lines.append(f"token {index}: {a} instead of {b}")
    return lines


def entries_of(model: EarlyExitGPT, text: Sequence[int]) -> KeyValueStore:
    """Keys and values of a whole text computed at once, block heads included."""
    network = DecodeNetwork(model, len(text), model.run.model.vocab_size)
    with torch.no_grad():
        hidden, depth = network.embed(text), 0
        for exit_ in network.exits:
            hidden = network.run_layers(hidden, 0, depth, exit_.depth)
            depth = exit_.depth
            if exit_.head == "block":
                network.run_block(depth, hidden, 0)
        network.run_layers(hidden, 0, depth, network.num_layers)
    return network.store


def entry_errors(found: KeyValueStore, expected: KeyValueStore, slots: Sequence[int]) -> list[str]:
    """Layers on which an entry of the whole text is missing, or differs by more than 1e-5."""
    length, wrong = expected.capacity, []
    for slot in slots:
        if found.valid_L[slot] != length:
            wrong.append(f"layer {slot}: {found.valid_L[slot]} of {length} entries")
        pair = [store.entries_L2GPD[slot, :, :, :length] for store in (found, expected)]
        largest = float((pair[0] - pair[1]).abs().max())
        if largest > 1e-5:
            wrong.append(f"layer {slot}: entries differ by {largest}")
    return wrong


@st.composite
def exit_requests(draw: st.DrawFn, min_size: int = 0) -> list[dict[str, Any]]:
    """Up to four exits of any kind below the last layer."""
    depths = draw(st.lists(st.integers(1, 4), unique=True, min_size=min_size, max_size=4))
    heads = st.sampled_from(HEAD_KINDS)
    return [{"layer": depth, "head": draw(heads), "tied": draw(st.booleans())} for depth in depths]
