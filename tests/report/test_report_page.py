"""The page: well-formed, self-contained, escaped, and with the run's numbers in it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fake_run import Reported, write_fake_run

from eeplan.errors import FileError
from eeplan.report import build, sections
from eeplan.report.build import write_report

FILES = {
    "index.html",
    "summary.json",
    "trace.json",
    "comparison.csv",
    "ops.csv",
    "timeline.csv",
    "timeline.png",
    "iteration_time.png",
    "iteration_distribution.png",
    "memory.png",
    "losses.png",
    "layout.png",
    "idle.png",
    "critical_path.png",
    "usage.png",
    "reliability.png",
}


@pytest.fixture(scope="module")
def html(reported: Reported) -> str:
    return (reported.out / "index.html").read_text()


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))


def text_of(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).replace("\u202f", " ").split())


def external_references(html: str) -> list[str]:
    """Everything that a browser would fetch: links, sources, imports and url() outside the page."""
    found = [
        value
        for name, value in re.findall(r'\b(src|href|srcset|action|poster|data|xlink:href)="([^"]*)"', html)
        if not value.startswith("#")
    ]
    found += [url for url in re.findall(r"url\(([^)]*)\)", html) if not url.startswith("#")]
    found += re.findall(r"@import|<script|<link|<iframe|<object", html)
    return found + [
        u for u in re.findall(r"https?://[^\s\"'<]+", html) if not u.startswith("http://www.w3.org/")
    ]


def test_the_folder_holds_the_report_and_nothing_else(reported: Reported) -> None:
    assert {path.name for path in reported.out.iterdir()} == FILES
    for path in reported.out.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_is_well_formed_and_ids_are_unique(html: str) -> None:
    root = parsed(html)
    ids = Counter(element.get("id") for element in root.iter() if element.get("id"))
    assert max(ids.values()) == 1
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', html))
    assert used
    assert used <= set(ids)


def test_the_page_fetches_nothing(html: str) -> None:
    assert external_references(html) == []


@pytest.mark.parametrize(
    "bad",
    [
        '<img src="timeline.png"/>',
        '<link rel="stylesheet" href="style.css"/>',
        "<style>p { background: url(paper.png) }</style>",
        '<a href="https://example.org/">x</a>',
    ],
)
def test_an_external_reference_would_be_noticed(html: str, bad: str) -> None:
    assert external_references(html.replace("</main>", bad + "</main>"))


def test_the_page_follows_the_scheme_and_fits_a_phone(html: str) -> None:
    assert "prefers-color-scheme: dark" in html
    assert "color-scheme: light dark" in html
    assert '<meta name="viewport" content="width=device-width, initial-scale=1"/>' in html
    assert "@media print" in html
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(figures) == 10
    # Ink and background must change with the scheme, so no figure may fix them.
    assert not any(re.search(r"#(1d1c1a|fdfcfa)\b", figure) for figure in figures)


def test_the_headline_says_predicted_measured_and_signed_error(html: str, reported: Reported) -> None:
    predicted = reported.summary["predicted"]["iteration_time_s"] * 1e3
    measured = reported.summary["measured"]["iteration_time_s"] * 1e3
    error = 100 * (predicted / measured - 1)
    heading = parsed(html).find(".//h1")
    assert heading is not None
    sign = "−" if error < 0 else "+"
    assert text_of(heading) == (
        f"Predicted {predicted:.0f} ms per iteration, measured {measured:.0f} ms ({sign}{abs(error):.1f} %)"
    )
    assert error < 0


def test_the_tables_hold_predicted_measured_and_error(html: str, reported: Reported) -> None:
    rows = {
        (text_of(caption), text_of(cells[0])): [text_of(cell) for cell in cells[1:]]
        for table in parsed(html).iter("table")
        for row in table.iter("tr")
        if (caption := table.find("caption")) is not None and (cells := row.findall("td"))
    }
    for index, error in enumerate(reported.summary["error"]["peak_bytes"]):
        row = rows["Peaks, one run", f"Peak memory, stage {index}"]
        predicted = reported.summary["predicted"]["peak_bytes"][index] / 2**20
        assert row[0] == f"{predicted:.1f} MiB"
        assert row[2] == f"{100 * error:+.1f} %".replace("-", "−")
        assert row[3] == "1"
    assert rows["Whole iteration", "Iteration time"][3] == "25"
    for name, (first, last) in reported.summary["losses"].items():
        assert rows["First and last loss of each exit", name][:2] == [f"{first:.3f}", f"{last:.3f}"]
    for planned in reported.plan.exits:
        row = rows["Exits", f"exit_{planned.depth}"]
        assert row[:3] == [f"after layer {planned.layer}", str(planned.stage), planned.head]


def test_decisions_hardware_and_commands_are_on_the_page(html: str, reported: Reported) -> None:
    text = text_of(parsed(html))
    for decision in reported.plan.decisions:
        for part in (decision.choice, decision.reason, decision.rejected):
            assert part in text
    for part in (
        "Fake CPU @ 2 GHz, 2 cores",
        "1 thread each",
        "6 microbatches of 2, fp32",
        "extrapolated instead of measured: none",
        "eeplan train plan.yaml --out run",
        "every exit is below the unigram entropy of the text (4.60 nats)",
        reported.plan.content_sha256[:12],
    ):
        assert part in text


def test_generated_text_is_marked_by_exit_and_escaped(html: str, reported: Reported) -> None:
    assert "<b>" not in html
    classes = {"exit_3": "token early e0", "exit_6": "token early e1", "final": "token"}
    samples = [e for e in parsed(html).iter("div") if e.get("class") == "sample"]
    assert len(samples) == len(reported.run.samples) == 2
    for element, sample in zip(samples, reported.run.samples, strict=True):
        spans = [e for e in element.iter("span") if e.get("class", "").startswith("token")]
        assert [e.get("class") for e in spans] == [classes[t.exit] for t in sample.tokens]
        shown = ["".join(e.itertext()).replace("↵\n", "\n").replace("↵", "\n") for e in spans]
        assert shown == [t.text for t in sample.tokens]
    legend = next(e for e in parsed(html).iter("div") if e.get("class") == "legend")
    counts = Counter(t.exit for s in reported.run.samples for t in s.tokens)
    for name, count in counts.items():
        assert f"{name} {100 * count / counts.total():.0f} %" in text_of(legend)


def test_many_line_ends_in_a_row_take_one_line() -> None:
    assert sections._visible(["a\n", "\n\n", "b", "\n", "c"]) == ["a↵\n", "↵↵", "b", "↵\n", "c"]


def test_the_page_tells_no_path_of_this_machine(html: str, reported: Reported) -> None:
    assert str(reported.folder.parent) not in html
    assert str(Path.home()) + "/" not in html


def test_the_tables_for_programs_agree_with_the_page(reported: Reported) -> None:
    with (reported.out / "comparison.csv").open() as file:
        rows = {row["quantity"]: row for row in csv.DictReader(file)}
    assert float(rows["Iteration time"]["error"]) == pytest.approx(
        reported.summary["error"]["iteration_time"]
    )
    with (reported.out / "timeline.csv").open() as file:
        spans = Counter(row["source"] for row in csv.DictReader(file))
    assert spans == {"predicted": 3 * (2 * 6 + 2), "measured": 3 * (2 * 6 + 2)}
    trace = json.loads((reported.out / "trace.json").read_text())
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    on_path = [event for event in ops if event["cat"] == "critical path"]
    assert len(ops) - len(on_path) == sum(spans.values())
    assert sum(event["dur"] for event in on_path) == pytest.approx(reported.plan.prediction.pipeline_s * 1e6)


def test_a_run_without_exits_samples_or_validation(tmp_path: Path) -> None:
    write_fake_run(
        tmp_path / "run",
        stages=1,
        exit_depths=(),
        iterations=2,
        recorded=1,
        prompts=0,
        evaluated=False,
        decode_bench=False,
    )
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in metrics if json.loads(line)["kind"] == "train"]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(kept))
    (tmp_path / "run" / "profile.yaml").unlink()
    summary = write_report(tmp_path / "run", tmp_path / "page")
    assert list(summary["losses"]) == ["final"]
    text = text_of(parsed((tmp_path / "page" / "index.html").read_text()))
    assert "no early exit" in text
    assert "holds no unigram entropy" in text
    assert "the only one recorded" in text
    assert "What early exits bring when decoding" not in text
    assert summary["replanned"] is None


def test_a_diverged_run_is_shown_as_it_is(tmp_path: Path) -> None:
    write_fake_run(tmp_path / "run", iterations=3, recorded=1, slowdown=1.6)
    path = tmp_path / "run" / "metrics.jsonl"
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    for document in documents[-2:]:
        document["losses"]["final"] = float("nan")
    path.write_text("\n".join(map(json.dumps, documents)))
    summary = write_report(tmp_path / "run", tmp_path / "page")
    assert summary["losses"]["final"][1] is None
    assert summary["error"]["iteration_time"] < -0.3
    text = text_of(parsed((tmp_path / "page" / "index.html").read_text()))
    assert "exit_4 is below the unigram entropy of the text (4.60 nats), final not" in text
    assert f"(−{-100 * summary['error']['iteration_time']:.1f} %)" in text


def test_a_failure_leaves_the_old_report_alone(
    reported: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page"
    out.mkdir()
    (out / "index.html").write_text("old")
    (out / "notes.txt").write_text("mine")

    def fail(*_: object) -> str:
        raise RuntimeError("drawn half-way")

    with monkeypatch.context() as patch:
        patch.setattr(build.page, "render", fail)
        with pytest.raises(RuntimeError):
            write_report(reported.folder, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "index.html": "old",
        "notes.txt": "mine",
    }
    write_report(reported.folder, out)
    assert {path.name for path in out.iterdir()} == FILES | {"notes.txt"}
    assert (out / "index.html").read_bytes() == (reported.out / "index.html").read_bytes()


def test_an_out_that_is_a_file_is_refused(reported: Reported, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("a file")
    with pytest.raises(FileError, match="it is a file; give a folder"):
        write_report(reported.folder, tmp_path / "page")


def test_importing_the_report_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, eeplan.report.build; "
        "print([m for m in ('torch', 'megatron', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
