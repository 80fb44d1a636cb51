"""The library's counters. No torch, no metrics client: a service exports these counters in its own
way.
"""

from lmcache_core.telemetry.codec_figures import CodecFigures as CodecFigures
from lmcache_core.telemetry.codec_figures import MeasuredError as MeasuredError
from lmcache_core.telemetry.counters import Counters as Counters
from lmcache_core.telemetry.names import *  # noqa: F403 - every name there is a counter or label
