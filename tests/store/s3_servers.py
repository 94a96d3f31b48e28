"""An S3 API server for tests: moto in a process of its own, and a proxy that misbehaves."""

import contextlib
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from obstore.store import S3Store
from servers import Process, connects, free_port

BUCKET = "kvxfer-test"
LOGIN = {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"}


class S3Server(Process):
    def __init__(self, folder):
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", self.port]
        super().__init__(command, folder, lambda: connects(self.port), os.environ | LOGIN)

    def make_bucket(self):
        urlopen(Request(f"{self.endpoint}/{BUCKET}", method="PUT"), timeout=10).close()

    def objects(self):
        """A client of our own, around the store."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=LOGIN["AWS_ACCESS_KEY_ID"],
            secret_access_key=LOGIN["AWS_SECRET_ACCESS_KEY"],
            client_options={"allow_http": True},
        )


@contextlib.contextmanager
def s3_server(folder):
    server = S3Server(folder)
    try:
        server.make_bucket()
        yield server
    finally:
        server.kill()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # as many may connect at once


class Proxy:
    """Passes requests on to the server, failing as it is told.

    `failures`: so many answers from now on are a 500, as are all of paths with `broken` in them.
    `think_seconds`: nothing is done about a request for so long. `body_seconds`: an answer's body
    takes this long. `requests` lists the methods that came; `most_at_once` is how many were under
    way together.
    """

    def __init__(self, server):
        self.failures = 0
        self.broken = None
        self.think_seconds = self.body_seconds = 0.0
        self.requests = []
        self.under_way = self.most_at_once = 0
        self._counting = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def _pass_on(self):
                with proxy.counted():
                    proxy.pass_on(self, server)

        for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
            setattr(Handler, f"do_{method}", Handler._pass_on)
        self._http = _Http(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def counted(self):
        with self._counting:
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            yield
        finally:
            with self._counting:
                self.under_way -= 1

    def wait_until_idle(self):
        while self.under_way:
            time.sleep(0.05)

    def pass_on(self, handler, server):
        self.requests.append(handler.command)
        length = int(handler.headers.get("content-length") or 0)
        body = handler.rfile.read(length)
        time.sleep(self.think_seconds)
        broken = self.broken is not None and self.broken in handler.path
        if self.failures > 0 or broken:
            self.failures -= not broken
            return self._answer(handler, 500, [], b"<Error><Code>InternalError</Code></Error>")
        headers = {k: v for k, v in handler.headers.items() if k.lower() != "host"}
        headers.setdefault("Content-Type", "application/octet-stream")  # urllib would say: a form
        request = Request(server.endpoint + handler.path, body or None, headers)
        request.method = handler.command
        try:
            with urlopen(request, timeout=10) as answer:
                return self._answer(handler, answer.status, answer.headers.items(), answer.read())
        except HTTPError as error:
            return self._answer(handler, error.code, error.headers.items(), error.read())

    def _answer(self, handler, status, headers, body):
        skipped = ("content-length", "connection", "transfer-encoding", "server", "date")
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        handler.send_response(status)
        for name, value in headers:
            if name.lower() not in skipped:
                handler.send_header(name, value)
        is_head = handler.command == "HEAD" and lengths
        handler.send_header("content-length", lengths[0] if is_head else str(len(body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        with contextlib.suppress(OSError):
            half = len(body) // 2
            handler.wfile.write(body[:half])
            time.sleep(self.body_seconds if body else 0)
            handler.wfile.write(body[half:])

    def close(self):
        self._http.shutdown()
        self._http.server_close()
