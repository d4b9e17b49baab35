"""Which request computes which tokens in which blocks, one iteration at a time. No jax in here."""
