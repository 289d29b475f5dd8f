"""Filtered ranking of link predictions, and what scores them."""
