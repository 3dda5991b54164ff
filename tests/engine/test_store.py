import os
import subprocess
import sys
import threading
import time

import boto3
import pytest

from engine import store
from engine.errors import MissingError, ModelError, RefusedError, StoreError
from engine.store import s3
from tests.engine.s3_server import s3_server


@pytest.fixture
def server(monkeypatch):
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture(params=["local", "s3"])
def root(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("server")
        return "s3://bucket/some/where"
    return str(tmp_path / "some" / "where")


def test_what_is_written_is_read_back(root):
    uri = store.join(root, "a", "b.bin")
    assert not store.exists(uri)
    store.write_bytes(uri, b"\0\xff" * 100)
    store.write_bytes(store.join(root, "t.txt"), "größe")
    assert store.read_bytes(uri) == b"\0\xff" * 100
    assert store.read_text(store.join(root, "t.txt")) == "größe"
    with store.open_read(uri) as stream:
        assert stream.read(3) + stream.read() == b"\0\xff" * 100
    store.write_bytes(uri, b"new")
    assert store.read_bytes(uri) == b"new"


def test_listing_is_sorted_relative_and_deep(root):
    for name in ("b/2", "a", "b/10", "c/d/e"):
        store.write_bytes(store.join(root, name), name)
    assert store.list_files(root) == ["a", "b/10", "b/2", "c/d/e"]
    assert store.list_files(store.join(root, "b")) == ["10", "2"]
    assert store.list_files(store.join(root, "nothing")) == []


def test_size_and_time_of_every_file_are_listed(root):
    before = time.time()
    for name, size in (("b/2", 3), ("a", 5), ("c/d/e", 0)):
        store.write_bytes(store.join(root, name), b"x" * size)
    found = store.stat_files(root)
    assert [(file.name, file.bytes) for file in found] == [("a", 5), ("b/2", 3), ("c/d/e", 0)]
    assert all(before - 2 < file.modified < time.time() + 2 for file in found)
    assert store.stat_files(store.join(root, "nothing")) == []


def test_directories_right_under_a_directory_are_listed(root):
    for name in ("b/2", "b/3/x", "a", "c/d/e"):
        store.write_bytes(store.join(root, name), b"x")
    assert store.list_dirs(root) == ["b", "c"]
    assert store.list_dirs(store.join(root, "c")) == ["d"]
    assert store.list_dirs(store.join(root, "nothing")) == []


def test_a_name_that_only_begins_alike_does_not_exist(root):
    store.write_bytes(store.join(root, "step-10", "x"), b"")
    assert store.exists(store.join(root, "step-10"))
    assert not store.exists(store.join(root, "step-1"))


def test_missing_files_are_a_refusal_and_not_a_fault_to_retry(root):
    for operation in (store.read_bytes, store.open_read):
        with pytest.raises(MissingError, match="nothing") as caught:
            operation(store.join(root, "nothing"))
        assert caught.value.exit_code == 2
    with pytest.raises(MissingError):
        store.download_dir(root, "/tmp/never-made")


def test_directories_travel_whole_and_come_back_equal(root, tmp_path):
    source = tmp_path / "source"
    for name in ("x/1", "x/2", "manifest.json", "z"):
        store.write_bytes(source / name, name * 1000)
    store.upload_dir(source, root)
    store.download_dir(root, tmp_path / "back")
    assert store.hash_dir(tmp_path / "back") == store.hash_dir(source)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_delete_removes_everything_under_a_directory_and_nothing_beside_it(root):
    for name in ("run/manifest.json", "run/x", "run-2/x"):
        store.write_bytes(store.join(root, name), b"1")
    store.delete(store.join(root, "run"))
    assert store.list_files(root) == ["run-2/x"]
    store.delete(store.join(root, "run-2/x"))
    assert not store.exists(root)


def test_fingerprint_changes_with_the_content_only(root):
    uri = store.join(root, "x")
    store.write_bytes(uri, b"1")
    first = store.fingerprint(uri)
    store.write_bytes(uri, b"1")
    assert store.fingerprint(uri) == first
    store.write_bytes(uri, b"2")
    assert store.fingerprint(uri) != first


def test_the_manifest_is_uploaded_after_all_other_files(server, tmp_path):
    for name in ("a/1", "manifest.json", "z"):
        store.write_bytes(tmp_path / name, b"x")
    store.upload_dir(tmp_path, "s3://bucket/d")
    written = [path for method, path, _ in server.requests if method == "PUT"]
    assert len(written) == 3 and written[-1].endswith("manifest.json")


def test_the_manifest_is_deleted_before_all_other_files(server):
    for name in ("a", "manifest.json"):
        store.write_bytes(f"s3://bucket/d/{name}", b"x")
    server.requests.clear()
    store.delete("s3://bucket/d")
    assert [path for method, path, _ in server.requests if method == "DELETE"][0].endswith("d/manifest.json")


def test_manifests_at_any_depth_are_deleted_before_all_other_files(server):
    for name in ("a", "step-1/manifest.json", "step-1/w", "step-2/manifest.json", "step-2/w"):
        store.write_bytes(f"s3://bucket/d/{name}", b"x")
    server.fault = lambda request: "403" if request["REQUEST_METHOD"] == "POST" else None
    with pytest.raises(StoreError, match="AccessDenied"):
        store.delete("s3://bucket/d")
    server.fault = None
    assert store.list_files("s3://bucket/d") == ["a", "step-1/w", "step-2/w"]


def test_many_objects_are_deleted_a_thousand_a_request(server, monkeypatch):
    monkeypatch.setattr(s3, "MOST_DELETED", 10)
    for number in range(25):
        store.write_bytes(f"s3://bucket/d/{number}", b"")
    store.write_bytes("s3://bucket/d2/x", b"")
    server.requests.clear()
    store.delete("s3://bucket/d")
    assert store.list_files("s3://bucket") == ["d2/x"]
    assert [method for method, _, _ in server.requests if method in ("POST", "DELETE")] == ["POST"] * 3


def test_an_object_that_the_store_keeps_is_an_error(server, monkeypatch):
    store.write_bytes("s3://bucket/d/x", b"")
    client = s3._client()
    monkeypatch.setattr(client, "delete_objects", lambda **_: {"Errors": [{"Key": "d/x", "Code": "AccessDenied"}]})
    with pytest.raises(StoreError, match="delete s3://bucket/d: the store answers AccessDenied for s3://bucket/d/x"):
        store.delete("s3://bucket/d")


def test_objects_that_a_busy_store_keeps_are_asked_for_again(server, monkeypatch):
    monkeypatch.setattr(s3, "FIRST_WAIT_S", 0.0)
    for name in "xy":
        store.write_bytes(f"s3://bucket/d/{name}", b"")
    client, asked = s3._client(), []
    delete = client.delete_objects

    def busy(**arguments):
        keys = [item["Key"] for item in arguments["Delete"]["Objects"]]
        asked.append(keys)
        kept = [key for key in keys if key == "d/y"] if len(asked) < 3 else []
        arguments["Delete"]["Objects"] = [{"Key": key} for key in keys if key not in kept]
        answer = delete(**arguments) if arguments["Delete"]["Objects"] else {}
        code = ("SlowDown", "InternalError")[len(asked) % 2]
        return answer | {"Errors": [{"Key": key, "Code": code} for key in kept]}

    monkeypatch.setattr(client, "delete_objects", busy)
    store.delete("s3://bucket/d")
    assert asked == [["d", "d/x", "d/y"], ["d/y"], ["d/y"]] and not store.exists("s3://bucket/d")
    store.write_bytes("s3://bucket/d/y", b"")
    monkeypatch.setattr(client, "delete_objects", lambda **_: {"Errors": [{"Key": "d/y", "Code": "SlowDown"}]})
    with pytest.raises(StoreError, match="the store answers SlowDown for s3://bucket/d/y"):
        store.delete("s3://bucket/d")


@pytest.mark.parametrize("key", ["d/../../out", "d/x/../../../out", "d//{root}/out", "d/.."])
def test_no_name_leads_out_of_where_a_directory_is_downloaded_to(server, tmp_path, key):
    boto3.client("s3").put_object(Bucket="bucket", Key="d/fine", Body=b"x")
    boto3.client("s3").put_object(Bucket="bucket", Key=key.format(root=tmp_path), Body=b"x")
    with pytest.raises(RefusedError, match=r"download s3://bucket/d: the name '.*' leads out of .*target") as refused:
        store.download_dir("s3://bucket/d", tmp_path / "here" / "target")
    assert "\n" not in str(refused.value) and not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_transfer_says_that_it_goes_on(server, tmp_path, small_parts, monkeypatch):
    monkeypatch.setattr(store.progress, "_watchers", [])
    moves = []
    store.watch_transfers(lambda: moves.append(1))
    store.upload_file(large_file(tmp_path), "s3://bucket/large")
    sent = len(moves)
    store.download_file("s3://bucket/large", tmp_path / "back")
    assert sent >= 4 and len(moves) - sent >= 4


def test_a_directory_that_could_not_be_uploaded_has_no_manifest(server, tmp_path, monkeypatch):
    for name in ("a", "b", "manifest.json"):
        store.write_bytes(tmp_path / name, b"x")
    server.fault = lambda request: "403" if request["PATH_INFO"].endswith("/b") else None
    with pytest.raises(StoreError, match="AccessDenied"):
        store.upload_dir(tmp_path, "s3://bucket/d")
    server.fault = None
    assert not store.exists("s3://bucket/d/manifest.json")


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    store.write_atomic(path, "old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        store.write_atomic(path, "new")
    with pytest.raises(StoreError, match=r"write .*x\.json: No space left"):
        store.write_bytes(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_readers_never_see_half_a_file(tmp_path):
    path, contents = tmp_path / "x", {"a" * 100_000, "b" * 200_000}
    store.write_atomic(path, "a" * 100_000)
    done = threading.Event()

    def write():
        for _ in range(20):
            for content in contents:
                store.write_atomic(path, content)
        done.set()

    threading.Thread(target=write).start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_text())
    assert seen <= contents


def test_files_have_the_permissions_of_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        store.write_atomic(tmp_path / "x", "")
        store.upload_file(tmp_path / "x", tmp_path / "y")
    finally:
        os.umask(previous)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "xy"} == {0o640}


def test_server_errors_and_throttling_are_tried_again(server):
    spoiled = iter(["500", "503"])
    server.fault = lambda request: next(spoiled, None)
    store.write_bytes("s3://bucket/x", b"content")
    assert store.read_bytes("s3://bucket/x") == b"content"
    assert [method for method, _, _ in server.requests] == ["PUT", "PUT", "PUT", "GET"]


def test_a_stream_goes_on_where_its_connection_broke(server):
    content = os.urandom(3 << 20)
    store.write_bytes("s3://bucket/x", content)
    server.requests.clear()
    spoiled = iter(["drop", "drop"])
    server.fault = lambda request: next(spoiled, None)
    with store.open_read("s3://bucket/x") as stream:
        assert stream.read() == content
    first, second, third = [range_ for _, _, range_ in server.requests]
    assert first == "" and 0 < int(second[6:-1]) < int(third[6:-1]) < len(content)


def test_a_read_survives_a_broken_connection(server):
    store.write_bytes("s3://bucket/x", b"0123456789" * 1000)
    spoiled = iter(["drop"])
    server.fault = lambda request: next(spoiled, None)
    assert store.read_bytes("s3://bucket/x") == b"0123456789" * 1000


def test_a_stream_does_not_mix_two_versions_of_an_object(server):
    store.write_bytes("s3://bucket/x", b"a" * (3 << 20))
    spoiled = iter(["drop"])
    server.fault = lambda request: next(spoiled, None)
    with store.open_read("s3://bucket/x") as stream:
        stream.read(10)
        store.write_bytes("s3://bucket/x", b"b" * (3 << 20))
        with pytest.raises(StoreError, match="PreconditionFailed"):
            stream.read()


def test_large_files_go_in_parts_and_come_back_equal(server, tmp_path):
    source = tmp_path / "large"
    source.write_bytes(os.urandom(s3.PART_BYTES + 12345))
    store.upload_file(source, "s3://bucket/large")
    parts = {query for method, query, _ in server.requests if method == "PUT"}
    assert s3.etag("s3://bucket/large").endswith("-2") and parts
    store.download_file("s3://bucket/large", tmp_path / "back")
    assert store.sha256_file(tmp_path / "back") == store.sha256_file(source)


def test_other_bytes_than_were_written_are_refused(server, tmp_path):
    store.write_bytes("s3://bucket/x", b"right")
    right = boto3.client("s3").head_object(Bucket="bucket", Key="x")["Metadata"]
    boto3.client("s3").put_object(Bucket="bucket", Key="x", Body=b"wrong", Metadata=right)
    with pytest.raises(StoreError, match="sha256"):
        store.download_file("s3://bucket/x", tmp_path / "x")
    with pytest.raises(StoreError, match="sha256"):
        store.read_bytes("s3://bucket/x")
    assert list(tmp_path.iterdir()) == []


def test_errors_are_one_line_without_credentials(server, monkeypatch):
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    s3._client_at.cache_clear()
    server.fault = lambda request: "403"
    messages = []
    for operation in (store.read_bytes, store.list_files, store.exists, store.delete, store.fingerprint):
        with pytest.raises(StoreError) as caught:
            operation("s3://bucket/x")
        messages.append(str(caught.value))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://CANARYUSER:CANARYPASSWORD@127.0.0.1:1")
    with pytest.raises(StoreError, match=r"read s3://bucket/x: .* at http://127\.0\.0\.1:1$") as caught:
        store.read_bytes("s3://bucket/x")
    messages.append(str(caught.value))
    s3._client_at.cache_clear()
    assert all("\n" not in message and "CANARY" not in message for message in messages)


def test_no_credentials_is_an_error_that_says_so(server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    s3._client_at.cache_clear()
    with pytest.raises(StoreError, match="NoCredentialsError"):
        store.read_bytes("s3://bucket/x")
    s3._client_at.cache_clear()


def test_a_uri_without_bucket_or_key_is_refused():
    for uri in ("s3://", "s3:///x", "s3://bucket"):
        with pytest.raises(MissingError, match="s3://bucket/key"):
            store.read_bytes(uri)


def test_a_model_is_known_by_its_weights_alone(tmp_path):
    with pytest.raises(ModelError, match="safetensors"):
        store.hash_model_dir(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(b"1")
    (tmp_path / "model-2.safetensors").write_bytes(b"2")
    (tmp_path / "README").write_text("one")
    first = store.hash_model_dir(tmp_path)
    (tmp_path / "README").write_text("two")
    assert store.hash_model_dir(tmp_path) == first
    (tmp_path / "model-1.safetensors").write_bytes(b"2")
    (tmp_path / "model-2.safetensors").write_bytes(b"1")
    assert store.hash_model_dir(tmp_path) != first


def test_the_store_loads_neither_torch_nor_boto3_until_it_is_needed():
    code = "import sys, engine.store; print(sorted({'torch', 'boto3', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def parts_sent(server):
    return sorted(int(query["partNumber"][0]) for query in server.queries if "partNumber" in query)


def large_file(tmp_path, parts=4):
    source = tmp_path / "large"
    source.write_bytes(os.urandom((parts - 1) * s3.PART_BYTES + 123))
    return source


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)  # S3 takes no smaller ones


def refuse_part(number):
    return lambda request: "403" if f"partNumber={number}" in request["QUERY_STRING"] else None


def test_an_interrupted_upload_goes_on_with_the_parts_that_are_missing(server, tmp_path, small_parts):
    source = large_file(tmp_path)
    server.fault = refuse_part(3)
    with pytest.raises(StoreError, match="AccessDenied"):
        store.upload_file(source, "s3://bucket/large")
    assert not store.exists("s3://bucket/large")
    server.fault, sent = None, parts_sent(server)
    assert 3 in sent and 1 in sent
    server.queries.clear()
    store.upload_file(source, "s3://bucket/large")
    assert 3 in parts_sent(server) and 1 not in parts_sent(server)
    store.download_file("s3://bucket/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_an_interrupted_upload_of_another_content_is_not_mixed_in(server, tmp_path, small_parts):
    source = large_file(tmp_path)
    server.fault = refuse_part(4)
    with pytest.raises(StoreError):
        store.upload_file(source, "s3://bucket/large")
    server.fault = None
    content = bytearray(source.read_bytes())
    content[-1] ^= 1  # the parts that are there stay right, what was recorded of the whole does not
    source.write_bytes(content)
    store.upload_file(source, "s3://bucket/large")
    store.download_file("s3://bucket/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content


def test_what_is_there_already_is_not_sent_again(server, tmp_path):
    for name in ("a", "b", "manifest.json"):
        store.write_bytes(tmp_path / "d" / name, name * 10)
    server.fault = lambda request: "403" if request["PATH_INFO"].endswith("/b") else None
    with pytest.raises(StoreError):
        store.upload_dir(tmp_path / "d", "s3://bucket/d")
    server.fault = None
    server.requests.clear()
    store.upload_dir(tmp_path / "d", "s3://bucket/d")
    assert sorted(path[-2:] for method, path, _ in server.requests if method == "PUT") == ["/b", "on"]


def test_parts_survive_server_errors_and_throttling(server, tmp_path, small_parts):
    source, seen = large_file(tmp_path), set()

    def first_time(request):
        part = request["QUERY_STRING"]
        if "partNumber" not in part or part in seen:
            return None
        seen.add(part)
        return "503" if len(seen) % 2 else "500"

    server.fault = first_time
    store.upload_file(source, "s3://bucket/large")
    assert len(seen) == 4
    store.download_file("s3://bucket/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_a_store_that_does_not_answer_is_asked_again(server, monkeypatch):
    store.write_bytes("s3://bucket/x", b"content")
    monkeypatch.setattr(s3, "ANSWER_LIMIT_S", 0.3)
    s3._client_at.cache_clear()
    slow = iter(["slow"])
    server.fault = lambda request: next(slow, None)
    assert store.read_bytes("s3://bucket/x") == b"content"
    s3._client_at.cache_clear()
