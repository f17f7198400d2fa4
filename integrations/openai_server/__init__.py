"""An HTTP server in OpenAI's form over one engine: ``create_app`` makes the application, ``serve`` runs it."""

from __future__ import annotations

try:
    from paged_backend.integrations.openai_server.api_keys import ApiKeys as ApiKeys
    from paged_backend.integrations.openai_server.app import create_app as create_app
    from paged_backend.integrations.openai_server.server import listen as listen
    from paged_backend.integrations.openai_server.server import serve as serve
except ImportError as error:
    if error.name not in ("fastapi", "pydantic", "starlette", "uvicorn"):
        raise
    raise ImportError(f"the server needs the {error.name} package: pip install 'paged-backend[serve]'") from error

__all__ = ["ApiKeys", "create_app", "listen", "serve"]
