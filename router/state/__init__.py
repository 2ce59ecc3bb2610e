"""What the router knows of the cluster, as data for policies: no I/O, no clock."""
