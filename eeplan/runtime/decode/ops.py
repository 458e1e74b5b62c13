"""What a decoder asks the network for, one operation at a time, so that sequences can share them.

A decoder is a generator: it yields operations and is sent their results, and at the end of each forward it
yields the tokens that the forward emitted. It never knows whether it runs alone (:func:`played`) or beside
others whose rows go through the same products (``lockstep``).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.network import DecodeNetwork


@dataclass(frozen=True, slots=True)
class RunLayers:
    """Layers after depth ``depth`` up to depth ``stop`` on consecutive positions; gives hidden states."""

    network: DecodeNetwork
    hidden_RH: Tensor
    position: int
    depth: int
    stop: int

    def alone(self) -> Tensor:
        """Its result, without company."""
        return self.network.run_layers(self.hidden_RH, self.position, self.depth, self.stop)


@dataclass(frozen=True, slots=True)
class RunBlock:
    """The layer inside the head at ``depth``; gives hidden states."""

    network: DecodeNetwork
    hidden_RH: Tensor
    position: int
    depth: int

    def alone(self) -> Tensor:
        """Its result, without company."""
        return self.network.run_block(self.depth, self.hidden_RH, self.position)


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of the head at ``depth`` on some rows, of all tokens or of some."""

    network: DecodeNetwork
    hidden_RH: Tensor
    depth: int
    candidates_C: Tensor | None = None

    def alone(self) -> Tensor:
        """Its result, without company."""
        if self.candidates_C is None and self.depth == self.network.num_layers:
            return self.network.final_logits(self.hidden_RH)
        return self.network.exit_logits(self.depth, self.hidden_RH, self.candidates_C)


Op = RunLayers | RunBlock | Logits
Emitted = tuple[Emission, ...]
"""Tokens of one forward: none if it only drafted, several if it verified drafts."""
T = TypeVar("T")
Steps = Generator[Op, Tensor, T]
"""Yields operations, is sent their results, returns T."""
Program = Generator[Op | Emitted, Tensor | None, None]
"""A sequence: operations, and at the end of each forward what it emitted."""


def alone(steps: Steps[T]) -> T:
    """Run steps to their end on one sequence."""
    try:
        op = next(steps)
        while True:
            op = steps.send(op.alone())
    except StopIteration as end:
        result: T = end.value
        return result


@torch.no_grad()
def played(program: Program) -> Iterator[Emission]:
    """Run a program on its own, token by token."""
    result: Tensor | None = None
    while True:
        try:
            asked = program.send(result)
        except StopIteration:
            return
        if isinstance(asked, tuple):
            result = None
            yield from asked
        else:
            result = asked.alone()
