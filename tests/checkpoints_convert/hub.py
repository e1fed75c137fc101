"""A loopback server that stands in for the hub: it sends ranges, counts what it sends, and fails as it is told."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    """What was asked for; `start` and `stop` are 0 where it was a whole file."""

    method: str
    revision: str
    file: str
    authorization: str
    start: int = 0
    stop: int = 0


@dataclass
class Reply:
    """What is sent, for a fault to change: after `drop_after` bytes the connection is closed, or stalls for a while."""

    status: int
    headers: dict[str, str]
    body: bytes
    drop_after: int | None = None
    stall_s: float = 0


class Hub:
    """Serves one folder as the repository org/tiny at one commit.

    Args:
        folder: The repository.
        ranges: Whether parts of files are sent.
        fault: Called with each request for a part and its reply, to change it.
        store: Where safetensors are sent from, as the hub's are from elsewhere; their etag comes with the redirect.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranges: bool = True,
        fault: Callable[[Request, Reply], None] = lambda request, reply: None,
        store: "Hub | None" = None,
    ) -> None:
        self.requests: list[Request] = []
        self.fault = fault
        self.sent_bytes = 0  # of parts
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                parts = self.path.split("?")[0].strip("/").split("/")
                if parts[:3] == ["org", "tiny", "resolve"]:
                    self.send(self.file(parts[3], "/".join(parts[4:])))
                else:
                    self.send(Reply(404, {"X-Error-Code": "RepoNotFound"}, b"{}"))

            def file(self, revision: str, file: str) -> Reply:
                request = Request(self.command, revision, file, self.headers.get("Authorization", ""))
                hub.requests.append(request)
                if revision not in ("main", "v1", COMMIT):
                    return Reply(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
                if not (folder / file).is_file():
                    return Reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"{}")
                content = (folder / file).read_bytes()
                headers = {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                if store is not None and file.endswith(".safetensors"):
                    linked = {"X-Linked-Etag": headers.pop("ETag"), "X-Linked-Size": str(len(content))}
                    return Reply(302, {**headers, **linked, "Location": store.url + self.path}, b"")
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if not (ranges and asked):
                    return Reply(200, headers, content)
                request.start, request.stop = int(asked[1]), min(int(asked[2]) + 1, len(content))
                headers["Content-Range"] = f"bytes {request.start}-{request.stop - 1}/{len(content)}"
                reply = Reply(206, headers, content[request.start : request.stop])
                hub.fault(request, reply)
                hub.sent_bytes += len(reply.body[: reply.drop_after])
                return reply

            def send(self, reply: Reply) -> None:
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                self.wfile.write(reply.body[: reply.drop_after])
                self.wfile.flush()
                if reply.drop_after is not None:
                    time.sleep(reply.stall_s)
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stops serving."""
        self.server.shutdown()
        self.server.server_close()

    def fetched(self) -> set[str]:
        """Files of which anything was asked for, beyond whether they are there."""
        return {request.file for request in self.requests if request.method == "GET"}
