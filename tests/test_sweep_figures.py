"""Figures of sweeps hold the table's numbers."""

from __future__ import annotations

from pathlib import Path

from builders import make_profile, make_run
from decode_cases import with_decode_costs

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


def test_decoding_has_a_panel_and_wide_axes_equal_ratios() -> None:
    run = make_run(exits={"count": 1})
    axes = parse_axes(("model.vocab_size=256,1024,8192", "exits.count=0..2"), run)
    table = sweep(run, with_decode_costs(make_profile(run)), axes)
    figure = axis_figure(table, axes[0], axes[1], "caption")
    assert len(figure.axes) == 3
    assert all(plot.get_xscale() == "log" for plot in figure.axes)
    assert list(figure.axes[0].get_xticks()) == [256, 1024, 8192]
    line = next(line for line in figure.axes[2].lines if line.get_gid() == "decode_s-1")
    rows = table[table["exits.count"] == 1]
    modes = ["decode_full_s", "decode_kv_recompute_s", "decode_catch_up_s", "decode_pipeline_s"]
    least = rows[modes].min(axis=1).tolist()
    assert [round(y / 1e3, 12) for y in line.get_ydata()] == [round(y, 12) for y in least]
    over_exits = axis_figure(table, axes[1], None, "caption")
    assert over_exits.axes[0].get_xscale() == "linear"
    assert all(tick == int(tick) for tick in over_exits.axes[0].get_xticks())
