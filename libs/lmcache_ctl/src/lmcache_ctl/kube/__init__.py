"""Services of a release in Kubernetes: found by the chart's labels, reached by port-forward
through its API.
"""
