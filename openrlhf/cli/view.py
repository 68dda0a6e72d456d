"""`openrlhf view [RUN …]`: a local web page of runs, while they train and afterwards."""

from __future__ import annotations

import argparse
import contextlib
import errno
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

PORT = 8471
LOCAL = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until an interrupt; 1 when a folder is missing or the address cannot be had."""
    given = _parser().parse_args(argv)
    places = list(dict.fromkeys(path.expanduser() for path in given.runs or [Path("runs")]))
    for path in places:
        if not path.is_dir():
            hint = "" if given.runs else "; name a run's folder, or a folder of runs: openrlhf view RUN"
            print(f"error: there is no folder {path}{hint}", file=sys.stderr)
            return 1
    from openrlhf.viewer.runs import find_runs
    from openrlhf.viewer.server import ViewServer, serve

    for path in places:
        if next(find_runs(path), None) is None:
            print(f"{path} holds no run yet; runs are shown as they appear", file=sys.stderr)
    try:
        listener = _listener(given.host, given.port)
    except OSError as error:
        print(f"error: --host {given.host} --port {given.port or PORT}: {error.strerror}", file=sys.stderr)
        return 1
    server = ViewServer(places)
    with listener:

        def say() -> None:
            if given.host != LOCAL:
                print("Who knows this address can read these runs; it is not encrypted.", file=sys.stderr)
            print(address(listener, given.host, server.token), flush=True)

        with contextlib.suppress(KeyboardInterrupt):
            serve(server, listener, ready=say)
    return 0


def address(listener: socket.socket, host: str, token: str) -> str:
    name = socket.gethostname() if host in EVERYWHERE else host
    return f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}/{token}/"


def _listener(host: str, port: int | None) -> socket.socket:
    """A socket of that port; where none was asked for and the usual one is taken, of any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, PORT if port is None else port), family=family)
    except OSError as error:
        if port is not None or error.errno != errno.EADDRINUSE:
            raise
        return socket.create_server((host, 0), family=family)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is no port: they are numbers from 0 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf view",
        usage="openrlhf view [RUN …] [--host HOST] [--port PORT]",
        description="Serve a local web page of runs, from what they have written: curves over each other, events, "
        "rollouts with search, and each sample's tokens. It follows runs while they train. Prints the page's address; "
        "Ctrl-C ends it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="folder of a run, or of several (default: runs)")
    add("--host", default=LOCAL, help=f"address to listen on (default {LOCAL}: this machine alone)")
    add("--port", type=_port, help=f"port to listen on (default {PORT}, or a free one where it is taken)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
