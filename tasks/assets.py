"""The assets that the DAGs tell each other about."""

from airflow.sdk import Asset, AssetAlias

PROMPTS = Asset("prompts", uri="ratchet://prompts")
"""Files of training prompts landed. `extra`: uris, sha256 (of each), rows (of all)."""
CANDIDATE = Asset("candidate", uri="ratchet://candidate")
"""A model version waits for its review. `extra`: model, version, run_uri."""
CHAMPION = Asset("champion", uri="ratchet://champion")
"""The model in production changed. `extra`: model, version, export_uri, weights_hash."""
LEFT_CANDIDATES = AssetAlias("left_candidates")
"""Through it a review announces CANDIDATE again for those that arrived together with the one it takes."""
