# The image of spec.routing.type Router: Python and vLLM's own router, what requirements/router.lock names.
# Build from the root of the repository:  docker build -f operator/router.Dockerfile -t ghcr.io/kvtier/router:0.1.0 .
# A release names it by the digest that it was built on.
ARG BASE=python:3.12-slim
FROM ${BASE}
COPY requirements/router.lock /tmp/router.lock
# --no-deps: the lock is complete, and says of each file what it must hash to.
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement /tmp/router.lock && rm /tmp/router.lock
ENV PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8000 29000
ENTRYPOINT ["python3", "-m", "vllm_router.launch_router"]
