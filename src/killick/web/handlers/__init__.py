"""The handlers of the routes: each returns a document, which is JSON or a page."""
