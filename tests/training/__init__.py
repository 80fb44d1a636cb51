"""Train the demo's models again: `make model`, or `python -m tests.training.train --help`."""
