# LMCache's server with the tier. From the repository's root:
#   docker build -f deploy/docker/lmcache.Dockerfile -t kvxfer-lmcache:0.1.0 .
# The inference engine beside it needs nothing of ours: lmcache/vllm-openai as it is.
FROM python:3.12.11-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvstore_xfer kvstore_xfer
COPY kernels kernels
COPY integrations integrations
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM lmcache/standalone:v0.5.6
# This image keeps Python in a virtual environment made by uv, without pip. What it has of these
# packages stays as it is, or the build fails.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    uv pip freeze --python /opt/venv/bin/python > /tmp/all.txt \
    && grep -E '^(torch|transformers|triton|numpy|pydantic)==' /tmp/all.txt > /tmp/engine.txt \
    && wheel="$(ls /wheels/*.whl)" \
    && uv pip install --no-cache --python /opt/venv/bin/python --constraint /tmp/engine.txt "kvstore-xfer[valkey,s3] @ file://${wheel}" \
    && /opt/venv/bin/python -c "import importlib.metadata as m; assert m.version('lmcache') == '0.5.6'; import kvxfer_lmcache.l2_adapter" \
    && rm /tmp/all.txt /tmp/engine.txt \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvxfer \
    && install --directory --owner=10001 --group=10001 /models /var/lib/kvxfer
ENV PATH=/opt/venv/bin:$PATH HOME=/home/kvxfer HF_HOME=/models \
    DO_NOT_TRACK=1 LMCACHE_TRACK_USAGE=false
WORKDIR /home/kvxfer
USER 10001:10001
EXPOSE 5555 8080
ENTRYPOINT ["lmcache", "server"]
