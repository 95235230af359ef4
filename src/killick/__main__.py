"""`python -m killick` is the command line."""

from killick.cli.main import main

raise SystemExit(main())
