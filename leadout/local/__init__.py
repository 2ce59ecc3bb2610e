"""A whole cluster on one machine: child processes, a private registry, and their folders."""
