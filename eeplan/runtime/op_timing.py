"""Times every op of a stage and counts its bytes, on the modules and in the rhythm that training uses.

A miniature stage (embedding, some layers, one head of each kind, final head) runs forward and backward with
two microbatches in flight, op by op. So each op finds the caches as a pipeline stage would leave them, and
its backward includes adding to the gradient buffers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from eeplan.profile import OpCost, OpName, Timing
from eeplan.runtime.clock import Clock, Mark
from eeplan.runtime.dropout import DropoutPlace
from eeplan.runtime.losses import mean_cross_entropy
from eeplan.runtime.memory import trace_allocations
from eeplan.runtime.model import EarlyExitGPT, ExitSpec, StageSpec
from eeplan.runtime.stage import Batch
from eeplan.spec import HEAD_KINDS, RunSpec

IN_FLIGHT = 2
"""Microbatches between forward and backward while timing."""
DISTURBED = 0.03
"""Share of a sample's time without a core from which on other work is taken to have disturbed it."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Op:
    """One op of the chain: hidden states (or tokens) in, hidden states or a scalar loss out."""

    name: OpName
    run: Callable[[Tensor], Tensor]
    is_head: bool
    """Heads read the last hidden state; their output is a loss and goes nowhere."""


@dataclass(slots=True)
class _Done:
    """An op that has run forward and waits for its backward."""

    op: _Op
    source: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class _Taken:
    """One timed run of an op."""

    op: OpName
    start: Mark
    end: Mark
    core_ns: int
    """How long this thread had a core meanwhile."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Duration of one run of an op, and whether other work took the core away meanwhile."""

    duration_ns: int
    disturbed: bool


class _Stopwatch:
    """Times ops in the order they run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.taken: list[_Taken] = []

    def around(self, op: _Op, run: Callable[[], Result]) -> Result:
        """Run an op between two marks."""
        core_ns = time.thread_time_ns()
        start = self._clock.mark()
        result = run()
        end = self._clock.mark()
        self.taken.append(_Taken(op.name, start, end, time.thread_time_ns() - core_ns))
        return result

    def samples(self, device: torch.device) -> dict[OpName, list[Sample]]:
        """Samples of every op. Disturbance can only be told where one CPU thread does all the work."""
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        times = self._clock.resolve([mark for taken in self.taken for mark in (taken.start, taken.end)])
        found: dict[OpName, list[Sample]] = {}
        for taken, start_ns, end_ns in zip(self.taken, times[::2], times[1::2], strict=True):
            duration_ns = end_ns - start_ns
            disturbed = alone and taken.core_ns < (1 - DISTURBED) * duration_ns
            found.setdefault(taken.op, []).append(Sample(duration_ns, disturbed))
        return found


@dataclass(slots=True)
class _Bytes:
    """Bytes per op, from the allocator."""

    kept: int
    forward_transient: int
    backward_transient: int = 0


def miniature_stage(layers: int) -> StageSpec:
    """A stage with every op that a plan may need; exits are untied, so that each has a matrix of its own."""
    exits = tuple(ExitSpec(index + 1, kind, tied=False) for index, kind in enumerate(HEAD_KINDS))
    return StageSpec(first_layer=1, last_layer=layers, exits=exits, is_first=True, is_last=True)


def random_batch(run: RunSpec, device: torch.device, micro_batch_size: int | None = None) -> Batch:
    """A microbatch of random tokens in the run's shape, or of another size."""
    shape = (micro_batch_size or run.training.micro_batch_size, run.training.seq_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, run.model.vocab_size, shape, generator=generator).to(device)
    positions = torch.arange(shape[1], device=device).expand(shape).contiguous()
    return Batch(tokens, tokens.roll(-1, dims=1), torch.ones(shape, device=device), positions)


def measure_ops(
    model: EarlyExitGPT, batch: Batch, clock: Clock, device: torch.device, *, seconds: float, min_rounds: int
) -> tuple[list[OpCost], float]:
    """Time all ops for about ``seconds`` (at least ``min_rounds`` rounds), then count their bytes.

    Args:
        model: built from :func:`miniature_stage`, with gradient buffers attached. Layers run as in its
            training: recomputed, on their part of the sequence, with dropout.
        batch: one microbatch; the costs returned are for its size.

    Returns:
        The costs, and the share of samples that other work on the machine disturbed.
    """
    chain = _chain(model, batch)
    forward, backward = (
        watch.samples(device) for watch in _time_rounds(chain, batch.tokens, clock, seconds, min_rounds)
    )
    sizes = _count_bytes(chain, batch.tokens, device)
    costs = [
        OpCost(
            op=name,
            micro_batch_size=batch.tokens.shape[0],
            tensor_model_parallel_size=model.config.tensor_model_parallel_size,
            sequence_parallel=model.config.sequence_parallel,
            recompute_granularity=model.run.training.recompute_granularity if name == "layer" else None,
            forward=timing(undisturbed(forward[name])),
            backward=timing(undisturbed(backward[name])),
            kept_bytes=sizes[name].kept,
            forward_transient_bytes=sizes[name].forward_transient,
            backward_transient_bytes=sizes[name].backward_transient,
        )
        for name in forward
    ]
    every = [sample for side in (forward, backward) for samples in side.values() for sample in samples]
    return costs, sum(sample.disturbed for sample in every) / len(every)


