"""Figures of sweeps hold the table's numbers."""

from __future__ import annotations

from pathlib import Path

from builders import make_profile, make_run

from eeplan.sweep import sweep
from eeplan.sweep_axes import parse_axes
from eeplan.sweep_figures import axis_figure, write_figures


def test_points_are_the_least_of_the_rows_they_stand_for(tmp_path: Path) -> None:
    run = make_run()
    axes = parse_axes(
        (
            "exits.count=0..3",
            "exits.head=norm,block",
            "training.global_batch_size=8,16",
            "model.vocab_size=256,512",
        ),
        run,
    )
    table = sweep(run, make_profile(run), axes)
    figure = axis_figure(table, axes[0], axes[1], "a device, 8 samples")
    drawn = {line.get_gid(): line for plot in figure.axes for line in plot.lines}
    assert set(drawn) == {f"{c}-{h}" for c in ("iteration_time_s", "peak_bytes") for h in ("norm", "block")}
    for head in ("norm", "block"):
        rows = table[table["exits.head"] == head]
        line = drawn[f"iteration_time_s-{head}"]
        assert list(line.get_xdata()) == [0, 1, 2, 3]
        assert "(ms)" in figure.axes[0].get_ylabel()
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
            least = rows.loc[rows["exits.count"] == x, "iteration_time_s"].min()
            assert abs(y / 1e3 - least) < 1e-12
    assert figure.get_supxlabel() == "a device, 8 samples"
    written = write_figures(table, axes, tmp_path / "figures", "caption")
    assert [path.name for path in written] == [
        *("exits.count.png", "training.global_batch_size.png", "model.vocab_size.png")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_nothing_feasible_draws_nothing(tmp_path: Path) -> None:
    run = make_run()
    axes = parse_axes(("training.global_batch_size=1,3",), run)
    assert write_figures(sweep(run, make_profile(run), axes), axes, tmp_path / "f", "") == []
    assert not (tmp_path / "f").exists()
