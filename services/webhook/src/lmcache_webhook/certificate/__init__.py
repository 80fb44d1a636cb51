"""The certificate that the webhook serves with, where nobody else makes it: keys, where they are
kept, and whom the API server trusts.
"""
