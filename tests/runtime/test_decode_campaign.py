"""The long campaign of decoding: every mode against the oracle on ten thousand (prompt, threshold) pairs.

With EEPLAN_EVIDENCE set to a folder, what was counted is written there (``reports/decoding`` keeps one run).
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_plan
from decode_chain import chained
from decode_models import SEQ_LENGTH, build, differences, entries_of, entry_errors, small_run
from decode_requests import VOCAB, drawn_request, play
from oracles import naive_decode
from oracles import reference_gpt as gpt
from scipy.stats import chisquare

from eeplan.plan import load_plan, write_plan
from eeplan.runtime import backend, checkpoint
from eeplan.runtime.decode.decoder import ExitDecoder
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.options import generate_options
from eeplan.runtime.decode.pipeline import PipelineEngine
from eeplan.runtime.decode.policy import CONFIDENCE_KINDS
from eeplan.runtime.decode.requests import Engine, Request
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.tokenizer import byte_tokenizer
from eeplan.spec import HEAD_KINDS, RunSpec

MODELS = 10
PAIRS = 10_000 // MODELS
DRAFTING_MODELS = 5
DRAFTED = 5_000 // DRAFTING_MODELS
NEW = 5
DRAWS = 50_000
ROUNDS = 20
PROCESS_MODELS = 3

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def evidence() -> Iterator[dict[str, Any]]:
    """What was counted, by test."""
    found: dict[str, Any] = {}
    yield found
    folder = os.environ.get("EEPLAN_EVIDENCE")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / "campaign.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | found, indent=2, sort_keys=True) + "\n")


def drawn_run(rng: random.Random) -> RunSpec:
    """One to four exits of any kind, tied or not; one, two or four key/value heads."""
    depths = sorted(rng.sample(range(1, 5), rng.randint(1, 4)))
    exits = [{"layer": d, "head": rng.choice(HEAD_KINDS), "tied": rng.random() < 0.5} for d in depths]
    run = small_run(exits, untied=rng.random() < 0.5)
    model = run.model.model_copy(update={"num_query_groups": rng.choice([1, 2, 4])})
    return run.model_copy(update={"model": model})


@dataclass(frozen=True)
class Pair:
    """A prompt, how to leave, and what the oracle emits."""

    prompt: tuple[int, ...]
    threshold: float
    confidence: str
    limit: int
    expected: list[naive_decode.NaiveToken]

    def request(self, mode: str) -> Request:
        return Request(
            self.prompt,
            generate_options(
                threshold=self.threshold,
                max_new_tokens=NEW,
                mode=mode,
                confidence=self.confidence,
                recompute_limit=self.limit,
            ),
        )


def drawn_pair(rng: random.Random, run: RunSpec, params: gpt.Parameters, threshold: float | None) -> Pair:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, SEQ_LENGTH - NEW)))
    due = rng.random() ** 2 if threshold is None else threshold
    kind = rng.choice(CONFIDENCE_KINDS)
    exits = gpt.requested_exits(run)
    expected = naive_decode.decode(params, run, exits, prompt, due, NEW, measure=kind)
    return Pair(prompt, due, kind, rng.randint(0, NEW), expected)


@dataclass
class Kept:
    """An engine that remembers the decoders of what it has served, with their keys and values."""

    engine: LocalEngine
    decoders: list[ExitDecoder] = field(default_factory=list)

    def submit(self, request: Request) -> int:
        return self.engine.submit(request)

    def step(self) -> list[Any]:
        self.engine._sequences.admit(self.engine._join)
        known = {id(decoder) for decoder in self.decoders}
        for number in list(self.engine._sequences.running):
            decoder = self.engine.decoder(number)
            assert isinstance(decoder, ExitDecoder)
            if id(decoder) not in known:
                self.decoders.append(decoder)
        return self.engine.step()

    def cancel(self, request: int) -> None:
        self.engine.cancel(request)

    def close(self) -> None:
        self.engine.close()

    @property
    def running(self) -> int:
        return self.engine.running

    @property
    def waiting(self) -> int:
        return self.engine.waiting


def stores_are_whole(model: EarlyExitGPT, decoders: Sequence[ExitDecoder], once: bool) -> int:
    """Check every entry of every store against the full model's; returns how many (layer, position) pairs."""
    pairs = 0
    for decoder in decoders:
        with torch.no_grad():
            decoder.rows.complete()
        store = decoder.rows.network.store
        slots = range(len(store.valid_L) if decoder.rows.exits else model.run.model.num_layers)
        assert entry_errors(store, entries_of(model, decoder.text), slots) == []
        computed = model.run.model.num_layers * len(decoder.text)
        assert not once or decoder.rows.work.layer_rows == computed
        pairs += computed
    return pairs


