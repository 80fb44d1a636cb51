# The image of lmcache-storage. Build it from the root of the repository:
#   docker build -f docker/storage.Dockerfile -t lmcache-storage:0.1.0 .
# Renovate adds to the base's tag the digest that its registry shows (.github/renovate.json).
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/lmcache

# Dependencies have a layer of their own: it is made again only when a pyproject.toml or a pin changes. The core's base has no torch.
COPY constraints.txt docker/dependencies.py ./
COPY libs/lmcache_core/pyproject.toml libs/lmcache_core/
COPY services/servicekit/pyproject.toml services/servicekit/
COPY services/node/pyproject.toml services/node/
COPY services/cache_storage/pyproject.toml services/cache_storage/
RUN python dependencies.py 'libs/lmcache_core[redis]' 'services/servicekit[fast,traces]' services/node services/cache_storage > requirements.txt \
    && pip --python /opt/lmcache/bin/python install --no-cache-dir -c constraints.txt -r requirements.txt

COPY libs/lmcache_core libs/lmcache_core
COPY services/servicekit services/servicekit
COPY services/node services/node
COPY services/cache_storage services/cache_storage
RUN pip --python /opt/lmcache/bin/python install --no-cache-dir --no-deps \
    ./libs/lmcache_core ./services/servicekit ./services/node ./services/cache_storage

FROM python:3.12-slim
LABEL org.opencontainers.image.title="lmcache-storage" \
      org.opencontainers.image.description="Cache storage: keeps KV chunks in memory and on disk for all pods" \
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
EXPOSE 8080 65432
ENTRYPOINT ["lmcache-storage"]
