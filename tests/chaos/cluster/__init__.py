"""The whole cluster as real processes, hurt by a plan that one seed gives, under a workload that
checks every number that it gets back.
"""
