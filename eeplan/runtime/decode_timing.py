"""Times the ops of a decode step by number of rows, and what the decode loop spends around them.

A miniature of the decoded model, with as many layers as the caches cannot hold, runs forward op by op
through the decoder's own network, on consecutive positions of one sequence or on one position of several,
with keys and values of those before. Exit checks stand between the layers as in a model with exits, so that a
vocabulary matrix they share has left the caches as far as it would there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from eeplan.profile import DecodeCosts, DecodeOpCost, OpName
from eeplan.runtime.backend import Backend
from eeplan.runtime.clock import Clock
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.network import Part, Transformer
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.decode.pipeline import NoLaterStages, PipelineDriver
from eeplan.runtime.decode.policy import judge
from eeplan.runtime.decode.requests import Engine, Request
from eeplan.runtime.decode.weights import Weights, weights_of
from eeplan.runtime.launch import available_cores
from eeplan.runtime.model import EarlyExitGPT, ExitSpec, StageSpec, build_model
from eeplan.runtime.op_timing import timing
from eeplan.sim.costs import EXIT_OPS
from eeplan.spec import HEAD_KINDS, RunSpec

ROWS = (1, 2, 4, 5, 8, 9, 12, 16)
"""Of one sequence. Products go in tiles of four, so costs step up after every fourth."""
SEQUENCES = 8
"""Of a batched step, with one row each and with two."""
STEPS_PER_PROMPT = 8
NEVER_REACHED = 1.0 - 2.0**-50
"""A threshold at which exits are asked, and keep their tokens."""
CACHE_BYTES = 256 * 2**20
"""Layers are added until their weights exceed this, which no cache holds, or the model is complete."""
WARM_UP_ROUNDS = 2

Mark = object
Key = tuple[OpName, int, int]
"""Op, rows, and sequences that they belong to."""


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
    model = build_model(run, decoded_stage(run), backend).eval()
    context = max(1, run.training.seq_length // 2)
    timer = DecodeTimer(model, context, processes=processes, threads=threads)
    deadline, rounds = time.monotonic() + seconds, 0
    while rounds < min_rounds or time.monotonic() < deadline:
        timer.round()
        rounds += 1
    return timer.costs()


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


class DecodeTimer:
    """Times steps in rounds, which may stand between other work that is timed.

    A round runs, op by op, one step for each of :data:`ROWS` and two of :data:`SEQUENCES` sequences, and
    whole steps of an engine with one sequence and with so many, asking no exit and asking all.

    Args:
        model: the whole model, without tensor parallelism.
        context: positions that attention looks back at.
        processes: that decode at once; of several, the engine is that of a pipeline's stages.
        threads: compute threads meanwhile.
        vocab_size: tokens that the tokenizer knows; default, the model's vocabulary without padding.
    """

    def __init__(
        self,
        model: EarlyExitGPT,
        context: int,
        *,
        processes: int,
        threads: int,
        vocab_size: int | None = None,
    ) -> None:
        self._context, self._processes, self._threads = context, processes, threads
        self._clock = Clock(next(model.parameters()).device)
        weights = weights_of(model, max(model.run.training.seq_length, context + ROWS[-1]), vocab_size)
        transformer = Transformer(weights)
        self._num_exits = len(weights.stage.exits)
        self._steps = [
            *(_Step(transformer, context, rows, sequences=1) for rows in ROWS),
            *(_Step(transformer, context, each * SEQUENCES, sequences=SEQUENCES) for each in (1, 2)),
        ]
        self._wholes = [
            _WholeStep(_engine(weights, processes, number), context, number, asks)
            for number in (1, SEQUENCES)
            for asks in (False, True)
        ]
        self._durations: dict[Key, list[int]] = {}
        self._overheads: dict[tuple[int, bool], list[int]] = {
            (whole.sequences, whole.asks): [] for whole in self._wholes
        }
        self._clock.start()
        for _ in range(WARM_UP_ROUNDS):
            self._run()

    def round(self) -> None:
        """Time every step once more."""
        marks, wholes = self._run()
        ends = [mark for _, start, end in marks for mark in (start, end)]
        times = self._clock.resolve([*ends, *(mark for _, start, end in wholes for mark in (start, end))])
        pairs = list(zip(times[::2], times[1::2], strict=True))
        ops_ns = dict.fromkeys(self._overheads, 0)
        for ((op, rows, sequences), _, _), (start_ns, end_ns) in zip(marks, pairs, strict=False):
            self._durations.setdefault((op, rows, sequences), []).append(end_ns - start_ns)
            if rows == sequences:
                ops_ns[sequences, True] += end_ns - start_ns
                ops_ns[sequences, False] += 0 if op in EXIT_OPS.values() else end_ns - start_ns
        for (whole, _, _), (start_ns, end_ns) in zip(wholes, pairs[len(marks) :], strict=True):
            key = whole.sequences, whole.asks
            self._overheads[key].append(end_ns - start_ns - ops_ns[key])

    def costs(self) -> DecodeCosts:
        """What the rounds so far have found."""
        ops = [
            DecodeOpCost(op=op, rows=rows, sequences=sequences, time=timing(durations))
            for (op, rows, sequences), durations in self._durations.items()
        ]
        # A model that is decoded to its last position at once has no whole step to time.
        one_s, _, many_s, many_asked_s = (
            max(0.0, statistics.median(found) / 1e9) if found else 0.0 for found in self._overheads.values()
        )
        further_s = max(0.0, many_s - one_s) / (SEQUENCES - 1)
        return DecodeCosts(
            processes=self._processes,
            threads=self._threads,
            context_tokens=self._context,
            ops=tuple(sorted(ops, key=lambda cost: (cost.op, cost.rows, cost.sequences))),
            step_overhead_s=one_s,
            sequence_overhead_s=further_s,
            check_overhead_s=max(0.0, many_asked_s - many_s) / (SEQUENCES * max(1, self._num_exits)),
        )

    def _run(self) -> tuple[list[tuple[Key, Mark, Mark]], list[tuple[_WholeStep, Mark, Mark]]]:
        marks: list[tuple[Key, Mark, Mark]] = []
        wholes: list[tuple[_WholeStep, Mark, Mark]] = []
        with _threads(self._threads), torch.no_grad():
            for step in self._steps:
                step.run(partial(_timed, self._clock, marks, step))
            for whole in self._wholes:
                if whole.is_ready():
                    start = self._clock.mark()
                    whole.run()
                    wholes.append((whole, start, self._clock.mark()))
        return marks, wholes


@dataclass(frozen=True, slots=True)
class _Op:
    """One op of a step: hidden states (or tokens) in, hidden states out; heads return their input."""

    name: OpName
    run: Callable[[Tensor], Tensor]


class _Step:
    """One decode step, op by op, on ``rows`` positions, of one sequence or each of another."""

    def __init__(self, transformer: Transformer, context: int, rows: int, *, sequences: int) -> None:
        self.rows, self.sequences = rows, sequences
        self._transformer = transformer
        each = rows // sequences
        self._parts = []
        for _ in range(sequences):
            store = transformer.new_store(context + each)
            store.suppose_filled(context)
            self._parts.append(Part(store, context, each))
        self._tokens = torch.randint(0, transformer.weights.vocab_size, (rows,)).tolist()
        self._chain = list(self._ops(transformer.weights.stage.exits))

    def run(self, around: Callable[[_Op, Tensor], Tensor]) -> None:
        """Run all ops, each through ``around``."""
        hidden = torch.empty(0)
        for op in self._chain:
            hidden = around(op, hidden)

    def _ops(self, exits: Sequence[ExitSpec]) -> Iterator[_Op]:
        num_layers = self._transformer.weights.num_layers
        yield _Op("embedding", lambda _: self._transformer.embed(self._tokens))
        for depth in range(1, num_layers + 1):
            yield _Op("layer", partial(self._layer, depth))
            for exit_ in exits:
                if exit_.depth == depth or (exit_.depth > depth == num_layers):
                    yield _Op(EXIT_OPS[exit_.head], partial(self._check, exit_))
        yield _Op("final_head", partial(self._emit, num_layers))

    def _layer(self, depth: int, hidden_RH: Tensor) -> Tensor:
        return self._transformer.run_layers(hidden_RH, self._parts, depth - 1, depth)

    def _check(self, exit_: ExitSpec, hidden_RH: Tensor) -> Tensor:
        read_RH = hidden_RH
        if exit_.head == "block":
            # The layer inside runs on all rows.
            read_RH = self._transformer.run_block(exit_.depth, hidden_RH, self._parts)
            # Of one sequence only the current token's logits are wanted.
            read_RH = read_RH[-1:] if self.sequences == 1 else read_RH
        for logits_V in self._logits(exit_.depth, read_RH):
            judge(logits_V)
        return hidden_RH

    def _emit(self, num_layers: int, hidden_RH: Tensor) -> Tensor:
        for logits_V in self._logits(num_layers, hidden_RH):
            judge(logits_V)
            float(logits_V[int(logits_V.argmax())])
        return hidden_RH

    def _logits(self, depth: int, hidden_RH: Tensor) -> Sequence[Tensor]:
        """Of each sequence's last row."""
        each = len(hidden_RH) // self.sequences
        logits_RV = self._transformer.logits(depth, hidden_RH, is_one_sequence=self.sequences == 1)
        return logits_RV[each - 1 :: each].unbind()


