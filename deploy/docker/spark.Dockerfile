# Spark with the data source `tierlog` and its jobs: `docker build -f deploy/docker/spark.Dockerfile .`
#
# Locked like the services (requirements-spark.lock). A release gives the base image by digest.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CONFIG=1
COPY requirements-boot.lock requirements-spark.lock ./
# pyspark is a source distribution: without its own flag its build would fetch setuptools outside
# the hashes.
RUN pip install --require-hashes -r requirements-boot.lock \
    && uv venv --python "$(command -v python)" /opt/tierlog \
    && uv pip install --python /opt/tierlog --require-hashes -r requirements-boot.lock \
    && uv pip install --python /opt/tierlog --require-hashes --no-build-isolation-package pyspark \
       -r requirements-spark.lock
COPY shared/pyproject.toml shared/pyproject.toml
COPY shared/tierlog shared/tierlog
COPY pipeline pipeline
RUN pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels ./shared ./pipeline \
    && uv pip install --python /opt/tierlog --offline --no-deps /wheels/*.whl \
    && uv pip uninstall --python /opt/tierlog uv uv-build

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tierlog-spark" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Debian's own Java 17 gets its updates; procps has the `ps` that Spark's scripts call.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/*
# Hadoop asks for the name of who runs it, and Java for a home: without them nothing starts.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tierlog
COPY --from=build /opt/tierlog /opt/tierlog
ENV PATH=/opt/tierlog/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PYSPARK_PYTHON=/opt/tierlog/bin/python \
    SPARK_LOCAL_DIRS=/tmp TIERLOG_STATE_DIR=/tmp/tierlog
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["spark-submit"]
CMD ["--version"]
