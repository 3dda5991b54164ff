# The worker on a GPU node: Airflow's scheduler with its LocalExecutor, and the engine that its tasks start. The launcher
# starts the engine as a process, so both environments are here, apart from each other as everywhere else.
# docker build -f docker/engine.Dockerfile .
# Without a GPU: --build-arg ENGINE=cpu --build-arg PIP_EXTRA_INDEX_URL=(an index with torch's CPU build)
FROM python:3.11.13-slim-bookworm AS build
ARG ENGINE=gpu
ARG PIP_EXTRA_INDEX_URL=""
COPY requirements/engine-${ENGINE}.txt requirements/pipeline.txt /requirements/
RUN python -m venv /opt/venv/pipeline \
 && /opt/venv/pipeline/bin/pip install --no-cache-dir --no-deps -r /requirements/pipeline.txt
RUN python -m venv /opt/venv/engine \
 && /opt/venv/engine/bin/pip install --no-cache-dir --no-deps -r "/requirements/engine-${ENGINE}.txt"

FROM python:3.11.13-slim-bookworm
# Triton compiles its launchers with the system's C compiler. Debian keeps only the newest build of a package, so a pinned
# one would make this image unbuildable.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 50000 --user-group --create-home ratchet \
 && install -d -o ratchet -g ratchet -m 0700 /opt/airflow /var/lib/ratchet
COPY --from=build /opt/venv /opt/venv
COPY engine /opt/ratchet/engine
COPY tasks /opt/ratchet/tasks
COPY dags /opt/ratchet/dags
COPY examples /opt/ratchet/examples
ENV PATH=/opt/venv/pipeline/bin:$PATH \
    PYTHONPATH=/opt/ratchet \
    PYTHONUNBUFFERED=1 \
    AIRFLOW_HOME=/opt/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/ratchet/dags \
    AIRFLOW__CORE__PLUGINS_FOLDER=/opt/ratchet/tasks/plugins \
    AIRFLOW__CORE__LOAD_EXAMPLES=false \
    RATCHET_ENGINE_PYTHON=/opt/venv/engine/bin/python \
    RATCHET_HOME=/var/lib/ratchet \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/ratchet
USER 50000:50000
CMD ["airflow", "scheduler"]
