"""Pure routing decisions: a snapshot of the cluster goes in, a plan with its reasons comes out."""
