"""Timelines as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing.

One process per timeline, say "predicted" and "measured"; one thread per stage; arrows from the op that makes
a tensor to the op that uses it; a counter of live bytes per stage; below the stages of a simulated timeline
its critical path, op after op and message after message. The format is Chrome's "Trace Event Format": times
are microseconds, as fractions where nanoseconds need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eeplan.timeline import Message, Span, Timeline

Event = dict[str, Any]
Path = Sequence[Span | Message]


def perfetto(timelines: Mapping[str, Timeline], paths: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """All ``timelines`` as one JSON document; equal timelines give equal documents.

    Args:
        timelines: name of the process to timeline, shown in this order.
        paths: critical path of some of them, by the same names.

    Returns:
        The document, ready for ``json.dump``. A message gets an arrow if both of its ops were recorded.
    """
    events: list[Event] = []
    next_flow = 1
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _names(process, name, timeline)
        events += _ops(process, timeline)
        arrows = list(_arrows(process, timeline, next_flow))
        next_flow += len(arrows) // 2
        events += arrows
        events += _memory(process, timeline)
        if path := (paths or {}).get(name):
            events += _critical_path(process, timeline.num_stages, path)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _names(process: int, name: str, timeline: Timeline) -> Iterator[Event]:
    yield _metadata("process_name", process, 0, {"name": name})
    yield _metadata("process_sort_index", process, 0, {"sort_index": process})
    for stage in range(timeline.num_stages):
        yield _metadata("thread_name", process, stage, {"name": f"stage {stage}"})
        yield _metadata("thread_sort_index", process, stage, {"sort_index": stage})


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _ops(process: int, timeline: Timeline) -> Iterator[Event]:
    for stage, spans in enumerate(timeline.spans):
        for span in spans:
            whole_iteration = span.microbatch < 0
            yield {
                "ph": "X",
                "name": span.kind if whole_iteration else f"{span.kind} {span.microbatch}",
                "cat": span.kind,
                "pid": process,
                "tid": stage,
                "ts": _us(span.start_ns),
                "dur": _us(span.end_ns - span.start_ns),
                "args": {} if whole_iteration else {"microbatch": span.microbatch},
            }


def _arrows(process: int, timeline: Timeline, first_flow: int) -> Iterator[Event]:
    """A start and an end event per message. Both must lie inside an op to stick to it, so an arrow leaves in
    the middle of the op that made the tensor and ends at the start of the op that uses it."""
    spans = {(s.kind, s.stage, s.microbatch): s for stage in timeline.spans for s in stage}
    flow = first_flow
    for message in timeline.messages:
        source = spans.get((message.direction, message.source, message.microbatch))
        target = spans.get((message.direction, message.target, message.microbatch))
        if source is None or target is None:
            continue
        common = {"name": f"{message.direction} message", "cat": "message", "id": flow, "pid": process}
        yield {
            "ph": "s",
            **common,
            "tid": message.source,
            "ts": _us((source.start_ns + source.end_ns) // 2),
            "args": {
                "microbatch": message.microbatch,
                "size_bytes": message.size_bytes,
                "send_us": _us(message.send_ns),
                "receive_us": _us(message.receive_ns),
            },
        }
        yield {"ph": "f", "bp": "e", **common, "tid": message.target, "ts": _us(target.start_ns)}
        flow += 1


def _memory(process: int, timeline: Timeline) -> Iterator[Event]:
    for stage, samples in enumerate(timeline.memory):
        for sample in samples:
            yield {
                "ph": "C",
                "name": f"memory of stage {stage}",
                "pid": process,
                "tid": stage,
                "ts": _us(sample.time_ns),
                "args": {"bytes": sample.live_bytes},
            }


def _critical_path(process: int, thread: int, path: Path) -> Iterator[Event]:
    """A thread of its own, behind those of the stages."""
    yield _metadata("thread_name", process, thread, {"name": "critical path"})
    yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})
    for node in path:
        if isinstance(node, Message):
            name = f"{node.direction} message {node.microbatch}, stage {node.source} to {node.target}"
            start_ns, end_ns, where = node.send_ns, node.receive_ns, node.source
        else:
            name = f"{node.kind} {node.microbatch} on stage {node.stage}"
            start_ns, end_ns, where = node.start_ns, node.end_ns, node.stage
        yield {
            "ph": "X",
            "name": name,
            "cat": "critical path",
            "pid": process,
            "tid": thread,
            "ts": _us(start_ns),
            "dur": _us(end_ns - start_ns),
            "args": {"microbatch": node.microbatch, "stage": where},
        }


def _us(time_ns: int) -> float:
    return time_ns / 1000
