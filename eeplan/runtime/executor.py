"""Interprets a schedule on one stage: runs its ops, moves its messages, records what happened when.

The executor knows nothing about models: it is given a computation with ``forward`` and ``backward``. Messages
travel in two process groups, one per direction, so that a back-end whose sends wait for their receive can
never block one direction on the other. Receives are posted one ahead on each channel, and an op waits for its
own message only, so a late message delays nothing else. Tensors being sent are owned until the transport is
done with them: not every transport tells (gloo's sends are done when waited for), but a message that the
neighbour sent after it had used ours says so, and the schedule says which those are.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from eeplan.runtime.clock import Clock, Mark
from eeplan.sim.schedule import Instruction, Op, Schedule
from eeplan.timeline import Direction, SpanKind

if TYPE_CHECKING:
    # At run time it would bring megatron-core, which a rehearsal needs not.
    from eeplan.runtime.stage import Batch


class Computation(Protocol):
    """What a stage computes; see ``stage.StageComputation``."""

    def forward(self, microbatch: int, received: Tensor | None, batch: Batch) -> Tensor | None:
        """Hidden states for the next stage, or None on the last."""
        ...

    def backward(self, microbatch: int, gradient: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Gradient for the previous stage (None on the first) and this stage's losses."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedSpan:
    """A span whose ends are still marks of the device's clock."""

    kind: SpanKind
    microbatch: int
    start: Mark
    end: Mark


@dataclass(frozen=True, slots=True)
class MarkedMessage:
    """When a message was handed to the transport, or had been received."""

    direction: Direction
    microbatch: int
    is_send: bool
    at: Mark


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One stage's part of one iteration: its spans, messages, and losses of every microbatch."""

    spans: list[MarkedSpan] = field(default_factory=list)
    messages: list[MarkedMessage] = field(default_factory=list)
    losses: list[dict[str, Tensor]] = field(default_factory=list)
    core_ns: list[int] = field(default_factory=list)
    """How long this thread had a core during each span."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Process groups and ranks of a stage's neighbours."""

    forward_group: Any
    backward_group: Any
    previous_rank: int | None
    next_rank: int | None
    message_shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    gradient_shape: tuple[int, int, int] | None = None
    """Of messages backward, where more than the gradient travels; None: ``message_shape``."""


class Executor:
    """Runs one stage of a schedule, iteration after iteration."""

    def __init__(
        self, schedule: Schedule, stage: int, computation: Computation, channels: Channels, clock: Clock
    ) -> None:
        self._instructions = schedule.stages[stage]
        self._computation = computation
        self._channels = channels
        self._clock = clock
        self._receive_order = {
            op: [i.microbatch for i in self._instructions if i.op is op]
            for op in (Op.RECV_FORWARD, Op.RECV_BACKWARD)
        }
        self._settled = settled_sends(schedule, stage)

    def run(self, batches: Callable[[int], Batch]) -> IterationRecord:
        """Execute every instruction once.

        Args:
            batches: microbatch number to its text.
        """
        return _Iteration(
            self._instructions,
            self._receive_order,
            self._settled,
            self._computation,
            self._channels,
            self._clock,
            batches,
        ).run()


def settled_sends(schedule: Schedule, stage: int) -> dict[tuple[Op, int], int]:
    """How many of a stage's sends to a neighbour are over when a message from that neighbour is there.

    A neighbour's compute op waits for its input, so what it sends afterwards tells that the input is there.

    Returns:
        By receive and microbatch: messages to the sender, in their order, that it had used before.
    """
    settled: dict[tuple[Op, int], int] = {}
    neighbours = [
        # (neighbour, its op that uses our messages, the receive of those, its send, our receive of that)
        (stage + 1, Op.FORWARD, Op.RECV_FORWARD, Op.SEND_BACKWARD, Op.RECV_BACKWARD),
        (stage - 1, Op.BACKWARD, Op.RECV_BACKWARD, Op.SEND_FORWARD, Op.RECV_FORWARD),
    ]
    for neighbour, uses, receives, sends, received in neighbours:
        if not 0 <= neighbour < schedule.num_stages:
            continue
        instructions = schedule.stages[neighbour]
        inputs = {i.microbatch for i in instructions if i.op is receives}
        used = 0
        for instruction in instructions:
            used += instruction.op is uses and instruction.microbatch in inputs
            if instruction.op is sends:
                settled[received, instruction.microbatch] = used
    return settled


