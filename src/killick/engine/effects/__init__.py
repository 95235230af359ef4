"""Nothing twice: deduplication, reconciliation, compensation, and the tree of forks."""
