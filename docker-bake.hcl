# Every image of the project:
#   docker buildx use lmcache || docker buildx create --name lmcache --use   # Docker's default builder makes neither attestations nor images of several platforms
#   docker buildx bake --load                # all of them, for this machine
#   TAG=0.1.0 REGISTRY=registry.example.com/lmcache PLATFORMS=linux/amd64,linux/arm64 docker buildx bake --push
#   docker buildx bake sbom                  # lists of what is in them, below build/sbom
# Pushed images carry their list of contents and how they were built as attestations.

variable "REGISTRY" {
  default     = ""
  description = "Registry and path that the images are pushed to; empty for local names"
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
  default = ["storage", "lookup", "broker", "sidecar", "sidecar-codec", "webhook", "payload"]
}

group "default" {
  targets = IMAGES
}

group "sbom" {
  targets = [for image in IMAGES : "sbom-${image}"]
}

target "image" {
  name       = image
  matrix     = { image = IMAGES }
  context    = "."
  dockerfile = "docker/${trimsuffix(image, "-codec")}.Dockerfile"
  args       = { VARIANT = image == "sidecar-codec" ? "-codec" : null }
  platforms  = PLATFORMS == "" ? [] : split(",", PLATFORMS)
  tags       = [REGISTRY == "" ? "lmcache-${image}:${TAG}" : "${REGISTRY}/lmcache-${image}:${TAG}"]
  labels     = REVISION == "" ? {} : { "org.opencontainers.image.revision" = REVISION }
  attest     = REGISTRY == "" ? [] : ["type=sbom", "type=provenance,mode=max"]
}

# The local exporter writes sbom.spdx.json beside the files that it describes.
target "contents" {
  name     = "sbom-${image}"
  matrix   = { image = IMAGES }
  inherits = [image]
  attest   = ["type=sbom"]
  output   = ["type=local,dest=build/sbom/${image}"]
}
