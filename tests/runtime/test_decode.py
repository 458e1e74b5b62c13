"""Every decoding mode emits the tokens of the oracle that computes everything anew, and fills every entry.

The model runs in float64, so that neither near ties nor a confidence next to the threshold can hide behind
rounding: tokens and exits must be equal, confidences and log-probabilities close to 1e-9.
"""

from __future__ import annotations

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
    THRESHOLD,
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

from eeplan.errors import DecodeError
from eeplan.runtime import backend
from eeplan.runtime.decode import kv
from eeplan.runtime.decode.decoder import ExitDecoder
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.modes import Mode, make_decoder
from eeplan.runtime.decode.network import DecodeNetwork
from eeplan.runtime.decode.policy import CONFIDENCE_KINDS, ExitPolicy, exit_policy
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.model import EarlyExitGPT
from eeplan.spec import RunSpec

EXIT_MODES: tuple[Mode, ...] = ("kv_recompute", "catch_up")


def decoder(
    model: EarlyExitGPT,
    threshold: float | ExitPolicy,
    recompute_limit: int = 8,
    mode: Mode = "catch_up",
    sampling: Sampling | None = None,
    capacity: int = SEQ_LENGTH,
) -> ExitDecoder:
    made = make_decoder(
        model,
        mode,
        threshold if isinstance(threshold, ExitPolicy) else exit_policy(threshold),
        sampling or Sampling(),
        seed=5,
        recompute_limit=recompute_limit,
        capacity=capacity,
    )
    assert isinstance(made, ExitDecoder)
    return made


def oracle(
    params: gpt.Parameters, run: RunSpec, prompt: Sequence[int], threshold: Any, count: int, **options: Any
) -> list[naive_decode.NaiveToken]:
    return naive_decode.decode(params, run, gpt.requested_exits(run), prompt, threshold, count, **options)


@settings(max_examples=15, deadline=None)
@given(
    exits=exit_requests(),
    untied=st.booleans(),
    threshold=st.floats(0.0, 1.0),
    recompute_limit=st.integers(0, 10),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    seed=st.integers(1, 5),
)
def test_every_mode_gives_the_oracles_tokens_and_every_entry(
    one_process: backend.Backend,
    exits: list[dict[str, Any]],
    untied: bool,
    threshold: float,
    recompute_limit: int,
    prompt: list[int],
    seed: int,
) -> None:
    run = small_run(exits, untied)
    model, params = build(one_process, run, seed=seed)
    expected = oracle(params, run, prompt, threshold, 12)
    for mode in EXIT_MODES:
        subject = decoder(model, threshold, recompute_limit, mode)
        found = list(islice(subject.emissions(prompt), 12))
        assert differences(found, expected) == [], mode
        assert missing_entries(subject, model) == [], mode
    full = list(islice(decoder(model, threshold, recompute_limit, "full").emissions(prompt), 12))
    assert differences(full, oracle(params, run, prompt, 1.0, 12)) == []


def missing_entries(subject: ExitDecoder, model: EarlyExitGPT) -> list[str]:
    """What is missing or wrong in the store after completing those who wait."""
    with torch.no_grad():
        subject.rows.complete()
    store = subject.rows.network.store
    # At threshold 1 no early head runs, so nobody needs a block's entries.
    slots = range(len(store.valid_L) if subject.rows.exits else subject.rows.network.num_layers)
    return entry_errors(store, entries_of(model, subject.text), slots)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), exits=exit_requests(min_size=1), seed=st.integers(1, 5))
def test_policies_follow_the_oracle(
    one_process: backend.Backend, data: st.DataObject, exits: list[dict[str, Any]], seed: int
) -> None:
    """Other measures, a threshold for each exit, some of the exits, a first token that may leave."""
    run = small_run(exits)
    model, params = build(one_process, run, seed=seed)
    depths = sorted(exit_["layer"] for exit_ in exits)
    chosen = sorted(data.draw(st.lists(st.sampled_from(depths), min_size=1, unique=True)))
    thresholds = [data.draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0])) for _ in chosen]
    kind = data.draw(st.sampled_from(CONFIDENCE_KINDS))
    first = data.draw(st.integers(0, 4))
    policy = exit_policy(thresholds, kind, chosen, first)
    expected = oracle(
        params,
        run,
        PROMPT,
        {f"exit_{depth}": value for depth, value in zip(chosen, thresholds, strict=True)},
        10,
        measure=kind,
        first_early_token=first,
    )
    for mode in EXIT_MODES:
        found = list(islice(decoder(model, policy, 3, mode).emissions(PROMPT), 10))
        assert differences(found, expected) == [], mode


@pytest.mark.parametrize("mode", EXIT_MODES)
@pytest.mark.parametrize("recompute_limit", [0, 1, 3, 100])
def test_every_exit_is_used_and_exact_up_to_a_full_store(
    one_process: backend.Backend, recompute_limit: int, mode: Mode
) -> None:
    run = small_run(ALL_HEADS, untied=True)
    model, params = build(one_process, run)
    subject = decoder(model, THRESHOLD, recompute_limit, mode)
    found = list(subject.emissions(PROMPT))
    assert differences(found, oracle(params, run, PROMPT, THRESHOLD, NEW)) == []
    assert {e.exit for e in found} == {"exit_1", "exit_2", "exit_3", "exit_4", "final"}
    assert len(subject.rows.waiting) <= recompute_limit


