"""moto's S3 as a process of its own that may be killed: an object is on disk before its writer gets the answer.

`python object_store.py PORT DIRECTORY`. What S3 promises and moto's memory does not: it survives. Uploads in parts that
were not complete are gone after a kill, as after an expiry.
"""

import json
import os
import sys
import urllib.parse
from pathlib import Path
from typing import Any

BUCKET, ACCOUNT = "bucket", "123456789012"


class DurableS3:
    """A WSGI application over moto that keeps every object as a file: a line of metadata, then the content."""

    def __init__(self, directory: Path):
        from moto.backends import get_backend
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._directory = directory
        self._application = DomainDispatcherApplication(create_backend_app)
        self._backend = get_backend("s3")[ACCOUNT]["aws"]
        self._backend.create_bucket(BUCKET, "us-east-1")
        for path in directory.iterdir():
            if path.suffix == ".object":
                metadata, _, content = path.read_bytes().partition(b"\n")
                key = self._backend.put_object(BUCKET, urllib.parse.unquote(path.stem), content)
                key.set_metadata(json.loads(metadata))
            else:
                path.unlink()  # of a write that was killed

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        body = list(self._application(environ, start_response))
        if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE"):
            self._keep(urllib.parse.unquote(environ["PATH_INFO"]).removeprefix(f"/{BUCKET}/"))
        return body

    def _keep(self, name: str) -> None:
        path = self._directory / f"{urllib.parse.quote(name, safe='')}.object"
        key = self._backend.buckets[BUCKET].keys.get(name)
        if key is None:
            path.unlink(missing_ok=True)
            return
        partial = path.with_suffix(f".{os.urandom(4).hex()}")
        partial.write_bytes(json.dumps(dict(key.metadata)).encode() + b"\n" + key.value)
        os.replace(partial, path)


def main(port: int, directory: Path) -> None:
    """Serve on 127.0.0.1 for ever."""
    from werkzeug.serving import make_server

    directory.mkdir(parents=True, exist_ok=True)
    make_server("127.0.0.1", port, DurableS3(directory), threaded=True).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
