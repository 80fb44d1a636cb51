"""All services of a cluster: where they are, and what each says when it is asked."""
