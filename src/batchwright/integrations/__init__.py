"""The signatures other frameworks call."""
