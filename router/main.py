"""A router process: serves until SIGTERM or SIGINT, drains within a bound, and exits 0. A second signal ends it now."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
import uvloop
from starlette.applications import Starlette

from forebay.router import log
from forebay.router.app import About, create_app
from forebay.router.config import RouterConfig
from forebay.router.door import Door

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LAST_BYTES_S = 2  # for connections to take what was written to them


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would cut streams off instead of draining them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: RouterConfig,
    sock: socket.socket | None = None,
    on_started: Callable[[], None] | None = None,
    about: About = dict,
) -> int:
    """Run the router in this process, on `sock` where one is given. Returns the exit status.

    `about`: what else its status says, of what runs beside it.
    """
    # Not sys.stderr itself: whoever is stuck in writing to it would hold its lock when the interpreter ends.
    with open(os.dup(sys.stderr.fileno()), "wb", buffering=0) as out, log.writing(out) as write_log:
        return uvloop.run(_serve(create_app(config, write_log, about), config, sock, on_started))


async def _serve(
    app: Starlette, config: RouterConfig, sock: socket.socket | None, on_started: Callable[[], None] | None
) -> int:
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=config.idle_connection_s,
            timeout_graceful_shutdown=_LAST_BYTES_S,
        )
    )
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in _SIGNALS:
        loop.add_signal_handler(each, _on_signal, asked, server)
    serving = asyncio.create_task(server.serve(sockets=[sock] if sock else None))
    closing = asyncio.create_task(_close_when(asked, app.state.door, config.drain_s, server))
    if on_started is not None:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        on_started()
    await serving
    closing.cancel()
    return 0


def _on_signal(asked: asyncio.Event, server: uvicorn.Server) -> None:
    if asked.is_set():
        server.should_exit = server.force_exit = True
    asked.set()


async def _close_when(asked: asyncio.Event, door: Door, drain_s: float, server: uvicorn.Server) -> None:
    await asked.wait()
    await door.close(drain_s)
    server.should_exit = True
