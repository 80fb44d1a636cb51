"""`lmcachectl`: the command line of the cache, for people. One package for each group of
commands.
"""
