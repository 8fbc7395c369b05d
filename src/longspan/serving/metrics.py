"""Prometheus metrics."""

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from longspan.serving.requests import server_of
from longspan.serving.security import App, Message, Receive, Scope, Send
from longspan.serving.server import Server

router = APIRouter()
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry per server, so that several servers can run in a process."""

    def __init__(self, server: Server) -> None:
        self.server, self.registry = server, CollectorRegistry()
        self.requests = Counter(
            "longspan_requests", "Requests by route and status", ["route", "status"], registry=self.registry
        )
        first = Histogram(
            "longspan_time_to_first_token_seconds",
            "From the request to its first token",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        following = Histogram(
            "longspan_time_per_token_seconds",
            "Between two tokens of a stream",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        for served in server.models:
            served.engine.statistics.first_token = first.labels(served.name).observe
            served.engine.statistics.next_token = following.labels(served.name).observe
        self.registry.register(self)  # type: ignore[arg-type]  # only `collect` is needed

    def collect(self) -> Iterable[Metric]:
        """Values that are read when they are asked for."""
        tokens = CounterMetricFamily("longspan_tokens", "Tokens read and generated", labels=["model", "kind"])
        queue = GaugeMetricFamily("longspan_queue_length", "Streams that wait for a row", labels=["model"])
        running = GaugeMetricFamily("longspan_running_streams", "Streams that have a row", labels=["model"])
        for served in self.server.models:
            engine = served.engine
            tokens.add_metric([served.name, "prompt"], engine.statistics.prompt_tokens)
            tokens.add_metric([served.name, "generated"], engine.statistics.generated_tokens)
            queue.add_metric([served.name], engine.load)
            running.add_metric([served.name], len(engine.running))
        table = self.server.sessions
        sessions = GaugeMetricFamily("longspan_sessions", "Sessions by place", labels=["place"])
        held = sum(session.moment is not None for session in list(table.table.values()))
        sessions.add_metric(["memory"], held)
        sessions.add_metric(["disk"], len(table.table) - held)
        size = GaugeMetricFamily("longspan_state_bytes", "States of sessions in memory", value=table.state_bytes)
        return [tokens, queue, running, sessions, size]


class CountRequests:
    """ASGI middleware: counts every answer, also those that are refused before they reach a route."""

    def __init__(self, app: App, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The pattern of the route: names of sessions would make a new metric each.
                route: Any = scope.get("route")
                self.metrics.requests.labels(getattr(route, "path", "other"), str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, counted)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    found: Metrics = request.app.state.metrics
    assert server_of(request) is found.server
    return Response(generate_latest(found.registry), media_type=CONTENT_TYPE_LATEST)
