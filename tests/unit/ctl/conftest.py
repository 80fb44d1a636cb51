"""No test reads what the person who runs it has set for `lmcachectl` and `kubectl`."""

from tests.fixtures.ctl import no_cluster as no_cluster
