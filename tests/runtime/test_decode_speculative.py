"""Self-speculative decoding is the full model: the same text when greedy, the same distribution if drawn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from decode_models import (
    ALL_HEADS,
    NEW,
    PROMPT,
    SEQ_LENGTH,
    build,
    differences,
    entries_of,
    entry_errors,
    exit_requests,
    small_run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import naive_decode
from oracles import reference_gpt as gpt
from scipy.stats import chisquare

from eeplan.errors import DecodeError
from eeplan.runtime import backend
from eeplan.runtime.decode import speculative
from eeplan.runtime.decode.modes import make_decoder
from eeplan.runtime.decode.policy import exit_policy
from eeplan.runtime.decode.sampling import Sampling, draw
from eeplan.runtime.decode.speculative import SpeculativeDecoder, verdict
from eeplan.runtime.model import EarlyExitGPT
from eeplan.spec import RunSpec

SIGNIFICANCE = 1e-4
"""A right sampler fails so rarely; a wrong one is told by many orders of magnitude."""


def decoder(
    model: EarlyExitGPT,
    threshold: float = 0.0,
    limit: int = 4,
    *,
    exits: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    seed: int = 5,
    capacity: int = SEQ_LENGTH,
) -> SpeculativeDecoder:
    made = make_decoder(
        model,
        "self_speculative",
        exit_policy(threshold, exits=exits),
        sampling or Sampling(),
        seed=seed,
        recompute_limit=limit,
        capacity=capacity,
    )
    assert isinstance(made, SpeculativeDecoder)
    return made


def full_model(
    params: gpt.Parameters, run: RunSpec, prompt: Sequence[int], count: int
) -> list[naive_decode.NaiveToken]:
    return naive_decode.decode(params, run, gpt.requested_exits(run), prompt, 1.0, count)


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    exits=exit_requests(min_size=1),
    threshold=st.sampled_from([0.0, 0.2, 0.4, 0.8, 1.0]),
    limit=st.integers(0, 8),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    seed=st.integers(1, 5),
)
def test_greedy_text_is_the_full_models(
    one_process: backend.Backend,
    data: st.DataObject,
    exits: list[dict[str, Any]],
    threshold: float,
    limit: int,
    prompt: list[int],
    seed: int,
) -> None:
    run = small_run(exits)
    model, params = build(one_process, run, seed=seed)
    chosen = data.draw(st.sampled_from([exit_["layer"] for exit_ in exits]))
    subject = decoder(model, threshold, limit, exits=[chosen], capacity=len(prompt) + 11)
    found = list(subject.emissions(prompt))
    assert differences(found, full_model(params, run, prompt, 12)) == []
    assert not subject.rows.waiting
    text = [*prompt, *(emission.token for emission in found[:-1])]
    assert subject.text == text
    assert entry_errors(subject.rows.network.store, entries_of(model, text), range(5)) == []
    assert subject.accepted == sum(emission.was_draft for emission in found)


def test_drafts_of_a_perfect_exit_all_stand(one_process: backend.Backend) -> None:
    """Layers that add nothing after the exit make its head the final one; each layer runs once a row."""
    model, _ = build(one_process, small_run([{"layer": 2, "head": "norm"}]))
    with torch.no_grad():
        for layer in model.decoder.layers[2:]:
            layer.self_attention.linear_proj.weight.zero_()
            layer.mlp.linear_fc2.weight.zero_()
        model.exits["2"].norm.weight.copy_(model.decoder.final_layernorm.weight)
    subject = decoder(model, 0.0, 4)
    found = list(subject.emissions(PROMPT))
    assert subject.accepted == subject.drafted == 15
    assert subject.rows.work.layer_rows == 5 * SEQ_LENGTH
    # The prompt, then three rounds of five rows and one of four: five tokens out of each full one.
    assert subject.rows.work.full_passes == 1 + 4
    assert len(found) == NEW


def test_refused_drafts_cost_rows(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    subject = decoder(model, 0.0, 4, exits=[1])
    list(subject.emissions(PROMPT))
    assert 0 < subject.accepted < subject.drafted
    refused = subject.rows.work.layer_rows - 5 * SEQ_LENGTH
    # A draft is fed through all layers with the others before it is refused.
    assert refused > 0
    assert refused % 5 == 0


def test_negative_control_refused_drafts_kept(
    one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(ALL_HEADS, untied=True)
    model, params = build(one_process, run)
    monkeypatch.setattr(SpeculativeDecoder, "_verify", lambda self, draft, logits_V: draft.token)
    found = list(decoder(model, exits=[1]).emissions(PROMPT))
    assert differences(found, full_model(params, run, PROMPT, NEW)) != []


def distributions(seed: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(2, size, generator=generator, dtype=torch.float64)
    q_V, p_V = logits.softmax(-1)
    return q_V, p_V


def sampled(q_V: torch.Tensor, p_V: torch.Tensor, count: int, rule: Any = verdict) -> list[int]:
    generator = torch.Generator().manual_seed(9)
    drafts = [draw(q_V, generator) for _ in range(count)]
    return torch.bincount(
        torch.tensor([rule(x, q_V, p_V, generator) for x in drafts]), minlength=len(p_V)
    ).tolist()


@pytest.mark.parametrize("seed", [1, 2])
def test_accepted_and_replaced_tokens_follow_the_full_model(seed: int) -> None:
    count = 25_000
    q_V, p_V = distributions(seed)
    assert chisquare(sampled(q_V, p_V, count), p_V.numpy() * count).pvalue > SIGNIFICANCE
    # Negative controls: the draft as it is, and a replacement drawn from p instead of what q left out.
    kept = sampled(q_V, p_V, count, lambda x, q, p, generator: x)
    assert chisquare(kept, p_V.numpy() * count).pvalue < SIGNIFICANCE

    def redraw(x: int, q: torch.Tensor, p: torch.Tensor, generator: torch.Generator) -> int:
        return x if float(torch.rand((), generator=generator)) * q[x] < p[x] else draw(p, generator)

    assert chisquare(sampled(q_V, p_V, count, redraw), p_V.numpy() * count).pvalue < SIGNIFICANCE


def test_equal_distributions_accept_every_draft() -> None:
    q_V, _ = distributions(3)
    generator = torch.Generator().manual_seed(1)
    assert all(verdict(x, q_V, q_V, generator) == x for x in range(6) for _ in range(50))


def test_tokens_that_the_full_model_rules_out_are_never_emitted() -> None:
    q_V = torch.tensor([0.5, 0.5, 0.0])
    p_V = torch.tensor([0.0, 0.5, 0.5])
    counts = sampled(q_V, p_V, 2000)
    assert counts[0] == 0
    assert min(counts[1:]) > 800


def joint(
    params: gpt.Parameters, run: RunSpec, prompt: list[int], length: int, sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``length`` tokens by the full model."""
    exits, vocab_size = gpt.requested_exits(run), run.model.vocab_size
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, before in found.items():
            whole = [*prompt, *text]
            logits_V = gpt.logits(params, run, exits, torch.tensor([whole]))["final"][0, -1, :vocab_size]
            for token, share in enumerate(sampling.probabilities(logits_V, whole).tolist()):
                longer[(*text, token)] = before * share
        found = longer
    return found


