"""The command line and the local launcher: what a person types."""
