"""What docs/review.md says about MLflow's webhooks, against a real server."""

import json
import queue
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks import registry, tracking

pytestmark = pytest.mark.slow

SECRET = "a long random text"
BLOCKS = re.findall(r"```python\n(.*?)```", Path("docs/review.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def receiver():
    """A serving team's endpoint; its address, and what arrived as (headers, body)."""
    arrived = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            arrived.put((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", arrived
    server.shutdown()
    server.server_close()


def documented(name):
    """A function of a code block of the document."""
    found = {}
    exec(next(block for block in BLOCKS if f"def {name}" in block), found)
    return found[name]


def test_a_promotion_reaches_a_webhook_whose_sender_can_be_verified(mlflow_uri, receiver):
    url, arrived = receiver
    client, genuine = MlflowClient(tracking_uri=mlflow_uri, registry_uri=mlflow_uri), documented("genuine")
    creation = next(block for block in BLOCKS if "create_webhook" in block)
    events = re.search(r"events=(\[.*?\])", creation).group(1)
    hook = client.create_webhook(name="champion-moved", url=url, secret=SECRET, events=json.loads(events))
    run = tracking.parent_run("hooks", "hooks/1", name="a run", lineage=tracking.Lineage())
    version = registry.register_candidate("hooked", registry.CandidateFiles(
        export_uri="/exports/1", weights_hash="hash", run_id=run.run_id))
    registry.promote(version, base=None, files_hash="hash", decision=registry.Decision(by="ada", reason="good"))
    try:
        seen = []
        while "champion" not in [data.get("alias") for data in seen]:
            headers, body = arrived.get(timeout=60)
            assert genuine(headers, body, SECRET) and not genuine(headers, body, "another")
            assert not genuine(headers, body + b" ", SECRET) and not genuine(headers, body, SECRET, max_age_s=-1)
            message = json.loads(body)
            assert message.keys() == {"entity", "action", "timestamp", "data"}
            seen.append(message["data"])
        assert seen[-1] == {"name": "hooked", "alias": "champion", "version": "1"}
    finally:
        client.delete_webhook(hook.webhook_id)
