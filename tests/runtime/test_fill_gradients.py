"""Filled schedules on real ranks: gradients and losses are the weighted sums that the plan promises.

The reference computes whole microbatches in one process, in float64, with a copy of the parameters for each
stage, and adds up what each stage should see of each microbatch. It knows nothing of messages or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from builders import make_plan, run_document
from four_layers import EXITS, four_layers
from oracles import reference_gpt as gpt
from ranks import run_ranks
from torch import Tensor

from eeplan.plan import Plan
from eeplan.schema import validate
from eeplan.spec import RunSpec

TOLERANCE = 1e-5
"""Relative, in fp32 against float64; per parameter, in the Euclidean norm."""


@dataclass(frozen=True, slots=True)
class Case:
    """One iteration of four layers."""

    pipeline: int
    exits: tuple[int, ...]
    fill: tuple[int, int] | None
    """Counts by hand; None for policy none."""
    mode: str = "added"
    untied: bool = False
    exit_forward: str = "deferred"
    microbatches: int = 6
    data: int = 1
    tensor: int = 1
    """Above 1 with sequence parallelism."""
    equal_data: bool = False
    """All microbatches hold the same text."""

    def run(self) -> dict[str, Any]:
        policy = "none" if self.fill is None else {"warmup": self.fill[0], "cooldown": self.fill[1]}
        return run_document(
            model=four_layers(untied=self.untied),
            parallel={
                "pipeline_model_parallel_size": self.pipeline,
                "data_parallel_size": self.data,
                "tensor_model_parallel_size": self.tensor,
                "sequence_parallel": self.tensor > 1,
            },
            training={
                "micro_batch_size": 2,
                "global_batch_size": 2 * self.microbatches * self.data,
                "seq_length": 16,
                "train_iters": 1,
            },
            exits={"layers": [EXITS[i] for i in self.exits], "exit_forward": self.exit_forward},
            fill={"policy": policy, "mode": self.mode},
        )


CASES = [
    Case(2, (0, 1), (1, 1)),
    Case(2, (0, 2), (1, 0), "same_count", untied=True, exit_forward="eager"),
    Case(2, (), (0, 1), "same_count"),
    Case(2, (0, 1), (0, 0)),
    Case(2, (0, 1), None),
    Case(2, (0, 2), (1, 1), equal_data=True),
    Case(4, (0, 1, 3), (3, 3)),
    Case(4, (0, 1, 3), (3, 2), "same_count", untied=True, exit_forward="eager"),
    # The exit reads what stage 2 receives: the inserts that turn there run no layer of it.
    Case(4, (1,), (3, 1)),
    Case(4, (0, 2), (2, 3), exit_forward="eager", microbatches=2),
    Case(4, (0, 1, 2), (3, 3), "same_count", microbatches=9, equal_data=True),
    Case(4, (0, 2), (3, 3), untied=True, equal_data=True),
    Case(2, (0, 1), (1, 1), data=2),
    Case(2, (0, 2), (1, 1), tensor=2, untied=True),
]


def inputs_of(case: Case, seed: int) -> dict[str, Any]:
    """Parameters, and text for all microbatches of all data-parallel ranks."""
    run = validate(case.run(), RunSpec, "case")
    plan = make_plan(run)
    inserts = len(plan.fill.warm_up_depths) + len(plan.fill.truncated_reaches) if plan.fill else 0
    count = case.microbatches + (inserts if case.mode == "added" else 0)
    generator = torch.Generator().manual_seed(seed)
    shape = (count * case.data, 2, 16)
    tokens = torch.randint(0, 120, shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) > 0.1).float()
    if case.equal_data:
        tokens, mask = tokens[:1].expand(shape).contiguous(), mask[:1].expand(shape).contiguous()
    parameters = gpt.init_parameters(run, seed, torch.float32, std=0.1)
    return {
        "run": case.run(),
        "executor": "own",
        "parameters": {name: value.detach() for name, value in parameters.items()},
        "data": {"tokens": tokens, "labels": tokens.roll(-1, dims=-1), "loss_mask": mask},
    }


def losses_by_stage(stages: list[gpt.Parameters], plan: Plan, batch: list[Tensor]) -> list[dict[str, Tensor]]:
    """Losses of every stage for one microbatch; each stage computes with its own parameters."""
    tokens, labels, mask = batch
    exits = {exit_.depth: exit_ for exit_ in plan.exits}
    hidden = gpt.embed(stages[0], tokens)
    found: list[dict[str, Tensor]] = [{} for _ in stages]

    def read(depth: int, at_stage: int) -> None:
        exit_ = exits.get(depth)
        if exit_ is not None and exit_.stage == at_stage:
            logits = gpt.exit_logits(stages[at_stage], plan.run.model, exit_, hidden)
            found[at_stage][f"exit_{depth}"] = gpt.mean_loss(logits, labels, mask)

    for stage, planned in enumerate(plan.stages):
        for layer in range(planned.first_layer, planned.last_layer + 1):
            read(layer - 1, stage)
            hidden = gpt.layer(stages[stage], f"decoder.layers.{layer - 1}.", plan.run.model, hidden)
        read(planned.last_layer, stage)
    logits = gpt.final_logits(stages[-1], plan.run.model, hidden)
    found[-1]["final"] = gpt.mean_loss(logits, labels, mask)
    return found


def expected(case: Case, inputs: dict[str, Any]) -> tuple[dict[str, Tensor], gpt.Parameters]:
    """Mean loss of every head over the microbatches that reach it, and every parameter's gradient."""
    plan = make_plan(validate(inputs["run"], RunSpec, "case"))
    num_stages = len(plan.stages)
    depths = plan.fill.warm_up_depths if plan.fill else ()
    reaches = plan.fill.truncated_reaches if plan.fill else ()
    num_full = case.microbatches
    if case.mode == "same_count":
        num_full -= len(depths) + len(reaches)
    weights = {f"exit_{e.depth}": e.target_weight for e in plan.exits} | {"final": 1.0}
    stages = [
        {name: value.double().requires_grad_() for name, value in inputs["parameters"].items()}
        for _ in plan.stages
    ]
    means: dict[str, list[Tensor]] = {name: [] for name in weights}
    totals = [torch.zeros((), dtype=torch.float64) for _ in stages]
    per_rank = num_full + len(reaches) + len(depths)
    for number in range(per_rank * case.data):
        batch = [inputs["data"][key][number] for key in ("tokens", "labels", "loss_mask")]
        found = losses_by_stage(stages, plan, batch)
        m = number % per_rank
        first, last = 0, num_stages - 1
        if num_full <= m < num_full + len(reaches):
            first = num_stages - reaches[m - num_full]
        if m >= num_full + len(reaches):
            last = depths[m - num_full - len(reaches)] - 1
        for stage in range(first, last + 1):
            truncated = sum(reach >= num_stages - stage for reach in reaches)
            scale = 1.0 if last < num_stages - 1 else num_full / (num_full + truncated)
            for later in range(stage, last + 1):
                factor = num_full / (num_full + sum(depth > later for depth in depths))
                for name, loss in found[later].items():
                    weight = weights[name] * factor
                    totals[stage] = totals[stage] + scale * weight * loss / num_full / case.data
            for name, loss in found[stage].items():
                means[name].append(loss.detach())
    gradients: gpt.Parameters = {}
    for stage, total in enumerate(totals):
        copies = list(stages[stage].values())
        found_here = torch.autograd.grad(total, copies, allow_unused=True, retain_graph=True)
        for (name, value), gradient in zip(stages[stage].items(), found_here, strict=True):
            so_far = gradients.get(name, torch.zeros_like(value))
            gradients[name] = so_far if gradient is None else so_far + gradient
    return {name: torch.stack(values).mean() for name, values in means.items()}, gradients


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-12))