def compare(found: list[list[Emission]], pairs: Sequence[Pair], counts: Counter[str], name: str) -> None:
    """Refuse any difference; count pairs, tokens, and exits other than the oracle's."""
    for tokens, pair in zip(found, pairs, strict=True):
        counts[f"involuntary exits, {name}"] += sum(
            token.exit != one.exit for token, one in zip(tokens, pair.expected, strict=True)
        )
        assert differences(tokens, pair.expected) == [], (name, pair)
        counts[f"pairs, {name}"] += 1
        counts[f"tokens, {name}"] += len(tokens)
        counts[f"early, {name}"] += sum(token.exit != "final" for token in tokens)


def test_every_mode_on_ten_thousand_pairs(one_process: backend.Backend, evidence: dict[str, Any]) -> None:
    counts: Counter[str] = Counter()
    for seed in range(MODELS):
        rng = random.Random(seed)
        run = drawn_run(rng)
        model, params = build(one_process, run, seed=seed + 100)
        chains = {stages: chained(model, stages, rng, SEQ_LENGTH) for stages in (1, 2, 4)}
        done = 0
        while done < PAIRS:
            batch = min(done % 8 + 1, PAIRS - done)
            pairs = [drawn_pair(rng, run, params, None) for _ in range(batch)]
            arrivals = [rng.choice([0, 0, 1, 3]) for _ in pairs]
            for mode in ("kv_recompute", "catch_up"):
                kept = Kept(LocalEngine(model, max_running=rng.randint(1, 8)))
                compare(play(kept, [pair.request(mode) for pair in pairs], arrivals), pairs, counts, mode)
                checked = stores_are_whole(model, kept.decoders, once=mode == "catch_up")
                counts[f"entries held against the full model's, {mode}"] += checked
            for stages, chain in chains.items():
                found = play(chain, [pair.request("pipeline") for pair in pairs], arrivals)
                compare(found, pairs, counts, f"pipeline P={stages}")
            full = [drawn_pair(rng, run, params, 1.0)]
            compare(play(LocalEngine(model), [full[0].request("full")]), full, counts, "full")
            done += batch
    assert counts["pairs, catch_up"] == MODELS * PAIRS
    assert all(not count for name, count in counts.items() if name.startswith("involuntary"))
    assert counts["early, catch_up"] > counts["tokens, catch_up"] / 10
    evidence["every mode against the oracle"] = {"models": MODELS, **counts}


