"""Early exits: heads, places, and the weights of their losses."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from eeplan.errors import SpecError
from eeplan.schema import Model
from eeplan.spec.fields import Fraction

HeadKind = Literal["minimal", "norm", "mlp", "block"]
"""What stands between an exit's hidden state and its logits.

``minimal``: the vocabulary matrix alone; ``norm``: RMSNorm, matrix; ``mlp``: pre-norm residual MLP, RMSNorm,
matrix; ``block``: a whole transformer layer, RMSNorm, matrix.
"""


HEAD_KINDS: tuple[HeadKind, ...] = ("minimal", "norm", "mlp", "block")


def _known_head(value: object) -> object:
    if value != "auto" and value not in HEAD_KINDS:
        kinds = ", ".join(HEAD_KINDS)
        raise ValueError(f"{value!r} is no head kind; expected {kinds}, auto, or a list of kinds")
    return value


HeadChoice = Annotated[
    # Tags in brackets are not taken for keys in error messages.
    Annotated[HeadKind | Literal["auto"], BeforeValidator(_known_head), Tag("[word]")]
    | Annotated[tuple[HeadKind, ...], Field(min_length=1), Tag("[kinds]")],
    Discriminator(lambda value: "[kinds]" if isinstance(value, list | tuple) else "[word]"),
]


Boundary = Literal["before", "after"]
"""Where an exit reads the hidden state: ``after`` layer l, or ``before`` layer l (EE-LLM's pre_exit)."""


ExitForward = Literal["deferred", "eager"]
"""When an exit's forward runs: inside the backward step (paper 3.2, Optimization 1) or the forward step."""


EXIT_FORWARDS: tuple[ExitForward, ...] = ("deferred", "eager")


class ExitRequest(Model):
    """One exit that the user placed by hand. Fields left out take the defaults of ``exits``."""

    layer: PositiveInt
    """Layer number, from 1."""
    boundary: Boundary = "after"
    head: HeadKind | None = None
    tied: bool | None = None
    weight: Fraction | None = None
    temperature: PositiveFloat | None = None
    """Divides the logits in this exit's loss; None means ``exits.temperature``."""

    @property
    def depth(self) -> int:
        """Layers computed before this exit: ``layer`` after it, ``layer - 1`` before it."""
        return self.layer if self.boundary == "after" else self.layer - 1


class WeightSchedule(Model):
    """How the weights of the early losses reach their targets: a factor from ``init`` to 1 (paper C.1)."""

    style: Literal["linear", "cosine"] = "linear"
    init: Fraction
    """Factor in the first iteration: below 1 warms up, above 1 cools down."""
    iters: PositiveInt
    """Iterations until the factor is 1, where it stays."""


class LossWeightSpec(Model):
    """Target weights of the early losses; the final loss has weight 1 (paper 3.3)."""

    policy: Literal["depth", "uniform", "normalized", "usage"] = "depth"
    """``depth``: scale x depth/num_layers (the paper's 0.25/0.5); ``uniform``: scale for each;
    ``normalized``: proportional to depth, summing to scale; ``usage``: proportional to the share of tokens
    that leave at the exit, summing to scale."""
    scale: PositiveFloat = 1.0
    warmup: WeightSchedule | None = None
    dynamic: bool = False
    """Multiply each token's early loss by the highest probability that the exit gives to any token there,
    taken as a constant (EE-Tuning): tokens that the exit is unsure of count less."""


class DistillationSpec(Model):
    """Early exits learn the final exit's distribution too: weight x temperature^2 x KL(final || exit)."""

    weight: PositiveFloat
    """Beside the cross entropy, both times the exit's own weight."""
    temperature: PositiveFloat = 1.0
    """Divides both exits' logits."""


class ExitsSpec(Model):
    """Which early exits are wanted: a number for the planner to place, or layers placed by hand."""

    count: Literal["auto"] | Annotated[int, Field(ge=0)] | None = None
    layers: tuple[ExitRequest, ...] = ()
    max_count: PositiveInt = 4
    """Most exits that ``count: auto`` may choose."""
    objective: Literal["iteration_time", "decode_speed_up"] = "iteration_time"
    """What placement and ``count: auto`` optimise. ``iteration_time``: the fastest training, with as many
    exits as the limits allow; ``decode_speed_up``: the fastest decoding within the limits, maybe no exit."""
    head: HeadChoice = "norm"
    """Of exits that say nothing else. A list, or ``auto`` for all kinds, leaves it to the planner, which
    takes one kind for all of them. It supposes that tokens leave as early with one kind as with another."""
    untie_exit_output_weights: bool = False
    exit_forward: Literal["auto", "deferred", "eager"] = "auto"
    loss_weights: LossWeightSpec = LossWeightSpec()
    temperature: PositiveFloat = 1.0
    """Divides the logits in the loss of every exit that names none of its own; decoding does without."""
    distillation: DistillationSpec | None = None

    def temperature_at(self, depth: int) -> float:
        """What divides the logits in the loss of the exit after ``depth`` layers."""
        given = [request.temperature for request in self.layers if request.depth == depth]
        return next((one for one in given if one is not None), self.temperature)

    @property
    def head_kinds(self) -> tuple[HeadKind, ...]:
        """Kinds that the planner may choose from."""
        if self.head == "auto":
            return HEAD_KINDS
        return self.head if isinstance(self.head, tuple) else (self.head,)

    @property
    def head_kind(self) -> HeadKind:
        """The one kind there is.

        Raises:
            SpecError: it was left to the planner.
        """
        kinds = self.head_kinds
        if len(kinds) > 1:
            raise SpecError(
                f"exits.head leaves {', '.join(kinds)} to the planner, but one kind is needed here; name it"
            )
        return kinds[0]

    @model_validator(mode="after")
    def _teacher_comes_first(self) -> Self:
        if self.distillation is not None and self.exit_forward == "eager":
            raise ValueError(
                "exit_forward eager runs exits before the final exit has spoken, from which distillation "
                "learns; leave exit_forward out"
            )
        return self

    @model_validator(mode="after")
    def _count_or_layers(self) -> Self:
        if self.count is not None and self.layers:
            raise ValueError("give either exits.count or exits.layers, not both")
        seen: dict[int, ExitRequest] = {}
        for request in self.layers:
            other = seen.setdefault(request.depth, request)
            if other is not request:
                raise ValueError(
                    f"exit {request.boundary} layer {request.layer} and exit {other.boundary} layer "
                    f"{other.layer} both read the hidden state after {request.depth} layers; remove one"
                )
        if isinstance(self.head, tuple) and len(set(self.head)) < len(self.head):
            raise ValueError(f"head {list(self.head)} names a kind twice; keep one")
        return self
