"""One stage of pipeline decoding: its layers and exits on whatever rows come in, first in, first out.

A row is a position of a sequence. It goes through every stage, so that all keys and values are there; where
its token leaves early, the token is handed out at once, and the row goes on merely to fill the stages after.
The token after it may be a few stages behind: every stage has the rows of a sequence in the order of their
positions, so each finds what it attends to. Rows that have come in together, of one sequence or of many,
share the products of the layers, and still attend one after another; nothing depends on who came with whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from eeplan.runtime.decode.emission import CheckCounts, Emission
from eeplan.runtime.decode.exit_check import ExitCheck, Found, found_at
from eeplan.runtime.decode.lockstep import advance
from eeplan.runtime.decode.modes import exit_check
from eeplan.runtime.decode.network import DecodeNetwork, Transformer
from eeplan.runtime.decode.ops import Logits, Program, RunBlock, RunLayers, Steps
from eeplan.runtime.decode.options import GenerateOptions
from eeplan.runtime.decode.team import from_bytes, to_bytes
from eeplan.runtime.model import ExitSpec
from eeplan.runtime.stage import FINAL


@dataclass(frozen=True, slots=True)
class Opening:
    """What a stage must know about a sequence; comes with its prompt."""

    options: GenerateOptions
    capacity: int
    depths: tuple[tuple[int, float], ...]
    """Exits in use, of all stages, with their thresholds."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive positions of one sequence on their way through the stages."""

    sequence: int
    tokens: tuple[int, ...]
    position: int
    """Of the first."""
    is_wanted: bool
    """Whether the token after the last row is still to be emitted."""
    may_leave: bool
    """Whether it may be by an early exit."""
    uniform: float
    """The number that draws it."""
    opening: Opening | None = None
    hidden: bytes = b""
    """Hidden states [R, H] after the stage before, in the model's own kind of number."""
    top: tuple[int, ...] | None = None
    """Candidates for the next exit, see ``exit_check``."""
    checks: CheckCounts | None = None
    """Of its token, on the stages before; None without candidates."""


@dataclass(frozen=True, slots=True)
class Closing:
    """A sequence is done: every stage may forget it."""

    sequence: int


Message = Rows | Closing
Emit = Callable[[int, Emission], None]
"""Called with a sequence and its token, as soon as that is decided."""


@dataclass(slots=True)
class _Sequence:
    network: DecodeNetwork
    opening: Opening
    check: ExitCheck
    exits: tuple[ExitSpec, ...]
    """In use, on this stage."""
    text: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Passage:
    """Rows on this stage."""

    rows: Rows
    sequence: _Sequence
    found: Found | None = None
    hidden_RH: Tensor | None = None
    """Once they are through."""
    top: tuple[int, ...] | None = None
    checks: CheckCounts | None = None
    """Of its token; None without candidates, where nobody asks."""


