"""Metrics of the runs in this process and of the store, in Prometheus' text format."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from killick.web.endpoints import Endpoints
from killick.web.routes import Call, Nothing, get
from killick.workers import metrics as meters


def metrics(call: Call[Nothing, Nothing]) -> Response:
    """Metrics of the runs in this process and of the store, in Prometheus' text format; also at `/metrics`."""
    return Response(meters.prometheus_text(call.client.runtime.engine), media_type=meters.MEDIA)


ROUTES: Final = (get("/metrics", metrics, media="text/plain"),)


def routes(endpoints: Endpoints) -> list[StarletteRoute]:
    """Prometheus' default address."""
    meters.counting()
    return [endpoints.at("/metrics", ROUTES[0])]
