# The image of lmcache-webhook. Build it from the root of the repository:
#   docker build -f docker/webhook.Dockerfile -t lmcache-webhook:0.1.0 .
# Renovate adds to the base's tag the digest that its registry shows (.github/renovate.json).
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/lmcache

# Dependencies have a layer of their own: it is made again only when a pyproject.toml or a pin changes. The core's base has no torch.
COPY constraints.txt docker/dependencies.py ./
COPY libs/lmcache_core/pyproject.toml libs/lmcache_core/
COPY services/servicekit/pyproject.toml services/servicekit/
COPY services/webhook/pyproject.toml services/webhook/
RUN python dependencies.py libs/lmcache_core 'services/servicekit[traces]' services/webhook > requirements.txt \
    && pip --python /opt/lmcache/bin/python install --no-cache-dir -c constraints.txt -r requirements.txt

COPY libs/lmcache_core libs/lmcache_core
COPY services/servicekit services/servicekit
COPY services/webhook services/webhook
RUN pip --python /opt/lmcache/bin/python install --no-cache-dir --no-deps \
    ./libs/lmcache_core ./services/servicekit ./services/webhook

FROM python:3.12-slim
LABEL org.opencontainers.image.title="lmcache-webhook" \
      org.opencontainers.image.description="Admission webhook: adds the cache sidecar to pods that ask for it" \
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
EXPOSE 8443
ENTRYPOINT ["lmcache-webhook"]
