"""Back-propagation through pipeline stages with auxiliary losses equals joint back-propagation (EE-LLM 3.1).

The plain model is cut at stage boundaries. Each stage owns copies of its parameters and sees nothing of the
others but the tensor received from the stage before and the gradient g received from the stage after; its
backward is one call with the roots (local loss, stage output) and the root gradients (scale, g). In float64
every gradient must equal whole-graph autograd to 1e-12.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from builders import make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference_gpt as gpt
from torch import Tensor

from eeplan.plan import PlannedExit
from eeplan.spec import HEAD_KINDS, RunSpec

TOLERANCE = 1e-12
STAGES, LAYERS, MICROBATCHES = 3, 6, 2
Batch = tuple[Tensor, Tensor, Tensor]


def small_run(exits: list[dict], untied: bool) -> RunSpec:
    return make_run(
        model={
            "num_layers": LAYERS,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 24,
            "vocab_size": 29,
            "make_vocab_size_divisible_by": 8,
            "untie_embeddings_and_output_weights": untied,
        },
        parallel={"pipeline_model_parallel_size": STAGES},
        training__global_batch_size=2 * MICROBATCHES,
        training__seq_length=5,
        exits={"layers": exits},
    )


def make_batch(run: RunSpec, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (run.training.micro_batch_size, run.training.seq_length + 1)
    text = torch.randint(run.model.vocab_size, shape, generator=generator)
    mask = torch.ones(shape[0], shape[1] - 1)
    mask[0, 1] = 0
    return text[:, :-1], text[:, 1:], mask


@dataclass
class Stage:
    """One pipeline stage of the reference model with its own parameter copies."""

    run: RunSpec
    index: int
    exits: list[PlannedExit]
    params: gpt.Parameters
    deferred: bool
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    exit_roots: dict[int, list[tuple[PlannedExit, Tensor]]] = field(default_factory=dict)
    """Per microbatch: the exit's hidden state when its forward is deferred, else its loss."""

    @property
    def is_last(self) -> bool:
        return self.index == STAGES - 1

    def forward(self, microbatch: int, batch: Batch, received: Tensor | None) -> Tensor:
        """Returns what would travel to the next stage; on the last one, the final loss."""
        tokens, labels, mask = batch
        if received is None:
            x = gpt.embed(self.params, tokens)
        else:
            x = self.inputs[microbatch] = received.detach().requires_grad_()
        per_stage = LAYERS // STAGES
        exit_roots: list[tuple[PlannedExit, Tensor]] = []
        for layer in range(self.index * per_stage + 1, (self.index + 1) * per_stage + 1):
            exit_roots += self._exits_at(layer, "before", x, batch)
            x = gpt.layer(self.params, f"decoder.layers.{layer - 1}.", self.run.model, x)
            exit_roots += self._exits_at(layer, "after", x, batch)
        if self.is_last:
            x = gpt.mean_loss(gpt.final_logits(self.params, self.run.model, x), labels, mask)
        self.outputs[microbatch], self.exit_roots[microbatch] = x, exit_roots
        return x

    def _exits_at(
        self, layer: int, boundary: str, x: Tensor, batch: Batch
    ) -> list[tuple[PlannedExit, Tensor]]:
        here = [e for e in self.exits if (e.layer, e.boundary) == (layer, boundary)]
        return [(e, x if self.deferred else self._exit_loss(e, x, batch)) for e in here]

    def _exit_loss(self, exit_: PlannedExit, x: Tensor, batch: Batch) -> Tensor:
        _, labels, mask = batch
        return gpt.mean_loss(gpt.exit_logits(self.params, self.run.model, exit_, x), labels, mask)

    def backward(self, microbatch: int, batch: Batch, received: Tensor | None, fault: str) -> Tensor | None:
        """One call with the roots (local loss, output); returns the gradient for the previous stage."""
        scale = 1 / MICROBATCHES
        roots, root_grads = [], []
        for exit_, root in self.exit_roots.pop(microbatch):
            loss = self._exit_loss(exit_, root, batch) if self.deferred else root
            if fault != "drop local losses":
                roots.append(exit_.effective_weight * loss)
                root_grads.append(torch.tensor(scale, dtype=torch.float64))
        output = self.outputs.pop(microbatch)
        g = torch.tensor(scale, dtype=torch.float64) if received is None else received
        if fault != "drop received gradient" or self.is_last:
            roots.append(output)
            root_grads.append(g)
        if roots:
            torch.autograd.backward(roots, root_grads)
        x = self.inputs.pop(microbatch, None)
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad


