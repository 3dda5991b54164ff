import contextlib
import gzip
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import engine.rows
from engine import store
from engine.errors import DataError, ModelError, SpecError, StoreError
from engine.prompts import PromptSet
from engine.rewards import gym
from tests.engine.data.preparing import (
    EVAL_ROWS,
    make_spec,
    prepare,
    quarantined,
    shard_bytes,
    train_rows,
    write_lines,
)
from tests.engine.s3_server import s3_server

USER = "<|user|>"
BAD_ROWS = [
    ({"prompt": "fine", "answer": "1"}, None),
    (b"{not json", "json"),
    (b'{"prompt": "caf\xe9", "answer": "1"}', "utf8"),
    (b'{"prompt": "half \\ud800 pair", "answer": "1"}', "utf8"),
    (b'{"prompt": "x", "answer": NaN}', "json"),
    (b"[1, 2]", "schema"),
    ({"answer": "1"}, "schema"),
    ({"prompt": "no answer"}, "schema"),
    ({"prompt": None, "answer": "1"}, "schema"),
    ({"prompt": 7, "answer": "1"}, "schema"),
    ({"prompt": " \n", "answer": "1"}, "empty"),
    ({"prompt": [], "answer": "1"}, "empty"),
    ({"prompt": [{"role": "user", "content": ""}], "answer": "1"}, "empty"),
    ({"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}, "schema"),
    ({"prompt": [{"role": "pope", "content": "a"}], "answer": "1"}, "schema"),
    ({"prompt": [{"role": "user", "text": "a"}], "answer": "1"}, "schema"),
    ({"prompt": ["a"], "answer": "1"}, "schema"),
    ({"prompt": [{"role": "assistant", "content": "a"}], "answer": "1"}, "schema"),
    ({"prompt": [{"role": "tool", "content": "the template refuses tools"}], "answer": "1"}, "template"),
    ({"prompt": "fine", "answer": "2"}, "duplicate"),
    ({"prompt": [{"role": "user", "content": "fine "}], "answer": "2"}, "duplicate"),
    ({"prompt": "held out", "answer": "1"}, "overlap"),
    ({"prompt": "long " * 1000, "answer": "1"}, "overlong"),
    (b"", None),
    ({"prompt": "fine too", "answer": "1"}, None),
]


def test_each_bad_row_is_quarantined_with_its_file_line_and_kind(tmp_path, chat_tokenizer):
    file = write_lines(tmp_path / "train.jsonl", [row for row, _ in BAD_ROWS])
    result = prepare(tmp_path, spec := make_spec(tmp_path, chat_tokenizer, file))
    expected = [("train.jsonl", line, kind) for line, (_, kind) in enumerate(BAD_ROWS, start=1) if kind]
    assert quarantined(tmp_path) == expected
    assert [prompt.text for prompt in train_rows(spec)] == ["fine", "fine too"]
    assert result.metrics["train/bad"] == len(expected)
    assert result.metrics["train/good"] == 2 and result.metrics["train/rows"] == len(expected) + 2
    assert result.metrics["train/bad/schema"] == [kind for _, kind in BAD_ROWS].count("schema")


def test_the_quarantine_says_the_reason_with_numbers(tmp_path, chat_tokenizer):
    file = write_lines(tmp_path / "t.jsonl", [{"prompt": "ok", "answer": 1}, {"prompt": "long " * 1000, "answer": 1}])
    prepare(tmp_path, make_spec(tmp_path, chat_tokenizer, file))
    (row,) = map(json.loads, (tmp_path / "output" / "quarantine.jsonl").read_text().splitlines())
    assert row == {"set": "train", "file": file, "line": 2, "kind": "overlong", "reason": row["reason"]}
    assert "max_prompt_tokens is 1000" in row["reason"]


@pytest.mark.parametrize(("allowed", "passes"), [(0.2, True), (0.19, False), (0.0, False)])
def test_more_than_the_allowed_share_of_bad_rows_ends_the_job(tmp_path, chat_tokenizer, allowed, passes):
    rows = [{"prompt": f"q{i}", "answer": "1"} for i in range(4)] + [{"prompt": ""}]
    spec = make_spec(tmp_path, chat_tokenizer, write_lines(tmp_path / "t.jsonl", rows), max_bad_share=allowed)
    if passes:
        prepare(tmp_path, spec)
        return
    with pytest.raises(DataError, match=r"train: 1 of 5 rows are bad \(20.00%\).*t\.jsonl:5: prompt is empty") as error:
        prepare(tmp_path, spec)
    assert error.value.exit_code == 2
    assert quarantined(tmp_path) == [("t.jsonl", 5, "empty")]
    assert not os.path.exists(spec.output) and not list(tmp_path.glob(".*")), "nothing half-written"


def test_a_truncated_gzip_gives_the_rows_before_the_cut_and_one_bad_row(tmp_path, chat_tokenizer):
    rows = [json.dumps({"prompt": os.urandom(200).hex(), "answer": str(i)}) for i in range(200)]
    whole = gzip.compress("\n".join(rows).encode())
    (tmp_path / "t.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    prepare(tmp_path, spec := make_spec(tmp_path, chat_tokenizer, str(tmp_path / "t.jsonl.gz")))
    answers = [prompt.answer for prompt in train_rows(spec)]
    assert 20 < len(answers) < 190 and answers == [str(i) for i in range(len(answers))]
    assert quarantined(tmp_path) == [("t.jsonl.gz", len(answers) + 1, "gzip")]


ONE_ROW = gzip.compress(b'{"prompt": "x", "answer": 1}\n')


@pytest.mark.parametrize("content", [b"no gzip at all", ONE_ROW[:-6] + b"123456"])
def test_a_corrupt_gzip_is_a_bad_row(tmp_path, chat_tokenizer, content):
    (tmp_path / "t.jsonl.gz").write_bytes(content)
    spec = make_spec(tmp_path, chat_tokenizer, str(tmp_path / "t.jsonl.gz"), max_bad_share=0.1)
    with pytest.raises(DataError, match="gzip"):
        prepare(tmp_path, spec)


def test_a_line_without_end_is_one_bad_row(tmp_path, chat_tokenizer, monkeypatch):
    monkeypatch.setattr(engine.rows, "MAX_LINE_BYTES", 100)
    rows = [{"prompt": "a", "answer": 1}, b"x" * 1000, {"prompt": "b", "answer": 1}]
    prepare(tmp_path, spec := make_spec(tmp_path, chat_tokenizer, write_lines(tmp_path / "t.jsonl", rows)))
    assert [prompt.text for prompt in train_rows(spec)] == ["a", "b"]
    assert quarantined(tmp_path) == [("t.jsonl", 2, "json")]


def test_the_same_rows_give_the_same_bytes_in_every_format_and_store(tmp_path, chat_tokenizer, monkeypatch):
    import datasets

    rows = [{"prompt": [{"role": "user", "content": f"question {i}"}], "answer": str(i), "level": i, "task": "t"}
            for i in range(300)]
    lines = write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(Path(lines).read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=7)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "hf", num_shards=2)
    directory = tmp_path / "directory"
    directory.mkdir()
    write_lines(directory / "1.jsonl", rows[:100])
    write_lines(directory / "2.jsonl", rows[100:])
    sources = [lines, *(str(tmp_path / name) for name in ("rows.jsonl.gz", "rows.parquet", "hf", "directory"))]
    with s3_server(monkeypatch):
        store.upload_file(lines, "s3://bucket/in/rows.jsonl")
        store.upload_dir(tmp_path / "hf", "s3://bucket/hf")
        store.upload_file(tmp_path / "rows.parquet", "s3://bucket/in/rows.parquet")
        sources += ["s3://bucket/in/rows.jsonl", "s3://bucket/in/rows.parquet", "s3://bucket/hf"]
        results = []
        for number, source in enumerate(sources):
            output = str(tmp_path / f"out{number}")
            prepare(tmp_path, make_spec(tmp_path, chat_tokenizer, source, output=output, rows_per_shard=128))
            results.append(shard_bytes(output))
        spec = make_spec(tmp_path, chat_tokenizer, lines, output="s3://bucket/out", rows_per_shard=128)
        prepare(tmp_path, spec)
        results.append({name: store.read_bytes(f"s3://bucket/out/{name}") for name in results[0]})
        assert len(PromptSet.open("s3://bucket/out", "train")) == 300
        for number, source in ((0, lines), (5, lines), (6, tmp_path / "rows.parquet")):
            manifest = json.loads((tmp_path / f"out{number}" / "manifest.json").read_text())
            assert [entry["sha256"] for entry in manifest["sets"]["train"]["sources"]] == [store.sha256_file(source)]
        before = (tmp_path / "out5" / "manifest.json").stat().st_mtime_ns
        prepare(tmp_path, make_spec(
            tmp_path, chat_tokenizer, sources[5], output=str(tmp_path / "out5"), rows_per_shard=128))
        assert (tmp_path / "out5" / "manifest.json").stat().st_mtime_ns == before, "found as it was"
    assert sorted(results[0]) == ["eval/00000.parquet", *(f"train/0000{i}.parquet" for i in range(3))]
    assert all(result == results[0] for result in results[1:])


def test_a_row_keeps_what_verifiers_and_people_need(tmp_path, chat_tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "größe?"}]
    rows = [{"prompt": messages, "answer": 12.5, "task": "sizes", "nested": {"a": [1, None]}},
            {"prompt": "plain", "answer": ["x", 1]}]
    prepare(tmp_path, spec := make_spec(tmp_path, chat_tokenizer, write_lines(tmp_path / "rows.jsonl", rows)))
    first, second = train_rows(spec)
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    assert first.messages == tuple(messages) and first.text == "größe?" and first.answer == "12.5"
    assert first.task == "sizes" and first.metadata == {"nested": {"a": [1, None]}}
    assert tokenizer.decode(first.token_ids) == f"<|system|>be brief<|end|>{USER}größe?<|end|><|assistant|>"
    assert second.task == "rows" and second.answer == '["x", 1]'
    assert tokenizer.decode(second.token_ids) == f"{USER}plain<|end|><|assistant|>"
    assert first.id != second.id and len(first.id) == 16


def test_without_chat_template_strings_stay_raw_and_chats_are_refused(tmp_path, raw_tokenizer):
    file = write_lines(tmp_path / "raw.jsonl", [{"prompt": " as it is ", "answer": 1}])
    prepare(tmp_path, spec := make_spec(tmp_path, raw_tokenizer, file))
    (row,) = train_rows(spec)
    assert row.messages is None
    assert AutoTokenizer.from_pretrained(raw_tokenizer).decode(row.token_ids) == " as it is "
    chats = write_lines(tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "hi"}], "answer": 1}])
    with pytest.raises(ModelError, match="no chat template.*chat.jsonl:1") as error:
        prepare(tmp_path, make_spec(tmp_path, raw_tokenizer, chats, output=str(tmp_path / "other")))
    assert error.value.exit_code == 2


