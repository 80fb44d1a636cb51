"""`lmcachectl bench`: a bounded load of stores and fetches against one target, cleaned up
afterwards.
"""
