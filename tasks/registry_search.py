"""Looking through the whole registry: every version of every model, and which versions came of something."""

from collections.abc import Iterator
from typing import Any

from tasks.registry import Version
from tasks.tracking import mlflow_client

EXPORT_DELETED = "ratchet.export_deleted"
"""Tag: when housekeeping took the files of this version away; set before it does."""
PAGE = 200


def every_version() -> list[Version]:
    """Every version of every registered model, with its aliases.

    Raises:
        FaultError: MLflow does not answer. RefusedError: it refused, or none is configured.
    """
    with mlflow_client() as client:
        # A search for versions leaves the aliases out; the models have them.
        aliases = {model.name: dict(model.aliases) for model in _pages(client.search_registered_models)}
        return [_version(found, aliases.get(found.name, {})) for found in _pages(client.search_model_versions)]


def mark_deleted(version: str, when: str) -> None:
    """Note at a version (`name/3`) that its files are gone; an empty `when` takes the note away."""
    model, _, number = version.rpartition("/")
    with mlflow_client() as client:
        if when:
            client.set_model_version_tag(model, number, EXPORT_DELETED, when)
        elif EXPORT_DELETED in client.get_model_version(model, number).tags:
            client.delete_model_version_tag(model, number, EXPORT_DELETED)


def runs_with_tag(key: str, value: str | None = None) -> dict[str, str]:
    """MLflow runs of all experiments that have a tag, with its value; those with this value, if one is given."""
    if value is not None and "'" in value:
        return {}  # MLflow cannot search for it
    wanted = f"tags.`{key}` LIKE '%'" if value is None else f"tags.`{key}` = '{value}'"
    with mlflow_client() as client:
        experiments = [found.experiment_id for found in _pages(client.search_experiments)]

        def search(**page: Any) -> Any:
            return client.search_runs(experiments, wanted, order_by=["attributes.start_time ASC"], **page)

        return {run.info.run_id: run.data.tags[key] for run in _pages(search)} if experiments else {}


def _pages(search: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(max_results=PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _version(found: Any, aliases: dict[str, Any]) -> Version:
    tags, number = dict(found.tags), str(found.version)
    return Version(
        model=found.name, version=number, export_uri=tags.get("ratchet.export", ""),
        weights_hash=tags.get("ratchet.weights_hash", ""), run_id=found.run_id or "", tags=tags,
        aliases=tuple(sorted(alias for alias, of in aliases.items() if str(of) == number)))
