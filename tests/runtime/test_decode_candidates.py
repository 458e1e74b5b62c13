"""A look at a few candidates before the full head: the same rule as the oracle's, and its error counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_chain import chained
from decode_models import ALL_HEADS, SEQ_LENGTH, build, differences, exit_requests, small_run
from decode_requests import play
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import naive_decode
from oracles import reference_gpt as gpt

from eeplan.errors import DecodeError
from eeplan.runtime import backend
from eeplan.runtime.decode.decoder import ExitDecoder
from eeplan.runtime.decode.emission import CheckCounts
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.exit_check import ExitCheck, shortlist_facts
from eeplan.runtime.decode.generate import total_checks
from eeplan.runtime.decode.modes import make_decoder
from eeplan.runtime.decode.ops import Logits
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.decode.policy import Candidates, candidates_of, confidence_of, exit_policy
from eeplan.runtime.decode.requests import Request
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.model import EarlyExitGPT, ExitSpec

PROMPT = (3, 1, 4, 1, 5)
NEW = 12


@pytest.fixture(scope="module")
def one_process() -> Iterator[backend.Backend]:
    with backend.single_process() as here:
        yield here


@given(
    st.lists(st.integers(-800, 800).map(lambda n: n / 100), min_size=2, max_size=20),
    st.sampled_from(["max_probability", "margin"]),
    st.data(),
)
def test_candidates_bound_the_confidence_if_the_likeliest_is_among_them(
    values: list[float], kind: Any, data: st.DataObject
) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    others = data.draw(st.sets(st.integers(0, len(values) - 1)))
    shortlist = torch.tensor(sorted({*others, int(logits.argmax())}))
    assert confidence_of(logits[shortlist], kind) >= confidence_of(logits, kind) - 1e-12


@settings(max_examples=20, deadline=None)
@example(
    exits=[{"layer": 1, "head": "minimal", "tied": False}, {"layer": 2, "head": "minimal", "tied": False}],
    threshold=0.1,
    number=1,
    kind="margin",
    seed=1,
)
@given(
    exits=exit_requests(min_size=2),
    threshold=st.sampled_from([0.1, 0.3, 0.5, 0.7]),
    number=st.integers(1, 13),
    kind=st.sampled_from(["max_probability", "margin"]),
    seed=st.integers(1, 50),
)
def test_modes_follow_the_oracle_with_the_same_rule(
    one_process: backend.Backend,
    exits: list[dict[str, Any]],
    threshold: float,
    number: int,
    kind: str,
    seed: int,
) -> None:
    run = small_run(exits)
    model, params = build(one_process, run, seed=seed)
    expected = naive_decode.decode(
        params, run, gpt.requested_exits(run), PROMPT, threshold, NEW, measure=kind, candidates=number
    )
    policy = exit_policy(threshold, kind, candidates=candidates_of(number))
    for mode in ("kv_recompute", "catch_up"):
        subject = make_decoder(
            model, mode, policy, Sampling(), seed=1, recompute_limit=3, capacity=SEQ_LENGTH
        )
        assert differences(list(islice(subject.emissions(PROMPT), NEW)), expected) == [], mode
    options = generate_options(
        threshold=threshold, max_new_tokens=NEW, mode="pipeline", confidence=kind, candidates=number
    )
    for stages in (1, 3):
        engine = chained(model, stages, random.Random(seed), SEQ_LENGTH)
        assert differences(play(engine, [Request(PROMPT, options)])[0], expected) == [], stages


def decoded(model: EarlyExitGPT, candidates: Candidates) -> tuple[list[tuple[int, str]], CheckCounts]:
    subject = make_decoder(
        model,
        "catch_up",
        exit_policy(0.7, candidates=candidates),
        Sampling(),
        seed=1,
        recompute_limit=8,
        capacity=SEQ_LENGTH,
    )
    assert isinstance(subject, ExitDecoder)
    tokens = [(emission.token, emission.exit) for emission in subject.emissions(PROMPT)]
    return tokens, subject.rows.work.exits


def test_the_error_is_measured_and_decides_nothing(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    plain, without = decoded(model, candidates_of(0))
    for number in (2, 3, 13):
        found, counts = decoded(model, candidates_of(number))
        measured, errors = decoded(model, candidates_of(number, measured=True))
        assert measured == found
        assert counts.refused == errors.refused == errors.measured > 0
        assert counts.wrong == counts.measured == 0
        assert errors.full > counts.full
        # A token held back wrongly is emitted at a deeper exit; nothing else changes.
        assert (found == plain) == (errors.wrong == 0)
    assert errors.wrong == 0, "all tokens as candidates are the full head"
    assert without.candidates == without.refused == 0
    assert without.full > counts.full


def test_frequent_tokens_as_candidates(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    plain, _ = decoded(model, candidates_of(0))
    every = candidates_of(13, "frequent", range(13))
    found, counts = decoded(model, every)
    assert found == plain
    # Unlike the previous exit's, they are there at the first exit too.
    assert counts.candidates > counts.full
    some, errors = decoded(model, candidates_of(4, "frequent", range(13), measured=True))
    assert errors.refused == errors.measured > 0
    assert (some == plain) == (errors.wrong == 0)


@pytest.mark.parametrize("source", ["previous_exit", "frequent"])
def test_every_engine_tells_the_same_counts(one_process: backend.Backend, source: str) -> None:
    """Tokens carry what their checks came to, from whatever stage, and sum up to the decoder's own count."""
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    frequent = tuple(range(13)) if source == "frequent" else ()
    number = 5
    asked = {"candidates": number, "candidate_source": source, "frequent_tokens": frequent}
    tokens, counts = decoded(model, candidates_of(number, source, frequent, measured=True))
    assert counts.refused > 0
    new = SEQ_LENGTH - len(PROMPT) + 1
    engines = [("catch_up", LocalEngine(model))]
    engines += [("pipeline", chained(model, stages, random.Random(1), SEQ_LENGTH)) for stages in (1, 3)]
    for mode, engine in engines:
        options = generate_options(
            threshold=0.7, max_new_tokens=new, mode=mode, measure_candidates=True, **asked
        )
        plain = generate_options(threshold=0.7, max_new_tokens=new, mode=mode)
        found, without = play(engine, [Request(PROMPT, options), Request(PROMPT, plain)])
        assert [(emission.token, emission.exit) for emission in found] == tokens
        assert total_checks(found) == counts
        assert {emission.checks for emission in without} == {None}