def _engine(weights: Weights, processes: int, sequences: int) -> Engine:
    """What decodes: of a pipeline, a stage that holds all layers."""
    if processes == 1:
        return LocalEngine(weights, max_running=sequences)
    exits = weights.stage.exits
    return PipelineDriver(Transformer(weights), NoLaterStages(), exits, max_running=sequences)


class _WholeStep:
    """A step as the engine runs it, on sequences of about ``context`` tokens, through all layers."""

    def __init__(self, engine: Engine, context: int, sequences: int, asks: bool) -> None:
        self._engine, self._context, self.sequences, self.asks = engine, context, sequences, asks
        mode = "full" if not asks else "catch_up" if isinstance(engine, LocalEngine) else "pipeline"
        self._options = generate_options(
            threshold=NEVER_REACHED, mode=mode, max_new_tokens=1 + STEPS_PER_PROMPT
        )

    def is_ready(self) -> bool:
        """Whether there is a step to run; feeds new prompts where the last ones are done."""
        if not self._engine.running:
            for _ in range(self.sequences):
                self._engine.submit(Request((0,) * self._context, self._options))
            self._engine.step()
        return self._engine.running == self.sequences

    def run(self) -> None:
        """Emit a token of each sequence."""
        self._engine.step()


def _timed(clock: Clock, marks: list[tuple[Key, Mark, Mark]], step: _Step, op: _Op, hidden: Tensor) -> Tensor:
    start = clock.mark()
    output = op.run(hidden)
    marks.append(((op.name, step.rows, step.sequences), start, clock.mark()))
    return output


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute with so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
