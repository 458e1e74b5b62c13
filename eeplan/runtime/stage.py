"""What one pipeline stage computes for one microbatch: forward, and one backward for all its losses.

Back-propagation across stages follows EE-LLM 3.1: the loss of stage i is its own weighted exit losses plus
<g, output>, with g the gradient received from stage i+1. In autograd terms that is a single backward call
with two roots. When an exit's forward runs is the plan's choice: ``deferred`` keeps only the hidden state
until the backward (3.2, Optimization 1), ``eager`` runs it in the forward.

In filled bubbles some microbatches pass a stage only in part (3.3; see ``sim.fill``): a warm-up insert turns
at its last exit, and a truncated microbatch goes through early stages without leaving anything behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from eeplan.plan import Plan
from eeplan.runtime.dropout import DropoutPlace
from eeplan.runtime.exit_timing import ExitTimer
from eeplan.runtime.losses import HeadLoss, head_loss
from eeplan.runtime.model import EarlyExitGPT
from eeplan.sim.loss_weights import weight_at
from eeplan.sim.schedule import Op, Schedule
from eeplan.spec import ExitForward

FINAL = "final"


def exit_name(depth: int) -> str:
    """Name of an early exit in logs, checkpoints and reports."""
    return f"exit_{depth}"


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch of text; all [B, S] int64, the mask float32."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What a stage does for one microbatch; the default is a full one's."""

    is_kept: bool = True
    """False: forward only, without exits, and nothing is kept."""
    turns: bool = False
    """Forward up to the stage's last exit; the backward starts from the exits' losses alone."""
    sends_gradient: bool = True
    """Whether the previous stage goes backward as well; the first stage never sends."""
    loss_factor: float = 1.0
    """Multiplies the gradient of the stage's own losses."""
    received_factor: float = 1.0
    """Multiplies the gradient received from the next stage."""


FULL = Part()


