"""Decoding over pipeline stages: the oracle's tokens, whatever P, and no hang when a process dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from builders import make_plan
from decode_models import ALL_HEADS, SEQ_LENGTH, build, differences, entries_of, entry_errors, small_run
from decode_requests import drawn_request, play
from oracles import naive_decode
from oracles import reference_gpt as gpt

from eeplan.errors import DecodeError
from eeplan.plan import load_plan, write_plan
from eeplan.runtime import backend, checkpoint
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.decode.pipeline import PIPELINE_MODES, PipelineEngine
from eeplan.runtime.decode.requests import Request
from eeplan.runtime.decode.stages import decode_stages
from eeplan.runtime.decode.weights import rotary_angles
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.tokenizer import byte_tokenizer
from eeplan.spec import RunSpec

PROMPT = (3, 1, 4, 1, 5)


def run_on(engine: PipelineEngine) -> None:
    """Step until something happens that ends it."""
    while True:
        engine.step()


@dataclass(frozen=True)
class Stored:
    folder: Path
    run: RunSpec
    model: EarlyExitGPT
    params: gpt.Parameters


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """A checkpoint in float64."""
    folder = tmp_path_factory.mktemp("pipeline")
    byte_tokenizer().save(folder / "tokenizer.json")
    run = small_run(ALL_HEADS, untied=True)
    data = run.data.model_copy(update={"tokenizer": str(folder / "tokenizer.json")})
    run = run.model_copy(update={"data": data})
    write_plan(folder / "plan.yaml", make_plan(run))
    with backend.single_process() as here:
        model, params = build(here, run)
        checkpoint.save(folder / "checkpoints", 1, model, load_plan(folder / "plan.yaml"))
        yield Stored(folder, run, model, params)


class Engines(dict[int, PipelineEngine]):
    """By number of stages; started when first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, size: int) -> PipelineEngine:
        self[size] = PipelineEngine(self.folder, pipeline_size=size)
        return self[size]


@pytest.fixture(scope="module")
def engines(stored: Stored) -> Iterator[Engines]:
    made = Engines(stored.folder)
    yield made
    for engine in made.values():
        engine.close()


SIZES = [1, 2, pytest.param(4, marks=pytest.mark.long)]
"""Four processes take their time to start."""


