"""Counters of the server, for `/metrics`."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

__all__ = ["Metrics"]

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters in a registry of their own, so that a process may have several."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = "jaxrl_post_{}".format
        self.requests = Counter(
            name("requests"), "Answers.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            name("request_seconds"),
            "Seconds until an answer was whole.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            name("first_token_seconds"),
            "Seconds until the first piece of a stream.",
            buckets=SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            name("prompt_tokens"), "Tokens of prompts.", registry=registry
        )
        self.generated_tokens = Counter(
            name("generated_tokens"), "Tokens of ended samples.", registry=registry
        )
        self.finished = Counter(
            name("samples"), "Ended samples.", ["reason"], registry=registry
        )
        self.disconnected = Counter(
            name("disconnected"),
            "Requests whose client left before the answer.",
            registry=registry,
        )
        self.broken_calls = Counter(
            name("broken_tool_calls"),
            "Tool calls that could not be read.",
            registry=registry,
        )
        self.calls = Counter(
            name("episode_calls"),
            "Calls in episodes: how each relates to those before it.",
            ["kind"],
            registry=registry,
        )
        self.episodes = Gauge(
            name("episodes_kept"), "Episodes that are kept.", registry=registry
        )
        self.samples = Gauge(
            name("samples_under_way"),
            "Samples that wait or run.",
            registry=registry,
        )

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)
