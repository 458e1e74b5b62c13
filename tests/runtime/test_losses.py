"""Every loss of an exit against its formula in float64, the vocabulary whole and cut over two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.naive_losses import LossCase, naive_judgement, naive_loss
from ranks import run_ranks

S, B, V = 5, 2, 12
CASES = [
    LossCase(),
    LossCase(temperature=2.5),
    LossCase(weighs_tokens=True),
    LossCase(temperature=0.5, weighs_tokens=True),
    LossCase(distillation_weight=0.7),
    LossCase(temperature=1.5, weighs_tokens=True, distillation_weight=0.3, distillation_temperature=4.0),
]
VOCAB_SIZES = [12, 11, 5]
"""No padding, some, and so much that the second of two ranks holds nothing else."""


def inputs(size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(S, B, V, dtype=torch.float64, generator=generator)
    # Equally likely tokens on both ranks, and far apart ones that overflow without their maximum taken off.
    logits[0, 0, 3] = logits[0, 0, 9] = 20.0
    logits[1, 1, 2] = 400.0
    return {
        "size": size,
        "logits": logits,
        "teacher": 4 * torch.randn(S, B, V, dtype=torch.float64, generator=generator),
        "labels": torch.randint(0, V, (B, S), generator=generator),
        "mask": (torch.rand(B, S, generator=generator) < 0.7).double(),
        "cases": CASES,
        "vocab_sizes": VOCAB_SIZES,
    }


@pytest.fixture(scope="module", params=[1, 2])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Inputs, and what each rank found."""
    size, folder = request.param, tmp_path_factory.mktemp("losses")
    given = inputs(size)
    torch.save(given, folder / "inputs.pt")
    run_ranks("losses_worker", [folder], nproc=size)
    return given, [torch.load(folder / f"seen.{rank}.pt", weights_only=False) for rank in range(size)]


def expected(given: dict[str, Any], case: LossCase) -> dict[str, torch.Tensor]:
    logits = given["logits"].clone().requires_grad_()
    objective, reported = naive_loss(logits, given["labels"], given["mask"], given["teacher"], case)
    (gradient,) = torch.autograd.grad(objective, logits)
    return {"objective": objective.detach(), "reported": reported, "gradient": gradient}


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.double(), wanted.double(), rtol=2e-5, atol=2e-6)


def test_losses_and_gradients_are_the_formulas(seen: Any) -> None:
    given, ranks = seen
    for index, case in enumerate(CASES):
        wanted = expected(given, case)
        of_rank = [rank["losses"][index] for rank in ranks]
        for name in ("objective", "reported"):
            assert all(close(found[name], wanted[name]) for found in of_rank), (case, name)
        gradient = torch.cat([found["gradient"] for found in of_rank], dim=-1)
        assert close(gradient, wanted["gradient"]), case


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """The oracle itself, by central differences; token weights are constants in it, so they are left out."""
    given, case = inputs(1), CASES[4]
    wanted = expected(given, case)["gradient"]
    generator = torch.Generator().manual_seed(1)
    direction, step = torch.randn(S, B, V, dtype=torch.float64, generator=generator), 1e-5

    def at(shift: float) -> float:
        moved = given["logits"] + shift * direction
        return float(naive_loss(moved, given["labels"], given["mask"], given["teacher"], case)[0])

    assert (at(step) - at(-step)) / (2 * step) == pytest.approx(float((wanted * direction).sum()), rel=1e-5)


def test_what_would_be_wrong_is_seen(seen: Any) -> None:
    """Each option moves the gradient, and so would a maximum taken over one rank's share only."""
    given, ranks = seen
    plain = expected(given, CASES[0])["gradient"]
    for case in CASES[1:]:
        assert not close(expected(given, case)["gradient"], plain), case
    found = torch.cat([rank["losses"][2]["gradient"] for rank in ranks], dim=-1)
    of_one_share = {**given, "logits": given["logits"].clone()}
    of_one_share["logits"][..., V // 2 :] = -1e9
    assert not close(found, expected(of_one_share, CASES[2])["gradient"])


def test_tokens_are_judged_by_the_real_vocabulary(seen: Any) -> None:
    given, ranks = seen
    for index, vocab_size in enumerate(VOCAB_SIZES):
        wanted = naive_judgement(given["logits"], given["labels"].clamp(max=vocab_size - 1), vocab_size)
        for rank in ranks:
            entropy, predicted, probability = rank["judged"][index]
            assert close(entropy, wanted[0]), vocab_size
            assert torch.equal(predicted, wanted[1]), vocab_size
            assert close(probability, wanted[2]), vocab_size
    padded = naive_judgement(given["logits"], given["labels"], V)
    assert not close(ranks[0]["judged"][2][2], padded[2]), "control: padding would have changed it"
