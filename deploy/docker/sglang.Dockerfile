# SGLang with the tier. From the repository's root:
#   docker build -f deploy/docker/sglang.Dockerfile -t kvxfer-sglang:0.1.0 .
FROM python:3.12.11-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvstore_xfer kvstore_xfer
COPY kernels kernels
COPY integrations integrations
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM lmsysorg/sglang:v0.5.23
# What the image has of these stays as it is, or the build fails. Mooncake's package is in the image.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip freeze > /tmp/all.txt \
    && grep -E '^(torch|transformers|triton|numpy|pydantic)==' /tmp/all.txt > /tmp/engine.txt \
    && wheel="$(ls /wheels/*.whl)" \
    && python3 -m pip install --no-cache-dir --constraint /tmp/engine.txt "kvstore-xfer[valkey,s3] @ file://${wheel}" \
    && python3 -c "import importlib.metadata as m; assert m.version('sglang') == '0.5.23'; import kvxfer_sglang.hicache" \
    && rm /tmp/all.txt /tmp/engine.txt \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvxfer \
    && install --directory --owner=10001 --group=10001 /models /var/lib/kvxfer
# Compiled kernels are cached below HOME.
ENV HOME=/home/kvxfer HF_HOME=/models
WORKDIR /home/kvxfer
USER 10001:10001
EXPOSE 30000
ENTRYPOINT ["python3", "-m", "sglang.launch_server"]
