"""The ASGI application: which path does what, and one life for everything that a router holds open."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.ops.exposition import CONTENT_TYPE, render
from forebay.router.ask import TextSide
from forebay.router.classes import key_name
from forebay.router.config import RouterConfig
from forebay.router.door import Door
from forebay.router.endpoint import Endpoint, request_id
from forebay.router.gate import Gate
from forebay.router.http_edge import encode
from forebay.router.ingress_client import IngressClient
from forebay.router.liveness import Liveness
from forebay.router.log import Log
from forebay.router.memory import SessionMemory
from forebay.router.outcome import ApiError, Outcome
from forebay.router.probes import probing
from forebay.router.ring import rank
from forebay.router.session import digest
from forebay.router.stats import Stats
from forebay.router.turn import Fleet

About = Callable[[], Mapping[str, object]]


def make_fleet(config: RouterConfig) -> Fleet:
    """All that the router's turns share. Reads the model's tokenizer; opens nothing."""
    names = list(config.weights)
    return Fleet(
        config=config,
        text=TextSide(config.model),
        client=IngressClient(
            {each.name: each.url for each in config.clusters}, connect_s=config.connect_s, probe_s=config.probe_s
        ),
        liveness=Liveness(names, fall=config.probes_fall, rise=config.probes_rise, hung_s=config.hung_s),
        gates={name: Gate(config.classes, config.spare_s, config.shared_resident_bytes) for name in names},
        memory=SessionMemory(config.sessions),
        stats=Stats([each.name for each in config.classes], names),
    )


def create_app(config: RouterConfig, write_log: Log, about: About = dict) -> Starlette:
    """The router; a line of its log is a call of `write_log`, and `about` adds to its status.

    `app.state.door` closes it (see Door); leaving the lifespan ends what is still open.
    """
    fleet, door = make_fleet(config), Door(config.open_requests_max)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with fleet.client, probing(fleet.client, fleet.liveness, list(config.weights), config.probe_every_s):
            yield

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Endpoint("chat", fleet, door, write_log), methods=["POST"]),
            Route("/v1/completions", Endpoint("completion", fleet, door, write_log), methods=["POST"]),
            Route("/v1/sessions/{name:path}", _session_end(fleet), methods=["DELETE"]),
            *_views(fleet, door, about),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _unknown_path, ApiError: _refused},
    )
    app.state.door = door
    app.state.fleet = fleet
    return app


def _session_end(fleet: Fleet) -> Callable[[Request], Awaitable[Response]]:
    """DELETE /v1/sessions/{name}: the client's own name of a session that is over. 204, however often."""

    async def end(request: Request) -> Response:
        key_name(request.headers.get("authorization"), fleet.config.keys)
        session = digest(request.path_params["name"])
        placement = fleet.memory.placement(session)
        clusters = {*rank(session, fleet.config.weights)[:2], *([placement.cluster] if placement else [])}
        await asyncio.gather(*(fleet.client.end_session(cluster, session) for cluster in clusters))
        return Response(status_code=204, headers=_id(request))

    return end


def _views(fleet: Fleet, door: Door, about: About) -> list[Route]:
    """What can be looked at."""
    created = int(time.time())

    async def models(request: Request) -> Response:
        key_name(request.headers.get("authorization"), fleet.config.keys)
        return JSONResponse({"object": "list", "data": _models(fleet.config, created)}, headers=_id(request))

    async def model(request: Request) -> Response:
        key_name(request.headers.get("authorization"), fleet.config.keys)
        name = request.path_params["name"]
        for card in _models(fleet.config, created):
            if card["id"] == name:
                return JSONResponse(card, headers=_id(request))
        text = f"The model `{name[:200]}` does not exist."
        raise ApiError(404, text, outcome="not_found", param="model", code="model_not_found")

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> Response:
        alive = sorted(fleet.liveness.alive())
        can_serve = bool(alive) and not door.closed
        return JSONResponse({"ready": can_serve, "clusters": alive}, status_code=200 if can_serve else 503)

    async def metrics(_: Request) -> Response:
        lanes = {name: gate.view() for name, gate in fleet.gates.items()}
        fleet.stats.open_streams = len(door)
        return Response(
            render(fleet.stats.samples(lanes, fleet.liveness.alive())), headers={"content-type": CONTENT_TYPE}
        )

    async def status(_: Request) -> Response:
        return JSONResponse({**await _status(fleet, door), **about()})

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/status", status),
    ]


def _models(config: RouterConfig, created: int) -> list[dict[str, object]]:
    """The model under its name and under each alias; `block_tokens` is the unit of cached_tokens."""
    model = config.model
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "forebay",
            "root": model.name,
            "max_model_len": model.context_tokens,
            "context_length": model.context_tokens,
            "block_tokens": model.block_tokens,
        }
        for name in (model.name, *model.aliases)
    ]


async def _status(fleet: Fleet, door: Door) -> dict[str, object]:
    """Every cluster as the router sees it, and what its ingress says of itself (null where it says nothing)."""
    config = fleet.config
    told = await asyncio.gather(*(fleet.client.status(each.name) for each in config.clusters))
    clusters = [
        {
            "name": each.name,
            "url": each.url,
            "weight": each.weight,
            "up": fleet.liveness.is_up(each.name),
            "status": status,
        }
        for each, status in zip(config.clusters, told, strict=True)
    ]
    return {
        "model": config.model.name,
        "ready": bool(fleet.liveness.alive()) and not door.closed,
        "draining": door.closed,
        "open_requests": len(door),
        "sessions": len(fleet.memory),
        "clusters": clusters,
    }


def _id(request: Request) -> dict[str, str]:
    return {"x-request-id": request_id(request.headers)}


async def _unknown_path(request: Request, error: Exception) -> Response:
    """404 and 405 in the API's own shape."""
    assert isinstance(error, HTTPException)
    text = f"{error.detail}: {request.method} {request.url.path[:200]}"
    outcome: Outcome = "not_found" if error.status_code == 404 else "invalid"
    code = "unknown_url" if error.status_code == 404 else "method_not_allowed"
    refusal = ApiError(error.status_code, text, outcome=outcome, code=code)
    return _error_response(request, refusal, dict(error.headers or {}))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(request, error, {})


def _error_response(request: Request, error: ApiError, headers: dict[str, str]) -> Response:
    return Response(encode(error.body()), error.status, headers | _id(request), "application/json")