class StageRunner:
    """The sequences of one stage.

    Args:
        transformer: the stage's layers and heads.
    """

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer
        self._team = transformer.weights.team
        self._sequences: dict[int, _Sequence] = {}

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are allocated now."""
        return sum(one.network.store.nbytes for one in self._sequences.values())

    def store_of(self, sequence: int) -> DecodeNetwork:
        """The network, and so the keys and values, of a sequence that is open."""
        return self._sequences[sequence].network

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        self._sequences.pop(sequence, None)

    def run(self, messages: Sequence[Message], emit: Emit) -> list[Message]:
        """Run what came in; returns what goes on to the next stage.

        Raises:
            DecodeError: a head's logits are not finite.
        """
        # The other processes of the stage do the same, and come to the same decisions.
        if self._team.rank == 0:
            self._team.tell(list(messages))
        closed = {message.sequence for message in messages if isinstance(message, Closing)}
        passages: list[_Passage] = []
        for message in messages:
            # What a sequence that is closed by now still has under way fills nothing that anybody reads.
            if isinstance(message, Rows) and message.sequence not in closed:
                passages.append(_Passage(message, self._open(message)))
        for number in closed:
            self.close(number)
        advance(self._transformer, [self._program(passage, emit) for passage in passages])
        onward: list[Message] = [Closing(number) for number in sorted(closed)]
        return onward if self._is_last else [*onward, *map(_onward, passages)]

    @property
    def _is_last(self) -> bool:
        return self._transformer.weights.stage.is_last

    def _open(self, rows: Rows) -> _Sequence:
        if rows.opening is None:
            return self._sequences[rows.sequence]
        opening, stage = rows.opening, self._transformer.weights.stage
        thresholds = dict(opening.depths)
        in_use = [(exit_, thresholds[exit_.depth]) for exit_ in stage.exits if exit_.depth in thresholds]
        network = DecodeNetwork.of(self._transformer, opening.capacity)
        check = exit_check(opening.options.policy, in_use)
        found = _Sequence(network, opening, check, tuple(exit_ for exit_, _ in in_use))
        self._sequences[rows.sequence] = found
        return found

    def _hidden(self, rows: Rows) -> Tensor:
        if self._transformer.weights.stage.is_first:
            return self._transformer.embed(rows.tokens)
        weights = self._transformer.weights
        shape = (len(rows.tokens), weights.run.model.hidden_size)
        return from_bytes(rows.hidden, torch.empty(shape, dtype=weights.dtype, device=weights.device))

    def _program(self, passage: _Passage, emit: Emit) -> Program:
        yield from self._pass(passage, partial(emit, passage.rows.sequence))
        yield ()

    def _pass(self, passage: _Passage, emit: Callable[[Emission], None]) -> Steps[None]:
        rows, sequence = passage.rows, passage.sequence
        network, position = sequence.network, rows.position
        sequence.text.extend(rows.tokens)
        text = tuple(sequence.text) if sequence.opening.options.sampling.repetition_penalty != 1.0 else ()
        hidden_RH, depth = self._hidden(rows), self._transformer.first_depth
        top_C = None if rows.top is None else torch.tensor(rows.top, device=network.device)
        if sequence.check.candidates.number:
            passage.checks = replace(rows.checks or CheckCounts())
        for exit_ in sequence.exits:
            if exit_.depth > depth:
                hidden_RH = yield RunLayers(network, hidden_RH, position, depth, exit_.depth)
                depth = exit_.depth
            read_RH = hidden_RH
            if exit_.head == "block":
                read_RH = yield RunBlock(network, hidden_RH, position, depth)
            if rows.is_wanted and rows.may_leave and passage.found is None:
                sequence.check.top_C = top_C
                counts = passage.checks or CheckCounts()
                passage.found = yield from sequence.check.leaves(network, exit_, read_RH[-1:], counts)
                top_C = sequence.check.top_C
                if passage.found is not None:
                    emit(_emission(passage.found, passage, text))
        if self._transformer.last_depth > depth:
            hidden_RH = yield RunLayers(network, hidden_RH, position, depth, self._transformer.last_depth)
        passage.hidden_RH = hidden_RH
        passage.top = None if top_C is None else tuple(top_C.tolist())
        if self._is_last and rows.is_wanted and passage.found is None:
            logits_V = (yield Logits(network, hidden_RH[-1:], network.num_layers))[0]
            found = found_at(FINAL, network.num_layers, logits_V, sequence.check.confidence)
            emit(_emission(found, passage, text))


def _emission(found: Found, passage: _Passage, text: Sequence[int]) -> Emission:
    options = passage.sequence.opening.options
    token = options.sampling.pick_at(found.logits_V, passage.rows.uniform, text)
    return found.emission(token, options.top_logprobs, passage.checks)


def _onward(passage: _Passage) -> Rows:
    rows, hidden_RH = passage.rows, passage.hidden_RH
    assert hidden_RH is not None, "rows that are not through the stage"
    return Rows(
        sequence=rows.sequence,
        tokens=rows.tokens,
        position=rows.position,
        is_wanted=rows.is_wanted and passage.found is None,
        may_leave=rows.may_leave,
        uniform=rows.uniform,
        opening=rows.opening,
        hidden=to_bytes(hidden_RH),
        top=passage.top,
        checks=passage.checks,
    )
