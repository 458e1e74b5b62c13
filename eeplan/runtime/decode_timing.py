"""Times the ops of a decode step by number of rows, and what the decode loop spends around them.

A miniature of the decoded model, with as many layers as the caches cannot hold, runs forward op by op through
the decoder's own network, on consecutive positions of one sequence, with keys and values of those before.
Exit checks stand between the layers as in a model with exits, so that a vocabulary matrix they share has left
the caches as far as it would there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from eeplan.profile import DecodeCosts, DecodeOpCost, OpName
from eeplan.runtime.backend import Backend
from eeplan.runtime.clock import Clock
from eeplan.runtime.decode.decoder import ExitDecoder
from eeplan.runtime.decode.modes import make_decoder
from eeplan.runtime.decode.network import DecodeNetwork
from eeplan.runtime.decode.policy import exit_policy, judge
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.launch import available_cores
from eeplan.runtime.model import EarlyExitGPT, ExitSpec, StageSpec, build_model
from eeplan.runtime.op_timing import timing
from eeplan.sim.costs import EXIT_OPS
from eeplan.spec import HEAD_KINDS, RunSpec

ROWS = (1, 2, 4, 8, 16)
CACHE_BYTES = 256 * 2**20
"""Layers are added until their weights exceed this, which no cache holds, or the model is complete."""
WARM_UP_ROUNDS = 2

Mark = object


@dataclass(frozen=True, slots=True)
class _Op:
    """One op of a step: hidden states (or tokens) in, hidden states out; heads return their input."""

    name: OpName
    run: Callable[[Tensor], Tensor]


def decoded_stage(run: RunSpec) -> StageSpec:
    """The whole model, or as much of it as the caches cannot hold, with one exit of each head kind.

    Exits are spread over the depth; they share the vocabulary matrix if the run's exits do. A model with too
    few layers to hold them all gets depths beyond its own, where only the timing meets them.
    """
    model = run.model
    matrices = 2 * (1 + model.query_groups / model.num_attention_heads) * model.hidden_size**2
    width = run.training.element_bytes
    layer_bytes = width * (matrices + 3 * model.hidden_size * model.ffn_size)
    layers = min(model.num_layers, int(CACHE_BYTES // layer_bytes) + 1)
    places = len(HEAD_KINDS) + 1
    tied = not run.exits.untie_exit_output_weights
    exits = tuple(
        ExitSpec(number * layers // places if layers >= places else layers + number, kind, tied)
        for number, kind in enumerate(HEAD_KINDS, start=1)
    )
    return StageSpec(first_layer=1, last_layer=layers, exits=exits, is_first=True, is_last=True)


def measure_decode(
    run: RunSpec, backend: Backend, *, processes: int, threads: int, seconds: float, min_rounds: int = 8
) -> DecodeCosts:
    """Time decode steps on this process.

    Args:
        run: without tensor parallelism; attention looks back at half of its sequence length.
        processes: how many measure at the same time, this one included.
        threads: compute threads of this process meanwhile.
        seconds: how long to time, after warm-up; at least ``min_rounds`` rounds.
    """
    with _threads(threads), torch.no_grad():
        model = build_model(run, decoded_stage(run), backend).eval()
        context = max(1, run.training.seq_length // 2)
        steps = {rows: _Step(model, context, rows) for rows in ROWS}
        decoder = _decoder_at(model, context)
        rounds = _time_rounds(steps, decoder, Clock(backend.device), seconds, min_rounds)
    ops = [
        DecodeOpCost(op=name, rows=rows, time=timing(durations))
        for (name, rows), durations in rounds.durations.items()
    ]
    return DecodeCosts(
        processes=processes,
        threads=threads,
        context_tokens=context,
        ops=tuple(sorted(ops, key=lambda cost: (cost.op, cost.rows))),
        step_overhead_s=max(0.0, statistics.median(rounds.overheads) / 1e9),
    )


def measure_decode_costs(
    run: RunSpec, backend: Backend, group: dist.ProcessGroup, processes: int, *, seconds: float
) -> tuple[DecodeCosts, ...]:
    """Time decode steps as they run in one process alone, and in a pipeline with all processes busy.

    Collective over the ``processes`` ranks of ``group``; what rank 0 returns counts. With tensor parallelism
    nothing is measured.

    Args:
        seconds: for each of both.
    """
    if run.parallel.tensor_model_parallel_size > 1:
        return ()
    measured = []
    if backend.rank == 0:
        # Alone, a process has all cores of the machine, as in `eeplan generate`.
        threads = available_cores()
        measured.append(measure_decode(run, backend, processes=1, threads=threads, seconds=seconds))
    dist.barrier(group=group)
    if processes > 1:
        threads = torch.get_num_threads()
        measured.append(measure_decode(run, backend, processes=processes, threads=threads, seconds=seconds))
    return tuple(measured)


class _Step:
    """One decode step on some rows, op by op."""

    def __init__(self, model: EarlyExitGPT, context: int, rows: int) -> None:
        vocab_size = model.run.model.vocab_size
        network = DecodeNetwork(model, context + rows, vocab_size)
        network.store.suppose_filled(context)
        self.tokens = torch.randint(0, vocab_size, (rows,)).tolist()
        self.chain = list(_chain(network, self.tokens, context))

    def run(self, around: Callable[[_Op, Tensor], Tensor]) -> None:
        """Run all ops, each through ``around``."""
        hidden = torch.empty(0)
        for op in self.chain:
            hidden = around(op, hidden)


def _chain(network: DecodeNetwork, tokens: list[int], context: int) -> Iterator[_Op]:
    def check(exit_: ExitSpec, hidden: Tensor) -> Tensor:
        read = hidden
        if exit_.head == "block":
            # The layer inside runs on all rows; only the current token's logits are wanted.
            read = network.run_block(exit_.depth, hidden, context)[-1:]
        judge(network.exit_logits(exit_.depth, read)[-1])
        return hidden

    def emit(hidden: Tensor) -> Tensor:
        logits_V = network.final_logits(hidden)[-1]
        judge(logits_V)
        float(logits_V[int(logits_V.argmax())])
        return hidden

    def layer(index: int, hidden: Tensor) -> Tensor:
        return network.run_layers(hidden, context, index, index + 1)

    yield _Op("embedding", lambda _: network.embed(tokens))
    for depth in range(1, network.num_layers + 1):
        yield _Op("layer", partial(layer, depth - 1))
        for exit_ in network.exits:
            if exit_.depth == depth or (exit_.depth > depth == network.num_layers):
                yield _Op(EXIT_OPS[exit_.head], partial(check, exit_))
    yield _Op("final_head", emit)


def _decoder_at(model: EarlyExitGPT, context: int) -> ExitDecoder:
    """A decoder whose next step is at position ``context`` and goes through all layers unchecked."""
    decoder = make_decoder(
        model, "full", exit_policy(1.0), Sampling(), seed=1, recompute_limit=0, capacity=context + 1
    )
    assert isinstance(decoder, ExitDecoder), "mode full has no drafts"
    decoder.rows.network.store.suppose_filled(context)
    return decoder


@dataclass(slots=True)
class _Rounds:
    """What the rounds took, in nanoseconds."""

    durations: dict[tuple[OpName, int], list[int]]
    overheads: list[int]
    """Of a whole decoder step over the sum of the same ops on one row, round by round."""


def _time_rounds(
    steps: dict[int, _Step], decoder: ExitDecoder, clock: Clock, seconds: float, min_rounds: int
) -> _Rounds:
    """Every round runs a step of each number of rows and a whole step of the decoder."""
    rounds = _Rounds({}, [])
    context = decoder.rows.network.store.capacity - 1
    clock.start()
    deadline = 0.0
    done = -WARM_UP_ROUNDS
    while done < min_rounds or time.monotonic() < deadline:
        marks: list[tuple[tuple[OpName, int], Mark, Mark]] = []
        for rows, step in steps.items():
            step.run(partial(_timed, clock, marks, rows))
        decoder.rows.length = context
        start = clock.mark()
        decoder.step(0)
        end = clock.mark()
        done += 1
        if done > 0:
            _add_round(rounds, clock, marks, (start, end))
        elif done == 0:
            deadline = time.monotonic() + seconds
    return rounds


def _timed(
    clock: Clock, marks: list[tuple[tuple[OpName, int], Mark, Mark]], rows: int, op: _Op, hidden: Tensor
) -> Tensor:
    start = clock.mark()
    output = op.run(hidden)
    marks.append(((op.name, rows), start, clock.mark()))
    return output


def _add_round(
    rounds: _Rounds,
    clock: Clock,
    marks: list[tuple[tuple[OpName, int], Mark, Mark]],
    whole: tuple[Mark, Mark],
) -> None:
    times = clock.resolve([*(mark for _, start, end in marks for mark in (start, end)), *whole])
    overhead = times[-1] - times[-2]
    for (key, _, _), start_ns, end_ns in zip(marks, times[:-2:2], times[1:-2:2], strict=True):
        rounds.durations.setdefault(key, []).append(end_ns - start_ns)
        if key in (("embedding", 1), ("layer", 1), ("final_head", 1)):
            overhead -= end_ns - start_ns
    rounds.overheads.append(overhead)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute with so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
