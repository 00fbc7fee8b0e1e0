"""A server of a policy for openpi-client: WebSocket, a message for each observation.

A connection is told the policy's metadata first. Each message is then answered, in order: by a
dict of actions and times, or by a text that says what was wrong, which openpi-client raises.
Observations of several clients are answered as one batch.
"""

import asyncio
import contextlib
import hmac
import http
import logging
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recipes.openpi.inputs import Prepared
from recipes.openpi.policy import Floats, Policy
from recipes.openpi.wire import pack, unpack
from recipes.packages import needed
from tpuport.foundation.errors import UsageError

logger = logging.getLogger(__name__)
_PREPARING = 4  # threads that decode messages and resize pictures


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The settings of a server.

    Attributes:
        host: Address to listen at.
        port: Port to listen at; 0 for any.
        api_key: What clients have to send, None for nothing.
        wait_ms: How long a batch waits for observations of further clients.
        max_clients: Connections at a time; further ones are answered by 503.
        max_waiting: Observations that wait for the policy. While so many do, no more are read.
        max_message: Bytes of a message.
        grace: Seconds that observations in work have when the server is ended.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    wait_ms: float = 2.0
    max_clients: int = 64
    max_waiting: int = 32
    max_message: int = 64 << 20
    grace: float = 30.0


@dataclass
class _Request:
    prepared: Prepared
    answer: asyncio.Future[tuple[Floats, dict[str, float]]]
    since: float = field(default_factory=time.monotonic)


class Server:
    """Answers clients with a policy until `stop` is called.

    Attributes:
        port: The port that it listens at, once it does.
        answered: Number of observations that were answered.
    """

    def __init__(self, policy: Policy, options: ServeOptions) -> None:
        self.policy, self.options = policy, options
        self.port, self.answered, self._in_work = 0, 0, 0
        self._clients: set[Any] = set()
        self._queue: asyncio.Queue[_Request] = asyncio.Queue(options.max_waiting)
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._preparing = ThreadPoolExecutor(_PREPARING, "prepare")
        self._computing = ThreadPoolExecutor(1, "policy")

    def stop(self) -> None:
        """End the server: no new observations, those in work are answered."""
        self._ended.set()

    async def run(self, ready: Callable[["Server"], None] | None = None) -> None:
        """Compile all programs, then listen until `stop` is called.

        Args:
            ready: Called once it listens.

        Raises:
            MissingExtraError: websockets is not installed.
        """
        sockets = needed("websockets.asyncio.server", "serving a policy", "websockets", "openpi")
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        warmed = await loop.run_in_executor(self._computing, self.policy.compile)
        loaded = sum(one.hit for one in warmed)
        took = time.monotonic() - began
        logger.info("%d programs ready in %.1f s, %d from the cache", len(warmed), took, loaded)
        batches = asyncio.create_task(self._answer_batches())
        async with sockets.serve(
            self._serve_client,
            self.options.host,
            self.options.port,
            compression=None,
            max_size=self.options.max_message,
            max_queue=1,
            process_request=self._before,
        ) as listening:
            self.port = listening.sockets[0].getsockname()[1]
            if ready is not None:
                ready(self)
            await self._ended.wait()
            listening.close(close_connections=False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self.options.grace)
            going_away = 1001
            await asyncio.gather(*(one.close(going_away) for one in self._clients))
        batches.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await batches
        self._preparing.shutdown(wait=False)
        self._computing.shutdown(wait=False)

    def _before(self, connection: Any, request: Any) -> Any:
        """Answer the health check, and clients that are not let in; None lets one in."""
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self.options.api_key is not None:
            given = request.headers.get("Authorization", "")
            if not _is_key(given, self.options.api_key):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "a key is needed\n")
        if len(self._clients) >= self.options.max_clients:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many clients\n")
        return None

    async def _serve_client(self, connection: Any) -> None:
        closed = needed("websockets.exceptions", "serving", "websockets", "openpi").ConnectionClosed
        self._clients.add(connection)
        before: float | None = None
        try:
            await connection.send(pack(self.policy.metadata))
            async for message in connection:
                if self._ended.is_set():
                    return
                began = time.monotonic()
                with self._working():
                    await connection.send(await self._answer(message, before))
                before = time.monotonic() - began
        except closed:
            pass
        finally:
            self._clients.discard(connection)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._in_work += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_work -= 1
            if not self._in_work:
                self._idle.set()

    async def _answer(self, message: bytes | str, before: float | None) -> bytes | str:
        """Return the answer to a message: actions as bytes, or a text that says what was wrong."""
        try:
            if isinstance(message, str):
                raise UsageError("the message is a text; expected bytes, as openpi-client sends")
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(self._preparing, self._prepared, message)
            request = _Request(prepared, loop.create_future())
            await self._queue.put(request)
            actions, times = await request.answer
        except UsageError as error:
            return str(error)
        except Exception:
            # One observation must not end the server; the client learns no more than that.
            logger.exception("an observation was not answered")
            return "the server failed to answer this observation; its log says why"
        self.answered += 1
        if before is not None:
            times["prev_total_ms"] = before * 1000
        infer = {"infer_ms": times["infer_ms"]}
        return pack({"actions": actions, "policy_timing": infer, "server_timing": times})

    def _prepared(self, message: bytes) -> Prepared:
        return self.policy.prepare(unpack(message))

    async def _answer_batches(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            await self._fill(batch)
            began = time.monotonic()
            try:
                found = await loop.run_in_executor(
                    self._computing, self.policy.act, [one.prepared for one in batch]
                )
            except Exception as error:
                for one in batch:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            took = time.monotonic() - began
            for one, actions in zip(batch, found, strict=True):
                _give(one, actions, began, took, len(batch))

    async def _fill(self, batch: list[_Request]) -> None:
        """Add observations that arrive within `wait_ms`, as far as a batch has room."""
        end = time.monotonic() + self.options.wait_ms / 1000
        # One client waits for its answer before it sends the next observation.
        most = min(self.policy.batch_sizes[-1], len(self._clients))
        while len(batch) < most:
            if not self._queue.empty():
                batch.append(self._queue.get_nowait())
                continue
            try:
                left = end - time.monotonic()
                batch.append(await asyncio.wait_for(self._queue.get(), left))
            except TimeoutError:
                return


def _is_key(given: str, key: str) -> bool:
    expected = f"Api-Key {key}".encode()
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected)


def _give(request: _Request, actions: Floats, began: float, took: float, rows: int) -> None:
    if request.answer.done():  # its client has gone
        return
    if not np.isfinite(actions).all():
        request.answer.set_exception(UsageError("the policy's actions are not finite numbers"))
        return
    times = {
        "infer_ms": took * 1000,
        "wait_ms": (began - request.since) * 1000,
        "batch": float(rows),
    }
    request.answer.set_result((actions, times))


def serve(
    policy: Policy, options: ServeOptions, ready: Callable[[Server], None] | None = None
) -> int:
    """Serve a policy until the process gets SIGTERM or SIGINT.

    Args:
        policy: The policy.
        options: The settings.
        ready: Called once the server listens.

    Returns:
        The number of observations that were answered.

    Raises:
        UsageError: The address cannot be listened at.
        MissingExtraError: websockets is not installed.
    """

    async def run() -> int:
        server = Server(policy, options)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        await server.run(ready)
        return server.answered

    try:
        return asyncio.run(run())
    except OSError as error:
        raise UsageError(f"cannot listen at {options.host}:{options.port}: {error}") from error
