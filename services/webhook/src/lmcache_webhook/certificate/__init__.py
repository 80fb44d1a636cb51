"""The certificate that the webhook serves with, where nothing else makes it: keys, where they are
kept, and whom the API server trusts.
"""
