"""Expected time per token by listing every way in which a decode process can come back to where it began.

The process starts anew after every token that passes all layers. So the expected time per token is the
expected time of such a cycle over its expected number of tokens, both sums over all sequences of exits, each
of which is played by the event simulation.
"""

from __future__ import annotations

from itertools import product
from math import prod

from eeplan.sim.decode_events import simulate_decode
from eeplan.sim.decode_process import DecodeProcess
from eeplan.spec import DecodeMode
from eeplan.usage import ExitShares


def ns_per_token(process: DecodeProcess, usage: ExitShares, mode: DecodeMode, limit: int) -> float:
    """For ``kv_recompute`` and ``catch_up``: no cycle is longer than ``limit + 1`` tokens."""
    pairs = list(zip(process.depths, usage.all, strict=True))
    time = tokens = 0.0
    for length in range(1, limit + 2):
        for early in product(pairs[:-1], repeat=length - 1):
            # When ``limit`` tokens wait, the last one passes all layers wherever it is emitted.
            for last in pairs if length == limit + 1 else pairs[-1:]:
                path = [*early, last]
                probability = prod(share for _, share in path)
                if probability > 0.0:
                    trace = simulate_decode(process, mode, [depth for depth, _ in path], limit)
                    time += probability * trace.done_ns
                    tokens += probability * length
    return time / tokens


def pipeline_ns_per_token(process: DecodeProcess, usage: ExitShares, longest: int) -> float:
    """For ``pipeline``, cycles of up to ``longest`` tokens; what is left out must be unlikely.

    A cycle begins when a token comes out of the last stage, so its first token finds everything idle.
    """
    pairs = list(zip(process.depths, usage.all, strict=True))
    time = tokens = 0.0
    for length in range(1, longest + 1):
        for early in product(pairs[:-1], repeat=length - 1):
            probability = prod(share for _, share in early) * pairs[-1][1]
            if probability > 0.0:
                path = [*(depth for depth, _ in early), process.num_layers]
                trace = simulate_decode(process, "pipeline", path)
                back_ns = process.return_ns if len(process.layers_per_stage) > 1 else 0
                time += probability * (trace.emitted_ns[-1] + back_ns)
                tokens += probability * length
    return time / tokens
