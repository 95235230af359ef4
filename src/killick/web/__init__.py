"""The web: a dashboard and an HTTP API over a store. Needs the extra: `pip install '.[web]'`."""

from killick.web.app import asgi
from killick.web.middleware import Limits

__all__ = ["Limits", "asgi"]