def test_drawn_texts_follow_the_full_model(
    one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole continuations over a vocabulary of three, with temperature and a penalty on what is there."""
    run = small_run([{"layer": 1, "head": "norm"}], vocab_size=3)
    model, params = build(one_process, run, seed=3)
    sampling, prompt, length, count = Sampling(1.3, repetition_penalty=1.2), [1, 2], 3, 600

    def drawn() -> list[int]:
        counts: Counter[tuple[int, ...]] = Counter()
        for seed in range(count):
            subject = decoder(model, 0.0, 2, sampling=sampling, seed=seed, capacity=len(prompt) + length - 1)
            counts[tuple(e.token for e in islice(subject.emissions(prompt), length))] += 1
        return [counts[text] for text in texts]

    expected = joint(params, run, prompt, length, sampling)
    texts = list(itertools.product(range(3), repeat=length))
    exact = torch.tensor([expected[text] for text in texts], dtype=torch.float64)
    # Rare texts are counted together, as the test wants five or more in each cell.
    rare = exact * count < 5

    def pooled(values: torch.Tensor) -> list[float]:
        return [*values[~rare].tolist(), float(values[rare].sum())]

    observed = torch.tensor(drawn(), dtype=torch.float64)
    assert chisquare(pooled(observed), pooled(exact / exact.sum() * count)).pvalue > SIGNIFICANCE
    monkeypatch.setattr(speculative, "verdict", lambda x, q, p, generator: x)
    wrong = torch.tensor(drawn(), dtype=torch.float64)
    assert chisquare(pooled(wrong), pooled(exact / exact.sum() * count)).pvalue < SIGNIFICANCE


def test_the_shallowest_exit_in_use_drafts(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    assert decoder(model).rows.exits[0].depth == 1
    assert decoder(model, exits=[4, 3]).rows.exits[0].depth == 3


def test_a_model_without_exits_cannot_draft(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run([]))
    with pytest.raises(DecodeError, match="drafts from an early exit, and the model has none"):
        decoder(model)
