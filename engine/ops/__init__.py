"""Numeric operations, one implementation per device behind one interface."""
