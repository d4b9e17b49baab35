"""POST /start_profile and /stop_profile: a trace of device and host, where the operator has named a directory."""

from aiohttp import web

from servers.errors import ApiError
from servers.state import STATE


async def start_profile(request: web.Request) -> web.Response:
    """Begin a trace in --profile-dir."""
    await request.app[STATE].engine.start_profile(_directory(request))
    return web.json_response({"profile_dir": _directory(request)})


async def stop_profile(request: web.Request) -> web.Response:
    """End the trace and write it."""
    directory = _directory(request)
    await request.app[STATE].engine.stop_profile()
    return web.json_response({"profile_dir": directory})


def _directory(request: web.Request) -> str:
    directory = request.app[STATE].config.profile_dir
    if directory is None:
        raise ApiError(404, "profiling is off; start the server with --profile-dir DIRECTORY")
    return directory