@pytest.mark.parametrize("size", SIZES)
def test_the_oracles_tokens(stored: Stored, engines: Engines, size: int) -> None:
    for threshold, mode in ((0.5, "pipeline"), (0.0, "pipeline"), (1.0, "pipeline"), (0.5, "full")):
        request = Request(PROMPT, generate_options(threshold=threshold, max_new_tokens=99, mode=mode))
        found = play(engines[size], [request])[0]
        expected = naive_decode.decode(
            stored.params,
            stored.run,
            gpt.requested_exits(stored.run),
            PROMPT,
            threshold if mode == "pipeline" else 1.0,
            SEQ_LENGTH - len(PROMPT) + 1,
        )
        assert differences(found, expected) == []
        if threshold == 0.5:
            assert len({emission.exit for emission in found}) == (5 if mode == "pipeline" else 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_batch_gives_each_the_tokens_it_gets_alone(stored: Stored, engines: Engines, size: int) -> None:
    """Equal in every bit, and those of mode full also to one process's."""
    rng = random.Random(size)
    for batch in (1, 2, 5, 8):
        requests = [drawn_request(rng, PIPELINE_MODES) for _ in range(batch)]
        alone = [play(engines[size], [request])[0] for request in requests]
        arrivals = [rng.choice([0, 0, 1, 3]) for _ in requests]
        assert play(engines[size], requests, arrivals) == alone
        for request, tokens in zip(requests, alone, strict=True):
            if request.options.mode == "full":
                assert play(LocalEngine(stored.model), [request])[0] == tokens


def test_every_entry_is_filled_on_the_first_stage(stored: Stored, engines: Engines) -> None:
    engine = engines[1]
    number = engine.submit(
        Request(PROMPT, generate_options(threshold=0.0, max_new_tokens=10, mode="pipeline"))
    )
    text = list(PROMPT)
    for _ in range(6):
        text += [event.emission.token for event in engine.step() if event.emission]
    network = engine._runner.store_of(number)
    # The token emitted last has not been fed.
    assert entry_errors(network.store, entries_of(stored.model, text[:-1]), range(5)) == []
    engine.cancel(number)
    assert (engine.running, engine.kv_bytes) == (0, 0)


def test_a_token_that_left_does_not_wait_for_later_stages(engines: Engines) -> None:
    """With the second stage stopped, tokens that leave on the first keep coming."""
    engine = engines[2]
    number = engine.submit(
        Request(PROMPT, generate_options(threshold=0.0, max_new_tokens=8, mode="pipeline"))
    )
    os.kill(engine.processes[0], signal.SIGSTOP)
    try:
        events = [event for _ in range(8) for event in engine.step()]
    finally:
        os.kill(engine.processes[0], signal.SIGCONT)
    assert [event.emission.exit for event in events if event.emission] == ["exit_1"] * 8
    assert events[-1].finish == "length"
    assert number == events[0].request


def test_cancelled_sequences_are_forgotten(engines: Engines) -> None:
    engine = engines[2]
    options = generate_options(threshold=0.5, max_new_tokens=99, mode="pipeline")
    numbers = [engine.submit(Request(PROMPT, options)) for _ in range(3)]
    engine.step()
    engine.cancel(numbers[0])
    assert engine.running == 2
    done: dict[int, str] = {}
    while engine.running:
        events = engine.step()
        assert numbers[0] not in {event.request for event in events}
        done |= {event.request: event.finish for event in events if event.finish}
    assert done == {numbers[1]: "length", numbers[2]: "length"}
    engine.step()
    assert engine.kv_bytes == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_stage_that_dies_is_named_and_nothing_hangs(stored: Stored, number: signal.Signals) -> None:
    engine = PipelineEngine(stored.folder, pipeline_size=2)
    processes = engine.processes
    engine.submit(Request(PROMPT, generate_options(threshold=1.0, max_new_tokens=9, mode="pipeline")))
    engine.step()
    os.kill(processes[0], number)
    begin_s = time.monotonic()
    with pytest.raises(
        DecodeError, match=f"stage 2 .process {processes[0]}. was killed by signal {int(number)}"
    ):
        run_on(engine)
    assert time.monotonic() - begin_s < 20
    engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.mark.long
def test_a_stage_that_hangs_is_given_up(stored: Stored) -> None:
    engine = PipelineEngine(stored.folder, pipeline_size=2, timeout_s=1.0)
    engine.submit(Request(PROMPT, generate_options(threshold=1.0, max_new_tokens=9, mode="pipeline")))
    os.kill(engine.processes[0], signal.SIGSTOP)
    with pytest.raises(DecodeError, match="no pipeline stage has answered for 1 s"):
        run_on(engine)
    assert engine.processes == ()


def test_what_stages_refuse(stored: Stored, engines: Engines) -> None:
    with pytest.raises(DecodeError, match="expected 1 to 5, the number of the model's layers"):
        PipelineEngine(stored.folder, pipeline_size=6)
    for mode in ("catch_up", "self_speculative"):
        request = Request((1,), generate_options(threshold=0.5, max_new_tokens=2, mode=mode))
        with pytest.raises(DecodeError, match="pipeline stages decode in mode pipeline or full"):
            engines[2].submit(request)
    options = generate_options(threshold=0.5, max_new_tokens=2, mode="pipeline", exits=[5])
    with pytest.raises(DecodeError, match="no exit at depth 5"):
        engines[2].submit(Request((1,), options))
    one_process = LocalEngine(stored.model)
    with pytest.raises(DecodeError, match="this engine has one"):
        one_process.submit(Request((1,), generate_options(threshold=0.5, max_new_tokens=2, mode="pipeline")))


def test_not_finite_logits_on_a_later_stage_are_reported(stored: Stored, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer.json")
    plan = load_plan(stored.folder / "plan.yaml")
    norm = stored.model.decoder.final_layernorm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(float("nan"))
        checkpoint.save(tmp_path / "checkpoints", 1, stored.model, plan)
        norm.copy_(kept)
    engine = PipelineEngine(tmp_path / "checkpoints", pipeline_size=2)
    engine.submit(Request(PROMPT, generate_options(threshold=1.0, max_new_tokens=9, mode="pipeline")))
    with pytest.raises(DecodeError, match="final are not finite"):
        run_on(engine)
    engine.close()


def test_stages_hold_every_layer_and_exit_once(stored: Stored) -> None:
    plan = load_plan(stored.folder / "plan.yaml")
    for size in range(1, 6):
        stages = decode_stages(plan, size)
        layers = [layer for stage in stages for layer in range(stage.first_layer, stage.last_layer + 1)]
        assert layers == [1, 2, 3, 4, 5]
        assert [exit_.depth for stage in stages for exit_ in stage.exits] == [1, 2, 3, 4]
        assert [stage.is_first for stage in stages] == [True] + [False] * (size - 1)
        assert all(exit_.depth <= stage.last_layer for stage in stages for exit_ in stage.exits)


def test_rotary_angles_are_megatrons(stored: Stored) -> None:
    assert torch.equal(rotary_angles(stored.run, SEQ_LENGTH), stored.model.rotary(SEQ_LENGTH))
    faster = stored.run.model.model_copy(update={"rotary_base": 77})
    other = stored.run.model_copy(update={"model": faster})
    assert not torch.equal(rotary_angles(other, SEQ_LENGTH), stored.model.rotary(SEQ_LENGTH))


def test_an_end_token_ends_a_sequence(engines: Engines) -> None:
    request = Request(PROMPT, generate_options(threshold=0.5, max_new_tokens=12, mode="pipeline"))
    plain = [emission.token for emission in play(engines[2], [request])[0]]
    end = plain[5]
    stopping = replace(request, end_tokens=frozenset({end}))
    assert [e.token for e in play(engines[2], [stopping])[0]] == plain[: plain.index(end)]


@pytest.mark.parametrize(
    ("stages", "shares"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)], ids=["1x2", "2x2"]
)
def test_stages_shared_by_two_processes(stored: Stored, stages: int, shares: int) -> None:
    """Heads, channels and the vocabulary cut in two; candidates and draws see all of it."""
    engine = PipelineEngine(stored.folder, pipeline_size=stages, tensor_size=shares)
    try:
        assert len(engine.processes) == stages * shares - 1
        rng = random.Random(stages)
        for threshold in (0.5, 0.0, 1.0):
            options = generate_options(threshold=threshold, max_new_tokens=99, mode="pipeline")
            found = play(engine, [Request(PROMPT, options)])[0]
            count = SEQ_LENGTH - len(PROMPT) + 1
            exits = gpt.requested_exits(stored.run)
            expected = naive_decode.decode(stored.params, stored.run, exits, PROMPT, threshold, count)
            assert differences(found, expected) == []
        whole = LocalEngine(stored.model)
        requests = [drawn_request(rng, ["full"]) for _ in range(5)]
        for mine, theirs in zip(play(engine, requests), play(whole, requests), strict=True):
            assert [(e.token, e.exit) for e in mine] == [(e.token, e.exit) for e in theirs]
        number = engine.processes[0]
        engine.submit(Request(PROMPT, generate_options(threshold=1.0, max_new_tokens=9, mode="pipeline")))
        engine.step()
        os.kill(number, signal.SIGKILL)
        with pytest.raises(DecodeError, match=f"share 2 of pipeline stage 1 .process {number}. was killed"):
            run_on(engine)
    finally:
        engine.close()


def test_what_cannot_be_shared_is_refused(stored: Stored) -> None:
    with pytest.raises(DecodeError, match="tensor size is 3; expected a divisor of the 2 key/value heads"):
        PipelineEngine(stored.folder, pipeline_size=1, tensor_size=3)
    with pytest.raises(DecodeError, match="dtype is 'int8'; expected one of float32"):
        PipelineEngine(stored.folder, pipeline_size=1, dtype="int8")