@pytest.mark.parametrize("size", [2, 4])
def test_real_processes(
    one_process: backend.Backend, evidence: dict[str, Any], tmp_path: Path, size: int
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(PROCESS_MODELS):
        rng = random.Random(1000 * size + seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        byte_tokenizer().save(folder / "tokenizer.json")
        run = drawn_run(rng)
        data = run.data.model_copy(update={"tokenizer": str(folder / "tokenizer.json")})
        run = run.model_copy(update={"data": data})
        write_plan(folder / "plan.yaml", make_plan(run))
        model, params = build(one_process, run, seed=seed + 300)
        checkpoint.save(folder / "checkpoints", 1, model, load_plan(folder / "plan.yaml"))
        engine = PipelineEngine(folder, pipeline_size=size)
        try:
            for batch in [*range(1, 9)] * 5:
                pairs = [drawn_pair(rng, run, params, None) for _ in range(batch)]
                found = play(engine, [pair.request("pipeline") for pair in pairs])
                compare(found, pairs, counts, f"P={size}")
        finally:
            engine.close()
    evidence[f"pipeline over {size} processes against the oracle"] = dict(counts)


def test_five_thousand_drafted_prompts(one_process: backend.Backend, evidence: dict[str, Any]) -> None:
    counts: Counter[str] = Counter()
    for seed in range(DRAFTING_MODELS):
        rng = random.Random(seed + 50)
        run = drawn_run(rng)
        model, params = build(one_process, run, seed=seed + 200)
        depths = [exit_.depth for exit_ in gpt.requested_exits(run)]
        done = 0
        while done < DRAFTED:
            batch = min(done % 8 + 1, DRAFTED - done)
            pairs = [drawn_pair(rng, run, params, 1.0) for _ in range(batch)]
            options = [
                generate_options(
                    threshold=rng.random() ** 2,
                    max_new_tokens=NEW,
                    mode="self_speculative",
                    confidence=pair.confidence,
                    exits=[rng.choice(depths)],
                    recompute_limit=pair.limit,
                )
                for pair in pairs
            ]
            requests = [Request(pair.prompt, one) for pair, one in zip(pairs, options, strict=True)]
            found = play(LocalEngine(model), requests)
            compare(found, pairs, counts, "self_speculative")
            counts["accepted drafts"] += sum(token.was_draft for tokens in found for token in tokens)
            done += batch
    assert counts["pairs, self_speculative"] == DRAFTING_MODELS * DRAFTED
    assert counts["accepted drafts"] > 0
    evidence["self_speculative greedy against the full model"] = dict(counts)


def test_drafted_draws_follow_the_full_model(one_process: backend.Backend, evidence: dict[str, Any]) -> None:
    """Pairs of tokens after one prompt: the first from a verification, the second after it."""
    run = small_run([{"layer": 2, "head": "norm", "tied": False}])
    model, params = build(one_process, run)
    prompt, exits = (3, 1, 4), gpt.requested_exits(run)

    def full_model(text: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = gpt.logits(params, run, exits, torch.tensor([text]))["final"]
        return (logits[0, -1, :VOCAB] / 1.5).softmax(-1)

    # The token after the prompt is fixed by the seed's first number; what follows is drafted.
    start = full_model(prompt)
    joint = torch.stack([start[one] * full_model([*prompt, one]) for one in range(VOCAB)]).flatten()
    counts = torch.zeros(VOCAB * VOCAB)
    options = [
        generate_options(threshold=0.0, max_new_tokens=3, mode="self_speculative", temperature=1.5, seed=seed)
        for seed in range(DRAWS)
    ]
    accepted = 0
    engine = LocalEngine(model, max_running=64)
    for start_at in range(0, DRAWS, 1000):
        requests = [Request(prompt, one) for one in options[start_at : start_at + 1000]]
        for first, second, _ in play(engine, requests):
            counts[first.token * VOCAB + second.token] += 1
            accepted += second.was_draft
    assert 0.05 < accepted / DRAWS < 0.95, "drafts that are always or never accepted test little"
    often = joint * DRAWS >= 5
    # Cells that few draws fall into are one cell, if there are any.
    observed, expected = counts[often], joint[often] * DRAWS
    if not bool(often.all()):
        observed = torch.cat((observed, counts[~often].sum()[None]))
        expected = torch.cat((expected, joint[~often].sum()[None] * DRAWS))
    test = chisquare(observed.numpy(), expected.numpy() * float(observed.sum() / expected.sum()))
    evidence["self_speculative sampling, chi-square"] = {
        "draws": DRAWS,
        "cells": len(observed),
        "statistic": float(test.statistic),
        "p": float(test.pvalue),
        "accepted": accepted / DRAWS,
    }
    assert test.pvalue > 1e-4
    wrong = chisquare(observed.roll(1).numpy(), expected.numpy() * float(observed.sum() / expected.sum()))
    assert wrong.pvalue < 1e-10, "negative control"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_batches_of_every_size_in_any_order(
    one_process: backend.Backend, evidence: dict[str, Any], dtype: torch.dtype
) -> None:
    """Equal in every bit to what each gets alone; modes mixed, greedy and drawn."""
    counts: Counter[str] = Counter()
    for seed in range(ROUNDS):
        rng = random.Random(seed)
        model, _ = build(one_process, drawn_run(rng), dtype, seed=seed)
        for size in range(1, 9):
            requests = [drawn_request(rng) for _ in range(size)]
            alone = [play(LocalEngine(model), [request])[0] for request in requests]
            for _ in range(2):
                order = rng.sample(range(size), size)
                engine: Engine = LocalEngine(model, max_running=rng.randint(1, 8))
                arrivals = [rng.choice([0, 0, 1, 2, 4]) for _ in order]
                found = play(engine, [requests[index] for index in order], arrivals)
                assert found == [alone[index] for index in order]
                counts[f"sequences in batches of {size}"] += size
                counts["tokens"] += sum(map(len, found))
    counts["sequences that differ"] = 0
    evidence[f"batch invariance, {str(dtype).removeprefix('torch.')}"] = dict(counts)
