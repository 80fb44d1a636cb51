# Every image of the project:
#   docker buildx use lmcache || docker buildx create --name lmcache --use   # Docker's default builder makes neither attestations nor images of several platforms
#   docker buildx bake --load                # all of them, for this machine
#   TAG=0.1.0 REGISTRY=registry.example.com/lmcache PLATFORMS=linux/amd64,linux/arm64 docker buildx bake --push
#   docker buildx bake sbom                  # lists of what is in them, below build/sbom
# Pushed images carry their list of contents and how they were built as attestations.

variable "REGISTRY" {
  default     = ""
  description = "Registry and path that the images are pushed to; empty or localhost for images that stay on this machine"
}

variable "TAG" {
  default     = "0.1.0"
  description = "Tag of all images; the chart's appVersion asks for it"
}

variable "PLATFORMS" {
  default     = ""
  description = "Platforms, separated by commas; empty for this machine's"
}

variable "REVISION" {
  default     = ""
  description = "Commit that is built"
}

variable "IMAGES" {
  default = ["storage", "lookup", "broker", "sidecar", "sidecar-codec", "mover", "webhook", "payload"]
}

variable "TORCH" {
  default     = "torch"
  description = "How pip gets PyTorch for vllm-cpu-tiny: with an index of CPU wheels that image is 5 GB smaller"
}

group "default" {
  targets = IMAGES
}

# What `make kind-up` and `make test-cluster` run: vLLM on a CPU serves a tiny model.
group "cluster-test" {
  targets = ["storage", "lookup", "broker", "sidecar", "webhook", "payload", "vllm-cpu-tiny"]
}

group "sbom" {
  targets = [for image in IMAGES : "sbom-${image}"]
}

target "image" {
  name       = image
  matrix     = { image = concat(IMAGES, ["vllm-cpu-tiny"]) }
  context    = "."
  dockerfile = "docker/${trimsuffix(image, "-codec")}.Dockerfile"
  args = {
    VARIANT = image == "sidecar-codec" ? "-codec" : null
    TORCH   = image == "vllm-cpu-tiny" ? TORCH : null
  }
  platforms  = PLATFORMS == "" ? [] : split(",", PLATFORMS)
  tags       = [REGISTRY == "" ? "lmcache-${image}:${TAG}" : "${REGISTRY}/lmcache-${image}:${TAG}"]
  labels     = REVISION == "" ? {} : { "org.opencontainers.image.revision" = REVISION }
  attest     = contains(["", "localhost"], REGISTRY) ? [] : ["type=sbom", "type=provenance,mode=max"]
}

# The local exporter writes sbom.spdx.json beside the files that it describes.
target "contents" {
  name     = "sbom-${image}"
  matrix   = { image = IMAGES }
  inherits = [image]
  attest   = ["type=sbom"]
  output   = ["type=local,dest=build/sbom/${image}"]
}
