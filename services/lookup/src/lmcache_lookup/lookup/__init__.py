"""Questions: who holds a prefix, and how long a prefix each instance holds."""
