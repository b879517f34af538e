# The image of the janitor: Python, the connector's store and janitor, and what requirements/janitor.lock names.
# Build from the root of the repository:  docker build -f connector/janitor.Dockerfile -t ghcr.io/kvtier/janitor:0.1.0 .
# A release names it by the digest that it was built on.
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY requirements/janitor.lock /tmp/janitor.lock
# --no-deps: the lock is complete, and says of each file what it must hash to.
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement /tmp/janitor.lock && rm /tmp/janitor.lock
COPY connector/kvtier_connector /opt/connector/kvtier_connector
# Never imported here, and needs vLLM.
RUN rm -r /opt/connector/kvtier_connector/vllm_adapter /opt/connector/kvtier_connector/cascade
ENV PYTHONPATH=/opt/connector PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 9400
ENTRYPOINT ["python3", "-m", "kvtier_connector.janitor"]
