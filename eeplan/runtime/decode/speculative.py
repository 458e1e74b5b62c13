"""Self-speculative decoding: an early exit drafts, the full model verifies all drafts in one batch.

The drafting exit proposes a token as long as it is confident enough, up to a limit; the rows of the drafts
wait at the exit like tokens that left there (``rows``). The first row that is not a draft goes through all
layers and takes the waiting ones along, so that every layer runs exactly once on every row, and the final
head gives the full model's distribution after each of them. Drafts that it refuses are taken back.

**Acceptance** (Leviathan et al. 2023, Chen et al. 2023). Let q be the distribution that the draft x was drawn
from and p the full model's at the same place, both after temperature, top-k, top-p and penalty. Accept x with
probability min(1, p(x) / q(x)); else emit a token drawn from r = max(p - q, 0) / sum max(p - q, 0), and
forget the drafts after it. The emitted token y is then distributed as p:

    P(y) = q(y) min(1, p(y)/q(y)) + P(refused) r(y)
         = min(p(y), q(y)) + (1 - sum_z min(p(z), q(z))) r(y)
         = min(p(y), q(y)) + max(p(y) - q(y), 0) = p(y),

because sum_z max(p - q, 0) = 1 - sum_z min(p, q). Whether to draft on depends on q, that is on the tokens
before, never on x, so it does not bias x. At temperature 0 both are a single token: a draft is accepted if it
is the full model's token, and r is that token. The text is the full model's.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eeplan.runtime.decode.emission import Emission, checked_judgement, top_logprobs
from eeplan.runtime.decode.ops import Emitted, Logits, Op, Program, Steps, played
from eeplan.runtime.decode.policy import ConfidenceKind
from eeplan.runtime.decode.rows import RowRunner
from eeplan.runtime.decode.sampling import Sampling, draw
from eeplan.runtime.model import ExitSpec
from eeplan.runtime.stage import FINAL, exit_name


@dataclass(frozen=True, slots=True)
class Draft:
    """A token proposed by the early exit."""

    token: int
    probabilities_V: Tensor | None
    """What it was drawn from, on the CPU; None at temperature 0."""


@dataclass(slots=True)
class SpeculativeDecoder:
    """Decoder of one sequence whose exit at ``rows.exits[0]`` drafts."""

    rows: RowRunner
    threshold: float
    """Confidence of the exit from which on it drafts."""
    confidence: ConfidenceKind
    sampling: Sampling
    generator: torch.Generator
    limit: int
    """Most drafts of one verification."""
    top_logprobs: int = 0
    """How many likeliest tokens an emission lists."""
    text: list[int] = field(default_factory=list)
    """Every token fed so far that stands."""
    drafted: int = 0
    accepted: int = 0
    _draft: Draft | None = None

    def program(self, prompt: Sequence[int]) -> Program:
        """Tokens after a prompt, until the store is full; a forward that drafts emits none."""
        emitted: Emitted = ((yield from self._first(prompt)),)
        yield emitted
        while self.rows.length < self.rows.network.store.capacity:
            emitted = yield from self._round(emitted[-1].token)
            yield emitted

    def emissions(self, prompt: Sequence[int]) -> Iterator[Emission]:
        """The same on its own, token by token."""
        return played(self.program(prompt))

    def _first(self, prompt: Sequence[int]) -> Steps[Emission]:
        self.text = list(prompt)
        depth, hidden_RH = yield from self.rows.forward(prompt, None, forced=True)
        logits_V = (yield Logits(self.rows.network, hidden_RH[-1:], depth))[0]
        return self._emit(logits_V, self._pick(logits_V), was_draft=False)

    def _round(self, token: int) -> Generator[Op | Emitted, Tensor, Emitted]:
        """Draft after ``token`` and verify; one emission more than drafts were accepted."""
        self.text.append(token)
        start, stands = self.rows.length, len(self.text)
        drafts, hidden_RH = yield from self._propose(token)
        logits_RV = yield Logits(self.rows.network, hidden_RH, self.rows.network.num_layers)
        del self.text[stands:]
        emitted: list[Emission] = []
        for draft, logits_V in zip(drafts, logits_RV, strict=False):
            verdict = self._verify(draft, logits_V)
            emitted.append(self._emit(logits_V, verdict, was_draft=verdict == draft.token))
            if verdict != draft.token:
                break
            self.text.append(draft.token)
        else:
            # All stand, and the row after the last draft gives one token more.
            emitted.append(self._emit(logits_RV[-1], self._pick(logits_RV[-1]), was_draft=False))
        self.drafted += len(drafts)
        self.accepted += len(emitted) - 1
        self.rows.forget(start + len(emitted))
        return tuple(emitted)

    def _propose(self, token: int) -> Generator[Op | Emitted, Tensor, tuple[list[Draft], Tensor]]:
        """Drafts after ``token``, and the last hidden states of it and of them."""
        drafts: list[Draft] = []
        while True:
            # The last place of the store is for a row that is verified, not for a draft.
            forced = len(drafts) >= self.limit or self.rows.length + 1 >= self.rows.network.store.capacity
            self._draft = None
            check = None if forced else self._confident
            depth, hidden_RH = yield from self.rows.forward((token,), check, forced)
            if depth == self.rows.network.num_layers:
                return drafts, hidden_RH
            assert self._draft is not None, "a row stops early only after a draft"
            drafts.append(self._draft)
            token = self._draft.token
            self.text.append(token)
            yield ()

    def _confident(self, exit_: ExitSpec, read_1H: Tensor) -> Steps[bool]:
        logits_V = (yield Logits(self.rows.network, read_1H, exit_.depth))[0]
        self.rows.work.exits.full += 1
        name = exit_name(exit_.depth)
        if checked_judgement(logits_V, self.confidence, name).confidence < self.threshold:
            return False
        if self.sampling.temperature == 0.0:
            self._draft = Draft(self.sampling.pick(logits_V, self.generator, self.text), None)
            return True
        probabilities_V = self.sampling.probabilities(logits_V, self.text)
        self._draft = Draft(draw(probabilities_V, self.generator), probabilities_V)
        return True

    def _verify(self, draft: Draft, logits_V: Tensor) -> int:
        """The token that stands at the draft's place: the draft, or what replaces it."""
        if draft.probabilities_V is None:
            return self._pick(logits_V)
        probabilities_V = self.sampling.probabilities(logits_V, self.text)
        return verdict(draft.token, draft.probabilities_V, probabilities_V, self.generator)

    def _pick(self, logits_V: Tensor) -> int:
        return self.sampling.pick(logits_V, self.generator, self.text)

    def _emit(self, logits_V: Tensor, token: int, was_draft: bool) -> Emission:
        judgement = checked_judgement(logits_V, self.confidence, FINAL)
        logprob = float(logits_V[token]) - judgement.log_normalizer
        depth = self.rows.network.num_layers
        top = top_logprobs(logits_V, judgement.log_normalizer, self.top_logprobs)
        return Emission(token, FINAL, depth, judgement.confidence, logprob, was_draft, top)


def verdict(draft: int, draft_V: Tensor, full_V: Tensor, generator: torch.Generator) -> int:
    """The draft if it is accepted, else a token drawn from what the draft's distribution left out.

    Args:
        draft_V: probabilities q that ``draft`` was drawn from.
        full_V: the full model's probabilities p.
    """
    uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
    if uniform * float(draft_V[draft]) < float(full_V[draft]):
        return draft
    rest_V = (full_V - draft_V).clamp(min=0.0)
    # Refused although p = q up to rounding: then p itself is what is left to draw from.
    return draw(rest_V if float(rest_V.sum()) > 0.0 else full_V, generator)
