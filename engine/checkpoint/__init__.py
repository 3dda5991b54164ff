"""Checkpoints that are whole or do not exist: saved beside the training, verified when loaded, kept by rule."""

from engine.checkpoint.checkpoints import Checkpoints, Saveable
from engine.checkpoint.files import CheckpointFiles

__all__ = ["CheckpointFiles", "Checkpoints", "Saveable"]
