"""Megatron-core behind Ratchet's interfaces: the only package that imports it."""

from engine.backends.megatron import cpu

# Before anything below imports megatron.core.
cpu.install()
