"""Serves a run's page, and its newest metrics and raised rules for Prometheus."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_post.programs.watching.live import guards, live_routes
from jaxrl_post.records.directory import RunDirectory

__all__ = ["Exposition", "serving_run"]


class Exposition:
    """The newest step of a run, in Prometheus' text format.

    Needs the extra serve.

    >>> exposition = Exposition(["no-spread"])
    >>> exposition.update(3, {"reward/mean": 0.5}, ["no-spread"])
    >>> text = exposition.text().decode()
    >>> 'jaxrl_post_run_metric{name="reward/mean"} 0.5' in text
    True
    >>> 'jaxrl_post_run_alarm{rule="no-spread"} 1.0' in text
    True
    """

    def __init__(self, rules: Sequence[str]) -> None:
        from prometheus_client import CollectorRegistry, Gauge

        self._registry = registry = CollectorRegistry()
        name = "jaxrl_post_run_{}".format
        self._step = Gauge(name("step"), "The last step.", registry=registry)
        self._metric = Gauge(
            name("metric"), "Its metrics.", ["name"], registry=registry
        )
        self._alarm = Gauge(
            name("alarm"),
            "1 for a rule whose bounds are crossed, else 0.",
            ["rule"],
            registry=registry,
        )
        for rule in rules:
            self._alarm.labels(rule).set(0)
        self._rules = rules

    def update(
        self, step: int, metrics: Mapping[str, float], raised: Sequence[str]
    ) -> None:
        """Takes the metrics of a step, and the rules that are raised after it."""
        self._step.set(step)
        for name, value in metrics.items():
            self._metric.labels(name).set(value)
        for rule in self._rules:
            self._alarm.labels(rule).set(rule in raised)

    def text(self) -> bytes:
        """All of it in the text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


@contextlib.contextmanager
def serving_run(
    address: tuple[str, int], directory: RunDirectory, rules: Sequence[str]
) -> Iterator[tuple[Exposition, str]]:
    """Serves the page of a run at /, and GET /metrics, until the block ends.

    Args:
        address: host and port.
        directory: of the run.
        rules: names of the run's rules.

    Yields:
        The metrics that are served, and the page's URL.

    Raises:
        OSError: the address is taken.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    from jaxrl_post.serve.threads import serving

    exposition = Exposition(rules)

    async def metrics(request: Any) -> Response:
        del request
        return Response(exposition.text(), media_type="text/plain; version=0.0.4")

    with live_routes(directory) as routes:
        routes = [*routes, Route("/metrics", metrics)]
        app = Starlette(routes=routes, middleware=guards(address[0]))
        with serving(app, *address, name="page of the run") as (url, _):
            yield exposition, url
