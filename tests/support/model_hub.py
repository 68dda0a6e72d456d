"""A hub on loopback that speaks as much of ModelScope's interface as a download needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


class ModelHub:
    """Repositories are folders: <root>/models/<owner>/<name> and <root>/datasets/<owner>/<name>."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.root = root
        self.endpoint = endpoint
        self.downloads: Counter[str] = Counter()
        """How often each file was asked for, as models/owner/name/file."""

    def repository(self, kind: str, name: str) -> Path | None:
        folder = self.root / kind / name
        return folder if folder.is_dir() else None

    def listing(self, folder: Path) -> list[dict[str, object]]:
        return [
            {
                "Path": path.relative_to(folder).as_posix(),
                "Name": path.name,
                "Type": "blob",
                "Size": path.stat().st_size,
                "Sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]


@contextlib.contextmanager
def model_hub(root: Path) -> Iterator[ModelHub]:
    """A hub while open."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            # /api/v1/models/owner/name/repo/files, …/datasets/owner/name/repo/tree, …/models/owner/name/repo?FilePath=…
            parts = url.path.removeprefix("/api/v1/").split("/")
            kind, name = parts[0], "/".join(parts[1:3])
            folder = hub.repository(kind, name)
            if folder is None or len(parts) < 4:
                self._answer(404, {"Code": 404, "Success": False, "Message": f"no such repository: {name}"})
            elif parts[4:] in (["files"], ["tree"]):
                self._answer(200, {"Code": 200, "Success": True, "Data": {"Files": hub.listing(folder)}})
            else:
                file = parse_qs(url.query)["FilePath"][0]
                with lock:
                    hub.downloads[f"{kind}/{name}/{file}"] += 1
                self._send((folder / file).read_bytes(), "application/octet-stream")

        do_HEAD = do_GET

        def _answer(self, status: int, body: dict[str, object]) -> None:
            self._send(json.dumps(body).encode(), "application/json", status)

        def _send(self, body: bytes, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server, lock = ThreadingHTTPServer(("127.0.0.1", 0), Handler), threading.Lock()
    hub = ModelHub(root, f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