class _Iteration:
    """The state of one pass over the instructions."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        receive_order: dict[Op, list[int]],
        settled: dict[tuple[Op, int], int],
        computation: Computation,
        channels: Channels,
        clock: Clock,
        batches: Callable[[int], Batch],
    ) -> None:
        self.instructions = instructions
        self.computation = computation
        self.channels = channels
        self.clock = clock
        self.batches = batches
        self.to_receive = {op: deque(order) for op, order in receive_order.items()}
        self.posted: dict[Op, tuple[Any, Tensor, int]] = {}
        self.settled = settled
        self.sending: dict[Op, deque[tuple[Any, Tensor]]] = {
            Op.SEND_FORWARD: deque(),
            Op.SEND_BACKWARD: deque(),
        }
        self.sends_over = {Op.SEND_FORWARD: 0, Op.SEND_BACKWARD: 0}
        self.arriving: dict[tuple[Op, int], tuple[Any, Tensor]] = {}
        self.outputs: dict[tuple[Op, int], Tensor | None] = {}
        self.record = IterationRecord()

    def run(self) -> IterationRecord:
        for op in self.to_receive:
            self._post_receive(op)
        for instruction in self.instructions:
            if instruction.op is Op.FORWARD:
                self._forward(instruction.microbatch)
            elif instruction.op is Op.BACKWARD:
                self._backward(instruction.microbatch)
            elif instruction.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
                self._send(instruction.op, instruction.microbatch)
            else:
                self._receive(instruction.op, instruction.microbatch)
        for op, sends in self.sending.items():
            self._release(op, self.sends_over[op] + len(sends))
        return self.record

    def _forward(self, microbatch: int) -> None:
        received = self._message(Op.RECV_FORWARD, microbatch)
        batch = self.batches(microbatch)
        with self._span("forward", microbatch):
            output = self.computation.forward(microbatch, received, batch)
        self.outputs[Op.SEND_FORWARD, microbatch] = output

    def _backward(self, microbatch: int) -> None:
        gradient = self._message(Op.RECV_BACKWARD, microbatch)
        with self._span("backward", microbatch):
            input_gradient, losses = self.computation.backward(microbatch, gradient)
        self.record.losses.append(losses)
        self.outputs[Op.SEND_BACKWARD, microbatch] = input_gradient

    @contextlib.contextmanager
    def _span(self, kind: SpanKind, microbatch: int) -> Iterator[None]:
        core_ns, start = time.thread_time_ns(), self.clock.mark()
        yield
        end = self.clock.mark()
        self.record.spans.append(MarkedSpan(kind, microbatch, start, end))
        self.record.core_ns.append(time.thread_time_ns() - core_ns)

    def _send(self, op: Op, microbatch: int) -> None:
        tensor = self.outputs.pop((op, microbatch))
        assert tensor is not None, f"{op} of microbatch {microbatch} has nothing to send"
        tensor = tensor.contiguous()
        forward = op is Op.SEND_FORWARD
        target = self.channels.next_rank if forward else self.channels.previous_rank
        group = self.channels.forward_group if forward else self.channels.backward_group
        direction: Direction = "forward" if forward else "backward"
        self.record.messages.append(MarkedMessage(direction, microbatch, True, self.clock.mark()))
        work = dist.isend(tensor, dst=target, group=group, tag=microbatch)
        self.sending[op].append((work, tensor))

    def _release(self, op: Op, sends: int) -> None:
        """Give up the tensors of the first ``sends`` sends, which are over or must be waited for."""
        while self.sends_over[op] < sends:
            self.sending[op].popleft()[0].wait()
            self.sends_over[op] += 1

    def _receive(self, op: Op, microbatch: int) -> None:
        """Hand the posted receive to the op that needs it, and post the channel's next one."""
        work, buffer, posted_for = self.posted.pop(op)
        assert posted_for == microbatch, f"{op} posted for {posted_for}, wanted {microbatch}"
        self.arriving[op, microbatch] = (work, buffer)
        self._post_receive(op)

    def _message(self, op: Op, microbatch: int) -> Tensor | None:
        """Wait for an op's message; None where the stage receives none."""
        if (op, microbatch) not in self.arriving:
            return None
        work, buffer = self.arriving.pop((op, microbatch))
        work.wait()
        direction: Direction = "forward" if op is Op.RECV_FORWARD else "backward"
        self.record.messages.append(MarkedMessage(direction, microbatch, False, self.clock.mark()))
        answers = Op.SEND_BACKWARD if op is Op.RECV_FORWARD else Op.SEND_FORWARD
        self._release(answers, self.settled[op, microbatch])
        return buffer

    def _post_receive(self, op: Op) -> None:
        if not self.to_receive[op]:
            return
        microbatch = self.to_receive[op].popleft()
        forward = op is Op.RECV_FORWARD
        source = self.channels.previous_rank if forward else self.channels.next_rank
        group = self.channels.forward_group if forward else self.channels.backward_group
        shape = self.channels.message_shape if forward else self.channels.gradient_shape
        buffer = torch.empty(
            shape or self.channels.message_shape, dtype=self.channels.dtype, device=self.channels.device
        )
        self.posted[op] = (dist.irecv(buffer, src=source, group=group, tag=microbatch), buffer, microbatch)