@dataclass(frozen=True, slots=True)
class Finished:
    """A case that has run."""

    case: Case
    inputs: dict[str, Any]
    ranks: list[Any]

    def gradients(self) -> dict[str, list[Tensor]]:
        """By name, from every rank that has the parameter."""
        found: dict[str, list[Tensor]] = {}
        for _, rank in self.ranks:
            for name, gradient in rank["gradients"].items():
                found.setdefault(name, []).append(gradient)
        return found


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Finished]:
    """All cases of a world size, run on real ranks in one launch."""
    folder = tmp_path_factory.mktemp("filled")
    cases = [case for case in CASES if case.pipeline * case.data * case.tensor == request.param]
    inputs = [inputs_of(case, seed=case.pipeline + len(case.exits)) for case in cases]
    torch.save(inputs, folder / "cases.pt")
    run_ranks("gradient_worker", [folder / "cases.pt", folder / "out.pt"], nproc=request.param)
    outputs = torch.load(folder / "out.pt", weights_only=False)
    return [Finished(*one) for one in zip(cases, inputs, outputs, strict=True)]


def test_gradients_and_losses_are_the_promised_sums(finished: list[Finished]) -> None:
    for done in finished:
        losses, gradients = expected(done.case, done.inputs)
        found = done.gradients()
        assert set(found) == set(gradients), done.case
        for name, wanted in gradients.items():
            for one in found[name]:
                assert difference(one, wanted) < TOLERANCE, f"{done.case}: {name}"
        for name, wanted in losses.items():
            mine = [rank["losses"][name] for _, rank in done.ranks if name in rank["losses"]]
            mean = torch.stack(mine).double().mean()
            assert abs(float(mean / wanted) - 1) < TOLERANCE, f"{done.case}: loss of {name}"


