"""Expected latency per token of pipeline decoding (EE-LLM 4), waiting included.

A token runs through all P stages, first in, first out on each. Where it leaves, it is emitted and its id
returns to stage 1 at once; the next token starts there when the id has arrived and stage 1 is done with the
old token, whose other stages go on in parallel. Without waiting the time per token is the paper's
max(time to the exit, stage 1's forward). But a stage may still be busy with earlier tokens: then the next
one waits, which happens unless stage 1 is the slowest.

**State.** At the start of a token let x_i be the time until stage i is free. The next state follows from x
and from the exit that the token takes, so with independent tokens x is a Markov chain. Let D be the deepest
stage on which tokens are emitted. Stages beyond D hold nobody up, so they are left out of the state. When a
token is emitted on D, the stages up to D are done with all earlier tokens: afterwards x depends on its exit
alone, and the chain starts anew. Between two such tokens, each token leaves on an earlier stage with
probability p. mu_g, the distribution of the state after g of them, is followed exactly, and the stationary
distribution is sum_g (1 - p) p^g mu_g. States are whole nanoseconds, and a stage free before any next token
could arrive counts as free just then, so histories merge quickly. Once the expected step changes by the same
amount with every further g (by nothing, or by what a stage slower than the first falls behind), the rest of
the sum is closed.

**Rate.** In the long run every stage has to complete every token's keys and values. Stages up to D hold up
emission when they fall behind; those beyond D do not, so their queue would grow without end. A queue has an
end: the time per token is at least the work per token of the slowest stage, and so at least 1 / P of all
work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from eeplan.sim.decode_process import DecodeProcess

State = tuple[int, ...]
"""Nanoseconds until each stage from the second to the deepest emitting one is free."""

NEGLIGIBLE = 1e-12
"""Probability of a state, or of a run of tokens, below which it is left out."""
SETTLED = 1e-9
"""Relative change of the expected waiting from one token to the next at which it counts as linear."""
SETTLED_TOKENS = 4
"""Tokens per stage for which it has to."""
MOST_STATES = 20_000
"""States that are followed at once; the least likely ones beyond are left out."""


@dataclass(frozen=True, slots=True)
class TokenPath:
    """What a token that leaves at one exit makes each stage do, in nanoseconds."""

    stage: int
    """Where it is emitted."""
    until_emitted_ns: int
    """From the start of the emitting stage's work to the emission."""
    work_ns: tuple[int, ...]
    """Of every stage, what comes after the emission included."""


def token_paths(process: DecodeProcess) -> tuple[TokenPath, ...]:
    """One path per exit, the final one last."""
    return tuple(_token_path(process, taken) for taken in range(len(process.exits) + 1))


def expected_pipeline_ns(process: DecodeProcess, shares: Sequence[float]) -> float:
    """Expected time per token of a long generation.

    Args:
        process: with the layers of each stage.
        shares: of tokens that leave at each exit, the final one last.
    """
    whole = sum(shares)
    taken = zip(token_paths(process), shares, strict=True)
    paths = [(path, share / whole) for path, share in taken if share > 0.0]
    deepest = max(path.stage for path, _ in paths)
    early = [(path, share) for path, share in paths if path.stage < deepest]
    renewing = [(path, share) for path, share in paths if path.stage == deepest]
    walk = _Walk(process, deepest, [path for path, _ in paths])
    emission_ns = _expected_step_ns(walk, early, renewing)
    work_ns = [sum(share * path.work_ns[stage] for path, share in paths) for stage in range(walk.num_stages)]
    return max(emission_ns, *work_ns[deepest + 1 :], 0.0)


