"""The trace document obeys the rules of the Trace Event Format and holds what the timeline holds."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from eeplan.sim.costs import PipelineCosts
from eeplan.sim.critical_path import critical_path, event_graph
from eeplan.sim.engine import simulate
from eeplan.sim.schedule import one_f_one_b
from eeplan.sim.trace import perfetto
from eeplan.timeline import Span, Timeline

REQUIRED_KEYS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "ts", "args"},
}


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    costs = PipelineCosts(
        (1001, 2000, 1500),
        (2001, 3000, 2500),
        message_ns=(397, 397),
        output_bytes=(64, 64, 0),
        static_bytes=(100, 90, 80),
        kept_bytes=(7, 6, 5),
        forward_transient_bytes=(3, 3, 3),
        backward_transient_bytes=(4, 4, 9),
    )
    return simulate(one_f_one_b(3, 5), costs)


def events_of(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def broken_rules(document: dict[str, Any]) -> list[str]:
    """Rules of the format that a document breaks: keys, numbers, nesting, flows inside ops and in pairs."""
    broken = []
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    flows: dict[tuple[int, int], list[str]] = {}
    for event in document["traceEvents"]:
        missing = REQUIRED_KEYS[event["ph"]] - event.keys()
        if missing:
            broken.append(f"{event} lacks {missing}")
        if event["ph"] != "M" and event["ts"] < 0:
            broken.append(f"{event} is before the beginning")
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
        if event["ph"] == "C" and not all(type(v) is int for v in event["args"].values()):
            broken.append(f"{event} counts something that is no number")
    for row in slices.values():
        row.sort()
        broken += [f"{a} and {b} overlap" for a, b in pairwise(row) if a[1] > b[0] + 1e-9]
    for event in document["traceEvents"]:
        if event["ph"] in "sf":
            flows.setdefault((event["pid"], event["id"]), []).append(event["ph"])
            row = slices.get((event["pid"], event["tid"]), [])
            if not any(start <= event["ts"] <= end for start, end in row):
                broken.append(f"{event} is in no op")
    broken += [f"flow {key} has {ends}" for key, ends in flows.items() if ends != ["s", "f"]]
    if len({flow for _, flow in flows}) != len(flows):
        broken.append("two flows share an id")
    return broken


def test_document_obeys_the_format(timeline: Timeline) -> None:
    document = perfetto({"predicted": timeline, "measured": timeline})
    assert broken_rules(document) == []
    assert json.loads(json.dumps(document)) == document
    assert document == perfetto({"predicted": timeline, "measured": timeline})


def test_rules_notice_a_broken_document(timeline: Timeline) -> None:
    """Negative control: an arrow outside its op, a lost end, an overlap."""
    for phase, change in (("f", {"ts": 1e9}), ("X", {"dur": 1e9}), ("s", {"id": 10**6})):
        document = perfetto({"predicted": timeline})
        events_of(document, phase)[1].update(change)
        assert broken_rules(document)


def test_processes_and_threads_are_named(timeline: Timeline) -> None:
    names = [
        (e["name"], e["pid"], e["tid"], e["args"]["name"])
        for e in events_of(perfetto({"predicted": timeline, "measured": timeline}), "M")
        if e["name"].endswith("_name")
    ]
    assert names == [
        row
        for pid, name in ((1, "predicted"), (2, "measured"))
        for row in [
            ("process_name", pid, 0, name),
            *(("thread_name", pid, stage, f"stage {stage}") for stage in range(3)),
        ]
    ]


def test_every_span_is_an_event_to_the_nanosecond(timeline: Timeline) -> None:
    events = events_of(perfetto({"predicted": timeline}), "X")
    found = [
        (e["tid"], e["cat"], e["args"]["microbatch"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3))
        for e in events
    ]
    assert found == [
        (s.stage, s.kind, s.microbatch, s.start_ns, s.end_ns) for row in timeline.spans for s in row
    ]


def test_every_message_is_an_arrow_between_its_ops(timeline: Timeline) -> None:
    document = perfetto({"predicted": timeline})
    starts, ends = events_of(document, "s"), events_of(document, "f")
    assert len(starts) == len(ends) == len(timeline.messages) == 2 * 2 * 5
    for message, start, end in zip(timeline.messages, starts, ends, strict=True):
        assert (start["tid"], end["tid"]) == (message.source, message.target)
        assert start["args"] == {
            "microbatch": message.microbatch,
            "size_bytes": 64,
            "send_us": message.send_ns / 1000,
            "receive_us": message.receive_ns / 1000,
        }
        assert start["ts"] * 1000 <= message.send_ns
        assert end["ts"] * 1000 >= message.receive_ns


def test_memory_is_a_counter_per_stage(timeline: Timeline) -> None:
    counters = events_of(perfetto({"predicted": timeline}), "C")
    for stage, samples in enumerate(timeline.memory):
        mine = [e for e in counters if e["name"] == f"memory of stage {stage}"]
        assert [(e["ts"] * 1000, e["args"]["bytes"]) for e in mine] == [
            (pytest.approx(s.time_ns), s.live_bytes) for s in samples
        ]


def test_ops_of_the_whole_iteration_have_no_microbatch() -> None:
    timeline = Timeline(((Span(0, "forward", 3, 0, 5), Span(0, "optimizer", -1, 5, 9)),))
    forward, optimizer = events_of(perfetto({"measured": timeline}), "X")
    assert (forward["name"], forward["args"]) == ("forward 3", {"microbatch": 3})
    assert (optimizer["name"], optimizer["args"]) == ("optimizer", {})


def test_the_critical_path_is_a_thread_without_gaps(timeline: Timeline) -> None:
    graph = event_graph(one_f_one_b(3, 5), timeline)
    document = perfetto({"predicted": timeline, "measured": timeline}, {"predicted": critical_path(graph)})
    assert broken_rules(document) == []
    on_path = [event for event in events_of(document, "X") if event["cat"] == "critical path"]
    assert {(event["pid"], event["tid"]) for event in on_path} == {(1, 3)}
    assert on_path[0]["ts"] == 0
    for before, after in pairwise(on_path):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
    assert on_path[-1]["ts"] + on_path[-1]["dur"] == pytest.approx(timeline.pipeline_ns / 1000)
    assert any(event["name"].startswith("forward message") for event in on_path)
    names = [event["args"]["name"] for event in events_of(document, "M") if event["name"] == "thread_name"]
    assert names.count("critical path") == 1
