"""Contract suites and makers of test data, for our tests and for those of other implementations.
Needs pytest.
"""
