"""The client: starts runs, reads them, and acts on them."""
