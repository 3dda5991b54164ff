"""moto's S3 on 127.0.0.1, with faults on request."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Fault = Callable[[dict[str, Any]], str | None]
"""Looks at a request (WSGI environ) and names what happens to it: `500`, `403`, `503`, `drop`, `slow`, or None."""


class S3Server:
    """Counts requests and spoils those that `fault` names."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and Range header of each request."""
        self.queries: list[dict[str, list[str]]] = []
        """Query of each request."""
        self.fault: Fault | None = None
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __call__(self, environ: dict[str, Any], start_response: Callable) -> Any:
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE", "")))
        self.queries.append(parse_qs(environ["QUERY_STRING"]))
        kind = self.fault(environ) if self.fault else None
        if kind == "slow":
            time.sleep(1.0)
            return self._application(environ, start_response)
        if kind == "drop":
            return _half(self._application(environ, start_response))
        if kind:
            code = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}[kind]
            start_response(f"{kind} {code}", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>as the test asked</Message></Error>".encode()]
        return self._application(environ, start_response)


def _half(body: Any) -> Iterator[bytes]:
    content = b"".join(body)
    yield content[: len(content) // 2]
    raise ConnectionAbortedError("the test drops this connection")


@contextmanager
def s3_server(monkeypatch: Any, bucket: str = "bucket") -> Iterator[S3Server]:
    """A server with one bucket, and an environment that points to it."""
    import boto3
    from moto.backends import get_backend

    server = S3Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CANARYID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "CANARYSECRET")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3").create_bucket(Bucket=bucket)
    server.requests.clear()
    try:
        yield server
    finally:
        server.stop()
        for backends in get_backend("s3").values():
            for backend in backends.values():
                backend.reset()
