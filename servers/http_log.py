"""What aiohttp itself logs of a server, without what clients sent: a malformed request may hold a key or a prompt.

Nor is there anything of clients that leave.
"""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError


def http_logger() -> logging.Logger:
    """Return the logger to give to aiohttp's server."""
    logger = logging.getLogger("servers.http")
    if not logger.filters:
        logger.addFilter(_filter)
    return logger


def _filter(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ConnectionError):  # the client has left, which is no error of ours
        return False
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.msg, record.args = "%s (%s)", (record.getMessage(), type(error).__name__)
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True
