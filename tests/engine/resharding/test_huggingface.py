"""Hugging Face directories in and out: every rank its slices, the same bytes back, errors that name file and tensor."""

import errno
import json
import os
import shutil
import struct

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from engine.errors import EXIT_FAULT, FaultError, LayoutError, ModelError
from engine.layout import GenerationLayout, ParallelLayout, read_model_shape
from engine.resharding.export import ExportOptions, export_hf
from engine.resharding.fsdp import FsdpSharding
from engine.resharding.load import load_hf
from engine.resharding.megatron import MegatronSharding
from engine.resharding.placement import Placement
from engine.resharding.safetensors_files import SINGLE, create_file
from engine.resharding.vllm import VllmSharding
from tests.engine.multiprocess import Ranks
from tests.engine.resharding import oracles
from tests.engine.resharding.hf_models import FAMILIES, make_model

LAYOUTS = {
    "tp2 pp2 dp2": ParallelLayout(tp=2, pp=2, dp=2), "pp4 dp2": ParallelLayout(pp=4, dp=2),
    "tp4 dp2": ParallelLayout(tp=4, dp=2), "tp2 dp4 ep4": ParallelLayout(tp=2, dp=4, ep=4)}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(8) as processes:
        yield processes


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {(family, tied): make_model(root / f"{family}-{tied}", family, tie_word_embeddings=tied)
            for family in FAMILIES for tied in (False, True)}
    made["bf16"] = make_model(root / "bf16", "qwen2", torch.bfloat16, max_shard="20KB")
    return made


def world():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def read_model(directory):
    """Every tensor of a directory, by the safetensors library."""
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def empty_params(holdings, dtype=torch.float32):
    return {name: torch.full(shape, oracles.UNTOUCHED, dtype=dtype) for name, shape in holdings.params.items()}


def load_and_export(model_dir, out_dir, layout, options):
    rank, shape = world(), read_model_shape(model_dir)
    sharding = MegatronSharding(shape, layout, vocab_multiple=16)
    params = empty_params(sharding.holdings(rank))
    load_hf(model_dir, sharding.holdings(rank), params)
    want = oracles.megatron_params(read_model(model_dir), shape, layout, rank, (16, 1))
    assert params.keys() == want.keys()
    for name, value in want.items():
        expected = torch.where(value == oracles.UNTOUCHED, 0.0, value.float())
        assert torch.equal(params[name], expected), name
    export_hf(model_dir, out_dir, sharding, params, options)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_loaded_and_exported_untrained_is_the_same_model(ranks, models, family, tmp_path):
    for tied in (False, True):
        source = models[family, tied]
        for name, layout in LAYOUTS.items():
            if layout.ep == 1 or family in ("mixtral", "qwen3_moe"):
                out = tmp_path / f"{tied} {name}"
                ranks.run(load_and_export, source, out, layout, ExportOptions(max_file_bytes=30_000))
                assert_same_model(source, out)


def assert_same_model(source, out):
    want, got = read_model(source), read_model(out)
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name
    copied = {file.name for file in source.iterdir() if ".safetensors" not in file.name}
    assert copied <= {file.name for file in out.iterdir()}
    for name in copied:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    leftovers = [path for path in out.parent.iterdir() if path.name.startswith(".")]
    assert not leftovers


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_with_an_exported_model(ranks, models, family, tmp_path):
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 23)[None]
    for tied in (False, True):
        source, out = models[family, tied], tmp_path / str(tied)
        ranks.run(load_and_export, source, out, LAYOUTS["tp2 pp2 dp2"], ExportOptions(max_file_bytes=20_000))
        assert (out / "model.safetensors.index.json").exists() and len(list(out.glob("*.safetensors"))) > 2
        with torch.no_grad():
            want, got = (AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits for path in (source, out))
        assert torch.equal(want, got)