def test_the_limit_counts_template_and_tools(tmp_path, chat_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    row = {"prompt": "a question", "answer": 1, "tools": [{"name": "calculator"}]}
    rendered = tokenizer.encode(f"<|tools|>calculator <|end|>{USER}a question<|end|><|assistant|>")
    source = {"kind": "file", "uri": write_lines(tmp_path / "t.jsonl", [row]), "tools_field": "tools"}
    short = write_lines(tmp_path / "eval.jsonl", [{"prompt": "e", "answer": 1}])
    fits = make_spec(tmp_path, chat_tokenizer, source, eval=short, max_prompt_tokens=len(rendered))
    prepare(tmp_path, fits)
    assert list(train_rows(fits)[0].token_ids) == rendered
    too_long = make_spec(tmp_path, chat_tokenizer, source, eval=short, max_prompt_tokens=len(rendered) - 1)
    with pytest.raises(DataError, match="no prompts left"):
        prepare(tmp_path, too_long)
    assert quarantined(tmp_path) == [("t.jsonl", 1, "overlong")]


@pytest.mark.parametrize("policy", ["quarantine", "drop", "cut_left", "cut_right", "error"])
def test_each_policy_for_overlong_prompts_is_counted_and_deterministic(tmp_path, chat_tokenizer, policy):
    rows = [{"prompt": "short", "answer": 1}, {"prompt": "0123456789" * 10, "answer": 1}]
    limit = 50
    spec = make_spec(tmp_path, chat_tokenizer, write_lines(tmp_path / "t.jsonl", rows), overlong=policy,
                     max_prompt_tokens=limit)
    if policy == "error":
        with pytest.raises(DataError, match=r"t\.jsonl:2: prompt has 103 tokens"):
            prepare(tmp_path, spec)
        return
    counts = prepare(tmp_path, spec).metrics
    prompts = train_rows(spec)
    full = AutoTokenizer.from_pretrained(chat_tokenizer).encode(f"{USER}{'0123456789' * 10}<|end|><|assistant|>")
    expected = {"cut_left": full[-limit:], "cut_right": full[:limit]}.get(policy)
    assert [list(prompt.token_ids) for prompt in prompts[1:]] == ([expected] if expected else [])
    seen = {name: counts.get(f"train/{name}", 0) for name in ("bad", "dropped", "cut")}
    assert seen == {"bad": policy == "quarantine", "dropped": policy == "drop", "cut": policy.startswith("cut")}


def test_rows_of_the_eval_set_are_not_trained_on_whatever_their_order(tmp_path, chat_tokenizer):
    dressed = [{"role": "system", "content": "Think."}, {"role": "user", "content": EVAL_ROWS[0]["prompt"]}]
    rows = [*EVAL_ROWS, {"prompt": "own", "answer": 1}, {"prompt": dressed, "answer": 1}]
    train = write_lines(tmp_path / "t.jsonl", rows)
    with pytest.raises(DataError, match="the eval set has the same prompt"):
        prepare(tmp_path, make_spec(tmp_path, chat_tokenizer, train, max_bad_share=0.1))
    prepare(tmp_path, spec := make_spec(tmp_path, chat_tokenizer, train))
    assert [prompt.text for prompt in train_rows(spec)] == ["own"]
    assert quarantined(tmp_path) == [("t.jsonl", 1, "overlap"), ("t.jsonl", 3, "overlap")]
    assert [prompt.text for prompt in train_rows(spec, "eval")] == ["held out"]


@pytest.mark.parametrize(("make", "message"), [
    (lambda d: str(d / "nothing.jsonl"), "nothing there"),
    (lambda d: write_lines(d / "x.csv", []), "nothing there, or not one of"),
    (lambda d: write_lines(d / "x.jsonl", []), "no prompts left of 0 rows"),
    (lambda d: write_lines(d / "x.parquet", [b"PAR1 no parquet PAR1"]), "cannot be read after row 0"),
])
def test_sources_without_rows_are_refused(tmp_path, chat_tokenizer, make, message):
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, make_spec(tmp_path, chat_tokenizer, make(tmp_path)))


