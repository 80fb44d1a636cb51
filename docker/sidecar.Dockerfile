# The image of lmcache-sidecar. Build it from the root of the repository:
#   docker build -f docker/sidecar.Dockerfile -t lmcache-sidecar:0.1.0 .
# With the codecs, for sidecars that encode chunks; their compiler is larger than all the rest:
#   docker build -f docker/sidecar.Dockerfile -t lmcache-sidecar-codec:0.1.0 --build-arg VARIANT=-codec .
# Renovate adds to the base's tag the digest that its registry shows (.github/renovate.json).
FROM python:3.12-slim AS build
ARG VARIANT=""
WORKDIR /src
RUN python -m venv --without-pip /opt/lmcache

# Dependencies have a layer of their own: it is made again only when a pyproject.toml or a pin changes. The core's base has no torch.
COPY constraints.txt docker/dependencies.py ./
COPY libs/lmcache_core/pyproject.toml libs/lmcache_core/
COPY services/servicekit/pyproject.toml services/servicekit/
COPY services/node/pyproject.toml services/node/
COPY services/sidecar/pyproject.toml services/sidecar/
RUN python dependencies.py 'libs/lmcache_core[redis]' 'services/servicekit[fast,traces]' services/node "services/sidecar${VARIANT:+[codec]}" > requirements.txt \
    && pip --python /opt/lmcache/bin/python install --no-cache-dir -c constraints.txt -r requirements.txt \
    && find /opt/lmcache/lib -type d -name tests -prune -exec rm -r {} +

COPY libs/lmcache_core libs/lmcache_core
COPY services/servicekit services/servicekit
COPY services/node services/node
COPY services/sidecar services/sidecar
# The machine code of the codecs, where it has them, is compiled here, for nodes of other kinds too: the root file system
# cannot be written.
RUN pip --python /opt/lmcache/bin/python install --no-cache-dir --no-deps \
    ./libs/lmcache_core ./services/servicekit ./services/node ./services/sidecar \
    && if [ -n "$VARIANT" ]; then /opt/lmcache/bin/python -m lmcache_core.serde.warm_up --portable; fi

FROM python:3.12-slim
ARG VARIANT=""
LABEL org.opencontainers.image.title="lmcache-sidecar$VARIANT" \
      org.opencontainers.image.description="Cache sidecar of a serving pod: shared-memory hot tier, disk tier, peers" \
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
EXPOSE 8083 8084 65433
ENTRYPOINT ["lmcache-sidecar"]
