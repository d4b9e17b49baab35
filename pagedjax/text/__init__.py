"""From text to tokens and back. Imports transformers before any module here does, so that it is quiet about PyTorch."""

import os


def _import_transformers() -> None:
    """Import it with its advice switched off, to install PyTorch. The environment stays as it was."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers  # noqa: F401
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_import_transformers()
