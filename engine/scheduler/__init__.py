"""Decides what each step computes. Pure: no tensors, no clock, no I/O."""
