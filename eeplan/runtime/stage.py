"""What one pipeline stage computes for one microbatch: forward, and one backward for all its losses.

Back-propagation across stages follows EE-LLM 3.1: the loss of stage i is its own weighted exit losses plus
<g, output>, with g the gradient received from stage i+1. In autograd terms that is a single backward call
with two roots. When an exit's forward runs is the plan's choice: ``deferred`` keeps only the hidden state
until the backward (3.2, Optimization 1), ``eager`` runs it in the forward.

In filled bubbles some microbatches pass a stage only in part (3.3; see ``sim.fill``): a warm-up insert turns
at its last exit, and a truncated microbatch goes through early stages without leaving anything behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eeplan.plan import Plan
from eeplan.runtime.model import EarlyExitGPT, loss_of
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
    exit_hidden: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)


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
        self._in_flight: dict[int, _InFlight] = {}
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
        if not part.is_kept:
            return self._pass_through(received, batch)
        if received is None:
            hidden = self.model.embed(batch.tokens, batch.position_ids)
        else:
            hidden = received.requires_grad_(part.sends_gradient)
        state = _InFlight(batch, received, output=None, part=part)
        depth = self._first_depth
        for exit_depth in self._depths:
            hidden = self.model.run_layers(hidden, self._rotary_angles(batch), depth, exit_depth)
            depth = exit_depth
            state.exit_hidden[exit_depth] = hidden
        if not part.turns:
            hidden = self.model.run_layers(hidden, self._rotary_angles(batch), depth, self._last_depth)
        if self.exit_forward == "eager":
            self._run_exits(state)
        if self.model.stage_spec.is_last:
            state.losses[FINAL] = loss_of(self.model.final_logits(hidden), batch.labels, batch.loss_mask)
        elif not part.turns:
            state.output = hidden
        self._in_flight[microbatch] = state
        return None if state.output is None else state.output.detach()

    def _pass_through(self, received: Tensor | None, batch: Batch) -> Tensor:
        """All layers of a stage before the last, no exit, nothing kept."""
        with torch.no_grad():
            hidden = self.model.embed(batch.tokens, batch.position_ids) if received is None else received
            return self.model.run_layers(
                hidden, self._rotary_angles(batch), self._first_depth, self._last_depth
            )

    def backward(
        self, microbatch: int, gradient: Tensor | None, loss_scale: float = 1.0
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Back-propagate all losses of the stage and the gradient from the next one in one call.

        Args:
            gradient: d(later losses)/d(output) [S, B, H], already scaled; None on the last stage, and where a
                warm-up insert turns.
            loss_scale: multiplies every loss of the stage.

        Returns:
            The gradient [S, B, H] for the previous stage (None on the first, and on the last that a truncated
            microbatch's backward passes), and the detached, unweighted losses of the stage's heads.
        """
        state = self._in_flight.pop(microbatch)
        if self.exit_forward == "deferred":
            self._run_exits(state)
        roots: list[Tensor] = []
        root_gradients: list[Tensor | None] = []
        if state.losses:
            total = sum(self.weights[name] * loss for name, loss in state.losses.items())
            assert isinstance(total, Tensor)
            roots.append(total)
            scale = loss_scale * state.part.loss_factor / self.num_microbatches
            root_gradients.append(total.new_full((), scale))
        if state.output is not None:
            roots.append(state.output)
            factor = state.part.received_factor
            root_gradients.append(gradient if gradient is None or factor == 1.0 else gradient * factor)
        losses = {name: loss.detach() for name, loss in state.losses.items()}
        state.losses.clear()
        torch.autograd.backward(roots, root_gradients)
        return None if state.received is None else state.received.grad, losses

    def evaluate(self, received: Tensor | None, batch: Batch) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Forward without gradients: output for the next stage and the losses of every head here."""
        with torch.no_grad():
            hidden = self.model.embed(batch.tokens, batch.position_ids) if received is None else received
            losses: dict[str, Tensor] = {}
            depth = self._first_depth
            rotary = self._rotary_angles(batch)
            for exit_depth in self._depths:
                hidden = self.model.run_layers(hidden, rotary, depth, exit_depth)
                depth = exit_depth
                logits = self.model.exit_logits(exit_depth, hidden, rotary)
                losses[exit_name(exit_depth)] = loss_of(logits, batch.labels, batch.loss_mask)
            hidden = self.model.run_layers(hidden, rotary, depth, self._last_depth)
            if not self.model.stage_spec.is_last:
                return hidden, losses
            losses[FINAL] = loss_of(self.model.final_logits(hidden), batch.labels, batch.loss_mask)
            return None, losses

    def _run_exits(self, state: _InFlight) -> None:
        for depth, hidden in state.exit_hidden.items():
            logits = self.model.exit_logits(depth, hidden, self._rotary_angles(state.batch))
            state.losses[exit_name(depth)] = loss_of(logits, state.batch.labels, state.batch.loss_mask)
        state.exit_hidden.clear()

    def _rotary_angles(self, batch: Batch) -> Tensor:
        length = batch.tokens.shape[1]
        if self._rotary is None or self._rotary.shape[0] != length:
            self._rotary = self.model.rotary(length)
        return self._rotary


def loss_weights(plan: Plan, iteration: int) -> dict[str, float]:
    """Weight of every head's loss by name, in an iteration (from 1)."""
    schedule = plan.loss_weight_schedule
    weights = {
        exit_name(exit_.depth): weight_at(exit_.effective_weight, schedule, iteration) for exit_ in plan.exits
    }
    return {**weights, FINAL: plan.final_exit_weight}
