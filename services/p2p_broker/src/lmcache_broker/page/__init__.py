"""The web page at `/`: files that tell nothing, whose script asks `/v1/overview` with the token
that it is given.
"""
