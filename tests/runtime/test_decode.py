"""Decoding with KV recomputation emits the tokens of the oracle that computes everything anew.

The model runs in float64, so that neither near ties nor a confidence next to the threshold can hide behind
rounding: tokens and exits must be equal, confidences close to 1e-9.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from builders import make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import naive_decode
from oracles import reference_gpt as gpt

from eeplan.errors import DecodeError
from eeplan.runtime import backend
from eeplan.runtime.decode import kv
from eeplan.runtime.decode.policy import ExitPolicy, exit_policy
from eeplan.runtime.decode.recompute import Emission, RecomputeDecoder, emissions, make_decoder
from eeplan.runtime.decode.sampling import Sampling
from eeplan.runtime.model import EarlyExitGPT, ExitSpec, StageSpec, build_model
from eeplan.spec import HEAD_KINDS, RunSpec

SEQ_LENGTH = 24


@pytest.fixture(scope="module")
def one_process() -> Iterator[backend.Backend]:
    with backend.single_process() as here:
        yield here


def small_run(exits: list[dict[str, Any]], untied: bool = False) -> RunSpec:
    return make_run(
        model={
            "num_layers": 5,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 24,
            "vocab_size": 13,
            "make_vocab_size_divisible_by": 16,
            "untie_embeddings_and_output_weights": untied,
        },
        parallel={"pipeline_model_parallel_size": 1},
        training__seq_length=SEQ_LENGTH,
        exits={"layers": exits},
    )


def build(
    here: backend.Backend, run: RunSpec, dtype: torch.dtype = torch.float64, seed: int = 6
) -> tuple[EarlyExitGPT, gpt.Parameters]:
    """The runtime's model and the reference's parameters, equal."""
    exits = gpt.requested_exits(run)
    params = gpt.init_parameters(run, seed, dtype, std=0.3)
    stage = StageSpec(
        first_layer=1,
        last_layer=run.model.num_layers,
        exits=tuple(ExitSpec(e.depth, e.head, e.tied) for e in exits),
        is_first=True,
        is_last=True,
    )
    model = build_model(run, stage, here).to(dtype).eval()
    named = dict(model.named_global_parameters())
    assert named.keys() == params.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(params[name])
    return model, params


def decoder(
    model: EarlyExitGPT,
    threshold: float,
    recompute_limit: int = 8,
    capacity: int = SEQ_LENGTH,
    sampling: Sampling | None = None,
) -> RecomputeDecoder:
    return make_decoder(
        model,
        exit_policy(threshold),
        sampling or Sampling(),
        seed=5,
        recompute_limit=recompute_limit,
        capacity=capacity,
    )


def differences(found: Sequence[Emission], expected: Sequence[naive_decode.NaiveToken]) -> list[str]:
    """What differs, one line a token; empty when equal."""
    lines = [f"{len(found)} tokens instead of {len(expected)}"] if len(found) != len(expected) else []
    for index, (a, b) in enumerate(zip(found, expected, strict=False)):
        if (a.token, a.exit) != (b.token, b.exit) or abs(a.confidence - b.confidence) > 1e-9:
            lines.append(f"token {index}: {a} instead of {b}")
    return lines


ALL_HEADS = [
    {"layer": 1, "head": "minimal"},
    {"layer": 2, "head": "block", "tied": False},
    {"layer": 4, "boundary": "before", "head": "mlp"},
    {"layer": 4, "head": "norm"},
]
PROMPT = [3, 1, 4, 1, 5]
THRESHOLD = 0.5
"""With these heads and seed, tokens leave at every exit."""
NEW = SEQ_LENGTH - len(PROMPT) + 1


@st.composite
def exit_requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    depths = draw(st.lists(st.integers(1, 4), unique=True, max_size=4))
    heads = st.sampled_from(HEAD_KINDS)
    return [{"layer": depth, "head": draw(heads), "tied": draw(st.booleans())} for depth in depths]


@settings(max_examples=25, deadline=None)
@given(
    exits=exit_requests(),
    untied=st.booleans(),
    threshold=st.floats(0.0, 1.0),
    recompute_limit=st.integers(0, 10),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    seed=st.integers(1, 5),
)
def test_tokens_and_exits_are_those_of_the_oracle(
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
    found = list(islice(emissions(decoder(model, threshold, recompute_limit), prompt), 12))
    expected = naive_decode.decode(params, run, gpt.requested_exits(run), prompt, threshold, 12)
    assert differences(found, expected) == []


@pytest.mark.parametrize("recompute_limit", [0, 1, 3, 100])
def test_every_exit_is_used_and_exact_up_to_a_full_store(
    one_process: backend.Backend, recompute_limit: int
) -> None:
    run = small_run(ALL_HEADS, untied=True)
    model, params = build(one_process, run)
    subject = decoder(model, THRESHOLD, recompute_limit)
    found = list(emissions(subject, PROMPT))
    expected = naive_decode.decode(params, run, gpt.requested_exits(run), PROMPT, THRESHOLD, NEW)
    assert differences(found, expected) == []
    assert {e.exit for e in found} == {"exit_1", "exit_2", "exit_3", "exit_4", "final"}
    assert len(subject.pending) <= recompute_limit


def test_threshold_one_is_the_full_model(one_process: backend.Backend) -> None:
    """In float32, against the stock forward of megatron-core's GPTModel without any cache."""
    run = small_run(ALL_HEADS, untied=True)
    model, _ = build(one_process, run, torch.float32)
    subject = decoder(model, 1.0)
    found = [e.token for e in emissions(subject, PROMPT)]
    text = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW):
            tokens = torch.tensor([text])
            logits_BSV = model(tokens, torch.arange(len(text))[None], None)
            text.append(int(logits_BSV[0, -1, : run.model.vocab_size].argmax()))
    assert found == text[len(PROMPT) :]
    assert len(set(found)) > 3, "a constant text would compare nothing"
    assert subject.work.forwards == subject.work.full_passes == NEW
    assert subject.work.layer_rows == 5 * SEQ_LENGTH


