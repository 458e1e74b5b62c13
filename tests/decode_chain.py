"""The stages of a decoding pipeline in one process, where all their keys and values can be looked at.

Messages between them are delivered in random order of channels (on each, first in, first out), several at a
time or one by one: more ways to be late than real processes come to in a test.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from builders import make_plan

from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.network import Transformer
from eeplan.runtime.decode.pipeline import PipelineDriver
from eeplan.runtime.decode.stage_rows import Message, StageRunner
from eeplan.runtime.decode.stages import decode_stages
from eeplan.runtime.decode.weights import weights_from
from eeplan.runtime.model import EarlyExitGPT


class ChainedStages:
    """Stages behind the first one, run whenever the driver asks for tokens."""

    def __init__(self, transformers: Sequence[Transformer], rng: random.Random) -> None:
        self.runners = [StageRunner(transformer) for transformer in transformers]
        self._inboxes: list[list[Message]] = [[] for _ in transformers]
        self._rng = rng
        self._tokens: list[tuple[int, Emission]] = []

    @property
    def pids(self) -> tuple[int, ...]:
        return ()

    def send(self, messages: list[Message]) -> None:
        if self._inboxes:
            self._inboxes[0] += messages

    def receive(self, wait_s: float) -> list[tuple[int, Emission]]:
        """Deliver something, or with a time to wait, go on until a token comes."""
        while any(self._inboxes) and (wait_s > 0 or self._rng.random() < 0.5):
            if wait_s > 0 and self._tokens:
                break
            self.deliver()
        tokens, self._tokens = self._tokens, []
        return tokens

    def deliver(self) -> None:
        """Hand a stage the oldest of what it has not had yet."""
        place = self._rng.choice([index for index, inbox in enumerate(self._inboxes) if inbox])
        count = self._rng.randint(1, len(self._inboxes[place]))
        messages = self._inboxes[place][:count]
        del self._inboxes[place][:count]
        onward = self.runners[place].run(
            messages, lambda number, emission: self._tokens.append((number, emission))
        )
        if place + 1 < len(self._inboxes):
            self._inboxes[place + 1] += onward

    def settle(self) -> None:
        """Deliver everything that is under way."""
        while any(self._inboxes):
            self.deliver()

    def explained(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Nothing to end."""


def chained(model: EarlyExitGPT, num_stages: int, rng: random.Random, positions: int) -> PipelineDriver:
    """A pipeline engine over a model in memory; ``engine._later`` is its :class:`ChainedStages`."""
    run = model.run
    named = {name: parameter.detach() for name, parameter in model.named_global_parameters()}
    transformers = [
        Transformer(weights_from(named, run, stage, model.rotary(positions).detach(), run.model.vocab_size))
        for stage in decode_stages(make_plan(run), num_stages)
    ]
    exits = tuple(exit_ for one in transformers for exit_ in one.weights.stage.exits)
    return PipelineDriver(transformers[0], ChainedStages(transformers[1:], rng), exits)
