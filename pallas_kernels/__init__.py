"""Array operations that models are built on, each with a dense oracle and one file per backend.

Imports jax and numpy only: it knows nothing of requests, models or engines.
"""
