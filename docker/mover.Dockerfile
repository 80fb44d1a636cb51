# The image of lmcache-mover. Build it from the root of the repository:
#   docker build -f docker/mover.Dockerfile -t lmcache-mover:0.1.0 .
# Renovate adds to the base's tag the digest that its registry shows (.github/renovate.json).
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/lmcache

# Dependencies have a layer of their own: it is made again only when a pyproject.toml or a pin changes. The core's base has no torch.
COPY constraints.txt docker/dependencies.py ./
COPY libs/lmcache_core/pyproject.toml libs/lmcache_core/
COPY services/mover/pyproject.toml services/mover/
RUN python dependencies.py libs/lmcache_core services/mover > requirements.txt \
    && pip --python /opt/lmcache/bin/python install --no-cache-dir -c constraints.txt -r requirements.txt \
    && find /opt/lmcache/lib -type d -name tests -prune -exec rm -r {} +
# NIXL asks for PyTorch, which it uses for tensors alone, and brings kernels for exchanging experts.
RUN pip --python /opt/lmcache/bin/python install --no-cache-dir --no-deps -c constraints.txt nixl-cu12 \
    && rm -r /opt/lmcache/lib/python3*/site-packages/nixl_ep_cu12

COPY libs/lmcache_core libs/lmcache_core
COPY services/mover services/mover
RUN pip --python /opt/lmcache/bin/python install --no-cache-dir --no-deps \
    ./libs/lmcache_core ./services/mover

FROM python:3.12-slim
LABEL org.opencontainers.image.title="lmcache-mover" \
      org.opencontainers.image.description="Reads from other pods into the arena of a cache sidecar, by NIXL" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/lmcache /opt/lmcache
# The root file system is read-only in Kubernetes: no byte code is written. The user has no entry in /etc/passwd, and some libraries ask
# for its home.
ENV PATH=/opt/lmcache/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
ENTRYPOINT ["lmcache-mover"]