def test_half_precision_files_come_back_bit_equal_from_fp32_parameters(ranks, models, tmp_path):
    source = models["bf16"]
    assert len(list(source.glob("*.safetensors"))) > 1
    options = ExportOptions(max_file_bytes=25_000, placement=Placement(ranks_per_node=3))
    ranks.run(load_and_export, source, tmp_path / "out", LAYOUTS["tp2 pp2 dp2"], options)
    assert_same_model(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.numel() * 2 for v in read_model(source).values())


def train_and_export(model_dir, out_dir):
    rank, shape = world(), read_model_shape(model_dir)
    sharding = MegatronSharding(shape, LAYOUTS["tp4 dp2"])
    params = empty_params(sharding.holdings(rank))
    load_hf(model_dir, sharding.holdings(rank), params)
    for name, value in params.items():
        if "linear_qkv.weight" in name:
            value.mul_(2.0)
    export_hf(model_dir, out_dir, sharding, params)


def test_only_what_was_trained_differs_in_an_export_that_replaces_an_older_one(ranks, models, tmp_path):
    source, out = models["qwen2", True], tmp_path / "out"
    shutil.copytree(models["llama", False], out)
    ranks.run(train_and_export, source, out)
    want, got = read_model(source), read_model(out)
    assert want.keys() == got.keys()
    for name, value in want.items():
        trained = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        assert torch.equal(got[name], value * 2.0 if trained else value), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def other_holders(model_dir, out_dir):
    rank, shape = world(), read_model_shape(model_dir)
    full, layout = read_model(model_dir), GenerationLayout(4)
    served, sharded = VllmSharding(shape, layout, 8), FsdpSharding(shape, 8)
    for sharding, want in ((served, oracles.vllm_params(full, shape, 4, rank)),
                           (sharded, oracles.fsdp_params(full, 8, rank))):
        params = empty_params(sharding.holdings(rank))
        load_hf(model_dir, sharding.holdings(rank), params)
        for name, value in want.items():
            assert torch.equal(params[name], torch.where(value == oracles.UNTOUCHED, 0.0, value)), name
        export_hf(model_dir, out_dir / sharding.name, sharding, params)


def test_vllm_and_fsdp_ranks_load_and_export_too(ranks, models, tmp_path):
    ranks.run(other_holders, models["mixtral", False], tmp_path)
    for name in ("vLLM tp=4", "FSDP dp=8"):
        assert_same_model(models["mixtral", False], tmp_path / name)


def test_a_critic_loads_the_backbone_and_keeps_its_value_head(models):
    for tied in (False, True):
        shape = read_model_shape(models["qwen3", tied])
        sharding = MegatronSharding(shape, ParallelLayout(pp=2), critic=True)
        for rank in range(2):
            holdings = sharding.holdings(rank)
            assert "output_layer.weight" not in holdings.params
            head = {"value_head.weight": torch.full((1, 32), 5.0)} if rank == 1 else {}
            params = empty_params(holdings) | head
            load_hf(models["qwen3", tied], holdings, params)
            assert all((value == 5.0).all() for value in head.values())
            assert not any((value == oracles.UNTOUCHED).any() for value in params.values())


def broken(source, tmp_path, change):
    target = tmp_path / "broken"
    shutil.copytree(source, target)
    change(target)
    return target


def rewrite(**changes):
    def change(directory):
        tensors = load_file(directory / "model.safetensors")
        for name, value in changes.items():
            if value is None:
                del tensors[name]
            else:
                tensors[name] = value
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return change


def truncate(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncate_header(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def scribble(directory):
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)


def wrong_offsets(directory):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header["model.norm.weight"]["data_offsets"][1] += 8
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length:])


