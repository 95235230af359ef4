"""The version of this package. The build reads it here, and reading it imports nothing."""

VERSION = "0.1.0.dev0"
