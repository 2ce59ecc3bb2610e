"""A worker process and the host of its roles."""