class TestWork:
    """How often each layer runs on each token."""

    @staticmethod
    def counted(subject: ExitDecoder, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
        """(layer, position) pairs as their entries are written."""
        counts: Counter[tuple[int, int]] = Counter()
        extend = kv.KeyValueStore.extend

        def count(self: kv.KeyValueStore, layer: int, start: int, entries: torch.Tensor) -> Any:
            counts.update((layer, start + row) for row in range(len(entries)))
            return extend(self, layer, start, entries)

        monkeypatch.setattr(kv.KeyValueStore, "extend", count)
        list(subject.emissions(PROMPT))
        with torch.no_grad():
            subject.rows.complete()
        return counts

    @pytest.mark.parametrize("recompute_limit", [0, 1, 3, 100])
    def test_catch_up_computes_every_pair_once(
        self, one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch, recompute_limit: int
    ) -> None:
        model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
        subject = decoder(model, THRESHOLD, recompute_limit)
        counts = self.counted(subject, monkeypatch)
        # Five layers and the one inside the block head.
        assert counts == Counter({(layer, at): 1 for layer in range(6) for at in range(SEQ_LENGTH)})
        assert subject.rows.work.layer_rows == 5 * SEQ_LENGTH

    def test_recomputing_computes_some_pairs_again(
        self, one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Negative control: the count sees what runs twice."""
        model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
        counts = self.counted(decoder(model, THRESHOLD, 8, "kv_recompute"), monkeypatch)
        assert len(counts) == 6 * SEQ_LENGTH
        assert max(counts.values()) > 1

    @pytest.mark.parametrize("mode", EXIT_MODES)
    def test_limit_forces_full_passes(self, one_process: backend.Backend, mode: Mode) -> None:
        """Always leaving early, with limit n, every (n + 1)-th token runs through all layers."""
        model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
        for limit in (0, 1, 4):
            subject = decoder(model, 0.0, limit, mode)
            waiting = [len(subject.rows.waiting) for _ in subject.emissions(PROMPT)]
            assert waiting == [i % (limit + 1) for i in range(NEW)]
            assert subject.rows.work.full_passes == waiting.count(0)

    def test_threshold_one_checks_no_exit(self, one_process: backend.Backend) -> None:
        model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
        subject = decoder(model, 1.0)
        list(subject.emissions(PROMPT))
        assert subject.rows.work.checks == 0
        assert subject.rows.work.forwards == subject.rows.work.full_passes == NEW
        assert subject.rows.work.layer_rows == 5 * SEQ_LENGTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_network_is_megatrons_own_forward(one_process: backend.Backend, dtype: torch.dtype) -> None:
    """The logits of every position, against megatron-core's modules without any cache."""
    run = small_run(ALL_HEADS, untied=True)
    model, _ = build(one_process, run, dtype)
    network = DecodeNetwork(model, SEQ_LENGTH, run.model.vocab_size)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 2e-2}[dtype]
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], None)
        hidden = network.run_layers(network.embed(PROMPT), 0, 0, network.num_layers)
        found = network.final_logits(hidden)
    torch.testing.assert_close(
        found, expected[0, :, : run.model.vocab_size].to(dtype), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", EXIT_MODES)
def test_short_floats_decode(one_process: backend.Backend, dtype: torch.dtype, mode: Mode) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True), dtype)
    found = list(decoder(model, THRESHOLD, 3, mode).emissions(PROMPT))
    assert len(found) == NEW
    assert len({e.exit for e in found}) > 1


def test_threshold_one_is_the_full_model(one_process: backend.Backend) -> None:
    """In float32, against the stock forward of megatron-core's GPTModel without any cache."""
    run = small_run(ALL_HEADS, untied=True)
    model, _ = build(one_process, run, torch.float32)
    found = [e.token for e in decoder(model, 1.0).emissions(PROMPT)]
    text = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW):
            tokens = torch.tensor([text])
            logits_BSV = model(tokens, torch.arange(len(text))[None], None)
            text.append(int(logits_BSV[0, -1, : run.model.vocab_size].argmax()))
    assert found == text[len(PROMPT) :]
    assert len(set(found)) > 3, "a constant text would compare nothing"