@pytest.mark.parametrize(("change", "message"), [
    (truncate, r"model.safetensors: truncated; tensor model\.\S+ ends at byte \d+, the file at \d+"),
    (truncate_header, r"model.safetensors: header of \d+ bytes in a file of 50; truncated or corrupt"),
    (scribble, r"model.safetensors: not a safetensors file"),
    (wrong_offsets, r"model.safetensors: tensor model.norm.weight of shape \(32,\) and dtype F32 needs 128 .* 136"),
    (lambda directory: (directory / "model.safetensors").unlink(), r"model.safetensors: cannot be read \(No such file"),
    (rewrite(**{"model.norm.weight": None}), r"tensor model.norm.weight with shape \(32,\) is missing"),
    (rewrite(**{"model.norm.weight": torch.zeros(31)}), r"norm.weight has shape \(31,\), config.json makes it \(32,\)"),
    (rewrite(**{"model.norm.bias": torch.zeros(32)}), r"tensor model.norm.bias \(and 0 more\) is not part"),
    (rewrite(**{"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), r"model.norm.weight has dtype I8; supported"),
    (lambda directory: (directory / "model.safetensors.index.json").write_text("{}"), r"not an index"),
    (lambda directory: (directory / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}})), r"00002-of-00002.*: cannot"),
    (lambda directory: (directory / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {"model.extra": "model.safetensors"}})), r"model.safetensors: has no tensor model.extra, which"),
])
def test_files_that_do_not_hold_the_model_are_refused_by_name(models, tmp_path, change, message):
    directory = broken(models["llama", False], tmp_path, change)
    holdings = MegatronSharding(read_model_shape(directory), ParallelLayout()).holdings(0)
    with pytest.raises(ModelError, match=message):
        load_hf(directory, holdings, empty_params(holdings))


def test_parameters_that_are_not_what_the_rank_holds_are_refused(models):
    holdings = MegatronSharding(read_model_shape(models["llama", False]), ParallelLayout()).holdings(0)
    params = empty_params(holdings)
    params["decoder.final_layernorm.weight"] = torch.zeros(31)
    with pytest.raises(LayoutError, match=r"final_layernorm.weight: rank 0 .* shape \(32,\), found \(31,\)"):
        load_hf(models["llama", False], holdings, params)


def interrupted(model_dir, out_dir):
    import engine.resharding.export as module

    rank, shape = world(), read_model_shape(model_dir)
    sharding = MegatronSharding(shape, ParallelLayout(tp=2))
    params = empty_params(sharding.holdings(rank))
    load_hf(model_dir, sharding.holdings(rank), params)
    finish = module._finish_directory

    def disk_full(*arguments):
        raise OSError(28, "No space left on device")

    module._finish_directory = disk_full
    try:
        export_hf(model_dir, out_dir, sharding, params, ExportOptions(sync=module.SyncOptions(timeout_s=3)))
    except (OSError, RuntimeError) as error:
        return str(error)
    finally:
        module._finish_directory = finish
    return "exported"


def test_a_full_disk_is_a_fault_and_not_the_models(models, tmp_path, monkeypatch):
    import engine.resharding.export as module

    def full(file, tensors):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    sharding = MegatronSharding(read_model_shape(models["llama", False]), ParallelLayout())
    monkeypatch.setattr(module, "create_file", full)
    with pytest.raises(FaultError, match="model.safetensors: cannot be written .No space left") as failure:
        export_hf(models["llama", False], tmp_path / "out", sharding, empty_params(sharding.holdings(0)))
    assert failure.value.exit_code == EXIT_FAULT


def test_the_disks_space_is_taken_before_the_mapped_file_is_written_to(tmp_path):
    file = tmp_path / SINGLE
    create_file(file, {"weight": (torch.float32, (1 << 20,))})
    assert file.stat().st_blocks * 512 >= file.stat().st_size > 4 << 20


def test_an_export_that_fails_leaves_what_was_there(models, tmp_path):
    source, out = models["qwen2", False], tmp_path / "out"
    shutil.copytree(models["llama", False], out)
    with Ranks(2) as fresh:
        messages = fresh.run(interrupted, source, out)
    assert "No space left" in messages[0] and all("gone or stuck" in text for text in messages[1:])
    want = read_model(models["llama", False])
    assert all(torch.equal(value, want[name]) for name, value in read_model(out).items())
