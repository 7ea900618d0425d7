"""The explorer as a page of this machine: `moments explore`.

The standard library's server and one page without a framework, which asks for nothing but this
server; that listens on this machine alone and answers two addresses.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import DomainError, MomentsError
from .chart import STYLE
from .explorer import Explorer
from .html import document

ADDRESS = "127.0.0.1"
_NOTHING_ELSE = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
MOST_QUERY = 4096
"""Characters of a state; the longest that the page sends has some 600."""


def page(explorer: Explorer, query: str = "") -> str:
    """The page's text, its controls standing where a link's query puts them."""
    body = Path(__file__).with_name("explorer.html").read_text(encoding="utf-8")
    controls = explorer.controls
    try:
        state = explorer.read(query)[0]
    except MomentsError:  # the answer to that query says why
        state = explorer.read("")[0]
    known = json.dumps([dataclasses.asdict(c) | {"value": state[n]} for n, c in controls.items()])
    body = body.replace("/*CONTROLS*/", known.replace("<", "\\u003c"))
    body = body.replace("<!--CONTROLS-->", "".join(c.html(state[n]) for n, c in controls.items()))
    return document("moments explore", body, STYLE)


class Server(ThreadingHTTPServer):
    """The explorer on a port of this machine, 0 for any that is free; `serve_forever` runs it,
    `shutdown` ends it.

    Raises:
        DomainError: the port is taken or not allowed.
    """

    daemon_threads = True

    def __init__(self, explorer: Explorer, port: int = 0) -> None:
        self.explorer = explorer
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DomainError(f"--port {port}: {reason}; 0 takes any that is free") from None

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that went on to another state, or was closed, is none."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        try:
            where = urlsplit(self.path)
        except ValueError:  # such as a bracket that opens an address and does not close
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "no address\n")
            return
        host = self.headers.get("Host", "")
        # A page of elsewhere whose name was made to point here must not read the answers.
        if host.rpartition(":")[0] not in (ADDRESS, "localhost"):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "not the name of this machine\n")
        elif where.path == "/":
            self._send(
                HTTPStatus.OK, "text/html", page(self.server.explorer, where.query[:MOST_QUERY])
            )
        elif where.path == "/view" and len(where.query) <= MOST_QUERY:
            self._views(where.query)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "nothing here\n")

    def _views(self, query: str) -> None:
        """A line for every view of the state, as it becomes known."""
        self._begin(HTTPStatus.OK, "application/x-ndjson", ("Transfer-Encoding", "chunked"))
        viewer = self.headers.get("X-Viewer", "")[:40]
        for view in self.server.explorer.views(query, viewer):
            line = json.dumps(dataclasses.asdict(view), allow_nan=False).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self._begin(status, kind, ("Content-Length", str(len(body))))
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, length: tuple[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header(*length)
        self.send_header("Content-Security-Policy", _NOTHING_ELSE)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: a line for every step of a slider helps nobody."""