def test_threshold_zero_always_leaves_at_the_first_exit(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    assert {e.exit for e in emissions(decoder(model, 0.0), PROMPT)} == {"exit_1"}


def test_certain_token_does_not_leave_at_threshold_one() -> None:
    """A probability that rounds to 1.0 is not an early exit for a user who asked for none."""
    assert not ExitPolicy(1.0).leaves(1.0)
    assert ExitPolicy(0.999).leaves(1.0)


def test_limit_forces_full_passes(one_process: backend.Backend) -> None:
    """Always leaving early, with limit n, every (n + 1)-th token runs through all layers."""
    model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
    for limit in (0, 1, 4):
        subject = decoder(model, 0.0, limit)
        waiting = [len(subject.pending) for _ in emissions(subject, PROMPT)]
        assert waiting == [i % (limit + 1) for i in range(NEW)]
        assert subject.work.full_passes == waiting.count(0)
        assert bool(subject.store.valid_LP[:, : subject.length - len(subject.pending)].all())


def test_sampling_follows_the_oracle_with_the_same_draws(one_process: backend.Backend) -> None:
    run = small_run(ALL_HEADS, untied=True)
    model, params = build(one_process, run)
    sampling = Sampling(temperature=1.5, top_k=8, top_p=0.95)
    generator = torch.Generator().manual_seed(5)
    found = list(emissions(decoder(model, THRESHOLD, 3, sampling=sampling), PROMPT))
    expected = naive_decode.decode(
        params,
        run,
        gpt.requested_exits(run),
        PROMPT,
        THRESHOLD,
        NEW,
        pick=lambda logits_V: sampling.pick(logits_V, generator),
    )
    assert differences(found, expected) == []


def test_training_goes_on_as_before_after_decoding(one_process: backend.Backend) -> None:
    """No attention module keeps a store, and nothing computed while decoding enters a later graph."""
    run = small_run(ALL_HEADS, untied=True)
    model, _ = build(one_process, run)
    tokens = torch.tensor([PROMPT])

    def loss() -> torch.Tensor:
        return model(tokens, torch.arange(len(PROMPT))[None], None).square().mean()

    before = loss().item()
    list(islice(emissions(decoder(model, 0.5), PROMPT), 5))
    after = loss()
    after.backward()
    assert after.item() == before


class TestNegativeControls:
    """Broken decoders are noticed: by the store, and, where that is blinded too, by the comparison."""

    def test_pending_tokens_forgotten(self, one_process: backend.Backend) -> None:
        model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
        subject = decoder(model, THRESHOLD)

        def forget_pending(emission: Emission) -> None:
            subject.pending = []

        with pytest.raises(AssertionError, match="have no keys yet"):
            list(map(forget_pending, emissions(subject, PROMPT)))

    def test_missing_entries_read_as_zeros(self, one_process: backend.Backend) -> None:
        run = small_run(ALL_HEADS, untied=True)
        model, params = build(one_process, run)
        subject = decoder(model, THRESHOLD)
        subject.store.valid_LP[:] = True
        found = []
        for emission in emissions(subject, PROMPT):
            found.append(emission)
            subject.pending = []
        expected = naive_decode.decode(params, run, gpt.requested_exits(run), PROMPT, THRESHOLD, NEW)
        assert differences(found, expected) != []

    def test_block_keys_left_out(self, one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """A head with its own attention that skips the rows before the current token."""
        model, _ = build(one_process, small_run(ALL_HEADS, untied=True))
        run_head = model.exit_logits
        monkeypatch.setattr(
            model, "exit_logits", lambda depth, x, rotary: run_head(depth, x[-1:], rotary[-1:])
        )
        with pytest.raises(AssertionError, match="1 rows where 5 are due"):
            list(emissions(decoder(model, THRESHOLD), PROMPT))

    def test_oracle_sees_wrong_positions(self, one_process: backend.Backend) -> None:
        run = small_run(ALL_HEADS, untied=True)
        model, params = build(one_process, run)
        subject = decoder(model, THRESHOLD)
        subject.rotary = torch.zeros_like(subject.rotary)
        expected = naive_decode.decode(params, run, gpt.requested_exits(run), PROMPT, THRESHOLD, NEW)
        assert differences(list(emissions(subject, PROMPT)), expected) != []


def test_store_refuses_positions_that_do_not_fit() -> None:
    store = kv.KeyValueStore(2, 4, 1, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(IndexError, match="do not fit a store of 4"):
        store.rows(3, 5)
    assert store.nbytes == 2 * 2 * 4 * 1 * 8 * 4


def test_not_finite_logits_are_reported(one_process: backend.Backend) -> None:
    model, _ = build(one_process, small_run([{"layer": 2, "head": "norm"}]))
    with torch.no_grad():
        model.exits["2"].norm.weight.fill_(float("nan"))
    with pytest.raises(DecodeError, match="exit_2 are not finite"):
        decoder(model, 0.5).prefill(PROMPT)
