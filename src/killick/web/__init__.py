"""The web: a dashboard and an HTTP API over a store. Needs the extra: `pip install '.[web]'`."""
