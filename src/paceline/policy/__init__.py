"""Decisions, as pure functions: numbers in, decision out."""
