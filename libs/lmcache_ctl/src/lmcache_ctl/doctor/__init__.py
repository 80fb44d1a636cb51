"""`lmcachectl doctor`: what is wrong with services, their configuration, this machine and the
cluster, and how to fix it.
"""