def partial_microbatches(schedule: Schedule, scales: Sequence[float], stage: int) -> dict[int, Part]:
    """Parts of the microbatches of ``schedule`` that are not full, for one stage.

    Args:
        scales: gradient scale of each stage. They are applied to all gradients of a stage at once, but those
            of warm-up inserts are not to be scaled (``sim.estimator``), so the inserts get the inverse: at
            their losses, and as the ratio of two stages' scales where their gradient comes in.
    """
    parts = {}
    for microbatch, kind in enumerate(schedule.kinds):
        if kind.name == "full" or not kind.has(Op.FORWARD, stage):
            continue
        part = Part(
            is_kept=kind.has(Op.BACKWARD, stage),
            turns=kind.turns_on(stage),
            sends_gradient=kind.has(Op.SEND_BACKWARD, stage),
        )
        if kind.name == "warm_up":
            later = 1.0 if part.turns else scales[stage + 1]
            part = replace(part, loss_factor=1.0 / scales[stage], received_factor=later / scales[stage])
        parts[microbatch] = part
    return parts


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps of a microbatch between its forward and its backward."""

    batch: Batch
    received: Tensor | None
    output: Tensor | None
    part: Part = FULL
    dropout: DropoutPlace | None = None
    exit_hidden: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[str, HeadLoss] = field(default_factory=dict)
    teacher: Tensor | None = None
    """Normed hidden states [S, B, H] that the final exit reads, where exits are distilled from it."""


class StageComputation:
    """Forward and backward of one stage over the microbatches of one iteration.

    Args:
        model: this stage's layers and heads.
        weights: loss weight of every head by name (``exit_<depth>``, ``final``); may change between
            iterations.
        exit_forward: when exit forwards run.
        num_microbatches: full ones of an iteration; losses are divided by it.
        parts: what to do for the microbatches that are not full.
    """

    def __init__(
        self,
        model: EarlyExitGPT,
        weights: Mapping[str, float],
        exit_forward: ExitForward,
        num_microbatches: int,
        parts: Mapping[int, Part] | None = None,
    ) -> None:
        self.model = model
        self.weights = dict(weights)
        self.exit_forward = exit_forward
        self.num_microbatches = num_microbatches
        self.parts = dict(parts or {})
        self.iteration = 1
        """Which one this is, from 1; dropout depends on it."""
        self.loss_scale = 1.0
        """Multiplies every loss (fp16), so that gradients and messages stay in the range of numbers."""
        self.before_backward: Callable[[int], None] = _nothing
        """Called with the microbatch before each backward."""
        self.exit_timer: ExitTimer | None = None
        """Told when exits run; None: nobody asks."""
        self._in_flight: dict[int, _InFlight] = {}
        self._exits = model.run.exits
        self._distillation = self._exits.distillation
        stage = model.stage_spec
        self._depths = sorted(exit_.depth for exit_ in stage.exits)
        self._first_depth, self._last_depth = stage.first_layer - 1, stage.last_layer
        self._rotary: Tensor | None = None

    def forward(self, microbatch: int, received: Tensor | None, batch: Batch) -> Tensor | None:
        """Run the stage's layers.

        Args:
            received: hidden states [S, B, H] from the previous stage; None on the first.

        Returns:
            Hidden states [S, B, H] for the next stage; None on the last, and where a warm-up insert turns.
        """
        part = self.parts.get(microbatch, FULL)
        dropout = self._dropout_place(microbatch)
        if not part.is_kept:
            return self._pass_through(received, batch, dropout)
        if received is None:
            hidden = self.model.embed(batch.tokens, batch.position_ids, dropout)
        else:
            hidden = received.requires_grad_(part.sends_gradient)
        state = _InFlight(batch, received, output=None, part=part, dropout=dropout)
        depth, rotary = self._first_depth, self._rotary_angles(batch)
        for exit_depth in self._depths:
            hidden = self.model.run_layers(hidden, rotary, depth, exit_depth, dropout)
            depth = exit_depth
            state.exit_hidden[exit_depth] = hidden
        if not part.turns:
            hidden = self.model.run_layers(hidden, rotary, depth, self._last_depth, dropout)
        if self.model.stage_spec.is_last:
            state.losses[FINAL] = head_loss(self.model.final_logits(hidden), batch.labels, batch.loss_mask)
            if self._distillation is not None:
                state.teacher = self._normed(hidden)
        elif not part.turns:
            state.output = hidden
        # After the final head, as when they are deferred: autograd then adds gradients in the same order.
        if self.exit_forward == "eager":
            self._run_exits(state)
        self._in_flight[microbatch] = state
        return None if state.output is None else state.output.detach()

    def _pass_through(self, received: Tensor | None, batch: Batch, dropout: DropoutPlace | None) -> Tensor:
        """All layers of a stage before the last, no exit, nothing kept."""
        with torch.no_grad():
            hidden = received
            if hidden is None:
                hidden = self.model.embed(batch.tokens, batch.position_ids, dropout)
            return self.model.run_layers(
                hidden, self._rotary_angles(batch), self._first_depth, self._last_depth, dropout
            )

    def backward(self, microbatch: int, gradient: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Back-propagate all losses of the stage and the gradient from the next one in one call.

        Args:
            gradient: d(later losses)/d(output) [S, B, H], already scaled; None on the last stage, and where a
                warm-up insert turns. Where exits are distilled, the final exit's normed hidden states
                [S, B, H] follow it in the first dimension.

        Returns:
            The same for the previous stage (None on the first, and on the last that a truncated microbatch's
            backward passes), and the detached, unweighted losses of the stage's heads.
        """
        self.before_backward(microbatch)
        state = self._in_flight.pop(microbatch)
        if self._distillation is not None and gradient is not None:
            gradient, state.teacher = gradient.chunk(2)
        if self.exit_forward == "deferred":
            self._run_exits(state)
        roots: list[Tensor] = []
        root_gradients: list[Tensor | None] = []
        if state.losses:
            total = sum(self.weights[name] * loss.objective for name, loss in state.losses.items())
            assert isinstance(total, Tensor)
            roots.append(total)
            scale = self.loss_scale * state.part.loss_factor / self.num_microbatches
            root_gradients.append(total.new_full((), scale))
        if state.output is not None:
            roots.append(state.output)
            factor = state.part.received_factor
            root_gradients.append(gradient if gradient is None or factor == 1.0 else gradient * factor)
        losses = {name: loss.reported for name, loss in state.losses.items()}
        state.losses.clear()
        if self.exit_timer is not None:
            self.exit_timer.begin_backward()
        torch.autograd.backward(roots, root_gradients)
        back = None if state.received is None else state.received.grad
        if back is not None and state.teacher is not None:
            back = torch.cat((back, state.teacher))
        return back, losses

    def _run_exits(self, state: _InFlight) -> None:
        teacher = self._teacher_logits(state)
        for depth, hidden in state.exit_hidden.items():
            name, timer = exit_name(depth), self.exit_timer
            if timer is None:
                state.losses[name] = self._exit_loss(depth, hidden, state, teacher)
                continue
            with timer.forward(name):
                state.losses[name] = self._exit_loss(depth, timer.watched(name, hidden), state, teacher)
        state.exit_hidden.clear()

    def _exit_loss(self, depth: int, hidden: Tensor, state: _InFlight, teacher: Tensor | None) -> HeadLoss:
        logits = self.model.exit_logits(depth, hidden, self._rotary_angles(state.batch), state.dropout)
        return head_loss(
            logits,
            state.batch.labels,
            state.batch.loss_mask,
            temperature=self._exits.temperature_at(depth),
            weighs_tokens=self._exits.loss_weights.dynamic,
            teacher_SBV=teacher,
            distillation=self._distillation,
        )

    @torch.no_grad()
    def _normed(self, hidden: Tensor) -> Tensor:
        """What the final head multiplies with the vocabulary matrix [S, B, H]."""
        norm: Any = self.model.decoder.final_layernorm
        normed: Tensor = norm(hidden.detach())
        return normed

    @torch.no_grad()
    def _teacher_logits(self, state: _InFlight) -> Tensor | None:
        """The final exit's logits [S, B, V], by this stage's copy of the matrix; the same on every stage."""
        if state.teacher is None or not state.exit_hidden:
            return None
        model = self.model
        heads = [model.exits[str(depth)] for depth in self._depths if model.exit_is_tied[depth]]
        layer: Any = model.output_layer if model.stage_spec.is_last else heads[0].output_layer
        logits, _ = layer(state.teacher, weight=model.shared_embedding_or_output_weight())
        return logits

    def _dropout_place(self, microbatch: int) -> DropoutPlace | None:
        training = self.model.run.training
        if training.hidden_dropout == training.attention_dropout == 0.0:
            return None
        data_rank = parallel_state.get_data_parallel_rank()
        return DropoutPlace(training.seed, self.iteration, data_rank, microbatch)

    def _rotary_angles(self, batch: Batch) -> Tensor:
        length = batch.tokens.shape[1]
        if self._rotary is None or self._rotary.shape[0] != length:
            self._rotary = self.model.rotary(length)
        return self._rotary


def _nothing(microbatch: int) -> None:
    """Default of ``StageComputation.before_backward``."""


def loss_weights(plan: Plan, iteration: int) -> dict[str, float]:
    """Weight of every head's loss by name, in an iteration (from 1)."""
    schedule = plan.loss_weight_schedule
    weights = {
        exit_name(exit_.depth): weight_at(exit_.effective_weight, schedule, iteration) for exit_ in plan.exits
    }
    return {**weights, FINAL: plan.final_exit_weight}
