"""Target weights of the early losses: L = L_final + sum_e w_e L_e (EE-LLM 3.3, C.1)."""

from __future__ import annotations

from collections.abc import Sequence

from eeplan.spec import LossWeightSpec


def target_weights(
    spec: LossWeightSpec,
    depths: Sequence[int],
    num_layers: int,
    given: Sequence[float | None] | None = None,
) -> tuple[float, ...]:
    """Weight of each exit's loss; the final loss has weight 1.

    Args:
        spec: policy and scale. ``depth``: scale x depth / num_layers, which with scale 1 is the 0.25 and 0.5
            of the paper's exits at a quarter and half of the depth; ``uniform``: scale for each exit;
            ``normalized``: proportional to depth, summing to scale.
        depths: layers computed before each exit.
        num_layers: of the whole model.
        given: weights set by hand, one per exit; None leaves that exit to the policy. The policy is computed
            over all exits first, so one weight by hand does not move the others.
    """
    fixed = given if given is not None else [None] * len(depths)
    weights = _policy_weights(spec, depths, num_layers)
    return tuple(mine if by_hand is None else by_hand for mine, by_hand in zip(weights, fixed, strict=True))


def _policy_weights(spec: LossWeightSpec, depths: Sequence[int], num_layers: int) -> list[float]:
    if spec.policy == "uniform":
        return [spec.scale] * len(depths)
    whole = num_layers if spec.policy == "depth" else sum(depths)
    return [spec.scale * depth / whole for depth in depths]


def explain_weights(spec: LossWeightSpec, num_by_hand: int) -> str:
    """One sentence that says where the weights come from."""
    formulas = {
        "depth": f"{spec.scale:g} x depth / num_layers, as the paper's 0.25 and 0.5 at a quarter and half",
        "uniform": f"{spec.scale:g} for every exit",
        "normalized": f"proportional to depth, together {spec.scale:g}",
    }
    tail = f"; {num_by_hand} set by hand in exits.layers" if num_by_hand else ""
    return f"policy '{spec.policy}': {formulas[spec.policy]}{tail}"
