"""Responses in, rewards with a validity bit out."""

__all__: list[str] = []
