"""``leadout doctor``: what is wrong with this machine or this cluster, and how to mend it."""