def test_equal_microbatches_give_the_full_gradient(finished: list[Finished]) -> None:
    """No bias: when every draw is the same text, filling changes nothing at all."""
    for done in finished:
        if not done.case.equal_data:
            continue
        run = validate(done.inputs["run"], RunSpec, "case")
        parameters = {name: v.double().requires_grad_() for name, v in done.inputs["parameters"].items()}
        one = [done.inputs["data"][key][0] for key in ("tokens", "labels", "loss_mask")]
        loss = gpt.total_loss(parameters, run, gpt.requested_exits(run), *one)
        for name, wanted in gpt.gradients(loss, parameters).items():
            for gradient in done.gradients()[name]:
                assert difference(gradient, wanted) < TOLERANCE, f"{done.case}: {name}"


def test_without_inserts_every_bit_is_that_of_the_plain_schedule(finished: list[Finished]) -> None:
    by_fill = {done.case.fill: done for done in finished if done.case.exits == (0, 1) and done.case.data == 1}
    if None not in by_fill:
        return
    plain, unfilled = by_fill[None].gradients(), by_fill[0, 0].gradients()
    assert plain.keys() == unfilled.keys()
    for name, copies in plain.items():
        assert all(torch.equal(a, b) for a, b in zip(copies, unfilled[name], strict=True)), name
    filled = by_fill[1, 1].gradients()
    assert not all(torch.equal(plain[name][0], filled[name][0]) for name in plain)


def test_sums_without_the_corrections_differ(finished: list[Finished]) -> None:
    """Negative control: with equal text, leaving the stage scale out moves the final norm's gradient."""
    for done in finished:
        plan = make_plan(validate(done.inputs["run"], RunSpec, "case"))
        if not done.case.equal_data or plan.fill is None:
            continue
        _, gradients = expected(done.case, done.inputs)
        unscaled = gradients["decoder.final_layernorm.weight"] / plan.fill.gradient_scales[-1]
        copies = done.gradients()["decoder.final_layernorm.weight"]
        assert all(difference(copy, unscaled) > 100 * TOLERANCE for copy in copies), done.case
