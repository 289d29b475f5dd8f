"""Rows of files and data sets, and what in them is to be trained."""
