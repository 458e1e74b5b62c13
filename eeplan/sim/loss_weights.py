"""Weights of the early losses: L = L_final + sum_e w_e L_e, and how they change (EE-LLM 3.3, C.1)."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi

from eeplan.errors import SpecError
from eeplan.spec import LossWeightSpec, WeightSchedule
from eeplan.usage import ExitShares


def target_weights(
    spec: LossWeightSpec,
    depths: Sequence[int],
    num_layers: int,
    given: Sequence[float | None] | None = None,
    usage: ExitShares | None = None,
) -> tuple[float, ...]:
    """Weight of each exit's loss; the final loss has weight 1.

    Args:
        spec: policy and scale. ``depth``: scale x depth / num_layers, which with scale 1 is the 0.25 and 0.5
            of the paper's exits at a quarter and half of the depth; ``uniform``: scale for each exit;
            ``normalized``: proportional to depth, summing to scale; ``usage``: proportional to the share of
            tokens that leave at the exit, summing to scale.
        depths: layers computed before each exit.
        num_layers: of the whole model.
        given: weights set by hand, one per exit; None leaves that exit to the policy. The policy is computed
            over all exits first, so one weight by hand does not move the others.
        usage: shares of these exits, which policy ``usage`` needs.

    Raises:
        SpecError: policy ``usage``, and no token leaves early.
    """
    fixed = given if given is not None else [None] * len(depths)
    weights = _policy_weights(spec, depths, num_layers, usage)
    return tuple(mine if by_hand is None else by_hand for mine, by_hand in zip(weights, fixed, strict=True))


def weight_at(target: float, schedule: WeightSchedule | None, iteration: int) -> float:
    """Weight of an early loss in one iteration.

    From init x target in the first iteration to the target: linear w0 + x (w1 - w0), or cosine
    w0 + (1 - cos(pi x)) (w1 - w0) / 2, with x the share of ``schedule.iters`` that has passed; constant
    afterwards (EE-LLM C.1).

    Args:
        target: weight at the end.
        schedule: None for a constant weight.
        iteration: from 1.
    """
    if schedule is None:
        return target
    passed = min(1.0, (iteration - 1) / schedule.iters)
    risen = passed if schedule.style == "linear" else (1.0 - cos(pi * passed)) / 2.0
    return target * (schedule.init + risen * (1.0 - schedule.init))


def _policy_weights(
    spec: LossWeightSpec, depths: Sequence[int], num_layers: int, usage: ExitShares | None
) -> list[float]:
    if spec.policy == "uniform":
        return [spec.scale] * len(depths)
    if spec.policy == "usage":
        return _usage_weights(spec, depths, usage)
    whole = num_layers if spec.policy == "depth" else sum(depths)
    return [spec.scale * depth / whole for depth in depths]


def _usage_weights(spec: LossWeightSpec, depths: Sequence[int], usage: ExitShares | None) -> list[float]:
    assert usage is not None, "policy 'usage' needs exit shares"
    assert usage.depths == tuple(depths), f"shares are for exits at {usage.depths}, not at {tuple(depths)}"
    whole = sum(usage.early)
    if depths and whole <= 0.0:
        raise SpecError(
            f"exits.loss_weights.policy 'usage' finds no token that leaves early ({usage.sentence}); lower "
            "decode.threshold, or choose another policy or decode.prior"
        )
    return [spec.scale * share / whole for share in usage.early]


def explain_weights(spec: LossWeightSpec, num_by_hand: int, usage: ExitShares | None = None) -> str:
    """One sentence that says where the weights come from."""
    formulas = {
        "depth": f"{spec.scale:g} x depth / num_layers, as the paper's 0.25 and 0.5 at a quarter and half",
        "uniform": f"{spec.scale:g} for every exit",
        "normalized": f"proportional to depth, together {spec.scale:g}",
        "usage": f"proportional to the tokens that leave there, together {spec.scale:g}",
    }
    source = f" ({usage.sentence})" if spec.policy == "usage" and usage is not None else ""
    tail = f"; {num_by_hand} set by hand in exits.layers" if num_by_hand else ""
    if spec.dynamic:
        tail += "; times each token's highest probability at the exit"
    return f"policy '{spec.policy}': {formulas[spec.policy]}{source}{tail}{_explain_schedule(spec.warmup)}"


def _explain_schedule(schedule: WeightSchedule | None) -> str:
    if schedule is None or schedule.init == 1.0:
        return ""
    change = "warm up" if schedule.init < 1.0 else "cool down"
    shape = "linearly" if schedule.style == "linear" else "along a cosine"
    start = f"{schedule.init:g} times their targets"
    return f"; all {change} {shape} from {start} over {schedule.iters} iterations"
