# Airflow's API server, DAG processor and triggerer, and the MLflow server. No torch.
# docker build -f docker/pipeline.Dockerfile .
FROM python:3.11.13-slim-bookworm AS build
COPY requirements/pipeline.txt /requirements/
RUN python -m venv /opt/venv/pipeline \
 && /opt/venv/pipeline/bin/pip install --no-cache-dir --no-deps -r /requirements/pipeline.txt

FROM python:3.11.13-slim-bookworm
RUN useradd --uid 50000 --user-group --create-home ratchet \
 && install -d -o ratchet -g ratchet -m 0700 /opt/airflow /var/lib/ratchet
COPY --from=build /opt/venv/pipeline /opt/venv/pipeline
COPY engine /opt/ratchet/engine
COPY tasks /opt/ratchet/tasks
COPY dags /opt/ratchet/dags
COPY examples /opt/ratchet/examples
COPY docker/initialise.py /opt/ratchet/docker/
ENV PATH=/opt/venv/pipeline/bin:$PATH \
    PYTHONPATH=/opt/ratchet \
    PYTHONUNBUFFERED=1 \
    AIRFLOW_HOME=/opt/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/ratchet/dags \
    AIRFLOW__CORE__PLUGINS_FOLDER=/opt/ratchet/tasks/plugins \
    AIRFLOW__CORE__LOAD_EXAMPLES=false \
    RATCHET_HOME=/var/lib/ratchet
WORKDIR /opt/ratchet
USER 50000:50000
CMD ["airflow", "api-server"]
