"""Many sequences at once: each gets, bit by bit, what it gets alone, whoever comes and goes beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from decode_models import ALL_HEADS, SEQ_LENGTH, build, small_run
from decode_requests import VOCAB, drawn_request, play
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from eeplan.errors import DecodeError
from eeplan.runtime import backend
from eeplan.runtime.decode import products
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.modes import MODES, make_decoder
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.decode.requests import Request
from eeplan.runtime.model import EarlyExitGPT

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def models() -> Iterator[dict[torch.dtype, EarlyExitGPT]]:
    with backend.single_process() as here:
        yield {dtype: build(here, small_run(ALL_HEADS, untied=True), dtype)[0] for dtype in DTYPES}


def tokens_alone(model: EarlyExitGPT, request: Request) -> list[Emission]:
    return play(LocalEngine(model), [request])[0]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 8))
def test_a_batch_gives_each_the_tokens_it_gets_alone(
    models: dict[torch.dtype, EarlyExitGPT], dtype: torch.dtype, seed: int, size: int
) -> None:
    """Tokens, exits, confidences and log-probabilities: equal in every bit, in every mode."""
    rng = random.Random(seed)
    requests = [drawn_request(rng) for _ in range(size)]
    arrivals = [rng.choice([0, 0, 1, 3]) for _ in requests]
    model = models[dtype]
    found = play(LocalEngine(model, max_running=rng.randint(1, 8)), requests, arrivals)
    assert found == [tokens_alone(model, request) for request in requests]
    order = list(range(size))
    rng.shuffle(order)
    permuted = play(LocalEngine(model), [requests[index] for index in order])
    assert permuted == [found[index] for index in order]


def test_negative_control_products_that_depend_on_the_number_of_rows(
    models: dict[torch.dtype, EarlyExitGPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_tiled", linear)
    requests = [drawn_request(random.Random(seed)) for seed in range(8)]
    model = models[torch.float32]
    found = play(LocalEngine(model), requests)
    assert found != [tokens_alone(model, request) for request in requests]


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_is_the_decoder(models: dict[torch.dtype, EarlyExitGPT], mode: str) -> None:
    request = Request((3, 1, 4, 1, 5), generate_options(threshold=0.5, max_new_tokens=12, mode=mode))
    options = request.options
    decoder = make_decoder(
        models[torch.float32],
        options.mode,
        options.policy,
        options.sampling,
        seed=options.seed,
        recompute_limit=options.recompute_limit,
        capacity=16,
    )
    assert tokens_alone(models[torch.float32], request) == list(decoder.emissions(request.prompt))


def test_products_are_shared(
    models: dict[torch.dtype, EarlyExitGPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sequences of full mode: every layer is run once a step, on eight rows."""
    rows: list[int] = []
    tiled = products._tiled

    def seen(rows_RI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        rows.append(len(rows_RI))
        return tiled(rows_RI, weight_OI)

    monkeypatch.setattr(products, "_tiled", seen)
    engine = LocalEngine(models[torch.float32])
    for token in range(8):
        engine.submit(Request((token,), generate_options(threshold=1.0, max_new_tokens=4, mode="full")))
    engine.step()
    rows.clear()
    engine.step()
    assert rows == [8] * (5 * 4 + 1)


def test_nobody_waits_for_another(models: dict[torch.dtype, EarlyExitGPT]) -> None:
    """One always leaves at the first exit, one never; each step is a token for both."""
    engine = LocalEngine(models[torch.float32])
    early = engine.submit(Request((1, 2), generate_options(threshold=0.0, max_new_tokens=9)))
    never = engine.submit(Request((1, 2), generate_options(threshold=1.0, max_new_tokens=9)))
    for _ in range(9):
        events = {event.request: event.emission for event in engine.step()}
        assert {number: e.exit for number, e in events.items() if e} == {early: "exit_1", never: "final"}


def test_ends_and_room(models: dict[torch.dtype, EarlyExitGPT]) -> None:
    model = models[torch.float32]
    engine = LocalEngine(model, max_running=2)
    request = Request((1, 2, 3), generate_options(threshold=1.0, max_new_tokens=100))
    numbers = [engine.submit(request) for _ in range(3)]
    assert (engine.running, engine.waiting, engine.kv_bytes) == (0, 3, 0)
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)
    one_store = engine.kv_bytes // 2
    engine.cancel(numbers[0])
    engine.cancel(numbers[0])
    engine.cancel(77)
    assert (engine.running, engine.kv_bytes) == (1, one_store)
    events = engine.step()
    assert {event.request for event in events} == set(numbers[1:])
    assert all(event.latency_s > 0 for event in events)
    finished = {}
    while engine.running:
        finished |= {event.request: event.finish for event in engine.step() if event.finish}
    assert finished == dict.fromkeys(numbers[1:], "length")
    assert engine.kv_bytes == 0
    assert len(tokens_alone(model, request)) == SEQ_LENGTH - 3 + 1
    assert engine.step() == []


def test_an_end_token_is_not_emitted(models: dict[torch.dtype, EarlyExitGPT]) -> None:
    model = models[torch.float32]
    for mode in MODES:
        request = Request((1, 2, 3), generate_options(threshold=0.5, max_new_tokens=12, mode=mode))
        plain = [emission.token for emission in tokens_alone(model, request)]
        end = plain[5]
        stopping = replace(request, end_tokens=frozenset({end}))
        assert [e.token for e in tokens_alone(model, stopping)] == plain[: plain.index(end)]


def test_top_logprobs_come_with_the_tokens(models: dict[torch.dtype, EarlyExitGPT]) -> None:
    for mode in MODES:
        options = generate_options(threshold=0.5, max_new_tokens=6, mode=mode, top_logprobs=3)
        for emission in tokens_alone(models[torch.float32], Request((1, 2), options)):
            assert len(emission.top_logprobs) == 3
            assert emission.top_logprobs[0] == (emission.token, pytest.approx(emission.logprob))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ((), {}, "prompt is empty"),
        ((1,) * (SEQ_LENGTH + 1), {}, "has 25 tokens, the model was trained on sequences of 24"),
        ((1, VOCAB), {}, "has token 13; expected ids from 0 to 12"),
        ((1,), {"exits": [5]}, "no exit at depth 5"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    models: dict[torch.dtype, EarlyExitGPT],
    prompt: tuple[int, ...],
    options: dict[str, list[int]],
    message: str,
) -> None:
    engine = LocalEngine(models[torch.float32])
    with pytest.raises(DecodeError, match=message):
        engine.submit(
            Request(prompt, generate_options(threshold=0.5, max_new_tokens=4, exits=options.get("exits")))
        )
    assert engine.waiting == 0