def test_a_dictionary_of_datasets_is_refused_with_its_splits(tmp_path, chat_tokenizer):
    store.write_bytes(tmp_path / "d" / "dataset_dict.json", "{}")
    store.write_bytes(tmp_path / "d" / "train" / "state.json", "{}")
    with pytest.raises(DataError, match=r"splits \['train'\]"):
        prepare(tmp_path, make_spec(tmp_path, chat_tokenizer, str(tmp_path / "d")))


@pytest.mark.parametrize("broken", ["missing", "empty", "corrupt"])
def test_a_tokenizer_that_cannot_be_loaded_is_a_model_error(tmp_path, broken):
    directory = tmp_path / "model"
    if broken != "missing":
        directory.mkdir()
    if broken == "corrupt":
        (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        prepare(tmp_path, make_spec(tmp_path, directory, write_lines(tmp_path / "t.jsonl", EVAL_ROWS)))


def test_a_second_run_changes_nothing_and_a_changed_source_changes_the_set(tmp_path, chat_tokenizer):
    file = write_lines(tmp_path / "t.jsonl", [{"prompt": "one", "answer": 1}])
    spec = make_spec(tmp_path, chat_tokenizer, file)
    first = prepare(tmp_path, spec)
    stamp = os.stat(f"{spec.output}/manifest.json")
    again = prepare(tmp_path, spec)
    assert (again.hashes, again.metrics, again.outputs) == (first.hashes, first.metrics, first.outputs)
    assert os.stat(f"{spec.output}/manifest.json") == stamp
    write_lines(tmp_path / "t.jsonl", [{"prompt": "two", "answer": 1}])
    assert prepare(tmp_path, spec).hashes["prompts/train"] != first.hashes["prompts/train"]
    assert train_rows(spec)[0].text == "two"


def test_a_damaged_output_is_noticed_by_readers_and_made_again(tmp_path, chat_tokenizer):
    spec = make_spec(tmp_path, chat_tokenizer, write_lines(tmp_path / "t.jsonl", [{"prompt": "one", "answer": 1}]))
    first = prepare(tmp_path, spec)
    shard = tmp_path / "output" / "train" / "00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match="not the bytes of its manifest"):
        PromptSet.open(spec.output, "train")
    assert prepare(tmp_path, spec).hashes == first.hashes
    assert train_rows(spec)[0].text == "one"


def test_a_directory_that_prepare_did_not_make_is_never_replaced(tmp_path, chat_tokenizer):
    spec = make_spec(tmp_path, chat_tokenizer, write_lines(tmp_path / "t.jsonl", [{"prompt": "one", "answer": 1}]))
    store.write_bytes(tmp_path / "output" / "thesis.txt", "years of work")
    with pytest.raises(SpecError, match="no earlier output of prepare"):
        prepare(tmp_path, spec)
    assert (tmp_path / "output" / "thesis.txt").read_text() == "years of work"


def test_a_run_that_dies_before_the_end_leaves_no_output(tmp_path, chat_tokenizer, monkeypatch):
    spec = make_spec(tmp_path, chat_tokenizer, write_lines(tmp_path / "t.jsonl", [{"prompt": "one", "answer": 1}]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            prepare(tmp_path, spec)
    assert not os.path.exists(spec.output)
    prepare(tmp_path, spec)
    assert len(train_rows(spec)) == 1 and not list(tmp_path.glob(".*"))


def gym_source(**changes):
    return {"kind": "reasoning_gym", "task": "chain_sum", "size": 200,
            "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}} | changes


def faults_until_done(tmp_path, spec, arm):
    """Replace an older output; fault the operation number 1, 2, ... until none is left; how many there were."""
    for count in range(1, 50):
        prepare(tmp_path, spec)
        assert len(PromptSet.open(spec.output, "train")) == 1
        write_lines(tmp_path / "t.jsonl", [{"prompt": f"{count}-{i}", "answer": 1} for i in range(2)])
        with arm(count) as faulted:
            try:
                prepare(tmp_path, spec)
            except (KeyboardInterrupt, StoreError):
                pass
        prepare(tmp_path, spec)
        assert [prompt.text for prompt in train_rows(spec)] == [f"{count}-0", f"{count}-1"]
        if not faulted:
            return count - 1
        write_lines(tmp_path / "t.jsonl", [{"prompt": f"{count} one", "answer": 1}])
    raise AssertionError("it never got through")


def test_whatever_an_interrupted_replacement_leaves_in_a_store_the_next_attempt_replaces(
        tmp_path, chat_tokenizer, monkeypatch):
    file = write_lines(tmp_path / "t.jsonl", [{"prompt": "one", "answer": 1}])
    spec = make_spec(tmp_path, chat_tokenizer, file, output="s3://bucket/out", rows_per_shard=1)
    with s3_server(monkeypatch) as server:
        @contextlib.contextmanager
        def arm(number):
            left, faulted = [number], []

            def fault(request):
                left[0] -= request["REQUEST_METHOD"] != "GET" and request["REQUEST_METHOD"] != "HEAD"
                faulted.extend([1] if left[0] <= 0 else [])
                return "403" if left[0] <= 0 else None

            server.fault = fault
            yield faulted
            server.fault = None

        assert faults_until_done(tmp_path, spec, arm) > 8
        assert store.list_files("s3://bucket/out") == [
            "eval/00000.parquet", "manifest.json", "quarantine.jsonl", "train/00000.parquet", "train/00001.parquet"]
        store.delete("s3://bucket/out/manifest.json")
        with pytest.raises(SpecError, match="no earlier output of prepare"):
            prepare(tmp_path, spec)


def test_whatever_an_interrupted_replacement_leaves_on_a_disk_the_next_attempt_replaces(
        tmp_path, chat_tokenizer, monkeypatch):
    file = write_lines(tmp_path / "t.jsonl", [{"prompt": "one", "answer": 1}])
    spec = make_spec(tmp_path, chat_tokenizer, file)
    replace, rmtree = os.replace, shutil.rmtree

    @contextlib.contextmanager
    def arm(number):
        """Killed at its n-th change of the output's directory; a removal is killed when half is done."""
        left, faulted = [number], []

        def killed(action, *paths):
            if any(Path(path).parent == tmp_path and "output" in Path(path).name for path in paths):
                left[0] -= 1
                if left[0] <= 0:
                    faulted.append(1)
                    raise KeyboardInterrupt
            action(*paths)

        def half_removed(path, ignore_errors=False):
            (Path(path) / "manifest.json").unlink(missing_ok=True)
            killed(lambda gone: rmtree(gone, ignore_errors=True), path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *paths: killed(replace, *paths))
            patch.setattr(shutil, "rmtree", half_removed)
            yield faulted

    assert faults_until_done(tmp_path, spec, arm) >= 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "job", "output", "t.jsonl"]


def test_generated_rows_are_all_different_held_out_and_verifiable_from_the_row(tmp_path, chat_tokenizer):
    train = gym_source(system="Only the number.", prompt="Q: {question}")
    spec = make_spec(tmp_path, chat_tokenizer, train, eval=gym_source(seed=1), max_bad_share=0.0)
    prepare(tmp_path, spec)
    train, held_out = train_rows(spec), train_rows(spec, "eval")
    assert len({p.text for p in train}) == len({p.text for p in held_out}) == 200
    assert not {p.metadata["reasoning_gym"]["entry"]["question"] for p in train} & {p.text for p in held_out}, \
        "the system message and the template differ, the questions must not be the same"
    for prompt in train[:20]:
        assert gym.verify(prompt.answer, prompt.metadata) == 1.0
        assert gym.verify("no number", prompt.metadata) < 0.1
    assert train[0].messages[0] == {"role": "system", "content": "Only the number."}
    assert train[0].text.startswith("Q: State the final answer")


def test_demonstrations_are_turns_and_never_the_question_itself(tmp_path, chat_tokenizer):
    small = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    question = "State the final answer to the following arithmetic problem: 7 ="
    train = gym_source(size=9, config=small, demonstrations=[{"question": question, "response": "7"}])
    prepare(tmp_path, spec := make_spec(tmp_path, chat_tokenizer, train))
    prompts = train_rows(spec)
    assert sorted(prompt.answer for prompt in prompts) == list("012345689")
    assert [turn["role"] for turn in prompts[0].messages] == ["user", "assistant", "user"]


def test_a_generator_with_too_few_different_rows_is_refused(tmp_path, chat_tokenizer):
    source = gym_source(size=200, config={"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1})
    with pytest.raises(DataError, match="only 10 different prompts.*size is 200"):
        prepare(tmp_path, make_spec(tmp_path, chat_tokenizer, source))


@pytest.mark.parametrize(("changes", "message"), [
    ({"task": "no_such_task"}, "no task 'no_such_task'"), ({"config": {"max_terms": 0}}, "chain_sum refuses"),
    ({"config": {"colour": "red"}}, "chain_sum refuses.*colour")])
def test_a_generator_that_does_not_exist_or_refuses_its_settings_is_named(tmp_path, chat_tokenizer, changes, message):
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, make_spec(tmp_path, chat_tokenizer, gym_source(**changes)))


def test_memory_does_not_grow_with_the_file(tmp_path, chat_tokenizer):
    def peak_bytes(rows: int) -> int:
        padding = "x" * 1500
        lines = ({"prompt": f"question {i}", "answer": "1", "metadata": padding} for i in range(rows))
        file = write_lines(tmp_path / f"{rows}.jsonl", lines)
        spec = make_spec(tmp_path, chat_tokenizer, file, output=str(tmp_path / f"out{rows}"))
        tracemalloc.start()
        prepare(tmp_path, spec)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    small, large = 1500, 4500
    peak_bytes(10)  # imports
    growth = peak_bytes(large) - peak_bytes(small)
    # The digests, about 100 bytes a row, and not the rows, about 1,600.
    assert growth < (large - small) * 300
