"""Contract suites, each for all implementations of one interface, and makers of test data."""
