# One image for each service: `docker build -f deploy/docker/service.Dockerfile --build-arg SERVICE=reader .`
#
# SERVICE is a folder under services/; its hashed lock is requirements-SERVICE.lock (ADR-0001: an
# image installs that service and `tierlog`, nothing else). A release gives the base image by
# digest: --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG SERVICE
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CONFIG=1
COPY requirements-boot.lock ./
RUN pip install --require-hashes -r requirements-boot.lock
# What rarely changes comes first: all that is not ours, by hash.
COPY requirements-*.lock ./
RUN test -f "requirements-${SERVICE}.lock" || { echo "no such service: '${SERVICE}'" >&2; exit 1; } \
    && uv venv --python "$(command -v python)" /opt/tierlog \
    && uv pip install --python /opt/tierlog --require-hashes -r "requirements-${SERVICE}.lock"
COPY shared/pyproject.toml shared/pyproject.toml
COPY shared/tierlog shared/tierlog
COPY services/${SERVICE} services/${SERVICE}
# The build backend is the one that requirements-boot.lock has: nothing is fetched here.
RUN pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels \
    ./shared "./services/${SERVICE}" \
    && uv pip install --python /opt/tierlog --offline --no-deps /wheels/*.whl \
    && ln -s "/opt/tierlog/bin/tierlog-${SERVICE}" /opt/tierlog/bin/tierlog-service

FROM ${PYTHON_IMAGE}
ARG SERVICE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tierlog-${SERVICE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/tierlog /opt/tierlog
# A number, so that Kubernetes can see that it is not root. /data is where volumes go.
RUN install -d -o 10001 -g 10001 -m 0750 /data
ENV PATH=/opt/tierlog/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 \
    TIERLOG_STATE_DIR=/tmp/tierlog SERVICE=${SERVICE}
WORKDIR /tmp
USER 10001:10001
STOPSIGNAL SIGTERM
# Of the service: wire, gRPC, HTTP with /livez, /readyz and /metrics. Not all have all of them.
EXPOSE 7070 9090 8080
# Asks as the service's own settings say: its port, and over TLS unless security is open.
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=3 \
    CMD ["sh", "-c", "exec python -m tierlog.runtime.probe \"$SERVICE\""]
ENTRYPOINT ["tierlog-service"]
