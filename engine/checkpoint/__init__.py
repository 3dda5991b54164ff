"""Checkpoints that are whole or do not exist: atomic save, verified load, retention, exact resume."""

from engine.checkpoint.checkpoints import Checkpoints, Saveable

__all__ = ["Checkpoints", "Saveable"]