def undisturbed(samples: list[Sample]) -> list[int]:
    """Durations in nanoseconds of the undisturbed samples, or of all where fewer than a quarter are."""
    clean = [sample.duration_ns for sample in samples if not sample.disturbed]
    if 4 * len(clean) >= len(samples):
        return clean
    return [sample.duration_ns for sample in samples]


def timing(durations_ns: list[int]) -> Timing:
    """Summary of measured durations."""
    ordered = sorted(durations_ns)
    tenth, quarter = len(ordered) // 10, len(ordered) // 4
    return Timing(
        n=len(ordered),
        median_s=statistics.median(ordered) / 1e9,
        mean_s=statistics.fmean(ordered[quarter : len(ordered) - quarter]) / 1e9,
        p10_s=ordered[tenth] / 1e9,
        p90_s=ordered[-1 - tenth] / 1e9,
    )


def _chain(model: EarlyExitGPT, batch: Batch) -> list[_Op]:
    rotary, training = model.rotary(batch.tokens.shape[1]), model.run.training
    drops = training.hidden_dropout or training.attention_dropout
    place = DropoutPlace(training.seed, iteration=0, data_rank=0, microbatch=0) if drops else None

    def loss(logits: Tensor) -> Tensor:
        return mean_cross_entropy(logits, batch.labels, batch.loss_mask)

    def layer(index: int, hidden: Tensor) -> Tensor:
        return model.run_layers(hidden, rotary, index, index + 1, place)

    def exit_head(depth: int, hidden: Tensor) -> Tensor:
        return loss(model.exit_logits(depth, hidden, rotary, place))

    names: dict[str, OpName] = {
        "minimal": "exit_minimal", "norm": "exit_norm", "mlp": "exit_mlp", "block": "exit_block"
    }  # fmt: skip
    stage = model.stage_spec
    return [
        _Op("embedding", lambda tokens: model.embed(tokens, batch.position_ids, place), is_head=False),
        *(_Op("layer", partial(layer, index), is_head=False) for index in range(stage.num_layers)),
        *(_Op(names[e.head], partial(exit_head, e.depth), is_head=True) for e in stage.exits),
        _Op("final_head", lambda hidden: loss(model.final_logits(hidden)), is_head=True),
    ]


def _forward(
    chain: list[_Op], tokens: Tensor, around: Callable[[_Op, Callable[[], Tensor]], Tensor]
) -> list[_Done]:
    """Run the chain; every op gets a detached input, so that its backward can run alone."""
    done: list[_Done] = []
    hidden = tokens
    for op in chain:
        source = hidden.detach()
        if source.is_floating_point():
            source.requires_grad_()
        output = around(op, partial(op.run, source))
        done.append(_Done(op, source, output))
        if not op.is_head:
            hidden = output
    return done


def _backward(done: list[_Done], around: Callable[[_Op, Callable[[], None]], None]) -> None:
    """Back-propagate the chain op by op, the last one first."""
    gradient: Tensor | None = None
    while done:
        item = done.pop()
        if item.op.is_head:
            around(item.op, item.output.backward)
        else:
            around(item.op, partial(torch.autograd.backward, item.output, gradient))
        arrived = item.source.grad
        if item.op.is_head and gradient is not None and arrived is not None:
            gradient = gradient + arrived
        else:
            gradient = arrived


def _time_rounds(
    chain: list[_Op], tokens: Tensor, clock: Clock, seconds: float, min_rounds: int
) -> tuple[_Stopwatch, _Stopwatch]:
    forward, backward = _Stopwatch(clock), _Stopwatch(clock)
    in_flight: list[list[_Done]] = []
    clock.start()
    deadline = 0.0
    rounds = -IN_FLIGHT - 1  # warm-up rounds are not counted
    while rounds < min_rounds or time.monotonic() < deadline:
        in_flight.append(_forward(chain, tokens, forward.around))
        if len(in_flight) == IN_FLIGHT:
            _backward(in_flight.pop(0), backward.around)
        rounds += 1
        if rounds == 0:
            forward.taken.clear()
            backward.taken.clear()
            deadline = time.monotonic() + seconds
    return forward, backward


def _count_bytes(chain: list[_Op], tokens: Tensor, device: torch.device) -> dict[OpName, _Bytes]:
    """Bytes of each op from the allocator; of several layers the last one counts."""
    sizes: dict[OpName, _Bytes] = {}

    def traced_forward(op: _Op, run: Callable[[], Tensor]) -> Tensor:
        with trace_allocations(device) as trace:
            output = run()
        kept = max(0, trace.end_bytes)
        sizes[op.name] = _Bytes(kept, forward_transient=max(0, trace.peak_bytes - kept))
        return output

    def traced_backward(op: _Op, run: Callable[[], None]) -> None:
        with trace_allocations(device) as trace:
            run()
        sizes[op.name].backward_transient = trace.peak_bytes

    _backward(_forward(chain, tokens, traced_forward), traced_backward)
    return sizes
