"""The page over HTTP, for people on this machine: it reads the files of runs and changes none.

    GET /TOKEN/                     the page
    GET /TOKEN/static/NAME          its scripts and styles
    GET /TOKEN/api/catalog          what each metric means
    GET /TOKEN/api/runs             the runs that are there
    GET /TOKEN/api/new              what a run has logged since the cursor that is given
    GET /TOKEN/api/settings         a run's settings
    GET /TOKEN/api/groups           rollouts that a query finds, some rows of them
    GET /TOKEN/api/group            the samples of one group
    GET /TOKEN/api/tokens           the tokens of one sample
    GET /TOKEN/api/image            the thumbnail of an image

TOKEN is a secret of this server; every other address is answered with 403. Files are found by names that the server
itself has given or that match a pattern, so that no request names a path.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import json
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from openrlhf.observability.catalog import CATALOG
from openrlhf.observability.report import PHASES
from openrlhf.observability.thumbnails import FOLDER, read_thumbnail
from openrlhf.viewer.index import ORDERS, GroupKey, QueryError, RolloutIndex, parse_query
from openrlhf.viewer.runs import Run, RunShelf
from openrlhf.viewer.tokens import group_view, sample_view

T = TypeVar("T")

TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""No script but the page's own files runs, nothing is loaded from elsewhere, and no address is told to others."""
THREADS = 4
MOST_ROWS = 500
FIRST_SECONDS, WAIT_SECONDS = 0.15, 0.05
"""How long a request waits for rollouts to be indexed where none are yet, and where some are; what is left is indexed
while the page is read."""
GROUP_SECONDS = 20.0
"""How long a request for a group waits until the index has come to it."""
SLICE_SECONDS = 0.05
"""Between two slices of indexing others get their turn."""
COMPRESSED_BYTES = 1 << 15

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """The request is answered with this status and `{"detail": …}`."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class ViewServer:
    """The handlers. They belong to one event loop; files are read in a few threads."""

    def __init__(self, places: Sequence[Path], *, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(16)
        self._shelf = RunShelf(places)
        self._work = ThreadPoolExecutor(THREADS, thread_name_prefix="view")
        self._static = static_files()
        self._indexing: dict[RolloutIndex, asyncio.Task[None]] = {}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/{token}/", self._page)
        app.router.add_get("/{token}/static/{name}", self._asset)
        answers: dict[str, Callable[[web.Request], Awaitable[Any]]] = {
            "catalog": self._catalog,
            "runs": self._runs,
            "new": self._new,
            "settings": self._settings,
            "groups": self._groups,
            "group": self._group,
            "tokens": self._tokens,
        }
        for name, answer in answers.items():
            app.router.add_get(f"/{{token}}/api/{name}", _as_json(answer))
        app.router.add_get("/{token}/api/image", self._image)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        for task in self._indexing.values():
            task.cancel()
        self._work.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.path.split("/")[1]
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            text = "403: the address of this page has a secret part; openrlhf view prints it\n"
            return web.Response(status=403, text=text, headers=HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.status}: {error.reason}\n")
        except Refusal as refusal:
            response = web.json_response({"detail": str(refusal)}, status=refusal.status)
        response.headers.update(HEADERS)
        return response

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._static["index.html"], content_type="text/html", charset="utf-8")

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._static:
            raise web.HTTPNotFound()
        kind = TYPES[Path(name).suffix]
        # The address holds the server's token: another server, perhaps of another version, has another address.
        headers = {"Cache-Control": "private, max-age=86400"}
        return web.Response(body=self._static[name], content_type=kind, charset="utf-8", headers=headers)

    async def _catalog(self, _: web.Request) -> Any:
        return {
            "sections": [
                {
                    "title": section.title,
                    "metrics": [
                        {"pattern": name_pattern(name), "unit": metric.unit, "meaning": metric.meaning}
                        for name, metric in section.metrics.items()
                    ],
                }
                for section in CATALOG
            ],
            "phases": PHASES,
        }

    async def _runs(self, _: web.Request) -> Any:
        return await self._in_thread(lambda: [run.summary() for run in self._shelf.runs()])

    async def _new(self, request: web.Request) -> Any:
        run = await self._run(request)
        given = request.query

        def read() -> dict[str, Any]:
            events = run.events()
            found = run.new_metrics(given.get("since", ""))
            if events["version"] != given.get("events"):
                found["events"] = events
            return {"summary": run.summary(), **found}

        return await self._in_thread(read)

    async def _settings(self, request: web.Request) -> Any:
        run = await self._run(request)
        return await self._in_thread(run.settings)

    async def _groups(self, request: web.Request) -> Any:
        run = await self._run(request)
        given = request.query
        try:
            query = parse_query(given.get("q", "")[:1000])
        except QueryError as error:
            raise Refusal(422, str(error)) from None
        order = next((order for order in ORDERS if order == given.get("order")), ORDERS[0])
        first, count = _integer(request, "first", 0), min(MOST_ROWS, _integer(request, "count", 100))
        at = _key(request) if "step" in given and "prompt" in given else None
        rollouts = await self._in_thread(lambda: run.rollouts)
        await self._index(rollouts)

        def read() -> dict[str, Any]:
            place = rollouts.position(query, at, order=order) if at is not None else None
            start = max(0, place - count // 2) if place is not None else first
            page = rollouts.find(query, order=order, first=start, count=count)
            done, size = rollouts.progress
            return {
                "groups": page.groups,
                "samples": page.samples,
                "of_samples": rollouts.samples,
                "first": page.first,
                "rows": page.rows,
                "place": place,
                "done": done,
                "size": size,
                "changes": rollouts.changes,
                "range": rollouts.reward_range,
            }

        return await self._in_thread(read)

    async def _group(self, request: web.Request) -> Any:
        run, key = await self._run(request), _key(request)
        for _ in range(round(GROUP_SECONDS / WAIT_SECONDS)):
            whole = await self._index(run.lines)
            records = await self._in_thread(lambda: run.lines.read(key))
            if records or whole:
                break

        def read() -> dict[str, Any]:
            found = run.tokens.group(key)
            if not records and found is None:
                raise Refusal(404, f"{run.name} has no rollouts of prompt {key.prompt} at step {key.step}")
            return group_view(records, found[1] if found else None)

        return await self._in_thread(read)

    async def _tokens(self, request: web.Request) -> Any:
        run, key, sample = await self._run(request), _key(request), _integer(request, "sample")

        def read() -> dict[str, Any]:
            found = run.tokens.group(key)
            view = sample_view(*found, sample, scales=run.tokens.scales(found[0])) if found else None
            if view is None:
                raise Refusal(404, f"{run.name} has kept no tokens of this sample")
            return view

        return await self._in_thread(read)

    async def _image(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        name = f"{FOLDER}/{request.query.get('name', '')}"
        png = await self._in_thread(lambda: read_thumbnail(run.directory.path, name))
        if png is None:
            raise Refusal(404, "there is no such thumbnail")
        return web.Response(body=png, content_type="image/png", headers={"Cache-Control": "private, max-age=86400"})

    async def _run(self, request: web.Request) -> Run:
        name = request.query.get("run", "")
        run = self._shelf.get(name)
        if run is None:
            await self._in_thread(self._shelf.runs)
            run = self._shelf.get(name)
        if run is None:
            raise Refusal(404, f"there is no run {name!r}")
        return run

    async def _index(self, rollouts: RolloutIndex) -> bool:
        """Wait a moment for rollouts to be indexed; whether all are. Where it takes longer it goes on without the
        request."""
        task = self._indexing.get(rollouts)
        if task is None or task.done():
            task = self._indexing[rollouts] = asyncio.create_task(self._index_all(rollouts))
        await asyncio.wait([task], timeout=WAIT_SECONDS if rollouts.samples else FIRST_SECONDS)
        if task.done():
            task.result()
        return task.done()

    async def _index_all(self, rollouts: RolloutIndex) -> None:
        while not await self._in_thread(lambda: rollouts.update(seconds=SLICE_SECONDS)):
            await asyncio.sleep(0.002)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._work, work)


def _as_json(answer: Callable[[web.Request], Awaitable[Any]]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        body = json.dumps(await answer(request), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        headers = {"Cache-Control": "no-store"}
        if len(body) > COMPRESSED_BYTES and "gzip" in request.headers.get("Accept-Encoding", ""):
            # The lightest level: it is for addresses that are forwarded, and must not slow down those that are not.
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        return web.Response(body=body, content_type="application/json", charset="utf-8", headers=headers)

    return handle


def _integer(request: web.Request, name: str, otherwise: int | None = None) -> int:
    text = request.query.get(name, "" if otherwise is None else str(otherwise))
    if not re.fullmatch(r"\d{1,15}", text):
        raise Refusal(422, f"{name} must be a whole number")
    return int(text)


def _key(request: web.Request) -> GroupKey:
    return GroupKey(_integer(request, "step"), _integer(request, "prompt"))


def name_pattern(name: str) -> str:
    """A name of the catalog as a regular expression: what stands in <…> is any text.

    >>> name_pattern("eval_<source>_pass1")
    'eval_.*_pass1'
    """
    return ".*".join(re.escape(part) for part in re.split(r"<\w+>", name))


def static_files() -> Mapping[str, bytes]:
    """The page's files by name, read once: an installation that changes does not change an open page."""
    folder = resources.files(__package__).joinpath("static")
    return {file.name: file.read_bytes() for file in folder.iterdir() if Path(file.name).suffix in TYPES}


def serve(server: ViewServer, listener: socket.socket, *, ready: Callable[[], None] = lambda: None) -> None:
    """Answer requests to this socket until an interrupt."""

    async def run() -> None:
        runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.2, handle_signals=False)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            ready()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    asyncio.run(run())
