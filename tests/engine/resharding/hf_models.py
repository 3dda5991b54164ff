"""Tiny random Hugging Face directories of every family."""

from pathlib import Path

import torch

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}}


def make_model(directory: Path, family: str, dtype: torch.dtype = torch.float32, max_shard: str = "5GB",
               **sizes) -> Path:
    """Write a random model, a generation config and a stand-in for a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SIZES | EXPERTS.get(family, {}) | sizes)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        for param in model.parameters():
            param.data.copy_(torch.randn(param.shape) * 0.2)
        model.save_pretrained(directory, max_shard_size=max_shard)
    (directory / "tokenizer.json").write_text('{"stand-in": true}\n')
    (directory / "chat_template.jinja").write_text("{{ messages }}\n")
    return directory