def test_threshold_zero_always_leaves_at_the_first_exit(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    assert {e.exit for e in decoder(model, 0.0).emissions(PROMPT)} == {"exit_1"}


@pytest.mark.parametrize("mode", EXIT_MODES)
def test_sampling_follows_the_oracle_with_the_same_draws(one_process: backend.Backend, mode: Mode) -> None:
    run = small_run(ALL_HEADS, untied=True)
    model, params = build(one_process, run)
    sampling = Sampling(temperature=1.5, top_k=8, top_p=0.95)
    generator = torch.Generator().manual_seed(5)
    found = list(decoder(model, THRESHOLD, 3, mode, sampling).emissions(PROMPT))
    expected = oracle(
        params,
        run,
        PROMPT,
        THRESHOLD,
        NEW,
        pick=lambda logits_V: sampling.pick(logits_V, generator),
    )
    assert differences(found, expected) == []


def test_repetition_penalty_sees_prompt_and_text(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    plain = [e.token for e in islice(decoder(model, 1.0).emissions(PROMPT), 8)]
    strict = Sampling(repetition_penalty=1e9)
    found = [e.token for e in islice(decoder(model, 1.0, sampling=strict).emissions(PROMPT), 8)]
    assert len({*found, *PROMPT}) > len({*plain, *PROMPT})


def test_training_goes_on_as_before_after_decoding(one_process: backend.Backend) -> None:
    """Nothing computed while decoding enters a later graph."""
    run = small_run(ALL_HEADS, untied=True)
    model, _ = build(one_process, run)
    tokens = torch.tensor([PROMPT])

    def loss() -> torch.Tensor:
        return model(tokens, torch.arange(len(PROMPT))[None], None).square().mean()

    before = loss().item()
    list(islice(decoder(model, 0.5).emissions(PROMPT), 5))
    after = loss()
    after.backward()
    assert after.item() == before


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (exit_policy(0.5, exits=[1, 5]), r"no exit at depth 5; it has exits at depths \[1, 2, 3, 4\]"),
        (exit_policy([0.5, 0.6]), r"2 values for 4 exits \(depths \[1, 2, 3, 4\]\)"),
    ],
)
def test_policy_for_another_model(one_process: backend.Backend, policy: ExitPolicy, message: str) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    with pytest.raises(DecodeError, match=message):
        decoder(model, policy)


class TestNegativeControls:
    """Broken decoders are noticed: by the store, and, where that is blinded too, by the comparison."""

    @pytest.mark.parametrize("mode", EXIT_MODES)
    def test_waiting_tokens_forgotten(self, one_process: backend.Backend, mode: Mode) -> None:
        model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
        subject = decoder(model, THRESHOLD, mode=mode)

        def forget(emission: Emission) -> None:
            subject.rows.waiting = []

        with pytest.raises(AssertionError, match="have no keys yet"):
            list(map(forget, subject.emissions(PROMPT)))

    def test_missing_entries_read_as_zeros(self, one_process: backend.Backend) -> None:
        run = small_run(ALL_HEADS, untied=True)
        model, params = build(one_process, run)
        subject = decoder(model, THRESHOLD)
        subject.rows.network.store.suppose_filled(SEQ_LENGTH)
        found = []
        for emission in subject.emissions(PROMPT):
            found.append(emission)
            subject.rows.waiting = []
        assert differences(found, oracle(params, run, PROMPT, THRESHOLD, NEW)) != []
        assert missing_entries(subject, model) != []

    def test_hidden_states_of_other_tokens(self, one_process: backend.Backend) -> None:
        """Two tokens that wait at one exit trade places."""
        run = small_run([{"layer": 2, "head": "norm"}])
        model, params = build(one_process, run)
        subject = decoder(model, 0.3)
        found = []
        for emission in subject.emissions(PROMPT):
            found.append(emission)
            subject.rows.waiting.reverse()
        assert differences(found, oracle(params, run, PROMPT, 0.3, NEW)) != []

    def test_block_keys_left_out(self, one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """A head with its own attention that skips the rows before the current token."""
        model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
        run_block = DecodeNetwork.run_block

        def last_only(self: DecodeNetwork, depth: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
            return run_block(self, depth, hidden[-1:], position + len(hidden) - 1)

        monkeypatch.setattr(DecodeNetwork, "run_block", last_only)
        with pytest.raises(AssertionError, match="4 positions before 4 have no keys yet"):
            list(decoder(model, THRESHOLD).emissions(PROMPT))

    def test_oracle_sees_wrong_positions(
        self, one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = small_run(ALL_HEADS, untied=True)
        model, params = build(one_process, run)
        rotary = model.rotary
        monkeypatch.setattr(model, "rotary", lambda length: torch.zeros_like(rotary(length)))
        found = list(decoder(model, THRESHOLD).emissions(PROMPT))
        assert differences(found, oracle(params, run, PROMPT, THRESHOLD, NEW)) != []


def test_store_refuses_positions_that_do_not_fit() -> None:
    store = kv.KeyValueStore(2, 4, 1, 8, torch.float32, torch.device("cpu"))
    store.suppose_filled(3)
    rows = torch.zeros(2, 1, 2, 8)
    with pytest.raises(IndexError, match="positions 3 to 4 do not fit a store of 4"):
        store.extend(0, 3, rows)
    assert store.nbytes == 2 * 2 * 4 * 1 * 8 * 4


def test_not_finite_logits_are_reported(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run([{"layer": 2, "head": "norm"}]))
    with torch.no_grad():
        model.exits["2"].norm.weight.fill_(float("nan"))
    with pytest.raises(DecodeError, match="exit_2 are not finite"):
        decoder(model, 0.5).prefill(PROMPT)
