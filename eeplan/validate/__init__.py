"""Predictions laid beside what others measured on their clusters."""