class _Walk:
    """Moves the state from one token to the next."""

    def __init__(self, process: DecodeProcess, deepest: int, paths: Sequence[TokenPath]) -> None:
        self.num_stages = len(process.layers_per_stage)
        self.deepest = deepest
        self.message_ns, self.return_ns = process.message_ns, process.return_ns
        # Earliest arrival of any token at each stage, counted from its start on the first.
        through = [list(accumulate(path.work_ns)) for path in paths]
        self.earliest_ns = tuple(
            min(times[stage - 1] for times in through) + stage * self.message_ns
            for stage in range(1, deepest + 1)
        )

    def step(self, state: State, path: TokenPath) -> tuple[int, State]:
        """Time from a token's start to the next one's, and the state then."""
        done = [path.work_ns[0]]
        emitted = path.until_emitted_ns
        for stage in range(1, self.deepest + 1):
            start = max(done[-1] + self.message_ns, state[stage - 1])
            done.append(start + path.work_ns[stage])
            if stage == path.stage:
                emitted = start + path.until_emitted_ns + self.return_ns
        step_ns = max(emitted, done[0])
        return step_ns, tuple(
            max(end - step_ns, earliest) for end, earliest in zip(done[1:], self.earliest_ns, strict=True)
        )


def _expected_step_ns(
    walk: _Walk,
    early: Sequence[tuple[TokenPath, float]],
    renewing: Sequence[tuple[TokenPath, float]],
) -> float:
    """Expected time between two emissions, over the stationary distribution of the state."""
    renewal = sum(share for _, share in renewing)
    p = sum(share for _, share in early)
    states: dict[State, float] = {}
    for path, share in renewing:
        _, state = walk.step(walk.earliest_ns, path)
        states[state] = states.get(state, 0.0) + share / renewal
    # Terms renewal p^g step_g, and the change of step_g from one g to the next.
    total, weight, power = 0.0, 0.0, 1.0
    step_ns = change = 0.0
    settled_for = 0
    while power > NEGLIGIBLE:
        before_ns, last_change = step_ns, change
        step_ns, states = _one_token(walk, states, early, renewing)
        total += power * step_ns
        weight += power
        power *= p
        change = step_ns - before_ns
        settled_for = settled_for + 1 if abs(change - last_change) <= SETTLED * step_ns else 0
        if settled_for >= SETTLED_TOKENS * walk.num_stages:
            # All further terms: sum over i of power p^i (step + (i + 1) change), with 1 - p = renewal.
            total += power / renewal * (step_ns + change / renewal)
            weight += power / renewal
            break
    return total / weight


def _one_token(
    walk: _Walk,
    states: dict[State, float],
    early: Sequence[tuple[TokenPath, float]],
    renewing: Sequence[tuple[TokenPath, float]],
) -> tuple[float, dict[State, float]]:
    """Expected step from a distribution of states, and the distribution after an early token."""
    expected = 0.0
    after: dict[State, float] = {}
    p = sum(share for _, share in early)
    for state, probability in states.items():
        for path, share in renewing:
            expected += probability * share * walk.step(state, path)[0]
        for path, share in early:
            step_ns, next_state = walk.step(state, path)
            expected += probability * share * step_ns
            after[next_state] = after.get(next_state, 0.0) + probability * share / p
    return expected, _likely(after)


def _likely(states: dict[State, float]) -> dict[State, float]:
    """The states worth following, scaled to a distribution."""
    kept = {state: value for state, value in states.items() if value > NEGLIGIBLE}
    if len(kept) > MOST_STATES:
        kept = dict(sorted(kept.items(), key=lambda item: -item[1])[:MOST_STATES])
    whole = sum(kept.values())
    return {state: value / whole for state, value in kept.items()}


def _token_path(process: DecodeProcess, taken: int) -> TokenPath:
    """Work of every stage for a token that leaves at exit ``taken``; the number of exits means final."""
    work, emitting_stage, until_emitted, depth = [], 0, 0, 0
    last = len(process.layers_per_stage) - 1
    for stage, layers in enumerate(process.layers_per_stage):
        spent = process.step_overhead_ns + (process.embedding.at(1) if stage == 0 else 0)
        end = depth + layers
        for index, exit_ in enumerate(process.exits):
            if exit_.stage != stage:
                continue
            spent += (exit_.depth - depth) * process.layer.at(1)
            depth = exit_.depth
            if index <= taken or exit_.head == "block":
                spent += process.heads[exit_.head].at(1)
            if index == taken:
                emitting_stage, until_emitted = stage, spent
        spent += (end - depth) * process.layer.at(1)
        depth = end
        if stage == last and taken == len(process.exits):
            spent += process.final_head.at(1)
            emitting_stage, until_emitted = stage, spent
        work.append(spent)
    return TokenPath(emitting_stage, until_emitted, tuple(work))
