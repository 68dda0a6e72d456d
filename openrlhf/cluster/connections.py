"""Requests to engines travel on TCP connections, one to each engine's process. Ray is not asked for each of them.

Ray starts, watches and ends the processes of engines, and says where to connect to. A call of an actor, however, costs
the driver about 0.9 ms of CPU, and a frame on a connection a tenth of that (`bench/scale.py`).

    driver → engine   GENERATE or STREAM with a packed request, then CANCEL if its answer is not wanted any more
    engine → driver   PART …, then ANSWER or REFUSAL; a refusal is a pickled exception

A request names its images. Before anything else of its answer:

    engine → driver   LACKING with the digest of an image that the engine's process does not have (any more)
    driver → engine   IMAGE with it

A frame is a header (length of the payload, number of the request, kind) and a payload. A payload is a pickle, so it may
only come from a process of the same run: before the first frame both ends prove that they know a key. The engine's
process makes the key, and Ray brings it to the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import pickle
import secrets
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

from openrlhf.rollout.base import EngineError
from openrlhf.rollout.requests import ImageStore, PackedRequest, RequestHandler
from openrlhf.types import ImageInput

CONNECT_SECONDS = 60.0
"""Deadline of connecting to a process that has said where."""
SILENT_SECONDS = 30
"""A connection is lost after so long without any sign of the other machine: one without power does not say so."""

GENERATE, STREAM, CANCEL, PART, ANSWER, REFUSAL, LACKING, IMAGE, LOST = range(9)
"""Kinds of frames. LOST is never sent: requests under way hear it when the connection ends."""

_HEADER = struct.Struct("<IQB")
_PROOF_BYTES = 32


class ConnectionLostError(Exception):
    """There is no connection to an engine's process any more, or none could be made."""


class Address(NamedTuple):
    """Where an engine's process answers requests."""

    host: str
    port: int
    key: bytes


class _End(asyncio.Protocol):
    """One end of a connection: first the proofs, then frames."""

    role: ClassVar[bytes]
    other_role: ClassVar[bytes]

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._challenge = secrets.token_bytes(_PROOF_BYTES)
        self._challenged = False
        self._trusted = False
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    def received(self, number: int, kind: int, payload: bytes) -> None:
        raise NotImplementedError

    def trusted(self) -> None:
        """The other end knows the key."""

    def send(self, number: int, kind: int, payload: bytes = b"") -> None:
        if not self._transport.is_closing():
            self._transport.writelines((_HEADER.pack(len(payload), number, kind), payload))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _keep_alive(transport.get_extra_info("socket"))
        self._transport.write(self._challenge)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._trusted and not self._exchange_proofs():
            return
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _HEADER.size:
                length, number, kind = _HEADER.unpack_from(view, start)
                end = start + _HEADER.size + length
                if len(view) < end:
                    break
                self.received(number, kind, bytes(view[start + _HEADER.size : end]))
                start = end
        del self._buffer[:start]

    def _exchange_proofs(self) -> bool:
        """Whether the other end is trusted by now."""
        if not self._challenged and len(self._buffer) >= _PROOF_BYTES:
            self._challenged = True
            self._transport.write(_proof(self._key, self.role, self._taken()))
        if self._challenged and len(self._buffer) >= _PROOF_BYTES:
            if not hmac.compare_digest(self._taken(), _proof(self._key, self.other_role, self._challenge)):
                self._transport.abort()
                return False
            self._trusted = True
            self.trusted()
        return self._trusted

    def _taken(self) -> bytes:
        taken = bytes(self._buffer[:_PROOF_BYTES])
        del self._buffer[:_PROOF_BYTES]
        return taken


def _proof(key: bytes, role: bytes, challenge: bytes) -> bytes:
    """The role is part of the proof, so that a proof cannot be sent back to the process that made it."""
    return hmac.digest(key, role + challenge, "sha256")