def parameters_of_stage(
    params: gpt.Parameters, run: RunSpec, exits: list[PlannedExit], index: int
) -> gpt.Parameters:
    """Copies of what one stage needs, a replica of the tied matrix included."""
    per_stage = LAYERS // STAGES
    wanted = [f"decoder.layers.{i}." for i in range(index * per_stage, (index + 1) * per_stage)]
    wanted += [f"exits.{e.depth}." for e in exits]
    if index == 0:
        wanted.append("embedding.")
    if index == STAGES - 1:
        wanted.append("decoder.final_layernorm.")
    if index == STAGES - 1 or any(e.tied for e in exits):
        wanted.append(gpt.tied_matrix_name(run.model))
    return {
        name: value.detach().clone().requires_grad_()
        for name, value in params.items()
        if name.startswith(tuple(wanted))
    }


def staged_gradients(
    params: gpt.Parameters,
    run: RunSpec,
    batches: list[Batch],
    deferred: bool,
    fault: str = "",
) -> gpt.Parameters:
    """Gradients accumulated over the microbatches, stage by stage, replicas of a matrix summed at the end."""
    planned = gpt.requested_exits(run)
    stages = []
    for index in range(STAGES):
        exits = [e for e in planned if e.stage == index]
        stages.append(Stage(run, index, exits, parameters_of_stage(params, run, exits, index), deferred))
    for microbatch, batch in enumerate(batches):
        x = None
        for stage in stages:
            x = stage.forward(microbatch, batch, x)
    for microbatch, batch in enumerate(batches):
        g = None
        for stage in reversed(stages):
            g = stage.backward(microbatch, batch, g, fault)
    total: gpt.Parameters = {}
    for stage in stages:
        for name, value in stage.params.items():
            grad = torch.zeros_like(value) if value.grad is None else value.grad
            if name not in total:
                total[name] = grad
            elif fault != "keep replicas apart":
                total[name] = total[name] + grad
    return total


def worst_error(run: RunSpec, deferred: bool, fault: str = "") -> float:
    """Largest difference to whole-graph autograd, relative to each parameter's largest entry."""
    exits = gpt.requested_exits(run)
    params = gpt.init_parameters(run, seed=3, dtype=torch.float64, std=0.3)
    batches = [make_batch(run, seed) for seed in range(MICROBATCHES)]
    loss = sum(gpt.total_loss(params, run, exits, *batch) for batch in batches) / MICROBATCHES
    expected = gpt.gradients(loss, params)
    found = staged_gradients(params, run, batches, deferred, fault)
    assert found.keys() == expected.keys()
    assert all(grad.abs().max() > 0 for grad in expected.values()), (
        "a parameter without gradient tests nothing"
    )
    return max(float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in expected.items())


FIRST_MIDDLE_LAST = [
    {"layer": 1, "head": "minimal", "weight": 0.3},
    {"layer": 3, "boundary": "before", "head": "mlp", "weight": 0.7},
    {"layer": 4, "head": "block", "tied": False},
    {"layer": 6, "boundary": "before", "head": "norm"},
]


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_exits_on_first_middle_and_last_stage(untied: bool, deferred: bool) -> None:
    run = small_run(FIRST_MIDDLE_LAST, untied)
    assert {e.stage for e in gpt.requested_exits(run)} == {0, 1, 2}
    assert worst_error(run, deferred) < TOLERANCE


def test_without_exits() -> None:
    assert worst_error(small_run([], untied=False), deferred=True) < TOLERANCE


@st.composite
def exit_requests(draw: st.DrawFn) -> list[dict]:
    depths = draw(st.lists(st.integers(1, LAYERS - 1), unique=True, max_size=4))
    requests = []
    for depth in depths:
        before = draw(st.booleans())
        requests.append(
            {
                "layer": depth + 1 if before else depth,
                "boundary": "before" if before else "after",
                "head": draw(st.sampled_from(HEAD_KINDS)),
                "tied": draw(st.booleans()),
                "weight": draw(st.floats(0.05, 2.0)),
            }
        )
    return requests


@settings(max_examples=25, deadline=None)
@given(exits=exit_requests(), untied=st.booleans(), deferred=st.booleans())
def test_any_placement(exits: list[dict], untied: bool, deferred: bool) -> None:
    assert worst_error(small_run(exits, untied), deferred) < TOLERANCE


@pytest.mark.parametrize("fault", ["drop received gradient", "drop local losses", "keep replicas apart"])
def test_faults_are_seen(fault: str) -> None:
    """Negative control: the comparison notices each way of getting the method wrong."""
    assert worst_error(small_run(FIRST_MIDDLE_LAST, untied=False), deferred=True, fault=fault) > 1e-3
