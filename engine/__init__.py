"""Ratchet's engine: trains with Megatron-core, generates with vLLM. Importing it costs nothing."""

__version__ = "0.1.0"
