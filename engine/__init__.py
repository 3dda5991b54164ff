"""Ratchet's engine: trains with Megatron-core, generates with vLLM. Importing it costs nothing."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.info import WorldInfo

__version__ = "0.1.0"


def get_world_info(load: bool = False) -> "WorldInfo":
    """Versions, devices, ranks, backends and what is missing; see `engine.info.get_world_info`."""
    from engine import info

    return info.get_world_info(load)