def _keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = {"TCP_KEEPIDLE": SILENT_SECONDS // 2, "TCP_KEEPINTVL": SILENT_SECONDS // 6, "TCP_KEEPCNT": 3}
    for name, value in (seconds | {"TCP_USER_TIMEOUT": SILENT_SECONDS * 1000}).items():
        if hasattr(socket, name):  # not every system has all of them
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---------------------------------------------------------------------------------------------- the driver's end


class EngineConnection(_End):
    """The driver's end. Any number of requests may be under way. Belongs to the event loop that made it."""

    role, other_role = b"driver", b"engine"

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the engine's process has proved that it knows the key."""
        self.lost = False
        self._numbers = itertools.count()
        self._hearers: dict[int, Callable[[int, bytes], None]] = {}
        """What each request under way does with a frame."""
        self._images: dict[int, Mapping[str, ImageInput]] = {}
        """The images of each request under way that has some."""

    async def answer(self, payload: bytes, images: Mapping[str, ImageInput] | None = None) -> bytes:
        """The answer to a packed request, whose images these are. Cancelling the call gives the request up.

        Raises ConnectionLostError, and whatever the engine raised.
        """
        heard: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def hear(kind: int, payload: bytes) -> None:
            if not heard.done():
                heard.set_result((kind, payload))

        number = self._begin(GENERATE, payload, hear, images)
        try:
            kind, answer = await heard
        except asyncio.CancelledError:
            self.send(number, CANCEL)
            raise
        finally:
            self._end(number)
        if kind != ANSWER:
            raise _failure(kind, answer)
        return answer

    async def parts(self, payload: bytes, images: Mapping[str, ImageInput] | None = None) -> AsyncGenerator[bytes]:
        """The parts of an answer. Closing the generator gives the request up. Raises as `answer` does."""
        heard: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        number = self._begin(STREAM, payload, lambda kind, payload: heard.put_nowait((kind, payload)), images)
        kind = PART
        try:
            while True:
                kind, part = await heard.get()
                if kind == ANSWER:
                    return
                if kind != PART:
                    raise _failure(kind, part)
                yield part
        finally:
            self._end(number)
            if kind == PART:
                self.send(number, CANCEL)

    def _begin(
        self,
        kind: int,
        payload: bytes,
        hear: Callable[[int, bytes], None],
        images: Mapping[str, ImageInput] | None,
    ) -> int:
        if self.lost:
            raise ConnectionLostError("its connection has ended")
        number = next(self._numbers)
        self._hearers[number] = hear
        if images:
            self._images[number] = images
        self.send(number, kind, payload)
        return number

    def _end(self, number: int) -> None:
        del self._hearers[number]
        self._images.pop(number, None)

    def received(self, number: int, kind: int, payload: bytes) -> None:
        if (hear := self._hearers.get(number)) is None:
            return
        if kind == LACKING:
            image = self._images[number][payload.decode()]
            self.send(number, IMAGE, pickle.dumps(image, protocol=pickle.HIGHEST_PROTOCOL))
        else:
            hear(kind, payload)

    def trusted(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        why = f"its connection has ended{f': {error}' if error else ''}"
        if not self.ready.done():
            self.ready.set_exception(ConnectionLostError(why))
        for hear in list(self._hearers.values()):
            hear(LOST, why.encode())


def _failure(kind: int, payload: bytes) -> Exception:
    if kind == LOST:
        return ConnectionLostError(payload.decode())
    error: Exception = pickle.loads(payload)
    return error


class EngineConnections:
    """The driver's connections to engines: one for each process and event loop, made when it is first needed."""

    def __init__(self) -> None:
        self._opened: dict[tuple[asyncio.AbstractEventLoop, int, Any], asyncio.Task[EngineConnection]] = {}

    async def to(self, engine: int, actor: Any) -> EngineConnection:
        """The connection to the process that is this engine now. Raises ConnectionLostError and what Ray raises."""
        place = asyncio.get_running_loop(), engine, actor
        opening = self._opened.get(place)
        if opening is None or _is_lost(opening):
            self._forget_lost()
            opening = self._opened[place] = asyncio.create_task(_connect(actor))
        return opening.result() if opening.done() else await asyncio.shield(opening)

    def close(self) -> None:
        """From any thread."""
        for (loop, _, _), opening in self._opened.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it its connections
                loop.call_soon_threadsafe(_close, opening)
        self._opened.clear()

    def _forget_lost(self) -> None:
        for place, opening in list(self._opened.items()):
            if place[0].is_closed() or _is_lost(opening):
                del self._opened[place]


def _is_lost(opening: asyncio.Task[EngineConnection]) -> bool:
    return opening.done() and (opening.cancelled() or opening.exception() is not None or opening.result().lost)


def _close(opening: asyncio.Task[EngineConnection]) -> None:
    opening.cancel()
    if not _is_lost(opening) and opening.done():
        opening.result().close()


async def _connect(actor: Any) -> EngineConnection:
    address: Address = await actor.serve_requests.remote()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: EngineConnection(address.key), address.host, address.port
            )
            await connection.ready
    except OSError as error:  # a TimeoutError is one
        why = str(error) or f"no answer within {CONNECT_SECONDS:g} s"
        raise ConnectionLostError(f"no connection to {address.host}:{address.port}: {why}") from error
    return connection


# ---------------------------------------------------------------------------------------------- the engine's end


async def serve_requests(handler: RequestHandler, *, host: str, images: ImageStore | None = None) -> Address:
    """From now on requests are answered at the address, on the running event loop, until the process ends. Images are
    kept in `images`."""
    key = secrets.token_bytes(_PROOF_BYTES)
    images = images or ImageStore()
    server = await asyncio.get_running_loop().create_server(lambda: _EngineEnd(key, handler, images), host, 0)
    return Address(host, server.sockets[0].getsockname()[1], key)


class _EngineEnd(_End):
    """The end in an engine's process: each request is a task, which ends with the connection."""

    role, other_role = b"engine", b"driver"

    def __init__(self, key: bytes, handler: RequestHandler, images: ImageStore) -> None:
        super().__init__(key)
        self._handler = handler
        self._images = images
        self._running: dict[int, asyncio.Task[None]] = {}
        self._coming: dict[str, asyncio.Future[ImageInput | None]] = {}
        """The images that a request has asked for. None: the request was given up, and its driver may have forgotten
        them."""

    def received(self, number: int, kind: int, payload: bytes) -> None:
        if kind == CANCEL:
            if (task := self._running.pop(number, None)) is not None:
                task.cancel()
            return
        if kind == IMAGE:
            image: ImageInput = pickle.loads(payload)
            self._images.keep(image)
            if (coming := self._coming.pop(image.digest, None)) is not None:
                coming.set_result(image)
            return
        # The beginning of a request is of no use here: this process is the choice of the router.
        task = asyncio.create_task(self._answer(number, PackedRequest(0, payload), stream=kind == STREAM))
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    def connection_lost(self, error: Exception | None) -> None:
        for task in list(self._running.values()):
            task.cancel()

    async def _answer(self, number: int, request: PackedRequest, *, stream: bool) -> None:
        try:
            images = await self._images_of(number, request)
            if stream:
                async with contextlib.aclosing(self._handler.answer_parts(request, images)) as parts:
                    async for part in parts:
                        self.send(number, PART, part)
                self.send(number, ANSWER)
            else:
                self.send(number, ANSWER, await self._handler.answer(request, images))
        except Exception as error:
            self.send(number, REFUSAL, _pickled(error))
        except asyncio.CancelledError:
            if number in self._running:  # the engine gave it up, and not the driver
                self.send(number, REFUSAL, _pickled(EngineError("the engine gave a request up")))
            raise

    async def _images_of(self, number: int, request: PackedRequest) -> dict[str, ImageInput]:
        """The request holds its images itself from here on, whatever the store forgets meanwhile."""
        digests = request.digests
        images = self._images.find(digests)
        lacking = [digest for digest in dict.fromkeys(digests) if digest not in images]
        came = await asyncio.gather(*(self._image(number, digest) for digest in lacking))
        return images | {image.digest: image for image in came}

    async def _image(self, number: int, digest: str) -> ImageInput:
        """From the driver. Requests that lack the same image, a prompt's samples for instance, ask for it once."""
        while True:
            coming = self._coming.get(digest)
            if coming is not None:
                if (image := await asyncio.shield(coming)) is not None:
                    return image
                continue
            coming = self._coming[digest] = asyncio.get_running_loop().create_future()
            self.send(number, LACKING, digest.encode())
            try:
                image = await asyncio.shield(coming)
                assert image is not None, "only this request gives it up"
                return image
            finally:
                if not coming.done():
                    del self._coming[digest]
                    coming.set_result(None)


def _pickled(error: Exception) -> bytes:
    """The error, or its text where it cannot travel."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return payload
