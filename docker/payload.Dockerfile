# The image of lmcache-payload: what goes into the process of an unmodified vLLM. Build it from the root of the repository:
#   docker build -f docker/payload.Dockerfile -t lmcache-payload:0.1.0 .
# An init container runs it once: `/payload/install /opt/lmcache`, and vLLM gets PYTHONPATH=/opt/lmcache/python.
# Renovate adds to the base's tag the digest that its registry shows (.github/renovate.json).
FROM python:3.12-slim AS build
WORKDIR /src

# For Pythons that lack them, in a folder that none of them looks at by itself (`append_missing` in lmcache_core.integrations.vllm).
COPY constraints.txt ./
RUN for minor in 11 12 13 14; do \
        pip install --no-cache-dir --no-compile --no-deps --only-binary :all: --implementation cp --python-version "3.$minor" \
            --target "/payload/bundled/cp3$minor" -c constraints.txt msgspec xxhash || exit 1; \
    done

COPY libs/lmcache_core libs/lmcache_core
COPY kernels kernels
COPY docker/payload_install.py /payload/install
# Our packages and nothing else: whatever lies here comes before what vLLM brings. A checkout may be readable for its owner alone.
RUN pip install --no-cache-dir --no-compile --no-deps --target /payload/python ./libs/lmcache_core ./kernels \
    && mv /payload/bundled /payload/python/lmcache_core/bundled \
    && python /payload/install --stamp \
    && chmod -R a+rX /payload

FROM python:3.12-slim
LABEL org.opencontainers.image.title="lmcache-payload" \
      org.opencontainers.image.description="What goes into the process of vLLM: the connector, copied into a pod by an init container" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /payload /payload
ENV PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["/payload/install"]
