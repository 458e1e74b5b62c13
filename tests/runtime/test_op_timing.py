"""Op timing: what is measured, and that other work on the machine does not get into the numbers."""

import gc

import pytest
import torch
from builders import make_run

from eeplan.profile import ModelShape
from eeplan.profile_variants import _with_recompute, hidden_bytes
from eeplan.runtime import op_timing
from eeplan.runtime.backend import Backend, single_process
from eeplan.runtime.clock import Clock
from eeplan.runtime.model import build_model
from eeplan.runtime.op_timing import Sample, measure_ops, miniature_stage, random_batch, timing, undisturbed
from eeplan.runtime.optimizer import Training


@pytest.fixture(scope="module")
def backend() -> Backend:
    with single_process() as backend:
        yield backend


def test_every_op_of_a_stage_is_measured(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    # However busy the machine is, every sample counts.
    monkeypatch.setattr(op_timing, "DISTURBED", 2.0)
    run = make_run(model__hidden_size=32, training__seq_length=16)
    training = Training(run, build_model(run, miniature_stage(2), backend), backend)
    costs, disturbed = measure_ops(
        training.model,
        random_batch(run, backend.device),
        Clock(backend.device),
        backend.device,
        seconds=0.0,
        min_rounds=3,
    )
    by_name = {cost.op: cost for cost in costs}
    heads = {"exit_minimal", "exit_norm", "exit_mlp", "exit_block", "final_head"}
    assert set(by_name) == {"embedding", "layer", *heads}
    assert by_name["layer"].forward.n == 2 * by_name["final_head"].forward.n
    hidden_bytes = run.training.micro_batch_size * 16 * 32 * 4
    for cost in costs:
        assert cost.forward.median_s > 0
        assert cost.backward.median_s > 0
        if cost.op not in heads:
            assert cost.kept_bytes >= hidden_bytes, f"{cost.op} keeps at least its output"
    logits_bytes = run.training.micro_batch_size * 16 * run.padded_vocab_size * 4
    assert by_name["exit_minimal"].kept_bytes >= logits_bytes
    assert by_name["exit_block"].kept_bytes > by_name["exit_mlp"].kept_bytes > by_name["exit_norm"].kept_bytes
    assert 0.0 <= disturbed <= 1.0


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_layers_are_measured_as_they_train(backend: Backend, granularity: str) -> None:
    """Their bytes are the derived ones: so little that what the profiler adds, or leaves out, would show."""
    costs = {}
    for recompute in (None, granularity):
        run = make_run(
            model__hidden_size=32, training__seq_length=64, training__recompute_granularity=recompute
        )
        training = Training(run, build_model(run, miniature_stage(2), backend), backend)
        batch = random_batch(run, backend.device, micro_batch_size=3)
        measured, _ = measure_ops(
            training.model, batch, Clock(backend.device), backend.device, seconds=0.0, min_rounds=3
        )
        costs[recompute] = {cost.op: cost for cost in measured}
    plain, again = costs[None]["layer"], costs[granularity]["layer"]
    assert (plain.recompute_granularity, again.recompute_granularity) == (None, granularity)
    assert costs[granularity]["exit_block"].recompute_granularity is None
    assert again.micro_batch_size == 3
    shape = ModelShape.of(run)
    derived = _with_recompute(plain, granularity, shape)  # type: ignore[arg-type]
    hidden = hidden_bytes(plain, shape)
    if granularity == "full":
        assert again.kept_bytes == derived.kept_bytes == hidden
        assert 0.5 < again.backward_transient_bytes / derived.backward_transient_bytes <= 1.05
    else:
        # megatron-core's checkpoint keeps random states, which are more than what is saved at this size.
        assert abs(again.kept_bytes - derived.kept_bytes) <= hidden


def test_bytes_kept_are_those_that_the_backward_frees(backend: Backend) -> None:
    """Kept bytes of a layer, counted once more by holding many of them and reading the allocator's trace."""
    from eeplan.runtime.memory import trace_allocations

    run = make_run(model__hidden_size=32, training__seq_length=16)
    model = build_model(run, miniature_stage(1), backend)
    batch = random_batch(run, backend.device)
    rotary = model.rotary(16)
    hidden = model.embed(batch.tokens, batch.position_ids).detach().requires_grad_()
    # What earlier tests left behind must not be freed within the traces.
    gc.collect()
    held = [model.run_layers(hidden, rotary, 0, 1)]
    with trace_allocations(backend.device) as one:
        held.append(model.run_layers(hidden, rotary, 0, 1))
    with trace_allocations(backend.device) as four:
        held.extend(model.run_layers(hidden, rotary, 0, 1) for _ in range(4))
    assert four.end_bytes == 4 * one.end_bytes
    with trace_allocations(backend.device) as freed:
        held.clear()
    assert freed.end_bytes <= -5 * one.end_bytes


def test_disturbed_samples_are_left_out() -> None:
    clean = [Sample(100, disturbed=False)] * 6
    samples = [*clean, *[Sample(250, disturbed=True)] * 10]
    assert undisturbed(samples) == [100] * 6
    assert timing(undisturbed(samples)).mean_s == pytest.approx(100e-9)
    # Negative control: counted in, they would more than double the cost.
    assert timing([sample.duration_ns for sample in samples]).median_s == pytest.approx(250e-9)


def test_with_too_few_clean_samples_all_count() -> None:
    samples = [Sample(100, disturbed=False), *[Sample(250, disturbed=True)] * 9]
    assert len(undisturbed(samples)) == 10


def test_a_thread_without_a_core_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample whose thread had its core for half of the time is disturbed; one that had it all is not."""
    core_ns = iter([0, 50_000_000, 0, 100_000_000])
    now_ns = iter([0, 100_000_000, 0, 100_000_000])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(op_timing.time, "thread_time_ns", lambda: next(core_ns))
    clock = Clock(torch.device("cpu"))
    monkeypatch.setattr(clock, "mark", lambda: next(now_ns))
    watch = op_timing._Stopwatch(clock)
    op = op_timing._Op("layer", lambda hidden: hidden, is_head=False)
    watch.around(op, lambda: None)
    watch.around(op, lambda: None)
    disturbed = [sample.disturbed for sample in watch.samples(torch.device("cpu"))["layer"]]
    assert disturbed == [True, False]


def test_the_middle_half_makes_the_mean() -> None:
    summary = timing([1, 10, 10, 10, 10, 10, 10, 1000])
    assert summary.mean_s == pytest.approx(10e-9)
    assert (summary.n, summary.p10_s, summary.p90_s) == (8, pytest.approx(1e-9), pytest.approx(1000e-9))
