"""A W&B server on loopback, as far as the wandb package needs one to run online: it knows runs by name and can be made to fail.

It has no artifacts, so that online tables fail here: what is in them is tested offline."""

from __future__ import annotations

import http.server
import json
import re
import threading
from types import TracebackType
from typing import Any, Self

EMPTY: dict[str, Any] = {"edges": []}


class WandbServer:
    """Answers on 127.0.0.1:`port` while it is entered.

    Args:
        accepts_key: False: every request is answered with 401.
    """

    def __init__(self, accepts_key: bool = True) -> None:
        self.accepts_key = accepts_key
        self.is_up = True
        self.runs: dict[str, list[str]] = {}  # name -> whether W&B said "inserted" or "resumed", per process
        self.configs: dict[str, str] = {}
        self.views: list[dict[str, Any]] = []
        self.num_streamed = 0
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        operation = found.group(1) if found else ""
        name = str(variables.get("name"))
        if operation == "RunResumeStatus":
            return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "ent"}, "bucket": self._run(name) if name in self.runs else None}}
        if operation == "UpsertBucket":
            if variables.get("id") is None and name not in self.configs:
                self.runs.setdefault(name, [])
            self.configs[name] = str(variables.get("config"))
            return {"upsertBucket": {"bucket": self._run(name), "inserted": True, "configPatch": None}}
        if operation == "UpsertView2":
            self.views.append(variables)
            return {"upsertView": {"view": {"id": "w", "name": name}, "inserted": True}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": [self._upload(file) for file in variables["files"]]}}
        nothing = {"cliVersionInfo": {"max_cli_version": "9.9.9"}, "latestLocalVersionInfo": None, "features": []}
        viewer = {"id": "v", "entity": "ent", "username": "u", "flags": "{}", "teams": EMPTY}
        return {"viewer": viewer, "serverInfo": nothing, "organization": None, "notifyScriptableRunAlert": {"success": True}}

    def _upload(self, file: str) -> dict[str, str]:
        return {"name": file, "uploadUrl": f"{self.url}/upload"}

    def _run(self, name: str) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "ent"}}
        empty = {"historyTail": "[]", "eventsTail": "[]", "history": "[]", "events": "[]", "config": "{}", "wandbConfig": '{"t": 1}'}
        counts = {"historyLineCount": 0, "eventsLineCount": 0, "logLineCount": 0, "summaryMetrics": "{}", "tags": []}
        return {"id": f"id-{name}", "name": name, "displayName": name, "sweepName": None, "project": project} | empty | counts


def _handler(server: WandbServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not server.is_up:
                self.close_connection = True
                return
            code, answer = 200, {}
            if not server.accepts_key:
                code, answer = 401, {"errors": [{"message": "user is not logged in"}]}
            elif "graphql" in self.path:
                asked = json.loads(body)
                answer = {"data": server.answer(asked["query"], asked.get("variables") or {})}
            elif "file_stream" in self.path:
                server.num_streamed += 1
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST

        def log_message(self, *args: object) -> None:
            """Silent."""

    return Handler
