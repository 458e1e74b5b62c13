"""Small decode processes and usages, drawn at random or written down, for the tests of the decode model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate

from hypothesis import strategies as st

from eeplan.profile import DecodeCosts, DecodeOpCost, OpName, OpProfile, Timing
from eeplan.sim.costs import EXIT_OPS
from eeplan.sim.decode_process import DecodeProcess, Exit, RowCosts
from eeplan.spec import HEAD_KINDS, HeadKind
from eeplan.usage import ExitShares


def constant(ns: int) -> RowCosts:
    """The same for any number of rows, as if only reading the weights counted."""
    return RowCosts((1,), (ns,))


def make_process(
    exits: Sequence[tuple[int, HeadKind, int]] = (),
    layers_per_stage: tuple[int, ...] = (4,),
    *,
    layer: RowCosts | None = None,
    embedding_ns: int = 50,
    head_ns: int = 700,
    final_ns: int = 900,
    heads: Mapping[HeadKind, RowCosts] | None = None,
    overhead_ns: int = 0,
    message_ns: int = 0,
    return_ns: int = 0,
) -> DecodeProcess:
    """A process with exits (depth, head, stage); a layer costs 1,000 ns and 100 ns for each further row."""
    return DecodeProcess(
        exits=tuple(Exit(*one) for one in exits),
        layers_per_stage=layers_per_stage,
        layer=layer or RowCosts((1, 2), (1000, 1100)),
        embedding=constant(embedding_ns),
        final_head=constant(final_ns),
        heads=heads or dict.fromkeys(HEAD_KINDS, constant(head_ns)),
        step_overhead_ns=overhead_ns,
        message_ns=message_ns,
        return_ns=return_ns,
    )


def make_shares(process: DecodeProcess, early: Sequence[float], threshold: float = 0.5) -> ExitShares:
    """Shares of the tokens that leave at each exit of ``process``."""
    return ExitShares(
        depths=process.depths[:-1],
        num_layers=process.num_layers,
        early=tuple(early),
        threshold=threshold,
        is_assumption=True,
        sentence="made up",
    )


@st.composite
def row_costs_cases(draw: st.DrawFn) -> RowCosts:
    """Costs at 1, 2, 4, 8 and 16 rows that do not fall."""
    steps = draw(st.lists(st.integers(0, 500), min_size=4, max_size=4))
    return RowCosts((1, 2, 4, 8, 16), tuple(accumulate([draw(st.integers(1, 2000)), *steps])))


@st.composite
def processes(draw: st.DrawFn, max_stages: int = 4, min_exits: int = 0) -> DecodeProcess:
    """Up to ``max_stages`` stages of 1 to 4 layers, up to 4 exits of any kind, random costs."""
    layers = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=max_stages)))
    if sum(layers) <= min_exits:
        layers = (layers[0] + min_exits, *layers[1:])
    ends, last = list(accumulate(layers)), sum(layers)
    chosen = draw(st.sets(st.integers(1, last - 1), min_size=min_exits, max_size=4)) if last > 1 else set()
    exits = []
    for depth in sorted(chosen):
        stage = next(index for index, end in enumerate(ends) if depth <= end)
        # The hidden state between two stages can be read on either side.
        stage += depth == ends[stage] and draw(st.booleans())
        exits.append(Exit(depth, draw(st.sampled_from(HEAD_KINDS)), stage))
    return DecodeProcess(
        exits=tuple(exits),
        layers_per_stage=layers,
        layer=draw(row_costs_cases()),
        embedding=draw(row_costs_cases()),
        final_head=draw(row_costs_cases()),
        heads={kind: draw(row_costs_cases()) for kind in HEAD_KINDS},
        step_overhead_ns=draw(st.integers(0, 300)),
        message_ns=draw(st.integers(0, 400)),
        return_ns=draw(st.integers(0, 400)),
    )


@st.composite
def usages(draw: st.DrawFn, process: DecodeProcess, least_final: float = 0.0) -> ExitShares:
    """Random shares for the exits of ``process``; some are nothing, some are nearly all."""
    parts = [draw(st.sampled_from([0.0, 0.01, 0.3, 1.0, 3.0])) for _ in process.exits]
    final = draw(st.sampled_from([0.01, 0.3, 1.0])) if least_final or not sum(parts) else 0.0
    final = max(final, draw(st.sampled_from([0.0, 0.01, 1.0])))
    whole = sum(parts) + final
    return make_shares(process, [part / whole * (1.0 - least_final) for part in parts])


def draw_depths(process: DecodeProcess, usage: ExitShares, num_tokens: int, seed: int) -> list[int]:
    """Where each of so many independent tokens leaves."""
    return random.Random(seed).choices(process.depths, usage.all, k=num_tokens)


def with_decode_costs(
    profile: OpProfile,
    *,
    layer_s: float = 1e-3,
    row_s: float = 5e-5,
    head_s: float = 3e-4,
    overhead_s: float = 1e-4,
    processes: Sequence[int] = (1, 2),
    rows: Sequence[int] = (1, 2, 4, 8, 16),
) -> OpProfile:
    """``profile`` with made-up decode costs: a layer takes ``layer_s`` and ``row_s`` for each further row."""
    base: dict[OpName, float] = {"layer": layer_s, "embedding": 2e-5, "final_head": head_s}
    base |= {EXIT_OPS[kind]: head_s for kind in HEAD_KINDS}
    base["exit_block"] += layer_s

    def timing(seconds: float) -> Timing:
        return Timing(n=5, median_s=seconds, mean_s=seconds, p10_s=seconds, p90_s=seconds)

    ops = tuple(
        DecodeOpCost(op=op, rows=number, time=timing(seconds + (number - 1) * row_s))
        for op, seconds in base.items()
        for number in rows
    )
    costs = [
        DecodeCosts(processes=number, threads=1, context_tokens=16, ops=ops, step_overhead_s=overhead_s)
        for number in processes
    ]
    return profile.model_copy(update={"decode": tuple(costs)})
