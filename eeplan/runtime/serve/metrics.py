"""What a server counts, in prometheus' terms."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("eeplan_http_requests", "Answers.", ["path", "status"], registry=registry)
        self.tokens = Counter("eeplan_tokens", "Generated tokens, by exit.", ["exit"], registry=registry)
        self.prompt_tokens = Counter("eeplan_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.first_token_s = Histogram(
            "eeplan_first_token_seconds",
            "From a request to its first token.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.token_s = Histogram(
            "eeplan_token_seconds",
            "From a token to the next of the same sequence.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.running = Gauge("eeplan_sequences_running", "Sequences that decode.", registry=registry)
        self.waiting = Gauge("eeplan_sequences_waiting", "Sequences that wait.", registry=registry)
        self.rejected = Counter("eeplan_queue_full", "Requests refused, queue full.", registry=registry)
        self.disconnected = Counter(
            "eeplan_disconnects", "Clients that left before the end of their answer.", registry=registry
        )
        self.threshold = Gauge(
            "eeplan_default_threshold", "Confidence at which a token leaves.", ["exit"], registry=registry
        )

    def text(self) -> bytes:
        """All of it, as prometheus reads it."""
        return generate_latest(self._registry)
