"""`/v1/overview`: the peers, what they say of their work, and how that went over the last hour."""
