"""`python -m kedge` is the command line."""

from kedge.cli.main import main

raise SystemExit(main())
