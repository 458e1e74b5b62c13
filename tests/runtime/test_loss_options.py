"""Temperatures, token weights and distillation on real ranks: gradients of a plain model in float64.

The final exit teaches exits on other stages: what it says travels backward through every stage in between.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import make_run, run_document
from oracles import reference_gpt as reference
from oracles.naive_losses import LossCase, naive_loss
from ranks import run_ranks

from eeplan.errors import SchemaError
from eeplan.schema import validate
from eeplan.spec import RunSpec

TOLERANCE = 2e-5
"""Relative, in fp32 against a float64 reference; per parameter, in the Euclidean norm."""
MICROBATCHES = 4

ALL_STAGES = [
    {"layer": 1, "head": "minimal", "temperature": 2.0},
    {"layer": 2, "head": "mlp"},
    {"layer": 4, "boundary": "before", "head": "norm"},
]
LAYOUTS: list[dict[str, Any]] = [
    {"pipeline_model_parallel_size": 4},
    {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2, "data_parallel_size": 2},
]
OPTIONS: list[dict[str, Any]] = [
    {"loss_weights": {"dynamic": True}, "temperature": 0.7},
    {"distillation": {"weight": 0.5, "temperature": 3.0}},
    {
        "distillation": {"weight": 2.0},
        "loss_weights": {"dynamic": True},
        "untie": True,
    },
]


def document(layout: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    return run_document(
        model={
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "vocab_size": 120,
            "make_vocab_size_divisible_by": 64,
            "untie_embeddings_and_output_weights": options.pop("untie", False),
        },
        parallel=layout,
        training={
            "micro_batch_size": 2,
            "global_batch_size": 2 * MICROBATCHES * layout.get("data_parallel_size", 1),
            "seq_length": 8,
            "train_iters": 1,
        },
        exits={"layers": ALL_STAGES, **options},
    )


CASES = [document(layout, options) for layout in LAYOUTS for options in OPTIONS]


def inputs_of(case: dict[str, Any], seed: int) -> dict[str, Any]:
    """Parameters and microbatches [M, B, S] of a case, as ``gradient_worker`` wants them."""
    run = validate(case, RunSpec, "case")
    generator = torch.Generator().manual_seed(seed)
    shape = (MICROBATCHES * run.parallel.data_parallel_size, 2, 8)
    tokens = torch.randint(0, 120, shape, generator=generator)
    parameters = reference.init_parameters(run, seed, torch.float32, std=0.2)
    return {
        "run": case,
        "executor": "own",
        "parameters": {name: value.detach() for name, value in parameters.items()},
        "data": {
            "tokens": tokens,
            "labels": tokens.roll(-1, dims=-1),
            "loss_mask": (torch.rand(shape, generator=generator) > 0.1).float(),
        },
    }


def expected(inputs: dict[str, Any]) -> tuple[dict[str, float], reference.Parameters]:
    """Mean reported losses and gradients of the objective over all microbatches, in float64."""
    run = validate(inputs["run"], RunSpec, "case")
    exits = reference.requested_exits(run)
    parameters = {name: value.double().requires_grad_() for name, value in inputs["parameters"].items()}
    total, reported = torch.zeros((), dtype=torch.float64), dict[str, float]()
    distilled = run.exits.distillation
    microbatches = list(zip(*(inputs["data"][key] for key in ("tokens", "labels", "loss_mask")), strict=True))
    for tokens, labels, mask in microbatches:
        logits = reference.logits(parameters, run, exits, tokens)
        total = total + reference.mean_loss(logits["final"], labels, mask)
        for exit_ in exits:
            name = f"exit_{exit_.depth}"
            case = LossCase(
                temperature=run.exits.temperature_at(exit_.depth),
                weighs_tokens=run.exits.loss_weights.dynamic,
                distillation_weight=distilled.weight if distilled else 0.0,
                distillation_temperature=distilled.temperature if distilled else 1.0,
            )
            student, teacher = logits[name].transpose(0, 1), logits["final"].transpose(0, 1)
            objective, shown = naive_loss(student, labels, mask.double(), teacher, case)
            total = total + exit_.effective_weight * objective
            reported[name] = reported.get(name, 0.0) + float(shown) / len(microbatches)
    return reported, reference.gradients(total / len(microbatches), parameters)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-12))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], list[Any]]]:
    """Inputs of every case, and what the ranks found; all in one launch."""
    folder = tmp_path_factory.mktemp("options")
    inputs = [inputs_of(case, seed) for seed, case in enumerate(CASES)]
    torch.save(inputs, folder / "cases.pt")
    run_ranks("gradient_worker", [folder / "cases.pt", folder / "out.pt"], nproc=4)
    return list(zip(inputs, torch.load(folder / "out.pt", weights_only=False), strict=True))


def test_gradients_and_losses_are_the_formulas(finished: list[tuple[dict[str, Any], list[Any]]]) -> None:
    for inputs, ranks in finished:
        losses, gradients = expected(inputs)
        where = (inputs["run"]["parallel"], inputs["run"]["exits"])
        for _, rank in ranks:
            for name, found in rank["gradients"].items():
                assert difference(found, gradients[name]) < TOLERANCE, (*where, name)
        for name, wanted in losses.items():
            seen = [rank["losses"][name] for _, rank in ranks if name in rank["losses"]]
            assert float(torch.stack(seen).double().mean()) == pytest.approx(wanted, rel=TOLERANCE), where


def test_leaving_an_option_out_is_noticed(finished: list[tuple[dict[str, Any], list[Any]]]) -> None:
    """Control: what the ranks found is far from the gradient of a run that says nothing of the kind."""
    for inputs, ranks in finished:
        exits = {"layers": [{**one, "temperature": 1.0} for one in ALL_STAGES]}
        _, plain = expected({**inputs, "run": {**inputs["run"], "exits": exits}})
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        found = next(rank["gradients"][name] for _, rank in ranks if name in rank["gradients"])
        assert difference(found, plain[name]) > 100 * TOLERANCE, inputs["run"]["exits"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"exits__exit_forward": "eager"}, "eager runs exits before the final exit has spoken"),
        ({"exits__untie_exit_output_weights": True}, "tie the exits to it"),
        ({"exits__layers": [{"layer": 2, "tied": False}]}, "tie the exits to it"),
        ({"fill": {"policy": "auto"}}, "set fill.policy to none"),
        ({"exits__temperature": 0.0}, "exits.temperature"),
    ],
)
def test_what_cannot_be_distilled_is_refused(overrides: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"exits__layers": [{"layer": 2}], "exits__distillation": {"weight": 1.0}}
    with pytest.raises(SchemaError, match=message) as caught:
        make_run(**(settings | overrides))
    assert "\n" not in str(caught.value)


def test_one_stage_may_distil_into_its_own_matrices() -> None:
    run = make_run(
        parallel__pipeline_model_parallel_size=1,
        exits={"layers": [{"layer": 2, "tied": False}], "distillation": {"weight": 1.0}},
    )
    assert run.exits.distillation is not None
