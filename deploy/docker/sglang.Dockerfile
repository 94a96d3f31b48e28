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
# The engine, its torch and its transformers stay as they are in the image: our ranges admit them,
# and pip leaves alone what already fits.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    wheel="$(ls /wheels/*.whl)" \
    && python3 -m pip install --no-cache-dir "kvstore-xfer[valkey,s3,mooncake] @ file://${wheel}" \
    && python3 -c "import importlib.metadata as m; assert m.version('sglang') == '0.5.23'; import kvxfer_sglang.hicache" \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvxfer \
    && install --directory --owner=10001 --group=10001 /models /var/lib/kvxfer
# Compiled kernels are cached below HOME; `sudo` and root's caches are not needed to serve.
ENV HOME=/home/kvxfer HF_HOME=/models
WORKDIR /home/kvxfer
USER 10001:10001
EXPOSE 30000
ENTRYPOINT ["python3", "-m", "sglang.launch_server"]
