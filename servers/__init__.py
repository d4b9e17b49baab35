"""An OpenAI-compatible HTTP server over pagedjax's AsyncEngine."""

from servers.app import create_app
from servers.config import ServerConfig
from servers.run import run_server

__all__ = ["ServerConfig", "create_app", "run_server"]