def test_facts_of_a_shortlist() -> None:
    counts = CheckCounts(full=7, candidates=10, refused=8, measured=8, wrong=2)
    assert shortlist_facts(candidates_of(0), counts) is None
    told = shortlist_facts(candidates_of(4, measured=True), counts)
    assert told == {
        "number": 4,
        "source": "previous_exit",
        "shortlists": 10,
        "refused": 8,
        "full_heads": 7,
        "wrong": 2,
        "wrong_share": 0.25,
    }
    unmeasured = shortlist_facts(candidates_of(4), counts)
    assert unmeasured is not None
    assert (unmeasured["wrong"], unmeasured["wrong_share"]) == (None, None)


@pytest.mark.parametrize(("likeliest", "wrong"), [(5, 1), (1, 0)])
def test_a_token_held_back_wrongly_is_counted(likeliest: int, wrong: int) -> None:
    """Three candidates are equally likely; the full head is certain of a token, or of none."""
    network: Any = SimpleNamespace(device=torch.device("cpu"))
    candidates = candidates_of(3, "frequent", (0, 1, 2), measured=True)
    check, counts = ExitCheck({2: 0.6}, "max_probability", candidates), CheckCounts()
    steps = check.leaves(network, ExitSpec(2, "norm", True), torch.zeros(1, 4), counts)
    asked = next(steps)
    assert isinstance(asked, Logits)
    assert asked.candidates_C is not None
    assert asked.candidates_C.tolist() == [0, 1, 2]
    asked = steps.send(torch.zeros(1, 3))
    assert isinstance(asked, Logits)
    assert asked.candidates_C is None
    full = torch.zeros(1, 6)
    full[0, likeliest] = 10.0 if wrong else 0.1
    with pytest.raises(StopIteration) as end:
        steps.send(full)
    assert end.value.value is None
    assert (counts.candidates, counts.refused, counts.measured, counts.wrong) == (1, 1, 1, wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": -1}, "candidates is -1"),
        ({"candidates": 4, "candidate_source": "luck"}, "expected one of previous_exit, frequent"),
        ({"candidates": 4, "candidate_source": "frequent", "frequent_tokens": [1]}, "4 wanted, 1 frequent"),
        ({"candidates": 4, "confidence": "entropy"}, "do not bound the entropy"),
        ({"candidates": 4, "mode": "full"}, "mode 'full' checks no exit"),
        ({"candidates": 4, "mode": "self_speculative"}, "takes drafts from the whole head"),
        ({"measure_candidates": True}, "there are none"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        generate_options(threshold=0.5, max_new_tokens=4, **options)
