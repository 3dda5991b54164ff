"""Who runs a dataflow: every rank on its own shard of the batch (multi)."""
