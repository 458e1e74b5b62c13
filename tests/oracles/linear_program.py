"""The closed form of 1F1B as a mixed-integer linear program: least makespan over layers and exits per stage.

A second method for spaces that cannot be enumerated. Without messages, synchronisation and optimizer, the
makespan is a maximum of sums that are linear in the layers and exits of each stage (see
``bounds.closed_form_ns``), so a general solver can minimise it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from eeplan.sim.family import Family

Floats = NDArray[np.float64]


def least_makespan_ns(family: Family) -> int:
    """Optimum over all splits and all exits per stage that have room; more microbatches than stages."""
    stages = family.num_stages
    # Columns: layers [P], exits [P], ramp up [P], ramp down [P], makespan.
    size = 4 * stages + 1
    rows: list[Floats] = []
    least: list[float] = []

    def at_least(row: Floats, constant: float) -> None:
        """row . x >= constant"""
        rows.append(row)
        least.append(constant)

    def op(stage: int, fixed: Floats, layer: float, exits: Floats) -> tuple[Floats, float]:
        row = np.zeros(size)
        row[stage], row[stages + stage] = layer, exits[1] - exits[0] if len(exits) > 1 else 0.0
        return row, float(fixed[stage])

    forwards = [op(s, family.forward, family.layer_forward, family.exit_forward) for s in range(stages)]
    backwards = [op(s, family.backward, family.layer_backward, family.exit_backward) for s in range(stages)]
    works = [(f[0] + b[0], f[1] + b[1]) for f, b in zip(forwards, backwards, strict=True)]
    through = [(sum(row for row, _ in works[:j]), sum(c for _, c in works[:j])) for j in range(1, stages + 1)]
    for column, ops in ((2 * stages, forwards), (3 * stages, backwards)):
        for low in range(stages):
            for top in range(low, stages):
                for slow in range(top + 1):
                    waits = stages - 1 - top
                    row = -through[top][0] - waits * ops[slow][0]
                    row[column + low] += 1
                    at_least(row, through[top][1] + waits * ops[slow][1])
    for low in range(stages):
        turns = family.num_microbatches - 2 - (stages - 1 - low)
        row, constant = -turns * works[low][0], turns * works[low][1]
        if low:
            row, constant = row + through[low - 1][0], constant - through[low - 1][1]
        row[-1] += 1
        row[2 * stages + low] -= 1
        row[3 * stages + low] -= 1
        at_least(row, constant)
    for first in range(stages):
        for last in range(first, stages):
            # Hidden states that these stages can read: one more than layers, but not 0 and not the last.
            row = np.zeros(size)
            row[first : last + 1] = 1
            row[stages + first : stages + last + 1] = -1
            at_least(row, (last == stages - 1) - (first > 0))
    totals = np.zeros((2, size))
    totals[0, :stages] = totals[1, stages : 2 * stages] = 1
    sums = [family.num_layers, family.num_exits]
    objective = np.zeros(size)
    objective[-1] = 1
    found = milp(
        objective,
        constraints=[LinearConstraint(np.array(rows), np.array(least)), LinearConstraint(totals, sums, sums)],
        integrality=np.array([1] * (2 * stages) + [0] * (2 * stages + 1)),
        bounds=Bounds(np.array([1.0] * stages + [0.0] * (size - stages))),
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    return round(found.fun)
