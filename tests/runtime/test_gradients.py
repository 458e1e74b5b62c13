"""Gradients of the executor on real ranks equal those of a plain single-process model; losses as well."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from builders import run_document
from four_layers import EXITS, four_layers
from oracles import reference_gpt as reference
from ranks import run_ranks

from eeplan.schema import validate
from eeplan.spec import RunSpec

TOLERANCE = 1e-5
"""Relative, in fp32 against a float64 reference; per parameter, in the Euclidean norm."""


@dataclass(frozen=True, slots=True)
class Case:
    """One iteration: a layout, exits, and which executor runs it."""

    pipeline: int
    exits: tuple[int, ...]
    untied: bool = False
    exit_forward: str = "deferred"
    microbatches: int = 5
    tensor: int = 1
    data: int = 1
    executor: str = "own"
    sequence: bool = False
    """Sequence parallelism."""
    distributed: bool = False
    """Distributed optimizer."""
    overlap: bool = False
    recompute: str | None = None
    swap_labels_on: int | None = None
    """A stage that gets the labels of the first two microbatches the wrong way round."""

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor * self.data

    def document(self) -> dict[str, Any]:
        return run_document(
            model=four_layers(untied=self.untied),
            parallel={
                "pipeline_model_parallel_size": self.pipeline,
                "tensor_model_parallel_size": self.tensor,
                "data_parallel_size": self.data,
                "sequence_parallel": self.sequence,
                "use_distributed_optimizer": self.distributed,
                "overlap_grad_reduce": self.overlap,
            },
            training={
                "recompute_granularity": self.recompute,
                "micro_batch_size": 2,
                "global_batch_size": 2 * self.microbatches * self.data,
                "seq_length": 16,
                "train_iters": 1,
            },
            exits={
                "layers": [EXITS[i] for i in self.exits],
                "exit_forward": self.exit_forward,
            },
        )


CASES = [
    *(
        Case(pipeline, exits, untied, mode)
        for pipeline, (exits, untied, mode) in itertools.product(
            (1, 2, 4),
            (
                ((0, 1, 2), False, "deferred"),
                ((0, 1, 3), True, "eager"),
                ((2,), True, "deferred"),
                ((0,), False, "eager"),
                ((), False, "deferred"),
            ),
        )
    ),
    Case(4, (0, 1, 3), microbatches=2),
    Case(2, (0, 1), swap_labels_on=0),
    Case(2, (0, 1), swap_labels_on=1),
    Case(2, (0, 1, 2), tensor=2, untied=False),
    Case(2, (1, 3), data=2),
    Case(1, (0, 1, 3), tensor=2, sequence=True, untied=True),
    Case(2, (0, 1, 2), tensor=2, sequence=True, exit_forward="eager", recompute="full"),
    Case(2, (0, 1, 3), recompute="full"),
    Case(2, (0, 1, 3), recompute="selective"),
    Case(2, (0, 1, 3), data=2, overlap=True),
    Case(2, (), executor="stock"),
    Case(4, (), executor="stock"),
    Case(1, (), executor="stock"),
]


def inputs_of(case: Case, seed: int) -> dict[str, Any]:
    """Parameters and microbatches [M, B, S] of a case, in fp32; a few labels are masked out."""
    run = validate(case.document(), RunSpec, "case")
    generator = torch.Generator().manual_seed(seed)
    shape = (case.microbatches * case.data, 2, 16)
    tokens = torch.randint(0, 120, shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) > 0.1).float()
    parameters = reference.init_parameters(run, seed, torch.float32, std=0.1)
    return {
        "run": case.document(),
        "executor": case.executor,
        "parameters": {name: value.detach() for name, value in parameters.items()},
        "data": {
            "tokens": tokens,
            "labels": tokens.roll(-1, dims=-1),
            "loss_mask": mask,
            "swap_labels_on": case.swap_labels_on,
        },
    }


def expected(inputs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], reference.Parameters]:
    """Mean losses and gradients over all microbatches, in float64."""
    run = validate(inputs["run"], RunSpec, "case")
    exits = reference.requested_exits(run)
    parameters = {name: value.double().requires_grad_() for name, value in inputs["parameters"].items()}
    microbatches = list(zip(*(inputs["data"][key] for key in ("tokens", "labels", "loss_mask")), strict=True))
    every = [reference.losses(parameters, run, exits, *microbatch) for microbatch in microbatches]
    total = sum(reference.total_loss(parameters, run, exits, *m) for m in microbatches) / len(microbatches)
    means = {name: torch.stack([losses[name] for losses in every]).mean().detach() for name in every[0]}
    return means, reference.gradients(total, parameters)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-12))


@dataclass(frozen=True, slots=True)
class Finished:
    """A case that has run: what the ranks found, and what they should have found."""

    case: Case
    ranks: list[Any]
    losses: dict[str, torch.Tensor]
    gradients: reference.Parameters


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["1 rank", "2 ranks", "4 ranks"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Finished]:
    """All cases of a world size, run on real ranks in one launch."""
    folder = tmp_path_factory.mktemp("gradients")
    cases = [case for case in CASES if case.world_size == request.param]
    inputs = [inputs_of(case, seed) for seed, case in enumerate(cases)]
    torch.save(inputs, folder / "cases.pt")
    run_ranks("gradient_worker", [folder / "cases.pt", folder / "out.pt"], nproc=request.param)
    outputs = torch.load(folder / "out.pt", weights_only=False)
    return [
        Finished(case, ranks, *expected(one)) for case, one, ranks in zip(cases, inputs, outputs, strict=True)
    ]


def test_gradients_equal_the_reference(finished: list[Finished]) -> None:
    for done in finished:
        if done.case.swap_labels_on is not None:
            continue
        seen = set()
        for _, rank in done.ranks:
            for name, found in rank["gradients"].items():
                seen.add(name)
                assert difference(found, done.gradients[name]) < TOLERANCE, f"{done.case}: {name}"
        assert seen == set(done.gradients), done.case
        for name, wanted in done.losses.items():
            found = [rank["losses"][name] for _, rank in done.ranks if name in rank["losses"]]
            mean = torch.stack(found).double().mean()
            assert abs(float(mean / wanted) - 1) < TOLERANCE, f"{done.case}: loss of {name}"


def test_swapped_labels_show(finished: list[Finished]) -> None:
    """Negative control: labels of another microbatch, on one stage, and only that stage's losses are off."""
    for done in finished:
        stage = done.case.swap_labels_on
        if stage is None:
            continue
        for (_, pipeline_rank), rank in done.ranks:
            for name, found in rank["losses"].items():
                off = abs(float(found.double() / done.losses[name]) - 1)
                assert (off > 100 * TOLERANCE) == (pipeline_rank == stage), f"{done.case}: loss of {name}"
            # On stage 0 the only exit reads the first layer; the final head on stage 1 reads them all.
            reached = "layers.0." if stage == 0 else "layers."
            for name, gradient in rank["gradients"].items():
                if pipeline_rank <= stage and reached in name:
                    assert difference(gradient, done.gradients[name]) > 100 * TOLERANCE, (
                        f"{done.case}: {name}"
                    )


def test_shares_of_the_sequence_need_their_norms_summed(finished: list[Finished]) -> None:
    """Negative control: a tensor-parallel rank's own gradient of a norm is far from the whole."""
    for done in finished:
        if done.case.sequence:
            name = "decoder.layers.0.input_layernorm.weight"
            owns = [rank["before_sync"][name] for _, rank in done.ranks if name in rank["before_sync"]]
            assert all(difference(own, done.gradients[name]) > 100 * TOLERANCE for own in owns), done.case


def test_tied_copies_would_differ_without_synchronisation(finished: list[Finished]) -> None:
    """Negative control: each copy alone is far from the gradient that the test above accepts."""
    for done in finished:
        case = done.case
        if case.pipeline == 1 or case.tensor > 1 or case.untied or case.overlap:
            continue
        name = "embedding.word_embeddings.weight"
        copies = [rank["before_sync"][name] for _, rank in done.ranks if name in rank["before_sync"]]
        assert len(copies) >= 2, done.case
        wanted = done.gradients[name]
        assert all(difference(copy, wanted) > 100 * TOLERANCE for copy in copies), done.case
