"""Runs before vLLM or SGLang is told to end: waits until no more requests come, then until those that it has are answered.

Arguments: the URL of its /metrics; seconds in which requests may still come; seconds after which nothing is waited for any more.
"""

import http.client
import ssl
import sys
import time
import urllib.request

GAUGES = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("sglang:num_running_reqs", "sglang:num_queue_reqs"),
)
OWN_CERTIFICATE = ssl._create_unverified_context()  # noqa: S323 (this pod asks itself)


def num_requests(url: str) -> float:
    """How many it has; none where it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=2, context=OWN_CERTIFICATE) as answer:  # noqa: S310 (the URL is the chart's)
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(GAUGES))
    except (OSError, ValueError, http.client.HTTPException):
        return 0


def main() -> None:
    """See the module."""
    url, grace_s, longest_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    end = time.monotonic() + longest_s
    time.sleep(grace_s)
    while time.monotonic() < end and num_requests(url) > 0:
        time.sleep(0.5)


main()
