"""Pipeline stages in one process: however late they are, the oracle's tokens and every entry filled."""

from __future__ import annotations

import random
from typing import Any

import pytest
from decode_chain import ChainedStages, chained
from decode_models import (
    ALL_HEADS,
    PROMPT,
    SEQ_LENGTH,
    build,
    differences,
    entries_of,
    entry_errors,
    exit_requests,
    small_run,
)
from decode_requests import drawn_request, play
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import naive_decode
from oracles import reference_gpt as gpt

from eeplan.runtime import backend
from eeplan.runtime.decode.kv import KeyValueStore
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.decode.pipeline import PIPELINE_MODES, PipelineDriver
from eeplan.runtime.decode.requests import Request
from eeplan.runtime.decode.stage_rows import StageRunner
from eeplan.runtime.model import EarlyExitGPT


def stage_errors(engine: PipelineDriver, model: EarlyExitGPT, number: int, text: list[int]) -> list[str]:
    """Missing and wrong entries of a sequence on all stages, block heads included."""
    later = engine._later
    assert isinstance(later, ChainedStages)
    later.settle()
    expected, errors = entries_of(model, text), []
    blocks = model.run.model.num_layers
    for runner in (engine._runner, *later.runners):
        store: KeyValueStore = runner.store_of(number).store
        stage = runner._transformer.weights.stage
        in_head = sum(exit_.head == "block" for exit_ in stage.exits)
        slots = [*range(stage.first_layer - 1, stage.last_layer), *range(blocks, blocks + in_head)]
        blocks += in_head
        part = KeyValueStore(
            len(slots), len(text), 1, 1, store.entries_L2GPD.dtype, store.entries_L2GPD.device
        )
        part.entries_L2GPD = expected.entries_L2GPD[slots]
        errors += entry_errors(store, part, range(len(slots)))
    return errors


@settings(max_examples=15, deadline=None)
@given(
    exits=exit_requests(),
    threshold=st.floats(0.0, 0.99),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    stages=st.integers(1, 5),
    seed=st.integers(1, 1000),
)
def test_the_oracles_tokens_and_every_entry(
    one_process: backend.Backend,
    exits: list[dict[str, Any]],
    threshold: float,
    prompt: list[int],
    stages: int,
    seed: int,
) -> None:
    run = small_run(exits)
    model, params = build(one_process, run, seed=seed)
    engine = chained(model, stages, random.Random(seed), SEQ_LENGTH)
    options = generate_options(threshold=threshold, max_new_tokens=9, mode="pipeline")
    number = engine.submit(Request(tuple(prompt), options))
    text = list(prompt)
    found = []
    while len(found) < min(4, SEQ_LENGTH - len(prompt)):
        found += [event.emission for event in engine.step() if event.emission]
    text += [emission.token for emission in found]
    # Feed the token emitted last, and let it through all stages.
    engine._run_first_stage()
    assert stage_errors(engine, model, number, text[: engine._sequences.running[number].length]) == []
    expected = naive_decode.decode(params, run, gpt.requested_exits(run), prompt, threshold, len(found))
    assert differences(found, expected) == []


@pytest.mark.parametrize("stages", [2, 4])
def test_a_batch_gives_each_the_tokens_it_gets_alone(one_process: backend.Backend, stages: int) -> None:
    """Bit by bit, whatever the order in which stages get on."""
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    rng = random.Random(stages)
    engine = chained(model, stages, rng, SEQ_LENGTH)
    for _ in range(6):
        requests = [drawn_request(rng, PIPELINE_MODES) for _ in range(rng.randint(1, 8))]
        alone = [play(chained(model, stages, rng, SEQ_LENGTH), [request])[0] for request in requests]
        assert play(engine, requests, [rng.choice([0, 0, 1, 3]) for _ in requests]) == alone


def test_negative_control_rows_out_of_order(
    one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    run = StageRunner.run
    monkeypatch.setattr(StageRunner, "run", lambda self, messages, emit: run(self, messages[::-1], emit))
    engine = chained(model, 3, random.Random(2), SEQ_LENGTH)
    request = Request(tuple(PROMPT), generate_options(threshold=0.0, max_new_tokens=12, mode="pipeline"))
    number = engine.submit(request)
    with pytest.raises((AssertionError, KeyError)):
        stage_errors_after(engine, model, number, 6)


def stage_errors_after(engine: PipelineDriver, model: EarlyExitGPT, number: int, steps: int) -> None:
    """Step, then let the stages get on with what is under way."""
    for _ in range(steps):
        engine.step()
    assert stage_errors(engine, model, number, list(PROMPT)) == []
